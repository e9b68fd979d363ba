"""What an image knows about itself, and whether a container still is what its image was built as."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bundle import files
from bundle.environment import search
from bundle.environment.facts import Finding, ok, warn
from bundle.environment.machine import Machine
from bundle.environment.packages import PACKAGES, Stack
from bundle.errors import BundleError

RECORD = "/opt/bundle/build-info.json"  # written at the end of a build, by `python -m tools.images stamp`
LARGEST = 1 << 20
_FIX = "start from the image again, or build one that has the change: what was tested is what was built"

Text = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]


class BuildInfo(BaseModel):
    """What was in the image when it was built, and what it was built from."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = Field(alias="schema")
    stack: Text
    revision: Text  # the commit; empty where nobody said
    inputs: Text  # the digest of `python -m tools.images fingerprint`; empty where nobody said
    python: Text
    sources: dict[Text, Text]  # name -> commit
    packages: dict[Text, Text]  # name -> version

    def text(self) -> str:
        """The JSON that `parse` reads."""
        return json.dumps(self.model_dump(by_alias=True), indent=2, sort_keys=True) + "\n"


def parse(document: str) -> BuildInfo:
    """The record in a build-info.json. Raises BundleError naming the first things that are wrong with it."""
    if len(document) > LARGEST:
        raise BundleError(f"more than {LARGEST >> 20} MiB")
    try:
        return BuildInfo.model_validate_json(document)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc']))[:80]}: {e['msg']}" for e in error.errors(include_url=False)]
        raise BundleError("; ".join(found[:3])[:400]) from error


def inputs_of(file: Path) -> str:
    """The digest of an image's inputs, by its record: "" without one, and where nobody said at the build."""
    document = files.read(file, LARGEST)
    try:
        return parse(document).inputs if document is not None else ""
    except BundleError:
        return "a record that cannot be understood"


def drift(record: BuildInfo, python: str, packages: Mapping[str, str]) -> Iterator[str]:
    """Every way in which what is installed now is not what the image was built with."""
    if record.python != python:
        yield f"python: {record.python} in the image, {python} now"
    for name in sorted({*record.packages, *packages}):
        built, now = record.packages.get(name), packages.get(name)
        if built is None:
            yield f"{name}: not in the image, {now} now"
        elif now is None:
            yield f"{name}: {built} in the image, gone now"
        elif built != now:
            yield f"{name}: {built} in the image, {now} now"


def installed_packages(stack: Stack) -> dict[str, str]:
    """The version of every distribution that a worker would see, and of what it would really import."""
    found = {}
    for name, directory in search.distributions(stack.path.directories()).items():
        record = search.distribution(directory)
        if record is not None:
            found[name] = record.version
    for name in PACKAGES:
        package = stack.package(name)
        if package is not None and package.version is not None:
            found[name] = package.version + (f" at {package.commit}" if package.commit else "")
    return found


def python_version() -> str:
    """The release of this interpreter."""
    return ".".join(map(str, sys.version_info[:3]))


def image_findings(machine: Machine, installed: Stack) -> Iterator[Finding]:
    """Findings about the image this runs in; none outside of our images."""
    document = machine.read(RECORD)
    if document.value is None:
        return
    try:
        built = parse(document.value)
    except BundleError as error:
        yield warn("image", f"{RECORD} cannot be understood: {error}", _FIX)
        return
    drifted = list(drift(built, python_version(), installed_packages(installed)))
    if not drifted:
        made = f", commit {built.revision[:12]}" if built.revision else ""
        inputs = f", inputs {built.inputs}" if built.inputs else ""
        yield ok("image", f"stack {built.stack} as built{made}{inputs}")
    for change in drifted:
        yield warn("image", change, _FIX)
