"""The list of a checkpoint's files with their SHA-256: what is checked before anything is unpickled."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from bundle import files

FILE_NAME = "manifest.json"
_SCHEMA = 1
_CHUNK_BYTES = 2**22
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


def compute_digest(path: Path, *, sync: bool = False) -> str:
    """Return the SHA-256 of a file in hexadecimal; with `sync` the file is on the disk afterwards."""
    with path.open("rb") as file:
        sha256 = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return sha256.hexdigest()


def list_file_names(directory: Path) -> list[str]:
    """Return the files and all links of a checkpoint, relative and sorted, without the manifest."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    relative_names = (path.relative_to(directory).as_posix() for path in paths)
    return sorted(name for name in relative_names if name != FILE_NAME)


def select_files_by_writer_rank(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return the files that `rank` reads: those it wrote by megatron's naming, or else every n-th.

    A rank finds the files that it wrote itself in the memory of its machine.
    """
    selected = []
    for index, name in enumerate(names):
        match = re.match(r"(?:.*/)?(?:__|random-)(\d+)[_.]", name)
        owner = int(match.group(1)) if match else index
        if owner % world_size == rank:
            selected.append(name)
    return selected


def write(directory: Path, digests: Mapping[str, str]) -> None:
    """Write the manifest, which makes the checkpoint complete."""
    files.write_json(directory / FILE_NAME, {"schema": _SCHEMA, "sha256": dict(digests)})


def read(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name; raise ValueError with the reason not to trust them."""
    path = directory / FILE_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"it has no {FILE_NAME}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"its {FILE_NAME} cannot be read: {error}") from None
    digests = (
        document.get("sha256") if isinstance(document, dict) and document.get("schema") == _SCHEMA else None
    )
    if not isinstance(digests, dict) or not all(
        isinstance(value, str) and _DIGEST_PATTERN.fullmatch(value) and _is_inside(name)
        for name, value in digests.items()
    ):
        raise ValueError(f"its {FILE_NAME} does not have the form that mcore-bundle writes")
    return digests


def find_defects(directory: Path, digests: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return the defects of the files `names`, all of them in `digests`; empty without defects."""
    problems = []
    for name in names:
        path = directory / name
        try:
            if path.is_symlink():
                problems.append(f"{name} is a symbolic link")
            elif compute_digest(path) != digests[name]:
                problems.append(f"{name} has changed since it was written")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    return problems


def describe_unlisted_files(directory: Path, digests: Mapping[str, str]) -> list[str]:
    """Return the files in a checkpoint that its manifest does not list, and that nothing has checked."""
    # A network file system keeps an open file that was removed under such a name; nobody reads it.
    unlisted = (
        name for name in list_file_names(directory) if name not in digests and not name.startswith(".nfs")
    )
    return [f"{name} is not listed in {FILE_NAME}. If it was added later, remove it" for name in unlisted]


def find_damage(directory: Path) -> list[str]:
    """Return the defects of a checkpoint, for which all its files are read; empty without defects."""
    try:
        digests = read(directory)
    except ValueError as error:
        return [str(error)]
    return [*describe_unlisted_files(directory, digests), *find_defects(directory, digests, sorted(digests))]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
