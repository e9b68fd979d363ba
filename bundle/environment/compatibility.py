"""Versions that were seen together: one recorded table, and what of it answers a question.

Nothing in compatibility.json is a guess: each combination is what a command ran in, or what a page of the
repository says that it ran in. What an image pins and nobody ran stands apart.
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
from bundle.environment.packages import Stack, minor_version, parse_version
from bundle.errors import UsageError, by_key

FILE = Path(__file__).with_name("compatibility.json")
PYTHON = "python"  # its place among the packages
EMULATED = "emulated"  # the device where an accelerator's libraries are stand-ins
_CORE = "megatron-core"


def emulated(device: str) -> bool:
    """Whether a device says of itself that it is none."""
    return EMULATED in device.lower()


Number = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.!+]{0,63}$")]
Line = Annotated[str, Field(min_length=1, max_length=4000, pattern=r"^[^\n\r]+$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    backend: Literal["cuda", "ascend", "cpu"]
    packages: dict[str, Number]  # distribution, or "python" -> version

    def version(self, package: str) -> str | None:
        """The version of one package; None where it is not among them."""
        return self.packages.get(package)


class Combination(_Entry):
    """Versions that one command ran in, and what it has proven with them."""

    device: Line  # "cpu", the accelerator's name, or EMULATED
    proven: Annotated[tuple[Line, ...], Field(min_length=1, strict=False)]
    command: Line
    date: Annotated[datetime.date, Field(strict=False)]
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{7,40})?$")] = ""  # of this repository
    source: str = ""  # the page that says so, where no file of the command is left
    notes: dict[str, Line] = {}  # package -> what whoever installs it must know

    @field_validator("device")
    @classmethod
    def _is_one(cls, device: str) -> str:
        if emulated(device) and device != EMULATED:
            raise ValueError(f"a device that is called emulated is no hardware: say {EMULATED}")
        return device

    @property
    def hardware(self) -> str:
        """The name of the device that it ran on; empty where that was emulated."""
        return "" if self.device == EMULATED else self.device


class Pinned(_Entry):
    """Versions that an image pins, and those pairs with its megatron-core that no combination has."""

    stack: Line
    unproven: Annotated[tuple[str, ...], Field(strict=False)]  # packages


class Table(BaseModel):
    """All that is recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    schema_: Literal[1] = Field(alias="schema")
    combinations: Annotated[tuple[Combination, ...], Field(strict=False)]
    images: Annotated[tuple[Pinned, ...], Field(strict=False)]

    def images_of(self, backend: str) -> Iterator[Pinned]:
        """What the images of a backend pin."""
        return (image for image in self.images if image.backend == backend)

    def proves(self, backend: str, package: str, version: str, core: str) -> bool:
        """Whether a package was seen beside a megatron-core on a backend; of Python the minor counts."""
        return any(
            seen.backend == backend and seen.version(_CORE) == core and _same(package, version, seen)
            for seen in self.combinations
        )


def _same(package: str, version: str, seen: Combination) -> bool:
    there = seen.version(package)
    if package == PYTHON and there is not None:
        return minor_version(there) == minor_version(version)
    return there is not None and Version(there).public == Version(version).public


def parse(text: str, origin: str) -> Table:
    """The table that a text holds. Raises UsageError with all that is wrong in it."""
    try:
        return Table.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"{origin} is no table of combinations:", by_key(error)) from None


@cache
def load() -> Table:
    """The table that the package ships."""
    return parse(files.content(FILE, 1 << 22).decode("utf-8"), FILE.name)


class CombinationAdvice(NamedTuple):
    """What the table says about a megatron-core on a backend; `found` is None where none was seen."""

    found: Combination | None
    also: tuple[Combination, ...] = ()  # other commands that ran in the same versions
    nearest: tuple[Combination, ...] = ()  # of the backend, by distance; then that megatron-core elsewhere
    images: tuple[Pinned, ...] = ()  # that pin what is asked for, seen or not


def resolve(table: Table, backend: str, core: str = "") -> CombinationAdvice:
    """The best known combination for a release ("0.17.1"), a minor ("0.17"), or any.

    The newest release wins, then what ran on a device, then the latest run. Raises UsageError for what is no
    version and no backend.
    """
    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend[:40]}: choose one of {', '.join(BACKENDS)}")
    wanted = parse_version(core) if core else None
    if core and (wanted is None or len(wanted.release) not in (2, 3)):
        raise UsageError(
            f"--mcore {core[:40]}: say a release or a minor of megatron-core, like 0.17.1 or 0.17"
        )

    def asked(entry: _Entry) -> bool:
        return wanted is None or _release(entry)[: len(wanted.release)] == wanted.release

    here = [seen for seen in table.combinations if seen.backend == backend]
    best = sorted(filter(asked, here), key=_merit, reverse=True)
    images = tuple(filter(asked, table.images_of(backend)))
    if best:
        also = tuple(seen for seen in best[1:] if seen.packages == best[0].packages)
        return CombinationAdvice(best[0], also=also, images=images)
    near = sorted(here, key=lambda seen: _distance(_release(seen), wanted.release if wanted else ()))
    elsewhere = [seen for seen in table.combinations if seen.backend != backend and asked(seen)]
    return CombinationAdvice(None, nearest=(*_one_each(near), *_one_each(elsewhere)), images=images)


def versions_met(table: Table, backend: str, package: str, *, hardware: bool) -> dict[str, Combination]:
    """Versions of a package that ran on a backend's devices, or on emulated ones: each with its last run."""
    met = (seen for seen in table.combinations if seen.backend == backend and package in seen.packages)
    found = (seen for seen in met if bool(seen.hardware) is hardware)
    return {seen.packages[package]: seen for seen in sorted(found, key=lambda seen: seen.date)}


def observed(
    stack: Stack, backend: str, device: str, proven: Iterable[str], command: str, *, core: str | None = None
) -> Combination:
    """What runs now, in this interpreter and with these packages; `core`: with another megatron-core.

    `device`: its name; of one that is called emulated nothing else is kept.
    """
    found = {package.name: package.version for package in stack.packages() if package.version}
    own = {_CORE: core} if core else {}
    return Combination.model_validate(
        {
            "backend": backend,
            "packages": {**found, **own, PYTHON: image.python_version()},
            "device": EMULATED if emulated(device) else device,
            "proven": tuple(proven),
            "command": command,
            "date": datetime.date.today(),
            "commit": search.commit(Path(__file__).parents[2]) or "",
        }
    )


def _merit(seen: Combination) -> tuple[tuple[int, ...], bool, datetime.date]:
    return _release(seen), bool(seen.hardware), seen.date


def _release(entry: _Entry) -> tuple[int, ...]:
    return Version(entry.packages[_CORE]).release


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip(one, (*other, 0, 0), strict=False))


def _one_each(entries: Iterable[Combination]) -> Iterator[Combination]:
    """One for each backend and megatron-core, in their order."""
    by_release: dict[tuple[str, str], Combination] = {}
    for entry in entries:
        by_release.setdefault((entry.backend, entry.packages[_CORE]), entry)
    yield from by_release.values()


def pins(found: Combination) -> Mapping[str, str]:
    """What pip is to be held to: package -> public version, megatron-core first; Python is not among them."""
    order = sorted(found.packages, key=lambda name: (name != _CORE, name != "torch", name))
    return {name: Version(found.packages[name]).public for name in order if name != PYTHON}
