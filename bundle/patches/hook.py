"""The `.pth` that enables the patches in every program of an environment: written, found and removed.

Python runs a `.pth` of its site-packages when it starts. Ours puts one finder in front of the others
(`finder`). The finder does nothing more until megatron.core is imported; then `begin` does what `enable`
does.
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

FILE_NAME = "mcore-bundle-patches.pth"
FORMAT = 1  # of the document that the file passes to `begin`
_INLINE_FINDER_MODULE_NAME = "mcore_bundle_patches"  # the module that the finder's class is in
_HEADER = "# mcore-bundle patches disable removes this file: "
_MAX_PTH_FILE_BYTES = 1 << 20  # bytes of such a file

_log = logging.getLogger(__name__)


class HookArguments(NamedTuple):
    """The arguments of `enable` that a hook holds."""

    features: tuple[str, ...] = ()
    vouched: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    backend: str = "auto"

    def __str__(self) -> str:
        lists = {"features": self.features, "vouched for": self.vouched, "drifts allowed": self.allowed}
        parts = [f"{label} {', '.join(values)}" for label, values in lists.items() if values]
        return "; ".join([*parts, f"backend {self.backend}"])

    def render_file(self) -> str:
        """Return the file's text: a line with the arguments and a digest, and a line that Python runs."""
        program = Path(__file__).with_name("finder.py").read_text(encoding="utf-8")
        source = f"{program}\n\nsys.meta_path.insert(0, MegatronCoreFinder({self._to_document()!r}))\n"
        line = (
            f"import sys; exec(compile({source!a}, {FILE_NAME!a}, 'exec'), {{'__name__':"
            f" {_INLINE_FINDER_MODULE_NAME!a}}})"
        )
        document = {
            **self._to_document(),
            "digest": files.compute_short_json_digest([self._to_document(), line]),
        }
        return f"{_HEADER}{json.dumps(document)}\n{line}\n"

    def _to_document(self) -> dict[str, object]:
        return {"format": FORMAT, **self._asdict()}


class Hook(NamedTuple):
    """A file of the hook's name, with its arguments, or with the reason why it is not ours or not whole."""

    file: Path
    arguments: HookArguments | None
    fault: str = ""


def find_hooks(sites: Iterable[Path]) -> tuple[Hook, ...]:
    """Return the files of the hook's name in these directories."""
    files_ = (site / FILE_NAME for site in dict.fromkeys(sites))
    return tuple(_read_and_verify_hook(file) for file in files_ if os.path.lexists(file))


def install(environment: Sites, arguments: HookArguments) -> bool:
    """Write the file, whole or not at all; return False where the same file is there already.

    Raises EnvironmentUnfit, with nothing written, where mcore-bundle is not installed in the environment
    itself, and where the installed one is another. Raises it also where a hook, or a file of its name, is
    there or in a directory that the environment stands on. A directory that may not be written to raises it
    too.
    """
    remedy = (
        f"Install it there first with {environment.python} -m pip install, from the same source as this"
        " mcore-bundle"
    )
    if environment.hook_file is None:
        raise EnvironmentUnfit(
            f"{environment.purelib}: its Python cannot import mcore-bundle ({environment.fault}). {remedy}"
        )
    if environment.user_site and environment.user_site in environment.hook_file.parents:
        raise EnvironmentUnfit(
            f"{environment.purelib}: its mcore-bundle belongs to one user ({environment.user_site}). {remedy}"
        )
    if environment.hook_format != FORMAT:
        raise EnvironmentUnfit(
            f"{environment.purelib}: its mcore-bundle is another version. {remedy}, or use its own"
        )
    for hook in find_hooks(environment.sites):
        if hook.fault:
            raise EnvironmentUnfit(_describe_faulty_hook(hook))
        if hook.file.parent != environment.purelib:
            raise EnvironmentUnfit(
                f"{hook.file}: this file already enables patches for {environment.purelib}. Disable them"
                " there first"
            )
        if hook.arguments != arguments or hook.file.read_text(encoding="utf-8") != arguments.render_file():
            raise EnvironmentUnfit(
                f"{hook.file}: patches are enabled already, with other arguments or by another mcore-bundle"
                f" ({hook.arguments}). Disable them first"
            )
        return False
    _check_writable(environment.purelib)
    files.write_text(environment.purelib / FILE_NAME, arguments.render_file())
    return True


