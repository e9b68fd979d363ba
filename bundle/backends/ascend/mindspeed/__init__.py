"""MindSpeed in our jobs (`backend_options.mindspeed`): its adaptor imports megatron and gives it its layers.

It is told little, so that it replaces little: attention, rotation, permutation and context parallelism stay
ours, and our patches in force. `runtime` imports megatron.
"""

import inspect
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bundle.backends import ascend
from bundle.capabilities.ascend import FACADE_TARGETS_WITH_MINDSPEED, RESTORED_FUNCTIONS
from bundle.errors import EnvironmentUnfit, PatchError
from bundle.patches import patcher
from bundle.recipe import Recipe

if TYPE_CHECKING:
    from bundle.backends import Runtime

_used_arguments: list[str] | None = None  # what MindSpeed was imported with in this process


def set_up_runtime(recipe: Recipe) -> "Runtime":
    """Return the runtime of NPUs through MindSpeed's layers, before megatron is imported.

    Raises EnvironmentUnfit where MindSpeed cannot be imported or megatron was imported before it. Raises
    PatchError where MindSpeed has replaced the target of one of our patches.
    """
    global _used_arguments
    arguments = build_arguments(recipe)
    if _used_arguments is None:
        ascend.redirect_cuda_to_npu()
        _patch_megatron(arguments)
        _used_arguments = arguments
    elif _used_arguments != arguments:
        raise EnvironmentUnfit(
            "backend ascend: MindSpeed was imported for another job in this process and can be configured"
            f" only once ({' '.join(_used_arguments)}). Start a process for each job"
        )
    # It imports megatron, which must be MindSpeed's by now.
    from bundle.backends.ascend.mindspeed.runtime import MindSpeedRuntime

    return MindSpeedRuntime()


def build_arguments(recipe: Recipe) -> list[str]:
    """Return MindSpeed's options, as the command line that it reads when it is imported."""
    arguments = ["--use-fused-rmsnorm"]
    if (fp8 := recipe.model.fp8) is not None:
        arguments += ["--transformer-impl", "transformer_engine", "--fp8-recipe", fp8.scaling]
        arguments += ["--fp8-format", fp8.format, "--fp8", fp8.format]
    return arguments


def _patch_megatron(arguments: list[str]) -> None:
    """Let MindSpeed patch megatron, and undo the replacements of functions that must stay ours."""
    from bundle.backends.ascend import facade

    if "megatron.core" in sys.modules:
        raise EnvironmentUnfit(
            "backend ascend: megatron.core was imported before MindSpeed and already uses what MindSpeed"
            " replaces. Start a new process and prepare MindSpeed first"
        )
    try:
        with _replace_command_line(arguments), _keep_log_format(), warnings.catch_warnings(record=True):
            from mindspeed import megatron_adaptor  # noqa: F401  # patches when it is imported
            from mindspeed.patch_utils import MindSpeedPatchesManager
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise EnvironmentUnfit(
            "backend ascend: MindSpeed cannot be imported (backend_options.mindspeed). Install its"
            " requirements and the commit that `mcore-bundle plan` names for the job's megatron-core",
            [f"{type(error).__name__}: {error}"],
        ) from error
    for target in RESTORED_FUNCTIONS:
        if (patch := MindSpeedPatchesManager.patches_info.get(target)) is not None:
            patch.remove_patch()
    facade.replace_attributes(FACADE_TARGETS_WITH_MINDSPEED)
    refuse_overwritten_patches()


def refuse_overwritten_patches() -> None:
    """Raise PatchError where MindSpeed has replaced a target of our applied patches.

    A function that MindSpeed only wraps still calls ours, as functools.wraps records.
    """
    lost = [target for target in patcher.list_applied_targets() if is_replaced_by_mindspeed(target)]
    if lost:
        raise PatchError(
            "MindSpeed has replaced these targets of our patches. Install the commit of MindSpeed that"
            " `mcore-bundle plan` names, or leave backend_options.mindspeed out:",
            lost,
        )


def is_replaced_by_mindspeed(target: str) -> bool:
    """Return whether MindSpeed has replaced (not only wrapped) the target "module:Qualified.name"."""
    name, _, path = target.partition(":")
    value: Any = sys.modules.get(name)
    for part in path.split("."):
        value = getattr(value, part, None)
    code = inspect.unwrap(value) if callable(value) else value
    return str(getattr(code, "__module__", "")).startswith("mindspeed.")


@contextmanager
def _replace_command_line(arguments: list[str]) -> Iterator[None]:
    """Replace the command line that started this rank by `arguments` inside the context."""
    previous = sys.argv
    sys.argv = [*previous[:1], *arguments]
    try:
        yield
    finally:
        sys.argv = previous


@contextmanager
def _keep_log_format() -> Iterator[None]:
    """Restore the log's handlers and level after the block: MindSpeed reformats all logs."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
