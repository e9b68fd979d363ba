"""What images there are and what is in them: docker-bake.json, which bake reads too."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bundle import files
from bundle.errors import UsageError, format_validation_errors

FILE = "docker-bake.json"

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")]
Version = Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.!+]{0,63}$")]
Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]  # empty: nobody could read it yet
Hash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Requirement = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z0-9_,-]+\])?([<>=!~]=?[0-9.]+)?$")
]
Why = Annotated[str, Field(min_length=10, pattern=r"^[^\n\r]+$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    why: Why


class Base(_Record):
    """An image that ours start from; `digest` names its exact content."""

    image: Annotated[str, Field(pattern=r"^[a-z0-9./-]+:[A-Za-z0-9._-]+$")]
    digest: Digest
    python: Annotated[str, Field(pattern=r"^3\.[0-9]+$")]
    platforms: Annotated[list[str], Field(min_length=1)]


class Source(_Record):
    """An archive that no package index has; where `commit` is empty, `archive` is the whole address."""

    archive: Annotated[str, Field(pattern=r"^https://[A-Za-z0-9._/-]+$")]
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{40})?$")]
    checksum: Digest


class Pin(_Record):
    """One version of one package; `hashes` where its files come from outside the common index."""

    version: Version
    extras: Annotated[str, Field(pattern=r"^[a-z0-9_,-]*$")] = ""
    hashes: list[Hash] | None = None


class Needs(_Record):
    """What a package is taken to require, instead of what its metadata says."""

    requires: list[Requirement]


class Apart(_Record):
    """Packages that the common lock leaves out: the lock STACK.`name`.txt has them."""

    name: Name
    packages: list[Name]


class Part(_Record):
    """A lock STACK.NAME.txt with what fewer extras need, in the versions of the whole one."""

    extras: list[Name]


class Backend(BaseModel):
    """What all stacks of a backend have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    requires: list[Requirement]
    metadata: dict[Name, Needs]
    apart: Apart


class Stack(BaseModel):
    """One combination of versions; `extras` are those of pyproject.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    backend: Literal["cpu", "cuda", "ascend"]
    extras: list[Name]
    pins: dict[Name, Pin]
    source: Name | None = None
    parts: dict[Name, Part] = {}


class Definition(BaseModel):
    """Every base, source, backend and stack, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bases: dict[Name, Base] = Field(alias="BASES")
    sources: dict[Name, Source] = Field(alias="SOURCES")
    backends: dict[Name, Backend] = Field(alias="BACKENDS")
    stacks: dict[Name, Stack] = Field(alias="STACKS")

    @model_validator(mode="after")
    def _names_resolve(self) -> "Definition":
        lost = [
            f"STACKS.{n}.backend: {s.backend}"
            for n, s in self.stacks.items()
            if s.backend not in self.backends
        ]
        lost += [f"STACKS.{n}.source: {s.source}" for n, s in self.stacks.items()
                 if s.source is not None and s.source not in self.sources]  # fmt: skip
        lost += [
            f"STACKS.{n}: no base for {s.backend}" for n, s in self.stacks.items() if not self.bases_of(n)
        ]
        if lost:
            raise ValueError("names that are not there: " + ", ".join(lost))
        return self

    def stack(self, name: str) -> Stack:
        """The stack of that name. Raises UsageError with the names that there are."""
        if name not in self.stacks:
            raise UsageError(f"no stack named {name[:100]!r}; there are {', '.join(self.stacks)}")
        return self.stacks[name]

    def bases_of(self, stack: str) -> Mapping[str, Base]:
        """The bases that a stack's images start from: one for each chip, or one."""
        backend = self.stacks[stack].backend
        return {n: b for n, b in self.bases.items() if n == backend or n.startswith(f"{backend}-")}


def load(root: Path) -> Definition:
    """The definition of the checkout at `root`. Raises UsageError with all that is wrong in it."""
    file = root / FILE
    source = files.read_text_if_small(file)
    if source is None:
        raise UsageError(f"{file}: not there, or too big: name the checkout with --root")
    try:
        return Definition.model_validate(_defaults(json.loads(source)))
    except ValidationError as error:
        found = format_validation_errors(error)
        raise UsageError(f"{file}: {len(found)} violations", found[:50]) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: {str(error)[:200]}") from error


def _defaults(document: Any) -> dict[str, Any]:
    """{variable: default} of bake's JSON, which may hold variables only."""
    if (
        not isinstance(document, dict)
        or set(document) != {"variable"}
        or not isinstance(document["variable"], dict)
    ):
        raise ValueError('must be one object {"variable": {...}}')
    bodies = document["variable"]
    if not all(isinstance(body, dict) and set(body) == {"default"} for body in bodies.values()):
        raise ValueError('every variable must be {"default": ...}')
    return {name: body["default"] for name, body in bodies.items()}


@dataclass(frozen=True)
class Target:
    """One image: `name` is bake's name for it, which holds no dot."""

    name: str
    stack: str
    base: str
    backend: str


def targets(definition: Definition) -> list[Target]:
    """Every image, in the order of the stacks: one for each stack and each base that it is built on."""
    return [
        Target(stack.replace(entry.backend, base, 1).replace(".", "-"), stack, base, entry.backend)
        for stack, entry in definition.stacks.items()
        for base in definition.bases_of(stack)
    ]


def chosen(definition: Definition, names: Iterable[str]) -> list[Target]:
    """The targets of these names, all where there is none. Raises UsageError with every unknown name."""
    known = {target.name: target for target in targets(definition)}
    wanted = list(names) or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"no target {', '.join(unknown)[:200]}; there are {', '.join(known)}")
    return [known[name] for name in wanted]
