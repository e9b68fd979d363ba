"""`mcore-bundle resolve`: versions that were seen together, as pip takes them."""

import json
from typing import Annotated, Any

import typer

from bundle.cli import options
from bundle.environment import compatibility, hardware
from bundle.environment.compatibility import EMULATED, PYTHON, Combination, CombinationAdvice
from bundle.errors import EnvironmentUnfit

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def resolve(
    mcore: Annotated[
        str,
        typer.Option(metavar="VERSION", help="A release or a minor, like 0.17.1 or 0.17; without it, any."),
    ] = "",
    backend: options.OwnBackend = "auto",
    as_json: options.JSON = False,
) -> None:
    """Print versions that were seen together, as constraints for pip; ends with 3 where none were."""
    backend = hardware.detect("auto").backend if backend == "auto" else backend
    answer = compatibility.resolve(compatibility.load(), backend, mcore)
    if as_json:
        print(json.dumps(_document(answer, backend, mcore), indent=2))
    elif answer.found is not None:
        print("\n".join(_lines(answer.found, answer, mcore)))
    if answer.found is None:
        raise EnvironmentUnfit(
            f"megatron-core{' ' + mcore if mcore else ''} was never seen on {backend}; nearest:",
            [*map(_where, answer.nearest), *map(_declared, answer.images)],
        )


def _lines(found: Combination, answer: CombinationAdvice, mcore: str) -> list[str]:
    lines = [f"# seen together on {found.backend}, Python {found.packages[PYTHON]}:"]
    for seen in (found, *answer.also):
        said = f", {seen.source}" if seen.source else ""
        lines.append(f"#   {seen.device}, {seen.date}{said}: {seen.command}")
        lines += [f"#     {what}" for what in seen.proven]
    if found.device == EMULATED:
        lines.append("# emulated: the vendor's libraries were stand-ins, and nothing ran on a device")
    lines += [f"# not this: {_declared(image)}" for image in answer.images if image.unproven]
    pins = _pins(found, mcore)
    width = max(len(f"{name}=={version}") for name, version, _ in pins)
    return lines + [f"{f'{name}=={version}':<{width}}  # {reason}" for name, version, reason in pins]


def _pins(found: Combination, mcore: str) -> list[tuple[str, str, str]]:
    """(package, version, reason) in the order of a constraints file."""
    core = found.packages["megatron-core"]
    rows = []
    for name, version in compatibility.pins(found).items():
        reason = f"ran beside megatron-core {core}"
        if name == "megatron-core":
            asked = f"the newest {mcore}".rstrip() + f" that was seen on {found.backend}"
            reason = "asked for" if version == mcore else asked
        note = found.notes.get(name)
        rows.append((name, version, f"{reason}; {note}" if note else reason))
    return rows


def _where(seen: Combination) -> str:
    beside = ", ".join(f"{name} {version}" for name, version in compatibility.pins(seen).items())
    return f"{seen.backend}: {beside}, Python {seen.packages[PYTHON]} ({seen.device}, {seen.command})"


def _declared(image: compatibility.Pinned) -> str:
    pins = ", ".join(f"{name} {version}" for name, version in image.packages.items())
    without = ", ".join(image.unproven)
    return f"the image stack {image.stack} pins {pins}; never run beside that megatron-core: {without}"


def _document(answer: CombinationAdvice, backend: str, mcore: str) -> dict[str, Any]:
    found = answer.found
    return {
        "schema": 1,
        "asked": {"backend": backend, "mcore": mcore or None},
        "pins": [
            {"package": name, "version": version, "reason": reason}
            for name, version, reason in (_pins(found, mcore) if found else ())
        ],
        "found": found.model_dump(mode="json") if found else None,
        "also": [seen.model_dump(mode="json") for seen in answer.also],
        "nearest": [seen.model_dump(mode="json") for seen in answer.nearest],
        "images": [image.model_dump(mode="json") for image in answer.images],
    }
