"""The `.pth` that enables the patches in every program of an environment: written, found, taken away.

Python runs a `.pth` of its site-packages when it starts. Ours puts one finder in front of the others
(`finder`) and does no more until megatron.core is imported; then `begin` does what `enable` does.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.environment.interpreters import Sites
from bundle.environment.machine import Finding, ok, warn
from bundle.errors import EnvironmentUnfit, PatchError

NAME = "mcore-bundle-patches.pth"
FORMAT = 1  # of what the file hands to `begin`
_PROGRAM = "mcore_bundle_patches"  # the module that the finder's class is in
_FIRST = "# mcore-bundle patches disable removes this file: "
_MOST = 1 << 20  # bytes of such a file

_log = logging.getLogger(__name__)


class Words(NamedTuple):
    """What a hook says to `enable`: the words of its arguments."""

    features: tuple[str, ...] = ()
    vouched: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    backend: str = "auto"

    def __str__(self) -> str:
        named = {"features": self.features, "vouched for": self.vouched, "drifts allowed": self.allowed}
        parts = [f"{what} {', '.join(words)}" for what, words in named.items() if words]
        return "; ".join([*parts, f"backend {self.backend}"])

    def text(self) -> str:
        """The whole file: what it says, with a digest; and one line, which Python runs."""
        program = Path(__file__).with_name("finder.py").read_text(encoding="utf-8")
        source = f"{program}\n\nsys.meta_path.insert(0, Finder({self._said()!r}))\n"
        line = f"import sys; exec(compile({source!a}, {NAME!a}, 'exec'), {{'__name__': {_PROGRAM!a}}})"
        said = {**self._said(), "digest": files.json_digest([self._said(), line])}
        return f"{_FIRST}{json.dumps(said)}\n{line}\n"

    def _said(self) -> dict[str, object]:
        return {"format": FORMAT, **self._asdict()}


class Hook(NamedTuple):
    """A file of that name: with what it says, or why it is none of ours, or not whole."""

    file: Path
    words: Words | None
    fault: str = ""


def found(sites: Iterable[Path]) -> tuple[Hook, ...]:
    """The files of that name in these directories."""
    files_ = (site / NAME for site in dict.fromkeys(sites))
    return tuple(_read(file) for file in files_ if os.path.lexists(file))


def install(at: Sites, words: Words) -> bool:
    """Writes the file, whole or not at all; False where it is there already and says the same.

    Raises EnvironmentUnfit, with nothing written, where mcore-bundle is not installed there, where a hook, or
    a file of that name, is there or in a directory that the environment stands on, and where it may not be
    written.
    """
    remedy = f"install it there first: {at.python} -m pip install, and what mcore-bundle is installed from"
    if at.bundle is None:
        raise EnvironmentUnfit(f"{at.own}: its python cannot import mcore-bundle ({at.fault}): {remedy}")
    if at.user and at.user in at.bundle.parents:
        raise EnvironmentUnfit(f"{at.own}: its mcore-bundle is in {at.user}, which is one user's: {remedy}")
    if at.format != FORMAT:
        raise EnvironmentUnfit(
            f"{at.own}: its mcore-bundle is another than this one: {remedy}, or use its own"
        )
    for there in found(at.sites):
        if there.fault:
            raise EnvironmentUnfit(_not_ours(there))
        if there.file.parent != at.own:
            raise EnvironmentUnfit(
                f"{there.file}: programs of {at.own} are patched by this one already; disable it there first"
            )
        if there.words != words or there.file.read_text(encoding="utf-8") != words.text():
            raise EnvironmentUnfit(
                f"{there.file}: enabled already, with other words or by another mcore-bundle "
                f"({there.words}): disable it first"
            )
        return False
    _check_writable(at.own)
    files.write_text(at.own / NAME, words.text())
    return True


def remove(at: Sites) -> bool:
    """Takes the file away; False where there is none. Raises EnvironmentUnfit as `install`."""
    for there in found([at.own]):
        if there.fault:
            raise EnvironmentUnfit(_not_ours(there))
        _check_writable(at.own)
        there.file.unlink()
        files.sync_directory(at.own)
        return True
    return False


def begin(said: dict[str, object]) -> None:
    """Enables the patches by what the file says; a program that has enabled some itself keeps those.

    Raises as `enable`, and PatchError for what another mcore-bundle has written.
    """
    from bundle.patches import applying
    from bundle.patches.enabling import enable

    words = _words(said)
    if words is None:
        raise PatchError(
            f"{NAME} of {sys.prefix} was written by another version of mcore-bundle than is installed there: "
            "mcore-bundle patches disable, then enable"
        )
    if applying.in_force() is not None:
        _log.debug("%s: this program has enabled patches itself", NAME)
        return
    enable(words.features, vouched=words.vouched, allowed=words.allowed, backend=words.backend)


def leave() -> None:
    """Has this process stay as it is: it decides about patches itself."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != _PROGRAM]


def findings(hooks: Iterable[Hook]) -> Iterator[Finding]:
    """What `doctor` and `patches audit` say of each."""
    for there in hooks:
        if there.fault:
            yield warn("patches", _not_ours(there), "look at it, and delete it")
        else:
            yield ok("patches", f"enabled in every program here by {there.file}: {there.words}")


def _read(file: Path) -> Hook:
    text = None if file.is_symlink() else files.read(file, _MOST)
    first, _, rest = (text or "").partition("\n")
    if not first.startswith(_FIRST):
        return Hook(file, None, "it was not written by mcore-bundle")
    try:
        said = json.loads(first.removeprefix(_FIRST))
        whole = said.pop("digest") == files.json_digest([said, rest[:-1]]) and rest.endswith("\n")
    except (ValueError, AttributeError, KeyError, RecursionError):
        whole = False
    words = _words(said) if whole else None
    return Hook(file, words, "" if words else "it was changed, or is not whole")


def _words(said: dict[str, object]) -> Words | None:
    """What a file of this format says; None for another."""
    if set(said) != {"format", *Words._fields} or said["format"] != FORMAT:
        return None
    lists = {name: value for name, value in said.items() if isinstance(value, list | tuple)}
    return Words(
        **{name: tuple(map(str, value)) for name, value in lists.items()}, backend=str(said["backend"])
    )


def _not_ours(there: Hook) -> str:
    return f"{there.file}: a file of the hook's name, and {there.fault}: look at it, and delete it yourself"


def _check_writable(directory: Path) -> None:
    if not os.access(directory, os.W_OK):
        raise EnvironmentUnfit(
            f"{directory}: may not be written to: make an environment of your own on top of it "
            "(python -m venv --system-site-packages), or start programs by python -m bundle.patched"
        )
