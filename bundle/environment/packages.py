"""The versions, commits and paths of the packages that a job uses, megatron-core's first of all.

Versions are compared on the base version, because the rest of the string can be wrong: the tag core_v0.17.0
calls itself 0.17.0rc0, which PEP 440 puts neither in `>=0.17` nor in `<0.17`. `megatron` has no __init__.py,
and Python merges the directories of that name on the path. Therefore megatron.core and megatron.training may
come from different trees.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from bundle import files
from bundle.environment import search
from bundle.environment.search import (
    PathEntry,
    SearchPath,
    find_distributions,
    parse_literals,
    read_commit,
    read_distribution,
)


def parse_version(version: str) -> Version | None:
    """Return the version, or None when PEP 440 cannot read it."""
    try:
        return Version(version)
    except InvalidVersion:
        return None


def parse_base_version(version: str) -> str | None:
    """Return the release number alone ("0.16.0" of "0.16.0rc0+g1234abc"); None if PEP 440 cannot read it."""
    parsed = parse_version(version)
    return parsed.base_version if parsed else None


def parse_minor_version(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of the release ((0, 16) of "0.16.1rc0"); None if PEP 440 fails on it."""
    parsed = parse_version(version)
    return (parsed.major, parsed.minor) if parsed else None


def is_base_version_within(version: str, specifier: str) -> bool | None:
    """Return whether the base version is inside a PEP 440 range; None when it cannot be read.

    The range "" has every version. Raise packaging.specifiers.InvalidSpecifier for an invalid range.
    """
    number = parse_base_version(version)
    return None if number is None else SpecifierSet(specifier).contains(number)


_VERSION_PART_NAMES = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


class MegatronCopy(NamedTuple):
    """One directory named megatron that holds megatron.core or megatron.training."""

    package: Path  # the directory `megatron` itself
    origin: str
    version: str | None  # what its package_info.py says, which may be a lie
    commit: str | None

    @property
    def root(self) -> Path:
        """The directory that holds `megatron`: the checkout, or site-packages."""
        return self.package.parent


class MegatronCopies(NamedTuple):
    """Every copy on the path, and the directories that `megatron.core` and `megatron.training` come from."""

    copies: tuple[MegatronCopy, ...]
    core: MegatronCopy | None
    training: MegatronCopy | None
    archive: str | None = None  # the zip that megatron.core would come from, which nobody here reads

    @property
    def core_training_mismatch(self) -> str | None:
        """The reason why the two halves do not fit, when they come from different trees."""
        if self.core is None or self.training is None or self.core.package == self.training.package:
            return None
        return files.to_printable(
            f"megatron.core comes from {self.core.package} ({self.core.version or 'no version'}, "
            f"{self.core.origin}) and megatron.training from {self.training.package} "
            f"({self.training.version or 'no version'}, {self.training.origin}): "
            "put one tree first on PYTHONPATH"
        )


def find_megatron(path: SearchPath) -> MegatronCopies:
    """Return the copies of megatron on the search path and those that an import would get."""
    location = path.find("megatron")
    halves = [path.find(f"megatron.{half}", location) if location else None for half in ("core", "training")]
    winners = [
        PathEntry(places[0].path.parent, places[0].origin) if places else None
        for places in map(path.list_package_directories, halves)
    ]
    hidden = [PathEntry(entry.path / "megatron", entry.origin) for entry in path.entries]
    copies: dict[Path, MegatronCopy] = {}
    for entry in (*hidden, *path.list_package_directories(location), *filter(None, winners)):
        if entry.path not in copies and (copy := read_copy(entry)) is not None:
            copies[entry.path] = copy
    core, training = (copies.get(winner.path) if winner else None for winner in winners)
    return MegatronCopies(tuple(copies.values()), core, training, halves[0].archive if halves[0] else None)


def find_copy(path: Path) -> MegatronCopy | None:
    """Return the copy in a tree that the user names.

    The tree is a checkout, a site-packages, `megatron` or `megatron/core`.
    """
    for package in (path / "megatron", path, path.parent):
        if package.name == "megatron" and files.is_directory(package / "core"):
            return read_copy(PathEntry(package, "--mcore"))
    return None


def read_copy(entry: PathEntry) -> MegatronCopy | None:
    """Return the copy in the directory `entry.path`; None when neither half of megatron is there."""
    if not any(files.is_directory(entry.path / child) for child in ("core", "training")):
        return None
    root = entry.path.parent
    record = read_distribution(find_distributions([root]).get("megatron-core"))
    version = build_version_from_constants(files.read_text_if_small(entry.path / "core" / "package_info.py"))
    version = version or (record.version if record else None)
    return MegatronCopy(
        entry.path, entry.origin, version, read_commit(root) or (record.commit if record else None)
    )


def build_version_from_constants(source: str | None) -> str | None:
    """Return the version that the constants in a package_info.py give; None when they are not literals.

    `__version__` itself is not read. From 0.19 on, importing the file runs git and appends the commit of the
    surrounding directory, which need not be megatron's.
    """
    values = parse_literals(source)
    if not all(isinstance(values.get(name), int | str) for name in _VERSION_PART_NAMES):
        return None
    major, minor, patch, pre = (str(values[name]) for name in _VERSION_PART_NAMES)
    return f"{major}.{minor}.{patch}{pre}"


class SourcePredicate(NamedTuple):
    """A text in a file below megatron/core that shows a behaviour, and the release that brought it."""

    file: str
    text: str
    since: str


