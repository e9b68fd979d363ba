"""The recipes that come with the package: launch/recipes of a checkout, the same files inside a wheel."""

import itertools
from pathlib import Path

# In a checkout a link to launch/recipes; a wheel holds the files themselves.
DIRECTORY = Path(__file__).parent / "recipes"


def names() -> list[str]:
    """The names of all built-in recipes, sorted."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def path_of(name: str) -> Path:
    """The file of a built-in recipe."""
    return DIRECTORY / f"{name}.yaml"


def about(name: str) -> str:
    """What a built-in recipe is for: the comment that its file begins with, as one line."""
    lines = path_of(name).read_text().splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)
