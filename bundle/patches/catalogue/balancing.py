"""Megatron's own losses that balance experts, and the counts of the bias that steers them."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import MEGATRONS_BALANCING, NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ATTACH = f"{_ROUTER}.attach_and_log_load_balancing_loss"  # from 0.14
_APPLY = f"{_ROUTER}.apply_load_balancing_loss"  # to 0.13
_Z_LOSS = f"{_ROUTER}.apply_z_loss"
_SEQUENCES = f"{_ROUTER}._apply_seq_aux_loss"
_MAINTAIN = f"{_ROUTER}._maintain_float32_expert_bias"
_INIT = f"{_ROUTER}.__init__"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_STEP = f"{_SCHEDULES}:forward_step"  # sets the scale to 0.13
_LOSS = f"{_SCHEDULES}:forward_step_calc_loss"  # from 0.14


def _over_ranks(wrapper: str) -> tuple[Replacement, ...]:
    """The function that sets the scale: from 0.14 one of its own, which both schedules call."""
    return (
        Replacement(_STEP, f"bundle.wrappers.moe:{wrapper}", by_signature=True),
        Replacement(_LOSS, f"bundle.wrappers.moe:{wrapper}", optional=True, by_signature=True),
    )


def _own_tokens(source: "Evidence") -> Presence:
    """Whether the weight is the number of tokens on this rank, and not of all that share a micro-batch."""
    attach, z_loss = source[_ATTACH] or source[_APPLY], source[_Z_LOSS]
    if attach is None or z_loss is None:
        return Presence.UNKNOWN
    all_ranks = "_ * num_local_tokens * self.tp_cp_group.size()"
    if attach.has(all_ranks) and z_loss.has(all_ranks):
        return Presence.ABSENT
    counted = ("aux_loss * activation.shape[0]", "aux_loss * num_tokens")
    of_logits = ("z_loss * logits.shape[0]", "z_loss * num_tokens")
    own = any(map(attach.has, counted)) and any(map(z_loss.has, of_logits))
    setting = source[_LOSS] or source[_STEP]
    # The wrapper multiplies the scale, which is to be set anew each time.
    anew = setting is not None and setting.has("MoEAuxLossAutoScaler.set_loss_scale(loss_scale)")
    return Presence.PRESENT if own and anew else Presence.UNKNOWN


def _mean_without_context(source: "Evidence") -> Presence:
    """Whether the scale of a mean is divided by micro-batches and knows no context-parallel ranks."""
    setting = source[_LOSS] or source[_STEP]
    if setting is None:
        return Presence.UNKNOWN
    if setting.has("MoEAuxLossAutoScaler.set_loss_scale(loss_scale / num_microbatches)"):
        return Presence.PRESENT
    scaled = ("cp_group_size", "cp_size_for_scaling")
    minds = (f"MoEAuxLossAutoScaler.set_loss_scale(loss_scale * {cp} / num_microbatches)" for cp in scaled)
    return Presence.ABSENT if any(map(setting.has, minds)) else Presence.UNKNOWN


def _one_row(source: "Evidence") -> Presence:
    """Whether the loss over sequences is weighed by the tokens of one of them."""
    apply, attach = source[_SEQUENCES], source[_ATTACH]
    if apply is None or attach is None:
        known = source[_APPLY] is not None and attach is None
        return Presence.ABSENT if known else Presence.UNKNOWN
    if "valid_token_count" not in attach.parameters:
        return Presence.ABSENT if attach.has("aux_loss * activation.shape[0]") else Presence.UNKNOWN
    counts = [
        keyword
        for call in apply.calls("attach_and_log_load_balancing_loss")
        for keyword in call.keywords
        if keyword.arg == "valid_token_count"
    ]
    weights = [ast.unparse(count.value) for count in counts]
    if weights == ["local_num_tokens * bsz"]:
        return Presence.ABSENT
    scales = {
        ast.unparse(keyword.value)
        for call in apply.calls("attach_and_log_load_balancing_loss")
        for keyword in call.keywords
        if keyword.arg == "aux_loss_scale_num_tokens"
    }
    own = weights == ["local_num_tokens"] and scales <= {"total_num_tokens"}  # of one of them, over the ranks
    return (
        Presence.PRESENT if own and apply.calls("get_tokens_per_expert_and_token_count") else Presence.UNKNOWN
    )


def _counts_in_bf16(source: "Evidence") -> Presence:
    """Whether the counts are a buffer, which mixed precision casts, that nobody casts back."""
    maintain, init = source[_MAINTAIN], source[_INIT]
    if maintain is None or init is None:
        return Presence.UNKNOWN
    counts = "self.local_tokens_per_expert"
    if maintain.assigned(counts) or maintain.assigned(f"{counts}.data"):
        return Presence.ABSENT
    if "local_tokens_per_expert" in maintain.names:
        return Presence.UNKNOWN
    buffer = init.has('self.register_buffer("local_tokens_per_expert", _, persistent=False)')
    return Presence.PRESENT if buffer and "expert_bias" in maintain.names else Presence.UNKNOWN


_LOSSES = frozenset({"moe", MEGATRONS_BALANCING})

PATCHES = (
    Patch(
        id="balancing-per-token-ranks",
        replacements=_over_ranks("per_token_over_ranks"),
        why=(
            "Under a loss per token the gradients of the experts' balancing loss and z-loss are divided by "
            "tensor and context parallel ranks: half of the coefficient at TP2 or CP2, silently."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#1652, #3672; fixed by #5047 in 0.19",
        range="<0.19",
        fixed_in="0.19.0",
        when=_LOSSES,
        assumes=(
            "calculate_per_token_loss, with a loss function that returns three values: a sum, this rank's "
            "own token count, and what is reported; and sequence parallelism wherever tensor parallel ranks "
            "are several"
        ),
        evidence=(_ATTACH, _APPLY, _Z_LOSS, _LOSS, _STEP),
        defect=_own_tokens,
    ),
    Patch(
        id="balancing-mean-context-parallel",
        replacements=_over_ranks("mean_over_context"),
        why=(
            "Under a mean loss the gradients of the experts' balancing loss and z-loss are divided by "
            "context parallel ranks: half of the coefficient at CP2, silently."
        ),
        silent=True,
        upstream="fixed by NVIDIA/Megatron-LM#2217 in 0.16",
        range="<0.16",
        fixed_in="0.16.0",
        when=_LOSSES | {"cp"},
        assumes="a mean loss: calculate_per_token_loss is off",
        evidence=(_LOSS, _STEP),
        defect=_mean_without_context,
    ),
    Patch(
        id="balancing-per-token-rows",
        replacements=(Replacement(_SEQUENCES, "bundle.wrappers.moe:every_sequence"),),
        why=(
            "Under a loss per token the balancing loss over sequences (seq_aux_loss) is divided by the rows "
            "of a micro-batch, silently."
        ),
        silent=True,
        upstream="fixed by NVIDIA/Megatron-LM#5798 in 0.19",
        range=">=0.16,<0.19",
        fixed_in="0.19.0",
        when=_LOSSES,
        assumes=NOTHING,
        evidence=(_SEQUENCES, _ATTACH, _APPLY),
        defect=_one_row,
    ),
    Patch(
        id="expert-bias-counts",
        replacements=(Replacement(_MAINTAIN, "bundle.wrappers.moe:exact_counts"),),
        why=(
            "In bf16 the tokens of each expert are counted in bf16, which has no 257: the bias that steers "
            "the choice moves the wrong way."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#7081",
        range="",
        when=frozenset({"expert-bias", "bf16"}),
        assumes=NOTHING,
        evidence=(_MAINTAIN, _INIT),
        defect=_counts_in_bf16,
    ),
)
