"""Find the files of a data.path and their kind, in an order that is the same on all machines."""

import glob
import json
import os
import platform
import re
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bundle import files, hub
from bundle.errors import UsageError
from bundle.recipe.data import DataKind
from bundle.recipe.loading import RECIPE_DIRECTORY as RECIPES

STDLIB_CORPUS_KEYWORD = "stdlib"
BUILT_IN_PREFIX = "builtin:"  # begins the name of a file that comes with the package
MEGATRON = "megatron"
# Tests contain deliberately broken sources, and packages from pip are not the standard library.
SKIPPED_STDLIB_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
UNCOMPRESSED_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# The kind of a file by the end of its name, where the recipe names no kind.
DATA_SUFFIXES: dict[DataKind, tuple[str, ...]] = {
    "text": (".txt",),
    "jsonl": tuple(
        f"{name}{packed}" for packed in ("", ".gz", ".zst") for name in UNCOMPRESSED_JSON_SUFFIXES
    ),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "megatron": (".idx",),
}
# Files of the library `datasets` that hold no rows: of a directory of save_to_disk, and of a repository.
STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
ROWLESS_FILE_NAMES = frozenset({STATE_FILE, SPLITS_FILE, "dataset_info.json", "dataset_infos.json"})
_MAX_STATE_FILE_BYTES = 2**24
_PATH_SPLIT_WORD_PATTERN = re.compile(r"(?:^|[/_.-])(train|test|valid|validation|val|dev|eval)(?:[/_.-]|$)")


class DataFile(NamedTuple):
    """One file, and the name under which messages and digests know it."""

    path: Path
    name: str
    kind: DataKind
    may_be_empty: bool = False


def needs_pyarrow(source: DataFile) -> bool:
    """Return whether pyarrow reads the file."""
    return source.kind in ("parquet", "arrow") or source.name.endswith(".zst")


def expand(paths: Sequence[str], kind: DataKind | None, key: str = "data.path") -> tuple[DataFile, ...]:
    """Return the files of `paths`, each once: files, directories (recursively), globs, and `stdlib`.

    All files are of one kind: `kind` is the one that the recipe names; None: found from the files' names. A
    path of megatron's files may be the index, the tokens or their common prefix; the result is the index.

    Raise UsageError that names every path without a file, and the `key` of the recipe that has the path.
    """
    data_files: dict[Path, DataFile] = {}
    violations = []
    for path in paths:
        if Path(path).is_absolute() and os.path.normpath(path) == Path(path).anchor:
            violations.append(f"{key} {path!r}: is the root of the file system. Name the folder of the data")
            continue
        unreadable: list[str] = []
        try:
            sources = list(
                _find_python_stdlib_sources()
                if path == STDLIB_CORPUS_KEYWORD
                else _find_sources(path, kind, unreadable)
            )
        except UsageError as error:
            violations.append(f"{key} {path!r}: {error}")
            continue
        if unreadable:
            more = f" and {len(unreadable) - 1:,} more" if unreadable[1:] else ""
            violations.append(
                f"{key} {path!r}: cannot be read ({unreadable[0]}{more}). Make it readable, or name the files"
            )
            continue
        violations += [
            f"{key} {source.name!r}: needs an .idx file and a .bin file of the same name"
            for source in sources
            if source.kind == MEGATRON and not files.is_file(source.path.with_suffix(".bin"))
        ]
        if not sources:
            has_ending = files.is_directory(Path(path)) and kind != "text"
            ending = f" ending in {_format_endings(kind)}" if has_ending else ""
            violations.append(f"{key} {path!r}: no file{ending} was found")
        for source in sources:
            data_files.setdefault(source.path.resolve(), source)
    kinds = {source.kind: source.name for source in reversed(data_files.values())}
    if len(kinds) > 1:
        first = ", ".join(f"{name} ({kind})" for kind, name in kinds.items())
        violations.append(f"{key}: files of several kinds: {first}. Name files of one kind")
    if violations:
        raise UsageError("the data cannot be found", violations)
    return tuple(data_files.values())


def format_python_version() -> str:
    """Return the interpreter whose standard library `stdlib` means, such as "CPython 3.11.7"."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def resolve_idx_file(path: str, kind: DataKind | None) -> str:
    """Return the index of megatron's files where `path` is one of them or their prefix, else `path`."""
    is_named = kind == MEGATRON or path.endswith((".bin", ".idx")) or not files.is_file(Path(path))
    if kind not in (None, MEGATRON) or not is_named or files.is_directory(Path(path)):
        return path
    index = path.removesuffix(".bin").removesuffix(".idx") + ".idx"
    return index if files.is_file(Path(index)) else path


def _find_python_stdlib_sources() -> Iterator[DataFile]:
    root = Path(sysconfig.get_path("stdlib"))
    for directory, inside, names in os.walk(root):
        inside[:] = sorted(
            set(inside) - SKIPPED_STDLIB_DIRECTORIES
        )  # the walk goes on through what is left here
        for name in sorted(name for name in names if name.endswith(".py")):
            path = Path(directory) / name
            name = f"{STDLIB_CORPUS_KEYWORD}/{path.relative_to(root).as_posix()}"
            yield DataFile(path, name, "text", may_be_empty=True)


