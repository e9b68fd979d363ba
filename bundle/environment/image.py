"""The record of a container image, and the check of a container against the record of its image."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bundle import files
from bundle.environment import search
from bundle.environment.machine import Finding, Machine, ok, warn
from bundle.environment.packages import PACKAGES, InstalledPackages, Package
from bundle.errors import BundleError, UsageError, format_validation_errors

RECORD_FILE = (
    "/opt/bundle/build-info.json"  # written at the end of a build, by `python -m tools.images stamp`
)
MOST_RECORD_BYTES = 1 << 20
_DRIFT_FIX = "start from the image again, or build one with the change; only a built image was tested"

Text = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]


class BuildInfo(BaseModel):
    """What was in the image when it was built, and what it was built from."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    version: Literal[1] = Field(alias="schema")
    stack: Text
    revision: Text  # the commit; empty where nobody said
    inputs: Text  # the digest of `python -m tools.images fingerprint`; empty where nobody said
    python: Text
    sources: dict[Text, Text]  # name -> commit
    packages: dict[Text, Text]  # name -> version

    def find_package(self, name: str) -> Package | None:
        """Return a package of the image by the name used here; the record does not have its directory."""
        recorded = self.packages.get(name)
        version, _, commit = (recorded or "").partition(" at ")
        return Package(name, version, commit or None, None) if recorded else None

    @property
    def megatron_version(self) -> str:
        """The version of the image's megatron-core. Raise UsageError where the image has none."""
        package = self.find_package("megatron-core")
        if package is None or package.version is None:
            raise UsageError("--image-record: the image has no megatron-core")
        return package.version

    def to_json(self) -> str:
        """Return the JSON that `parse` reads."""
        return json.dumps(self.model_dump(by_alias=True), indent=2, sort_keys=True) + "\n"


def parse(document: str) -> BuildInfo:
    """Return the record in a build-info.json. Raise BundleError with the first three errors in it."""
    if len(document) > MOST_RECORD_BYTES:
        raise BundleError(f"more than {MOST_RECORD_BYTES >> 20} MiB")
    try:
        return BuildInfo.model_validate_json(document)
    except ValidationError as error:
        raise BundleError("; ".join(format_validation_errors(error)[:3])[:400]) from error


def read_own_record(file: Path = Path(RECORD_FILE)) -> BuildInfo | None:
    """Return the record of this process's image; None outside our images and for a broken record."""
    document = files.read_text_if_small(file, MOST_RECORD_BYTES)
    try:
        return parse(document) if document is not None else None
    except BundleError:
        return None


def read_record(file: Path) -> BuildInfo:
    """Return the record in a file: an image's own record, or the output of `doctor --json` in that image.

    Raise UsageError where the file cannot be read or has no record.
    """
    try:
        document = files.read_content(file, MOST_RECORD_BYTES).decode(errors="replace")
        printed = json.loads(document)
        image_record = (
            printed.get("image") if isinstance(printed, dict) and "findings" in printed else printed
        )
        if image_record is None:
            raise BundleError("doctor did not run in an image of mcore-bundle")
        return parse(json.dumps(image_record))
    except OSError as error:
        raise UsageError(f"--image-record {file}: {error.strerror}") from error
    except (BundleError, ValueError, RecursionError) as error:
        raise UsageError(f"--image-record {file}: not the record of an image: {error}") from error


def compare_records(job_record: BuildInfo | None, own_record: BuildInfo | None) -> Iterator[str]:
    """Yield every difference between the image that a job was made for and this one, by their records."""
    if job_record is None or own_record is None:
        expected, actual = (
            f"the mcore-bundle image {record.stack}" if record else "no mcore-bundle image"
            for record in (job_record, own_record)
        )
        yield f"image: the job expects {expected}, but runs in {actual}. See `plan --image-record`"
        return
    job_fields, own_fields = job_record.model_dump(), own_record.model_dump()
    for key in sorted(job_fields):
        old, new = job_fields[key], own_fields[key]
        if not isinstance(old, dict):
            old, new = {key: old}, {key: new}
        for name in _list_changed_keys(old, new):
            yield f"image, {name}: {old.get(name)} in the job, {new.get(name)} here"


def find_drift(record: BuildInfo, python: str, packages: Mapping[str, str]) -> Iterator[str]:
    """Yield every difference between the packages installed now and those that the image was built with."""
    built, now = {"python": record.python, **record.packages}, {"python": python, **packages}
    for name in _list_changed_keys(built, now):
        yield f"{name}: {built.get(name, 'not')} in the image, but {now.get(name, 'not')} installed now"


def _list_changed_keys(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def list_distribution_versions(stack: InstalledPackages) -> dict[str, str]:
    """Return the versions of all distributions that a worker sees; of PACKAGES, of what it imports."""
    versions = {}
    for name, directory in search.find_distributions(stack.search_path.list_directories()).items():
        record = search.read_distribution(directory)
        if record is not None:
            versions[name] = record.version
    for name in PACKAGES:
        package = stack.find_package(name)
        if package is not None and package.version is not None:
            versions[name] = package.version + (f" at {package.commit}" if package.commit else "")
    return versions


def get_python_version() -> str:
    """Return the release of this interpreter."""
    return ".".join(map(str, sys.version_info[:3]))


def check_image(machine: Machine, installed: InstalledPackages) -> Iterator[Finding]:
    """Yield the findings about the image that this process runs in; none outside our images."""
    document = machine.read(RECORD_FILE)
    if document.value is None:
        return
    try:
        built = parse(document.value)
    except BundleError as error:
        yield warn("image", f"{RECORD_FILE} cannot be read: {error}", _DRIFT_FIX)
        return
    drifted = list(find_drift(built, get_python_version(), list_distribution_versions(installed)))
    if not drifted:
        commit = f", commit {built.revision[:12]}" if built.revision else ""
        inputs = f", inputs {built.inputs}" if built.inputs else ""
        yield ok("image", f"stack {built.stack} as built{commit}{inputs}")
    for change in drifted:
        yield warn("image", change, _DRIFT_FIX)
