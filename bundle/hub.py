"""Models and data sets of the Hugging Face Hub: downloaded once, pinned to a commit, found in its cache."""

import functools
import re
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bundle.errors import EnvironmentUnfit, UsageError, format_bytes
from bundle.files import DISK_FULL_ERRORS

Kind = Literal["model", "dataset"]
# Files that hold numbers, text and settings. Pickles and code are never downloaded.
SAFE_PATTERNS = {
    "model": ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"),
    "dataset": tuple(
        f"*.{name}{packed}"
        for name in ("jsonl", "json", "ndjson", "txt", "parquet", "arrow")
        for packed in ("", ".gz", ".zst")
    ),
}
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NAME_PATTERN = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_MODEL_REFERENCE = re.compile(rf"(?:hf://)?(?P<name>{_NAME_PATTERN})(?:@(?P<revision>[\w.-]+))?(?P<inside>)")
_DATASET_REFERENCE = re.compile(
    rf"hf://datasets/(?P<name>{_NAME_PATTERN})(?:@(?P<revision>[\w.-]+))?(?:/(?P<inside>.+))?"
)
_COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
_LOCAL_FILE_EXTENSION = re.compile(r"\.[a-z]+$")  # of a path that is not there, rather than of a repository
_TIMEOUT_SECONDS = 10.0


class RepositoryReference(NamedTuple):
    """A repository of the Hub, a revision of it ("": its main branch), and files of it ("": all)."""

    kind: Kind
    name: str
    revision: str = ""
    inside: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        if self.kind == "model":
            return f"{self.name}{revision}"
        return f"hf://datasets/{self.name}{revision}" + (f"/{self.inside}" if self.inside else "")

    @property
    def patterns(self) -> list[str]:
        """The names of its files that are downloaded."""
        if self.inside and self._has_safe_file_format(self.inside):
            return [self.inside]
        return [f"{self.inside}{ending}" for ending in SAFE_PATTERNS[self.kind]]

    def _has_safe_file_format(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in SAFE_PATTERNS[self.kind])

    def is_selected_for_download(self, name: str) -> bool:
        """Return whether a file of the repository is downloaded."""
        is_inside = self.kind == "dataset" or "/" not in name
        return (
            is_inside
            and self._has_safe_file_format(name)
            and any(fnmatch(name, pattern) for pattern in self.patterns)
        )


def find_reference(text: str, kind: Kind) -> RepositoryReference | None:
    """Return the repository that a text names; None for a path, and for anything that is there under it."""
    if kind == "dataset" and (match := _DATASET_REFERENCE.fullmatch(text)):
        return RepositoryReference(kind, match["name"], match["revision"] or "", match["inside"] or "")
    match = _MODEL_REFERENCE.fullmatch(text)
    if match is None or (
        "://" not in text and (_LOCAL_FILE_EXTENSION.search(match["name"]) or _exists(text))
    ):
        return None
    return RepositoryReference(kind, match["name"], match["revision"] or "")


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:
        return False


def is_reference(text: str, kind: Kind) -> bool:
    """Return whether a text names a repository of the Hub."""
    return find_reference(text, kind) is not None


def strip_revision(text: str | None) -> str | None:
    """Return the name of a model of the Hub without its revision; any other text as it is."""
    reference = find_reference(text, "model") if text else None
    return reference.name if reference else text


def build_cache_path_if_pinned(text: str, kind: Kind = "model") -> str:
    """Return where a pinned repository lies in the cache; any other text is returned as it is."""
    reference = find_reference(text, kind) if "@" in text else None
    if reference is None or not _COMMIT_PATTERN.fullmatch(reference.revision):
        return text
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = f"{reference.kind}s--{reference.name.replace('/', '--')}"
    snapshot = Path(HF_HUB_CACHE, folder, "snapshots", reference.revision)
    return str(snapshot / reference.inside if reference.inside else snapshot)


