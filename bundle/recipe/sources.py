"""Which files a recipe's data.path means, in an order that every machine agrees on."""

import glob
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bundle.errors import UsageError

STDLIB = "stdlib"
MEGATRON = "megatron"
# Tests hold deliberately broken sources, and what pip installed is not the standard library.
LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
SUFFIXES = {"text": "", "jsonl": ".jsonl", "parquet": ".parquet", MEGATRON: ".idx"}


class Source(NamedTuple):
    """One file, and the name under which messages and digests know it."""

    path: Path
    name: str
    may_be_empty: bool = False


def expand(paths: Sequence[str], kind: str, key: str = "data.path") -> tuple[Source, ...]:
    """The files of `paths`, each once: files, directories (recursively), globs, and `stdlib`.

    megatron's are named by their index, their tokens or what both begin with; here they are the index.
    Raises UsageError naming every path that means no file, and the `key` of the recipe that it stands under.
    """
    found: dict[Path, Source] = {}
    violations = []
    for path in paths:
        sources = list(_stdlib() if path == STDLIB else _given(_index_of(path, kind), SUFFIXES[kind]))
        if kind == MEGATRON:
            alone = [source.name for source in sources if not source.path.with_suffix(".bin").is_file()]
            violations += [f"{key} {name}: no .idx with a .bin beside it" for name in alone]
        if not sources:
            ending = f" ending in {SUFFIXES[kind]}" if SUFFIXES[kind] and Path(path).is_dir() else ""
            violations.append(f"{key} {path}: no such file, or no files{ending}")
        for source in sources:
            found.setdefault(source.path.resolve(), source)
    if violations:
        raise UsageError("the data cannot be found", violations)
    return tuple(found.values())


def interpreter() -> str:
    """The interpreter whose standard library `stdlib` means, such as "CPython 3.11.7"."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def _stdlib() -> Iterator[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    for directory, inside, names in os.walk(root):
        inside[:] = sorted(set(inside) - LEFT_OUT)  # the walk goes on through what is left here
        for name in sorted(name for name in names if name.endswith(".py")):
            path = Path(directory) / name
            yield Source(path, f"{STDLIB}/{path.relative_to(root).as_posix()}", may_be_empty=True)


def _index_of(path: str, kind: str) -> str:
    """The index that `path` means where it is one of megatron's files or their prefix, else `path`."""
    if kind != MEGATRON or Path(path).is_dir():
        return path
    index = path.removesuffix(".bin").removesuffix(".idx") + SUFFIXES[MEGATRON]
    return index if Path(index).is_file() else path


def _given(path: str, suffix: str) -> Iterator[Source]:
    if Path(path).is_file():
        yield Source(Path(path), path)
        return
    if Path(path).is_dir():
        inside = (p for p in Path(path).rglob(f"*{suffix}") if p.is_file() and not p.name.startswith("."))
        yield from (Source(p, str(p)) for p in sorted(inside, key=lambda p: p.as_posix()))
        return
    found = glob.glob(path, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    matches = (p for p in sorted(found) if Path(p).is_file())
    yield from (Source(Path(p), p) for p in matches)
