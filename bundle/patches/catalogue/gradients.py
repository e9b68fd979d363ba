"""What gradients are divided by, and where they lie."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__"


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


def _start_padded_sometimes(source: "Evidence") -> Presence:
    """Whether a shared parameter starts behind padding only where ranks do not divide its start."""
    buffer = source[_BUFFER]
    if buffer is None:
        return Presence.UNKNOWN
    remainders = [n for n in buffer.walk() if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
    return Presence.of(any(ast.unparse(n.left) == "param_start_index" for n in remainders))


PATCHES = (
    Patch(
        id="per-token-loss-context-parallel",
        replacements=(Replacement(_FINALIZE, "bundle.wrappers.gradients:count_tokens_of_all_ranks"),),
        why="Gradients of a per-token loss are twice too large at CP2: only data ranks' tokens are counted.",
        upstream="fixed upstream in 0.13; found by comparing CP2 with CP1",
        range="<0.13",
        fixed_in="0.13.0",
        when=frozenset({"cp"}),
        assumes=(
            "the loss function returns three values, of which the token count is this rank's own; "
            "Megatron's pretrain_gpt.py of 0.12 returns one summed over context-parallel ranks, and "
            "with it gradients become too small"
        ),
        evidence=(_FINALIZE,),
        defect=_tokens_of_data_ranks,
        check="per-token-loss-context-parallel",
    ),
    Patch(
        id="shared-embedding-bucket",
        replacements=(Replacement(_BUFFER, "bundle.wrappers.gradients:start_behind_padding"),),
        why=(
            "The optimizer refuses an embedding that stages share (tied, or read by MTP): its bucket starts "
            "behind padding, and it in front of that, if what is before it ends at 64 modulo 128."
        ),
        upstream="fixed upstream in 0.13",
        range="<0.13",
        fixed_in="0.13.0",
        when=frozenset({"pp"}),
        assumes=NOTHING,
        evidence=(_BUFFER,),
        defect=_start_padded_sometimes,
        check="shared-embedding-bucket",
    ),
)