@dataclass(frozen=True, slots=True)
class MegatronCode:
    """The code of one megatron-core: its release number, and the directory that holds `megatron`, if any."""

    release: Version
    root: Path | None = None
    _texts: dict[str, str | None] = field(default_factory=dict, compare=False, repr=False)

    def has(self, predicate: SourcePredicate) -> bool:
        """Return whether this megatron-core has the behaviour of the predicate."""
        text = self._read_text(predicate.file)
        return self.release >= Version(predicate.since) if text is None else predicate.text in text

    def describe_evidence_source(self, predicate: SourcePredicate) -> str:
        """Return the text that says by what `has` was decided."""
        text = self._read_text(predicate.file)
        return f"judged by version number {self.release}" if text is None else f"read in {predicate.file}"

    def _read_text(self, file: str) -> str | None:
        """Return a file's text; None where there is no tree, or no such file in it."""
        if self.root is not None and file not in self._texts:
            self._texts[file] = files.read_text_if_small(self.root / "megatron/core" / file)
        return self._texts.get(file)


# what we ask about -> (distribution, import package)
PACKAGES: dict[str, tuple[str, str]] = {
    "torch": ("torch", "torch"),
    "numpy": ("numpy", "numpy"),
    "megatron-core": ("megatron-core", "megatron.core"),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "flash-attn": ("flash-attn", "flash_attn"),
    "torch-npu": ("torch-npu", "torch_npu"),
    "mindspeed": ("mindspeed", "mindspeed"),
    "megatron-adaptor": ("megatron-adaptor", "megatron_adaptor"),
    "sglang": ("sglang", "sglang"),
    "ray": ("ray", "ray"),
    "triton": ("triton", "triton"),
}
# frameworks that train with megatron-core, and what they are made of -> (distribution, import packages)
MEGATRON_FRAMEWORK_PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
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


def detect_megatron_triton_import(root: Path | None, version: Version) -> tuple[bool, str]:
    """Return whether a megatron-core imports triton on every machine, and the evidence.

    The evidence is its source in `root`, the directory that holds `megatron`, or else its version number.
    """
    experts = root / "megatron/core/transformer/moe" if root else None
    if experts is None or not files.is_directory(experts):
        return version >= Version("0.18"), f"judged by version number {version}"
    for file in ("paged_stash.py", "ops/paged_stash.py"):
        if re.search(r"^import triton", files.read_text_if_small(experts / file) or "", re.MULTILINE):
            return True, f"read in transformer/moe/{file}"
    return False, ""


def get_triton_distribution(backend: str) -> str:
    """Return the distribution that brings the module triton."""
    return "triton-ascend" if backend == "ascend" else "triton"


class Package(NamedTuple):
    """One installed package; its version is that of its metadata, which is meaningless for MindSpeed."""

    name: str
    version: str | None
    commit: str | None
    path: Path | None  # the directory of its modules

    @property
    def base_version(self) -> str | None:
        """The release number alone; None where the version is unknown."""
        return parse_base_version(self.version) if self.version else None


class Packages(Protocol):
    """A source of facts about packages: a machine's own search path, or the record of an image."""

    def find_package(self, name: str) -> Package | None: ...


class InstalledPackages:
    """The installed packages, read lazily: a question about torch does not look for megatron."""

    def __init__(self, path: SearchPath) -> None:
        self.search_path = path

    @cached_property
    def megatron(self) -> MegatronCopies:
        """Every copy of megatron on the path and the one that wins."""
        return find_megatron(self.search_path)

    @cached_property
    def _distributions(self) -> Mapping[str, Path]:
        return search.find_distributions(self.search_path.list_directories())

    def find_package(self, name: str) -> Package | None:
        """Return the package by the name used here (a key of PACKAGES); None when it is not installed."""
        if name == "megatron-core":
            core = self.megatron.core
            return Package(name, core.version, core.commit, core.package / "core") if core else None
        return self._locate_package(name, *PACKAGES[name])

    def find_megatron_frameworks(self) -> tuple[Package, ...]:
        """Return installed packages of MEGATRON_FRAMEWORK_PACKAGES, each by its framework's name."""
        candidates = [
            self._locate_package(name, distribution, module)
            for name, (distribution, modules) in MEGATRON_FRAMEWORK_PACKAGES.items()
            for module in modules
        ]
        return tuple(package for package in candidates if package is not None and package.path is not None)

    def _locate_package(self, name: str, distribution: str, module: str) -> Package | None:
        record = search.read_distribution(self._distributions.get(distribution))
        location = None
        for end in range(
            1, module.count(".") + 2
        ):  # the last part is looked for in the package of the others
            location = self.search_path.find(".".join(module.split(".")[:end]), location)
            if location is None:
                break
        entry = (
            next(iter(self.search_path.list_package_directories(location)), None)
            if location and location.is_regular
            else None
        )
        path = entry.path if entry else None
        if record is None and path is None:
            return None
        commit = (record.commit if record else None) or (search.find_enclosing_commit(path) if path else None)
        version = record.version if record else _read_version_literal(path)
        return Package(name, version, commit, path)

    def list_tracked_packages(self) -> tuple[Package, ...]:
        """Return every package of PACKAGES that is installed."""
        return tuple(package for name in PACKAGES if (package := self.find_package(name)) is not None)


def detect() -> InstalledPackages:
    """Return the packages that a worker started here would see."""
    return InstalledPackages(search.build_worker_path())


def detect_process_packages() -> InstalledPackages:
    """Return the packages that this process itself imports from, by its present search path."""
    return InstalledPackages(search.build_process_path())


def _read_version_literal(path: Path | None) -> str | None:
    """Return the literal `__version__` of a package that is on the path without having been installed."""
    for name in ("version.py", "_version.py", "__init__.py"):
        source = files.read_text_if_small(path / name) if path else None
        match = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", source or "", re.MULTILINE)
        if match:
            return match[1]
    return None
