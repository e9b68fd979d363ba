"""The interpreter, and whether `import bundle` in a worker would really get this package."""

from collections.abc import Iterator
from pathlib import Path

from bundle.health.finding import Finding, fail, ok, warn
from bundle.stack import SearchPath

OLDEST = (3, 11)  # pyproject.toml, requires-python


def interpreter(version: tuple[int, int], path: SearchPath, own: Path) -> Iterator[Finding]:
    """Findings about the Python `version` and about packages named bundle on `path`; `own` is ours."""
    shown = ".".join(map(str, version))
    if version < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        yield fail("python", f"Python {shown} is older than {wanted}", f"use Python {wanted} or newer")
    else:
        yield ok("python", f"Python {shown}")
    yield from _bundles(path, own)


def _bundles(path: SearchPath, own: Path) -> Iterator[Finding]:
    """A worker starts as `python -m bundle` in this directory, so the first bundle on its path runs."""
    found = [(entry.path / name, entry.origin) for entry in path.entries for name in ("bundle", "bundle.py")]
    others = [(place, origin) for place, origin in found if _importable(place) and not _same(place, own)]
    position = {place: index for index, (place, _) in enumerate(found)}
    mine = next((index for place, index in position.items() if _same(place, own)), len(found))
    if not others:
        yield ok("bundle", f"workers import {own}")
    for place, origin in others:
        fix = f"rename or remove {place}, or start jobs from another directory"
        if position[place] > mine:
            yield warn(
                "bundle", f"a second package of that name at {place} ({origin}); ours comes first", fix
            )
        else:
            yield fail("bundle", f"a worker would import {place} ({origin}) instead of {own}", fix)


def _importable(place: Path) -> bool:
    return place.is_file() if place.suffix else (place / "__init__.py").is_file()


def _same(place: Path, own: Path) -> bool:
    return place.resolve() == own.resolve()