def remove(environment: Sites) -> bool:
    """Delete the file; return False where there is none. Raises EnvironmentUnfit as `install` does."""
    for hook in find_hooks([environment.purelib]):
        if hook.fault:
            raise EnvironmentUnfit(_describe_faulty_hook(hook))
        _check_writable(environment.purelib)
        hook.file.unlink()
        files.sync_directory(environment.purelib)
        return True
    return False


def enable_patches_from_hook(document: dict[str, object]) -> None:
    """Enable the patches by the file's arguments; a program that has enabled patches itself keeps those.

    Raises the same errors as `enable`, and PatchError for a file that another mcore-bundle has written.
    """
    from bundle.patches import patcher
    from bundle.patches.external_program import enable

    arguments = _parse_arguments(document)
    if arguments is None:
        raise PatchError(
            f"{FILE_NAME} of {sys.prefix} was written by another version of mcore-bundle than the installed"
            " one. Run mcore-bundle patches disable, then enable"
        )
    if patcher.get_active_plan() is not None:
        _log.debug("%s: this program has enabled patches itself", FILE_NAME)
        return
    enable(
        arguments.features, vouched=arguments.vouched, allowed=arguments.allowed, backend=arguments.backend
    )


def remove_hook_finder() -> None:
    """Remove the finder from this process, which decides about patches itself."""
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if type(finder).__module__ != _INLINE_FINDER_MODULE_NAME
    ]


def list_ok_and_fault_findings(hooks: Iterable[Hook]) -> Iterator[Finding]:
    """Yield what `doctor` and `patches audit` say about each hook."""
    for hook in hooks:
        if hook.fault:
            yield warn("patches", _describe_faulty_hook(hook), "check it, and delete it")
        else:
            yield ok("patches", f"{hook.file} enables patches in every program here: {hook.arguments}")


def _read_and_verify_hook(file: Path) -> Hook:
    text = None if file.is_symlink() else files.read_text_if_small(file, _MAX_PTH_FILE_BYTES)
    first, _, rest = (text or "").partition("\n")
    if not first.startswith(_HEADER):
        return Hook(file, None, "it was not written by mcore-bundle")
    try:
        document = json.loads(first.removeprefix(_HEADER))
        is_intact = document.pop("digest") == files.compute_short_json_digest(
            [document, rest[:-1]]
        ) and rest.endswith("\n")
    except (ValueError, AttributeError, KeyError, RecursionError):
        is_intact = False
    arguments = _parse_arguments(document) if is_intact else None
    return Hook(file, arguments, "" if arguments else "it was changed, or is incomplete")


def _parse_arguments(document: dict[str, object]) -> HookArguments | None:
    """Return the arguments that a file of this format holds; None for another format."""
    if set(document) != {"format", *HookArguments._fields} or document["format"] != FORMAT:
        return None
    lists = {name: value for name, value in document.items() if isinstance(value, list | tuple)}
    return HookArguments(
        **{name: tuple(map(str, value)) for name, value in lists.items()}, backend=str(document["backend"])
    )


def _describe_faulty_hook(hook: Hook) -> str:
    return f"{hook.file}: the file has the hook's name, but {hook.fault}. Check and delete it yourself"


def _check_writable(directory: Path) -> None:
    if not os.access(directory, os.W_OK):
        raise EnvironmentUnfit(
            f"{directory}: not writable. Create an environment on top of it (python -m venv"
            " --system-site-packages), or start programs with python -m bundle.patched"
        )
