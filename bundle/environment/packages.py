"""The versions, commits and paths of the packages that a job stands on."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from bundle import files
from bundle.environment import megatron, search, versions
from bundle.environment.megatron import Megatron
from bundle.environment.search import SearchPath

# what we ask about -> (distribution, import package)
PACKAGES: dict[str, tuple[str, str]] = {
    "torch": ("torch", "torch"),
    "numpy": ("numpy", "numpy"),
    "megatron-core": ("megatron-core", "megatron.core"),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "flash-attn": ("flash-attn", "flash_attn"),
    "torch-npu": ("torch-npu", "torch_npu"),
    "mindspeed": ("mindspeed", "mindspeed"),
    "sglang": ("sglang", "sglang"),
    "ray": ("ray", "ray"),
    "triton": ("triton", "triton"),
}
# frameworks that train with megatron-core, and what they are made of -> (distribution, import packages)
FRAMEWORKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "verl": ("verl", ("verl",)),
    "slime": ("slime", ("slime", "slime_plugins")),
    "miles": ("miles", ("miles", "miles_plugins")),
    "ms-swift": ("ms-swift", ("swift",)),
    "mcore-bridge": ("mcore-bridge", ("mcore_bridge",)),
    "mbridge": ("mbridge", ("mbridge",)),
    "Megatron-Bridge": ("megatron-bridge", ("megatron.bridge",)),
    "NeMo RL": ("nemo-rl", ("nemo_rl",)),
    "Primus": ("primus", ("primus",)),
}


class Package(NamedTuple):
    """One installed package; its version is what its metadata says, which for MindSpeed says nothing."""

    name: str
    version: str | None
    commit: str | None
    path: Path | None  # the directory of its modules

    @property
    def base_version(self) -> str | None:
        """The release number alone."""
        return versions.base(self.version) if self.version else None


class Packages(Protocol):
    """What can tell about packages: a machine's own search path, or the record of an image."""

    def package(self, name: str) -> Package | None: ...


@dataclass(frozen=True)
class Stack:
    """What is installed. Reads lazily: a question about torch does not look for megatron."""

    path: SearchPath

    @cached_property
    def megatron(self) -> Megatron:
        """Every copy of megatron on the path and the one that wins."""
        return megatron.find(self.path)

    @cached_property
    def _distributions(self) -> Mapping[str, Path]:
        return search.distributions(self.path.directories())

    def package(self, name: str) -> Package | None:
        """The package by our name for it (a key of PACKAGES); None when it is not installed."""
        if name == "megatron-core":
            core = self.megatron.core
            return Package(name, core.version, core.commit, core.package / "core") if core else None
        return self._package(name, *PACKAGES[name])

    def frameworks(self) -> tuple[Package, ...]:
        """The import packages of those of FRAMEWORKS that are here, each by its framework's name."""
        found = [
            self._package(name, distribution, module)
            for name, (distribution, modules) in FRAMEWORKS.items()
            for module in modules
        ]
        return tuple(package for package in found if package is not None and package.path is not None)

    def _package(self, name: str, distribution: str, module: str) -> Package | None:
        record = search.distribution(self._distributions.get(distribution))
        location = None
        for end in range(
            1, module.count(".") + 2
        ):  # the last part is looked for in the package of the others
            location = self.path.find(".".join(module.split(".")[:end]), location)
            if location is None:
                break
        found = next(iter(self.path.packages(location)), None) if location and location.regular else None
        path = found.path if found else None
        if record is None and path is None:
            return None
        commit = (record.commit if record else None) or (search.enclosing_commit(path) if path else None)
        version = record.version if record else _version(path)
        return Package(name, version, commit, path)

    def packages(self) -> tuple[Package, ...]:
        """Every package of PACKAGES that is installed."""
        return tuple(package for name in PACKAGES if (package := self.package(name)) is not None)


def detect() -> Stack:
    """The stack that a worker started here would see."""
    return Stack(search.current())


def importable() -> Stack:
    """The stack that this very process imports from, as its search path stands now."""
    return Stack(search.own())


def _version(path: Path | None) -> str | None:
    """The literal `__version__` of a package that is on the path without having been installed."""
    for name in ("version.py", "_version.py", "__init__.py"):
        source = files.read(path / name) if path else None
        found = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", source or "", re.MULTILINE)
        if found:
            return found[1]
    return None
