"""What gradients are divided by, and where they lie."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement
from bundle.patches.pattern import found

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__"


def _tokens_of_data_ranks(source: "Evidence") -> Presence:
    """Whether the token count is summed over a data-parallel group without the context-parallel ranks."""
    finalize = source[_FINALIZE]
    if finalize is None:
        return Presence.UNKNOWN
    counted = [call for call in finalize.calls("all_reduce") if call.args and _is_count(call.args[0])]
    if len(counted) != 1:
        return Presence.UNKNOWN
    group = next((keyword.value for keyword in counted[0].keywords if keyword.arg == "group"), counted[0])
    if found("parallel_state.get_data_parallel_group()", [group]):
        return Presence.PRESENT
    over_all = found("parallel_state.get_data_parallel_group(with_context_parallel=True)", [group])
    return Presence.ABSENT if over_all or found("dp_cp_group", [group]) else Presence.UNKNOWN


def _is_count(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Name) and argument.id == "num_tokens"


def _start_padded_sometimes(source: "Evidence") -> Presence:
    """Whether a shared parameter starts behind padding only where ranks do not divide its start."""
    buffer = source[_BUFFER]
    if buffer is None:
        return Presence.UNKNOWN
    if buffer.has("param_start_index % self.data_parallel_world_size != 0"):
        return Presence.PRESENT
    remainders = [n for n in buffer.walk() if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
    asked = any(
        isinstance(n, ast.Name) and n.id == "param_start_index" for r in remainders for n in ast.walk(r)
    )
    closes = buffer.has("param_start_index = _update_bucket_metadata(param_start_index)")
    given = buffer.has("self.param_index_map = param_layout.param_index_map")  # worked out elsewhere
    return Presence.ABSENT if (closes or given) and not asked else Presence.UNKNOWN


PATCHES = (
    Patch(
        id="per-token-loss-context-parallel",
        replacements=(Replacement(_FINALIZE, "bundle.wrappers.gradients:count_tokens_of_all_ranks"),),
        why="Gradients of a per-token loss are twice too large at CP2: only data ranks' tokens are counted.",
        silent=True,
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
    ),
    Patch(
        id="shared-embedding-bucket",
        replacements=(Replacement(_BUFFER, "bundle.wrappers.gradients:start_behind_padding"),),
        why=(
            "The optimizer refuses an embedding that stages share (tied, or read by MTP): its bucket starts "
            "behind padding, and it in front of that, if what is before it ends at 64 modulo 128."
        ),
        silent=False,
        upstream="fixed upstream in 0.13",
        range="<0.13",
        fixed_in="0.13.0",
        when=frozenset({"pp"}),
        assumes=NOTHING,
        evidence=(_BUFFER,),
        defect=_start_padded_sometimes,
    ),
)
