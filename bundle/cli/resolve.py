"""`mcore-bundle resolve`: versions that were tested together, in pip's format."""

import json
from typing import Annotated, Any

import typer

from bundle.cli import options
from bundle.environment import compatibility, hardware
from bundle.environment.compatibility import EMULATED_ACCELERATOR, PYTHON_KEY, Combination, CombinationAdvice
from bundle.errors import EnvironmentUnfit

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def resolve(
    mcore: Annotated[
        str,
        typer.Option(metavar="VERSION", help="Ask for a release or a minor: 0.17.1 or 0.17. Default: any."),
    ] = "",
    backend: options.MachineBackend = "auto",
    as_json: options.JSON_OPTION = False,
) -> None:
    """Print versions that were seen together, as constraints for pip; ends with 3 if there are none."""
    backend = hardware.detect("auto").backend if backend == "auto" else backend
    answer = compatibility.resolve(compatibility.load(), backend, mcore)
    if as_json:
        print(json.dumps(_build_document(answer, backend, mcore), indent=2))
    elif answer.best is not None:
        print("\n".join(_format_pip_constraints(answer.best, answer, mcore)))
    if answer.best is None:
        raise EnvironmentUnfit(
            f"megatron-core{' ' + mcore if mcore else ''} was never seen on {backend}; nearest:",
            [*map(_format_combination, answer.nearest), *map(_format_unproven_image_pins, answer.images)],
        )


def _format_pip_constraints(combination: Combination, answer: CombinationAdvice, mcore: str) -> list[str]:
    lines = [f"# seen together on {combination.backend}, Python {combination.packages[PYTHON_KEY]}:"]
    for listed in (combination, *answer.same_versions):
        source = f", {listed.source}" if listed.source else ""
        lines.append(f"#   {listed.device}, {listed.date}{source}: {listed.command}")
        lines += [f"#     {proof}" for proof in listed.proven]
    if combination.device == EMULATED_ACCELERATOR:
        lines.append("# emulated: the vendor's libraries were stand-ins, and nothing ran on a device")
    lines += [
        f"# not this: {_format_unproven_image_pins(image)}" for image in answer.images if image.unproven
    ]
    pins = _list_pins(combination, mcore)
    width = max(len(f"{name}=={version}") for name, version, _ in pins)
    return lines + [f"{f'{name}=={version}':<{width}}  # {reason}" for name, version, reason in pins]


def _list_pins(combination: Combination, mcore: str) -> list[tuple[str, str, str]]:
    """Return (package, version, reason) in the order of a constraints file."""
    core = combination.packages["megatron-core"]
    rows = []
    for name, version in compatibility.build_pins(combination).items():
        reason = f"ran beside megatron-core {core}"
        if name == "megatron-core":
            newest_reason = f"the newest {mcore}".rstrip() + f" that was seen on {combination.backend}"
            reason = "asked for" if version == mcore else newest_reason
        note = combination.notes.get(name)
        rows.append((name, version, f"{reason}; {note}" if note else reason))
    return rows


def _format_combination(combination: Combination) -> str:
    pins = ", ".join(f"{name} {version}" for name, version in compatibility.build_pins(combination).items())
    return (
        f"{combination.backend}: {pins}, Python {combination.packages[PYTHON_KEY]}"
        f" ({combination.device}, {combination.command})"
    )


def _format_unproven_image_pins(image: compatibility.PinnedImage) -> str:
    pins = ", ".join(f"{name} {version}" for name, version in image.packages.items())
    unproven = ", ".join(image.unproven)
    return f"the image stack {image.stack} pins {pins}; never run beside that megatron-core: {unproven}"


def _build_document(answer: CombinationAdvice, backend: str, mcore: str) -> dict[str, Any]:
    combination = answer.best
    return {
        "schema": 1,
        "asked": {"backend": backend, "mcore": mcore or None},
        "pins": [
            {"package": name, "version": version, "reason": reason}
            for name, version, reason in (_list_pins(combination, mcore) if combination else ())
        ],
        "found": combination.model_dump(mode="json") if combination else None,
        "also": [listed.model_dump(mode="json") for listed in answer.same_versions],
        "nearest": [listed.model_dump(mode="json") for listed in answer.nearest],
        "images": [image.model_dump(mode="json") for image in answer.images],
    }
