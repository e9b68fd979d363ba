"""A reward of a measurement: groups must differ, whatever a model without training answers."""


def alternate(answers: list[str], rows: list[dict[str, object]]) -> list[float]:
    """Return 0 and 1 in turns."""
    return [float(number % 2) for number, _ in enumerate(zip(answers, rows, strict=True))]
