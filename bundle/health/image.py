"""Whether a container still is what its image was built as."""

from collections.abc import Iterator

from bundle.errors import BundleError
from bundle.hardware import Machine
from bundle.health.finding import Finding, ok, warn
from bundle.images import RECORD
from bundle.stack import Stack

_FIX = "start from the image again, or build one that has the change: what was tested is what was built"


def image_findings(machine: Machine, installed: Stack) -> Iterator[Finding]:
    """Findings about the image this runs in; none outside of our images."""
    document = machine.read(RECORD)
    if document.value is None:
        return
    from bundle.images import (
        record,
    )  # pydantic is half of what a verb may take, and most machines are no image

    try:
        built = record.parse(document.value)
    except BundleError as error:
        yield warn("image", f"{RECORD} cannot be understood: {error}", _FIX)
        return
    drifted = list(record.drift(built, record.python_version(), record.installed_packages(installed)))
    if not drifted:
        made = f", commit {built.revision[:12]}" if built.revision else ""
        inputs = f", inputs {built.inputs}" if built.inputs else ""
        yield ok("image", f"stack {built.stack} as built{made}{inputs}")
    for change in drifted:
        yield warn("image", change, _FIX)
