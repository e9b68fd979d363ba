"""What pyproject.toml asks for: its dependencies, with extras that name extras taken apart."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from bundle.errors import UsageError
from bundle.frozen import frozen
from bundle.stack import text


@frozen
class Project:
    """The parts of pyproject.toml that an image depends on."""

    name: str
    version: str
    dependencies: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]]

    def requirements(self, extras: Iterable[str]) -> list[str]:
        """Every requirement of the package with these extras, sorted, each once.

        Raises UsageError for an extra that is not there.
        """
        wanted = [*self.dependencies, *(r for extra in extras for r in self._extra(extra))]
        return sorted(set(wanted), key=str.lower)

    def _extra(self, name: str) -> Iterator[str]:
        if name not in self.extras:
            raise UsageError(f"pyproject.toml has no extra {name!r}; there are {', '.join(self.extras)}")
        for entry in self.extras[name]:
            requirement = Requirement(entry)
            if requirement.name == self.name:
                for inner in sorted(requirement.extras - {name}):
                    yield from self._extra(inner)
            else:
                yield entry


def read(root: Path) -> Project:
    """The project of the checkout at `root`. Raises UsageError when pyproject.toml cannot be understood."""
    file = root / "pyproject.toml"
    try:
        table = tomllib.loads(text.read(file) or "")["project"]
        extras = {name: tuple(entries) for name, entries in table["optional-dependencies"].items()}
        for entry in [*table["dependencies"], *(r for entries in extras.values() for r in entries)]:
            Requirement(entry)
        return Project(table["name"], table["version"], tuple(table["dependencies"]), extras)
    except (tomllib.TOMLDecodeError, InvalidRequirement, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: {type(error).__name__}: {str(error)[:200]}") from error
