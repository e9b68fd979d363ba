"""The distributed optimizer on a machine without an accelerator."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement
from bundle.patches.pattern import found

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_MODULE = "megatron.core.fp8_utils"
_IMPLEMENTATION = f"{_MODULE}:_quantize_param_shard_impl"


def _always_raises(source: "Evidence") -> Presence:
    """Whether the last alternative, without Transformer Engine, only raises, even for no parameters."""
    implementation = source[_IMPLEMENTATION]
    functions = implementation.nodes if implementation else ()
    if len(functions) < 2 or not all(isinstance(node, ast.FunctionDef) for node in functions):
        return Presence.UNKNOWN
    (last,) = (node for node in functions[-1:] if isinstance(node, ast.FunctionDef))
    if isinstance(last.body[0], ast.Raise):
        return Presence.PRESENT
    return Presence.ABSENT if found("len(model_params) == 0", ast.walk(last)) else Presence.UNKNOWN


PATCHES = (
    Patch(
        id="cpu-optimizer-without-fp8-quantize",
        replacements=(
            Replacement(
                f"{_MODULE}:quantize_param_shard",
                "bundle.wrappers.optimizer:quantize_only_what_there_is",
                by_signature=True,
            ),
        ),
        why="Every step ends in an error without Transformer Engine, although no parameter is FP8.",
        silent=False,
        upstream="fixed upstream in 0.13",
        range="<0.13",
        fixed_in="0.13.0",
        backends=("cpu",),
        assumes=NOTHING,
        evidence=(_IMPLEMENTATION,),
        defect=_always_raises,
    ),
)
