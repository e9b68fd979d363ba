"""The distributed optimizer on a machine without an accelerator."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_MODULE = "megatron.core.fp8_utils"
_IMPLEMENTATION = f"{_MODULE}:_quantize_param_shard_impl"


def _always_raises(source: "Evidence") -> Presence:
    """Whether one of the alternative implementations does nothing but raise, even for no parameters."""
    implementation = source[_IMPLEMENTATION]
    if implementation is None:
        return Presence.UNKNOWN
    bodies = [node.body for node in implementation.nodes if isinstance(node, ast.FunctionDef)]
    return Presence.of(any(isinstance(body[0], ast.Raise) for body in bodies))


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
        upstream="fixed upstream in 0.13",
        range="<0.13",
        fixed_in="0.13.0",
        backends=("cpu",),
        assumes=NOTHING,
        evidence=(_IMPLEMENTATION,),
        defect=_always_raises,
        check="cpu-optimizer-without-fp8-quantize",
    ),
)
