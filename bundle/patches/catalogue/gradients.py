"""What gradients are divided by."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"


def _tokens_of_data_ranks(source: "Evidence") -> Presence:
    """Whether the token count is summed over a data-parallel group without the context-parallel ranks."""
    finalize = source[_FINALIZE]
    counted = [
        call
        for call in (finalize.calls("all_reduce") if finalize else ())
        if call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "num_tokens"
    ]
    if len(counted) != 1:
        return Presence.UNKNOWN
    group = next((keyword.value for keyword in counted[0].keywords if keyword.arg == "group"), None)
    alone = isinstance(group, ast.Call) and not group.args and not group.keywords
    return Presence.of(alone)


PATCHES = (
    Patch(
        id="per-token-loss-context-parallel",
        replacements=(Replacement(_FINALIZE, "bundle.wrappers.gradients:count_tokens_of_all_ranks"),),
        why="Gradients of a per-token loss are twice too large at CP2: only data ranks' tokens are counted.",
        upstream="fixed upstream in 0.13; found by comparing CP2 with CP1",
        range="<0.13",
        fixed_in="0.13.0",
        when=frozenset({"cp"}),
        evidence=(_FINALIZE,),
        defect=_tokens_of_data_ranks,
        check="per-token-loss-context-parallel",
    ),
)
