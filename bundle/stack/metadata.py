"""Installed distributions, read from their dist-info directories.

Not through importlib.metadata: MindSpeed replaces `importlib.metadata.version` and answers for packages that
are not installed, so whatever asks it after MindSpeed was imported is told a story.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bundle.frozen import frozen
from bundle.stack import text


@frozen
class Distribution:
    """What one dist-info (or egg-info) directory says."""

    name: str
    version: str
    directory: Path  # the dist-info directory itself
    commit: str | None = None  # direct_url.json, when it was installed from a repository
    editable: Path | None = None  # the checkout behind an editable install


def normalised(name: str) -> str:
    """The name as PEP 503 compares it: lower case, runs of `-`, `_` and `.` are one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(paths: Iterable[Path]) -> dict[str, Path]:
    """The dist-info directory of every distribution on `paths`, by normalised name: the first one wins."""
    found: dict[str, Path] = {}
    for path in paths:
        try:
            names = sorted(os.listdir(path))  # noqa: PTH208 - a Path of each of thousands of names is slow
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                found.setdefault(normalised(name[: -len(".dist-info")].partition("-")[0]), path / name)
    return found


def read(directory: Path) -> Distribution | None:
    """What a dist-info directory says; None when it names no version."""
    metadata = text.read(directory / "METADATA") or text.read(directory / "PKG-INFO")
    if metadata is None:
        return None
    headers = re.split(r"\r?\n\r?\n", metadata, maxsplit=1)[0]
    fields = dict(re.findall(r"^(Name|Version):\s*(\S+)\s*$", headers, re.MULTILINE))
    if set(fields) != {"Name", "Version"}:
        return None
    commit, editable = _origin(text.read(directory / "direct_url.json"))
    return Distribution(fields["Name"], fields["Version"], directory, commit, editable)


def _origin(record: str | None) -> tuple[str | None, Path | None]:
    """(commit, editable checkout) of a PEP 610 direct_url.json."""
    if record is None:
        return None, None
    try:
        origin = json.loads(record)
        commit = origin.get("vcs_info", {}).get("commit_id")
        editable = origin.get("dir_info", {}).get("editable", False)
        path = Path(unquote(urlsplit(origin["url"]).path)) if editable else None
    except (ValueError, AttributeError, KeyError, TypeError):
        return None, None  # somebody's broken record is as good as none
    return (commit if isinstance(commit, str) else None), path
