"""Small megatron trees for tests: made from text, or from a release with something changed."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bundle.environment import packages
from bundle.patches.definitions import Definitions
from bundle.patches.source import Module, SourceTree, find_module_file, parse_module

Release = Callable[[str], Path]  # the fixture `release`: version -> tree


def written(root: Path, files: Mapping[str, str]) -> Definitions:
    """The definitions of a tree with these files, by module name."""
    for module, source in files.items():
        file = root / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return Definitions(SourceTree(root))


@dataclass(frozen=True)
class _Edited(SourceTree):
    """A tree in which some modules have another text; None is a module that is not there."""

    texts: Mapping[str, str | None] = field(kw_only=True)

    def find_module(self, name: str) -> Module | None:
        if name not in self.texts:
            return super().find_module(name)
        text = self.texts[name]
        return None if text is None else parse_module(name, f"{name.replace('.', '/')}.py", text.encode())


def edited(release: Path, edits: Mapping[str, Sequence[tuple[str, str]] | None]) -> Definitions:
    """The definitions of a release with changed modules: (text to find, what to put in its place)."""
    texts: dict[str, str | None] = {}
    for name, replacements in edits.items():
        file = find_module_file(release, f"megatron.core.{name}")
        assert file is not None
        source = (release / file).read_text()
        for before, after in replacements or ():
            assert before in source, before
            source = source.replace(before, after)
        texts[f"megatron.core.{name}"] = None if replacements is None else source
    return Definitions(_Edited(release, texts=texts))


def copied(release: Path, root: Path, edits: Mapping[str, tuple[str, str]]) -> Path:
    """A copy of a release's megatron/core; `edits`: file -> (text to find, what to put in its place)."""
    shutil.copytree(release / "megatron/core", root / "megatron/core", ignore=shutil.ignore_patterns("*.pyc"))
    for name, (before, after) in edits.items():
        file = root / "megatron/core" / name
        source = file.read_text()
        assert before in source
        file.write_text(source.replace(before, after))
    return root


def renumbered(release: Path, root: Path, version: str) -> Path:
    """A copy of a release that calls itself another version."""
    copy = packages.find_copy(release)
    assert copy is not None and copy.version is not None
    _, minor, patch = copy.version.split(".")
    _, new_minor, new_patch = version.split(".")
    copied(release, root, {})
    info = root / "megatron/core/package_info.py"
    source = info.read_text().replace(f"MINOR = {minor}", f"MINOR = {new_minor}")
    info.write_text(source.replace(f"PATCH = {patch}", f"PATCH = {new_patch}"))
    return root
