"""The recorded table of versions that ran together, and the answers that it gives.

Nothing in compatibility.json is a guess: a command ran in each combination, or a page of the repository says
that it ran. Versions that an image pins and that nobody ran are listed separately.
"""

import datetime
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from bundle import files
from bundle.environment import BACKENDS, image, search
from bundle.environment.packages import InstalledPackages, parse_minor_version, parse_version
from bundle.errors import UsageError, format_validation_errors

COMPATIBILITY_FILE = Path(__file__).with_name("compatibility.json")
PYTHON_KEY = "python"  # its place among the packages
EMULATED_ACCELERATOR = "emulated"  # the device where an accelerator's libraries are stand-ins
_MEGATRON_PACKAGE = "megatron-core"


def is_emulated(device: str) -> bool:
    """Return whether the name of a device says that the device is emulated."""
    return EMULATED_ACCELERATOR in device.lower()


VersionText = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.!+]{0,63}$")]
LineText = Annotated[str, Field(min_length=1, max_length=4000, pattern=r"^[^\n\r]+$")]


class _BackendPackageVersions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    backend: Literal["cuda", "ascend", "cpu"]
    packages: dict[str, VersionText]  # distribution, or "python" -> version

    def get_version(self, package: str) -> str | None:
        """Return the version of one package; None where the set does not have the package."""
        return self.packages.get(package)


class Combination(_BackendPackageVersions):
    """Versions that one command ran in, and what it has proven with them."""

    device: LineText  # "cpu", the accelerator's name, or EMULATED_ACCELERATOR
    proven: Annotated[tuple[LineText, ...], Field(min_length=1, strict=False)]
    command: LineText
    date: Annotated[datetime.date, Field(strict=False)]
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{7,40})?$")] = ""  # of this repository
    source: str = ""  # the page that says so, where no file of the command is left
    notes: dict[str, LineText] = {}  # package -> what whoever installs it must know

    @field_validator("device")
    @classmethod
    def _check_emulated_device_name(cls, device: str) -> str:
        if is_emulated(device) and device != EMULATED_ACCELERATOR:
            raise ValueError(f"an emulated device must be called {EMULATED_ACCELERATOR}")
        return device

    @property
    def device_name_unless_emulated(self) -> str:
        """The name of the device that it ran on; empty where that was emulated."""
        return "" if self.device == EMULATED_ACCELERATOR else self.device


class PinnedImage(_BackendPackageVersions):
    """Versions that an image pins, and those pairs with its megatron-core that no combination has."""

    stack: LineText
    unproven: Annotated[tuple[str, ...], Field(strict=False)]  # packages


