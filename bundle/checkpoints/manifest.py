"""The list of a checkpoint's files with their SHA-256: what is checked before anything is unpickled."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from bundle import files

NAME = "manifest.json"
_SCHEMA = 1
_CHUNK = 2**22
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest(path: Path, *, sync: bool = False) -> str:
    """The SHA-256 of a file in hexadecimal; with `sync` the file is on the disk afterwards."""
    with path.open("rb") as file:
        found = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            found.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return found.hexdigest()


def file_names(directory: Path) -> list[str]:
    """The files of a checkpoint and links of any kind, relative and sorted, but for the manifest."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    found = (path.relative_to(directory).as_posix() for path in paths)
    return sorted(name for name in found if name != NAME)


def share(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """The files that `rank` reads: those it wrote by megatron's naming, or else every n-th.

    A rank finds what it wrote itself in its own machine's memory.
    """
    kept = []
    for index, name in enumerate(names):
        written = re.match(r"(?:.*/)?(?:__|random-)(\d+)[_.]", name)
        owner = int(written.group(1)) if written else index
        if owner % world_size == rank:
            kept.append(name)
    return kept


def write(directory: Path, digests: Mapping[str, str]) -> None:
    """Writes the manifest, which makes the checkpoint complete."""
    files.write_json(directory / NAME, {"schema": _SCHEMA, "sha256": dict(digests)})


def read(directory: Path) -> dict[str, str]:
    """The SHA-256 of each file by its name; raises ValueError saying why it cannot be trusted."""
    path = directory / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError("it has no manifest") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"its manifest cannot be read: {error}") from None
    digests = found.get("sha256") if isinstance(found, dict) and found.get("schema") == _SCHEMA else None
    if not isinstance(digests, dict) or not all(
        isinstance(value, str) and _DIGEST.fullmatch(value) and _inside(name)
        for name, value in digests.items()
    ):
        raise ValueError("its manifest is not one of ours")
    return digests


def defects(directory: Path, digests: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """What is wrong with the files `names`, all of them in `digests`; empty when nothing is."""
    found = []
    for name in names:
        path = directory / name
        try:
            if path.is_symlink():
                found.append(f"{name} is a link")
            elif digest(path) != digests[name]:
                found.append(f"{name} is not what was written")
        except OSError as error:
            found.append(f"{name}: {error.strerror}")
    return found


def strangers(directory: Path, digests: Mapping[str, str]) -> list[str]:
    """The files that lie in a checkpoint without being listed, which nothing has checked."""
    # A network file system keeps an open file that was removed under such a name; nobody reads it.
    found = (name for name in file_names(directory) if name not in digests and not name.startswith(".nfs"))
    return [f"{name} is not in its manifest" for name in found]


def damage(directory: Path) -> list[str]:
    """What is wrong with a checkpoint, all of whose files are read for it; empty when nothing is."""
    try:
        digests = read(directory)
    except ValueError as error:
        return [str(error)]
    return [*strangers(directory, digests), *defects(directory, digests, sorted(digests))]


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