def _find_sources(path: str, kind: DataKind | None, unreadable: list[str]) -> Iterator[DataFile]:
    """Yield the files that a path means; unreadable parts of a directory are added to `unreadable`."""
    if path.startswith(BUILT_IN_PREFIX):
        location = RECIPES / "data" / path.removeprefix(BUILT_IN_PREFIX)
        if location.parent == RECIPES / "data" and files.is_file(location):
            yield DataFile(location, path, kind or _find_kind(location.name))
        return
    is_repository = hub.is_reference(path, "dataset")
    path = hub.build_cache_path_if_pinned(path, "dataset")
    location = Path(resolve_idx_file(path, kind))
    if files.is_file(location):
        yield DataFile(location, str(location), kind or _find_kind(location.name))
    elif (
        files.is_directory(location)
        and kind in (None, "arrow")
        and (saved_files := _find_saved_files(location)) is not None
    ):
        yield from (DataFile(file_path, str(file_path), "arrow") for file_path in saved_files)
    elif files.is_directory(location):
        inside = sorted(_walk(location, _list_endings(kind), unreadable), key=lambda p: p.as_posix())
        for file_path in _find_training_split(inside, location) if is_repository else inside:
            yield DataFile(file_path, str(file_path), kind or _find_kind(file_path.name))
    else:
        names = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
        for name in names:
            if files.is_file(Path(name)):
                yield DataFile(Path(name), name, kind or _find_kind(name))


def _find_training_split(paths: list[Path], root: Path) -> list[Path]:
    """Return the files of a repository that are named train, where some are named as splits; else all."""
    splits: dict[str, list[Path]] = {}
    for path in paths:
        if match := _PATH_SPLIT_WORD_PATTERN.search(path.relative_to(root).as_posix()):
            splits.setdefault(match[1], []).append(path)
    if splits and "train" not in splits:
        raise UsageError(f"has the splits {', '.join(splits)}, but none named train. Add a path: .../FOLDER")
    return splits.get("train", paths)


def _find_kind(name: str) -> DataKind:
    """Return the kind of a file by the end of its name. Raise UsageError where it says none."""
    for kind, endings in DATA_SUFFIXES.items():
        if name.endswith(endings):
            return kind
    raise UsageError(f"{name} does not end in {_format_endings(None)}. Set its kind with data.source")


def _list_endings(kind: DataKind | None) -> tuple[str, ...]:
    """Return the endings of the file names that are read in a directory; for kind text, of all files."""
    if kind == "text":
        return ("",)
    return (
        DATA_SUFFIXES[kind]
        if kind
        else tuple(ending for endings in DATA_SUFFIXES.values() for ending in endings)
    )


def _format_endings(kind: DataKind | None) -> str:
    return ", ".join(ending for ending in _list_endings(kind) if not ending.endswith((".gz", ".zst")))


def _find_saved_files(directory: Path) -> list[Path] | None:
    """Return the files of a directory that `datasets` saved (save_to_disk), in order; None for any other.

    Raise UsageError for one of several splits, and for one that cannot be read.
    """
    if files.is_file(directory / SPLITS_FILE):
        splits = _read_json_file_names(directory / SPLITS_FILE, "splits")
        if len(splits) != 1:
            raise UsageError(f"has the splits {', '.join(splits)}. Name one: {directory / splits[0]}")
        return _find_saved_files(directory / splits[0])
    if not files.is_file(directory / STATE_FILE):
        return None
    return [directory / name for name in _read_json_file_names(directory / STATE_FILE, "_data_files")]


def _read_json_file_names(path: Path, key: str) -> list[str]:
    """Return the names of files or directories under `key` of a file of `datasets`."""
    try:
        entries = json.loads(files.read_content(path, _MAX_STATE_FILE_BYTES))[key]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in entries]
        if names and all(isinstance(name, str) and name == Path(name).name for name in names):
            return names
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path.name} cannot be read: {error}") from error
    raise UsageError(f"{path.name}: {key} must list names of files in the same folder")


def _walk(root: Path, endings: tuple[str, ...], unreadable: list[str]) -> Iterator[Path]:
    """Yield the regular files below a directory whose names have these endings, without hidden ones."""

    def note(error: OSError) -> None:
        unreadable.append(f"{error.filename}: {error.strerror}")

    for folder, _, names in os.walk(root, onerror=note):
        named = (name for name in names if name.endswith(endings) and name not in ROWLESS_FILE_NAMES)
        for path in (Path(folder, name) for name in named if name[0] != "."):
            try:
                if stat.S_ISREG(path.stat().st_mode):
                    yield path
            except FileNotFoundError:  # a link to nothing, or just removed
                continue
            except OSError as error:
                note(error)