class CombinationTable(BaseModel):
    """All that is recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    schema_: Literal[1] = Field(alias="schema")
    combinations: Annotated[tuple[Combination, ...], Field(strict=False)]
    images: Annotated[tuple[PinnedImage, ...], Field(strict=False)]

    def list_images(self, backend: str) -> Iterator[PinnedImage]:
        """Return the versions that the images of a backend pin."""
        return (image for image in self.images if image.backend == backend)

    def is_proven(self, backend: str, package: str, version: str, core: str) -> bool:
        """Return whether a package ran with a megatron-core on a backend; of Python, the minor counts."""
        return any(
            seen.backend == backend
            and seen.get_version(_MEGATRON_PACKAGE) == core
            and _has_same_version(package, version, seen)
            for seen in self.combinations
        )


def _has_same_version(package: str, version: str, combination: Combination) -> bool:
    recorded = combination.get_version(package)
    if package == PYTHON_KEY and recorded is not None:
        return parse_minor_version(recorded) == parse_minor_version(version)
    return recorded is not None and Version(recorded).public == Version(version).public


def parse_json(text: str, origin: str) -> CombinationTable:
    """Return the table in a JSON text. Raise UsageError with every error in the table."""
    try:
        return CombinationTable.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"{origin} is not a valid table:", format_validation_errors(error)) from None


@cache
def load() -> CombinationTable:
    """Return the table that the package ships."""
    return parse_json(
        files.read_content(COMPATIBILITY_FILE, 1 << 22).decode("utf-8"), COMPATIBILITY_FILE.name
    )


class CombinationAdvice(NamedTuple):
    """What the table says about a megatron-core on a backend; `best` is None where none was seen."""

    best: Combination | None
    same_versions: tuple[Combination, ...] = ()  # other commands that ran in the same versions
    nearest: tuple[Combination, ...] = ()  # of the backend, by distance; then that megatron-core elsewhere
    images: tuple[PinnedImage, ...] = ()  # that pin what is asked for, seen or not


def resolve(table: CombinationTable, backend: str, core: str = "") -> CombinationAdvice:
    """Return the best known combination for a release ("0.17.1"), a minor version ("0.17"), or any version.

    The newest release wins, then a run on a device, then the latest run. Raise UsageError for an unknown
    backend and for text that is not a version.
    """
    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend[:40]}: unknown. Choose one of {', '.join(BACKENDS)}")
    requested = parse_version(core) if core else None
    if core and (requested is None or len(requested.release) not in (2, 3)):
        raise UsageError(
            f"--mcore {core[:40]}: not a version of megatron-core. Write a release such as 0.17.1, or a minor"
            " version such as 0.17"
        )

    def matches_request(entry: _BackendPackageVersions) -> bool:
        return (
            requested is None or _parse_megatron_release(entry)[: len(requested.release)] == requested.release
        )

    candidates = [seen for seen in table.combinations if seen.backend == backend]
    best = sorted(filter(matches_request, candidates), key=_build_sort_key, reverse=True)
    images = tuple(filter(matches_request, table.list_images(backend)))
    if best:
        also = tuple(seen for seen in best[1:] if seen.packages == best[0].packages)
        return CombinationAdvice(best[0], same_versions=also, images=images)
    near = sorted(
        candidates,
        key=lambda seen: _measure_distance(
            _parse_megatron_release(seen), requested.release if requested else ()
        ),
    )
    elsewhere = [seen for seen in table.combinations if seen.backend != backend and matches_request(seen)]
    return CombinationAdvice(
        None,
        nearest=(*_drop_duplicate_megatron_releases(near), *_drop_duplicate_megatron_releases(elsewhere)),
        images=images,
    )


def list_tested_versions(
    table: CombinationTable, backend: str, package: str, *, hardware: bool
) -> dict[str, Combination]:
    """Return the versions of a package that ran on a backend's devices, each with its last run.

    `hardware` False: the versions that ran on emulated devices.
    """
    candidates = (seen for seen in table.combinations if seen.backend == backend and package in seen.packages)
    tested = (seen for seen in candidates if bool(seen.device_name_unless_emulated) is hardware)
    return {seen.packages[package]: seen for seen in sorted(tested, key=lambda seen: seen.date)}


def build_proven_combination(
    stack: InstalledPackages,
    backend: str,
    device: str,
    proven: Iterable[str],
    command: str,
    *,
    core: str | None = None,
) -> Combination:
    """Return the combination of versions that runs now: this interpreter and these packages.

    `core` replaces the version of megatron-core. `device` is the name of the device; an emulated one is
    recorded as EMULATED_ACCELERATOR alone.
    """
    versions = {package.name: package.version for package in stack.list_tracked_packages() if package.version}
    core_version = {_MEGATRON_PACKAGE: core} if core else {}
    return Combination.model_validate(
        {
            "backend": backend,
            "packages": {**versions, **core_version, PYTHON_KEY: image.get_python_version()},
            "device": EMULATED_ACCELERATOR if is_emulated(device) else device,
            "proven": tuple(proven),
            "command": command,
            "date": datetime.date.today(),
            "commit": search.read_commit(Path(__file__).parents[2]) or "",
        }
    )


def _build_sort_key(combination: Combination) -> tuple[tuple[int, ...], bool, datetime.date]:
    return (
        _parse_megatron_release(combination),
        bool(combination.device_name_unless_emulated),
        combination.date,
    )


def _parse_megatron_release(entry: _BackendPackageVersions) -> tuple[int, ...]:
    return Version(entry.packages[_MEGATRON_PACKAGE]).release


def _measure_distance(release: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip(release, (*target, 0, 0), strict=False))


def _drop_duplicate_megatron_releases(entries: Iterable[Combination]) -> Iterator[Combination]:
    """Yield the first entry for each backend and megatron-core, in their order."""
    by_release: dict[tuple[str, str], Combination] = {}
    for entry in entries:
        by_release.setdefault((entry.backend, entry.packages[_MEGATRON_PACKAGE]), entry)
    yield from by_release.values()


def build_pins(combination: Combination) -> Mapping[str, str]:
    """Return the versions to pin with pip: package -> public version, megatron-core first, without Python."""
    order = sorted(combination.packages, key=lambda name: (name != _MEGATRON_PACKAGE, name != "torch", name))
    return {name: Version(combination.packages[name]).public for name in order if name != PYTHON_KEY}
