"""Unpacks released megatron-core wheels side by side, for tests that look at several.

python -m tests.matrix.fetch DIRECTORY [VERSION...]

A version may be `oldest` or `newest`: that minor's newest release. Without one: every reviewed minor's.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import Version

from bundle.patches import table


def newest_of_each_minor() -> list[str]:
    """The newest reviewed release of every minor, oldest first."""
    newest = {Version(reference).release[:2]: reference for reference in table.load().references}
    return list(newest.values())


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
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--no-deps", "--ignore-requires-python", "--no-compile", "--target", str(target)),
                f"megatron-core=={version}",
            ],
            check=True,
        )
        target.rename(tree)
    return tree


if __name__ == "__main__":
    directory, *versions = sys.argv[1:]
    minors = newest_of_each_minor()
    named = {"oldest": minors[0], "newest": minors[-1]}
    for version in versions or minors:
        print(fetch(Path(directory), named.get(version, version)))
