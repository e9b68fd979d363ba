"""What an image knows about itself: /opt/bundle/build-info.json, written when it is built."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bundle.errors import BundleError, EnvironmentUnfit
from bundle.frozen import frozen
from bundle.images.definition import Definition
from bundle.stack import PACKAGES, Stack, metadata, text, versions

LARGEST = 1 << 20

Text = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]


class BuildInfo(BaseModel):
    """What was in the image when it was built, and what it was built from."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = Field(alias="schema")
    stack: Text
    revision: Text  # the commit; empty where nobody said
    inputs: Text  # the digest of `images fingerprint`; empty where nobody said
    python: Text
    sources: dict[Text, Text]  # name -> commit
    packages: dict[Text, Text]  # name -> version

    def text(self) -> str:
        """The JSON that `parse` reads."""
        return json.dumps(self.model_dump(by_alias=True), indent=2, sort_keys=True) + "\n"


@frozen
class Origin:
    """What the build says about itself: its stack and, where known, the commit and the inputs' digest."""

    stack: str
    revision: str = ""
    inputs: str = ""


def stamp(definition: Definition, origin: Origin, installed: Stack) -> BuildInfo:
    """The record of the image being built. Raises EnvironmentUnfit when it is not what was defined."""
    stack = definition.stack(origin.stack)
    packages = installed_packages(installed)
    python = python_version()
    wrong = [
        f"{name}: {packages.get(name, 'not installed')}, and the stack says {pin.version}"
        for name, pin in stack.pins.items()
        if versions.parse(packages.get(name, "")) is None or not _is(packages[name], pin.version)
    ]
    pythons = {base.python for base in definition.bases_of(origin.stack).values()}
    if not any(python.startswith(f"{wanted}.") for wanted in pythons):
        wrong.append(f"Python {python}, and the base says {' or '.join(sorted(pythons))}")
    if wrong:
        raise EnvironmentUnfit(f"this is not the stack {origin.stack} of docker-bake.json", wrong)
    source = {stack.source: definition.sources[stack.source].commit} if stack.source else {}
    return BuildInfo(
        schema=1,
        stack=origin.stack,
        revision=origin.revision,
        inputs=origin.inputs,
        python=python,
        sources=source,
        packages=packages,
    )


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
    document = text.read(file, LARGEST)
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
    for name, directory in metadata.distributions(stack.path.directories()).items():
        record = metadata.read(directory)
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


def _is(installed: str, wanted: str) -> bool:
    """Whether a version is the wanted one, whatever build it is ("2.13.0+cpu" is 2.13.0)."""
    return installed.partition("+")[0].partition(" ")[0] == wanted
