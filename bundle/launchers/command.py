"""A command with the environment it sets, and the text of it that a person can paste."""

import re
import shlex
from collections.abc import Mapping

from bundle.frozen import frozen

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE|(^|_)KEY($|_)", re.IGNORECASE)


@frozen
class Command:
    """An argument vector, the variables set for it and the inherited variables kept from it."""

    argv: tuple[str, ...]
    sets: tuple[tuple[str, str], ...] = ()
    unsets: tuple[str, ...] = ()

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the whole environment of the command."""
        kept = {name: value for name, value in inherited.items() if name not in self.unsets}
        return kept | dict(self.sets)

    def shell(self) -> str:
        """Returns one line that a POSIX shell runs as this command; values of secrets are redacted."""
        words = [f"--unset={name}" for name in self.unsets]
        words += [f"{name}={redacted(name, value)}" for name, value in self.sets]
        return shlex.join([*(["env", *words] if words else []), *self.argv])


def redacted(name: str, value: str) -> str:
    """Returns `value`, or stars where the variable's name says that nobody else may read it."""
    return "***" if _SECRET.search(name) else value
