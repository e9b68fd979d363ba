"""Unpacks released megatron-core wheels side by side, for tests that look at several.

A version may be `oldest` or `newest` (that reviewed minor's newest release), `reviewed` (all of them)
or `later` (every published one after those). Without a version: the newest release of every reviewed minor.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import Version

from bundle.patches import megatron_core

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def newest_of_each_minor() -> list[str]:
    """The newest reviewed release of every minor, oldest first."""
    newest = {
        Version(reference).release[:2]: reference
        for reference in megatron_core.load_review_table().references
    }
    return list(newest.values())


def later() -> list[str]:
    """The published releases after the newest reviewed one, oldest first."""
    listing = subprocess.run(
        [*PIP, "index", "versions", "megatron-core", "--ignore-requires-python"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    published = re.search(r"^Available versions: (.*)$", listing, re.MULTILINE)
    assert published, listing
    reviewed = max(map(Version, megatron_core.load_review_table().references))
    found = [Version(text) for text in published[1].split(", ")]
    return [str(version) for version in sorted(found) if version > reviewed]


def fetch(directory: Path, version: str) -> Path:
    """The tree of one release under `directory`; what is there already stays.

    Releases from 0.17 declare Python 3.12, but publish wheels for 3.11 that run there.
    """
    tree = directory / version
    if tree.is_dir():
        return tree
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        target = Path(temporary) / version
        subprocess.run(
            [
                *(*PIP, "install", "--quiet", "--no-deps", "--ignore-requires-python", "--no-compile"),
                *("--target", str(target), f"megatron-core=={version}"),
            ],
            check=True,
        )
        try:
            target.rename(tree)
        except OSError:  # `make test` and `make matrix` may fetch one release at the same time
            if not tree.is_dir():
                raise
    return tree


def named(words: list[str]) -> list[str]:
    """The versions that the words of the command line mean."""
    minors = newest_of_each_minor()
    reviewed = list(megatron_core.load_review_table().references)
    meanings = {"oldest": minors[:1], "newest": minors[-1:], "reviewed": reviewed}
    return [v for word in words for v in (later() if word == "later" else meanings.get(word, [word]))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.fetch", description=__doc__)
    parser.add_argument("directory", metavar="DIRECTORY", type=Path)
    parser.add_argument("words", metavar="VERSION", nargs="*")
    said = parser.parse_args()
    versions = named(said.words) if said.words else newest_of_each_minor()
    for version in versions:
        print(fetch(said.directory, version))
    if not versions:
        print(
            "no release of megatron-core after"
            f" {max(map(Version, megatron_core.load_review_table().references))}"
        )