@functools.cache  # a process asks once for a branch, which may move
def download_and_pin(text: str, kind: Kind) -> str:
    """Return a repository pinned to a commit, whose files are in the cache; a path as it is.

    The cache is asked first for a commit, and the Hub for a branch or a tag. Raise UsageError for what the
    Hub does not have, EnvironmentUnfit where it cannot be reached, denies access, or the disk is full.
    """
    reference = find_reference(text, kind)
    if reference is None:
        return text
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise EnvironmentUnfit(
            f"{text}: no such file or directory, and downloads from the Hub need huggingface_hub. Install it:"
            " pip install 'mcore-bundle[data]'."
        ) from error
    if _COMMIT_PATTERN.fullmatch(reference.revision) and _find_cached_commit(huggingface_hub, reference):
        return str(reference)
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return _pin_reference_from_cache(huggingface_hub, reference, "HF_HUB_OFFLINE is set")
    try:
        info = huggingface_hub.HfApi().repo_info(
            reference.name,
            repo_type=reference.kind,
            revision=reference.revision or None,
            timeout=_TIMEOUT_SECONDS,
            files_metadata=True,
        )
    except Exception as error:  # noqa: BLE001 (of the HTTP library that this release of huggingface_hub uses)
        _raise_permanent_error(huggingface_hub, reference, error)
        return _pin_reference_from_cache(
            huggingface_hub, reference, f"the Hub cannot be reached: {_format_error(error)}"
        )
    pinned = reference._replace(revision=info.sha or "")
    sizes = {file.rfilename: file.size or 0 for file in getattr(info, "siblings", None) or ()}
    _require_safe_files(pinned, list(sizes))
    _check_disk_space(
        huggingface_hub,
        pinned,
        sum(size for name, size in sizes.items() if pinned.is_selected_for_download(name)),
    )
    try:
        snapshot = _download(huggingface_hub, reference)  # the branch is noted in the cache
    except Exception as error:
        _raise_permanent_error(huggingface_hub, reference, error)
        raise EnvironmentUnfit(
            f"{pinned}: the download failed: {_format_error(error)}. Run the command again."
        ) from error
    return str(reference._replace(revision=Path(snapshot).name))


def _download(library: Any, reference: RepositoryReference, *, is_offline: bool = False) -> str:
    """Return the directory of the files. Locks of huggingface_hub keep two processes from one file."""
    snapshot: str = library.snapshot_download(
        reference.name,
        repo_type=reference.kind,
        revision=reference.revision or None,
        allow_patterns=reference.patterns,
        ignore_patterns=["*/*", *PICKLE_PATTERNS] if reference.kind == "model" else None,
        local_files_only=is_offline,
    )
    return snapshot


def _find_cached_commit(library: Any, reference: RepositoryReference) -> str:
    """Return the commit of what the cache has of a repository; "" where it does not have it whole."""
    try:
        return Path(_download(library, reference, is_offline=True)).name
    except Exception:  # noqa: BLE001 (whatever is the matter with a cache, the Hub may have it)
        return ""


def _pin_reference_from_cache(library: Any, reference: RepositoryReference, reason: str) -> str:
    if commit := _find_cached_commit(library, reference):
        return str(reference._replace(revision=commit))
    repository = f"{reference.name} --repo-type {reference.kind}"
    raise EnvironmentUnfit(
        f"{reference}: no such file or directory, not in the cache of the Hub"
        f" ({library.constants.HF_HUB_CACHE}), and {reason}. Download it on a machine with a network"
        f" (hf download {repository}). Copy the cache here and set HF_HOME to it."
    )


def _require_safe_files(reference: RepositoryReference, names: Sequence[str]) -> None:
    """Raise UsageError for a repository without a file that may be read."""
    if not any(map(reference.is_selected_for_download, names)):
        have = ", ".join(names)[:200] or "no files"
        read = ", ".join(SAFE_PATTERNS[reference.kind])
        raise UsageError(
            f"{reference}: none of its files can be read ({have}). Name a repository with {read}."
        )
    has_weights = any(fnmatch(name, "*.safetensors") for name in names)
    pickles = [name for name in names if any(fnmatch(name, pattern) for pattern in PICKLE_PATTERNS)]
    if reference.kind == "model" and pickles and not has_weights:
        raise UsageError(
            f"{reference}: its weights are pickles ({pickles[0]}), which are never loaded. Name a repository"
            " with safetensors."
        )


def _check_disk_space(library: Any, reference: RepositoryReference, size: int) -> None:
    """Raise EnvironmentUnfit where the disk of the cache has less room than the files may take."""
    cache = Path(library.constants.HF_HUB_CACHE)
    if _find_cached_commit(library, reference):
        return
    existing_path = next(path for path in (cache, *cache.parents) if path.exists())
    if size > (free := shutil.disk_usage(existing_path).free):
        raise EnvironmentUnfit(
            f"{reference}: needs {format_bytes(size)}, and {existing_path} has {format_bytes(free)} free."
            " Set HF_HOME to a larger disk."
        )


def _raise_permanent_error(library: Any, reference: RepositoryReference, error: Exception) -> None:
    """Raise what an answer of the Hub or a full disk means; nothing for a Hub that does not answer."""
    errors = library.errors
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        raise EnvironmentUnfit(
            f"{reference}: access is not granted. Request it on the repository's page, and set HF_TOKEN."
        ) from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise UsageError(f"{reference}: the repository has no revision {reference.revision!r}") from error
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        raise UsageError(
            f"{reference}: no such file or directory, and no {reference.kind} of the Hub that may be read."
            " Correct the name; for a private repository, set HF_TOKEN."
        ) from error
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        raise EnvironmentUnfit(f"{reference}: {error.strerror}. Set HF_HOME to a larger disk.") from error


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
