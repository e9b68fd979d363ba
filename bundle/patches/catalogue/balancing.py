"""Megatron's own losses that balance experts, and the counts of the bias that steers them."""

import ast

from bundle.patches.definitions import Definition, Evidence
from bundle.patches.entry import (
    MEGATRONS_BALANCING,
    NOTHING,
    Patch,
    Presence,
    Replacement,
    Trap,
    asks,
    called,
    reads,
)

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ATTACH = f"{_ROUTER}.attach_and_log_load_balancing_loss"  # from 0.14
_APPLY = f"{_ROUTER}.apply_load_balancing_loss"  # to 0.13
_Z_LOSS = f"{_ROUTER}.apply_z_loss"
_SEQUENCES = f"{_ROUTER}._apply_seq_aux_loss"  # from 0.14
_SEQUENCES_THEN = f"{_ROUTER}.seq_aux_loss_load_balancing"  # to 0.13
_MAINTAIN = f"{_ROUTER}._maintain_float32_expert_bias"
_INIT = f"{_ROUTER}.__init__"
_ROUTING = f"{_ROUTER}.routing"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_STEP = f"{_SCHEDULES}:forward_step"  # sets the scale to 0.13
_LOSS = f"{_SCHEDULES}:forward_step_calc_loss"  # from 0.14


def _over_ranks(wrapper: str) -> tuple[Replacement, ...]:
    """The function that sets the scale: from 0.14 one of its own, which both schedules call."""
    return called(_STEP, f"moe:{wrapper}"), called(_LOSS, f"moe:{wrapper}", optional=True)


@asks(_ATTACH, _APPLY, _Z_LOSS, _LOSS, _STEP)
def _own_tokens(source: Evidence) -> Presence:
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
    return Presence.told(own and anew)


@asks(_LOSS, _STEP)
def _mean_without_context(source: Evidence) -> Presence:
    """Whether the scale of a mean is divided by micro-batches and knows no context-parallel ranks."""
    setting = source[_LOSS] or source[_STEP]
    if setting is None:
        return Presence.UNKNOWN
    scaled = ("loss_scale", "loss_scale * cp_group_size", "loss_scale * cp_size_for_scaling")
    plain, *minding = (
        setting.has(f"MoEAuxLossAutoScaler.set_loss_scale({by} / num_microbatches)") for by in scaled
    )
    return Presence.told(plain, any(minding))


@asks(_SEQUENCES, _ATTACH, _APPLY)
def _one_row(source: Evidence) -> Presence:
    """Whether the loss over sequences is weighed by the tokens of one of them."""
    apply, attach = source[_SEQUENCES], source[_ATTACH]
    if apply is None or attach is None:
        return Presence.told(absent=source[_APPLY] is not None and attach is None)
    if "valid_token_count" not in attach.parameters:
        return Presence.told(absent=attach.has("aux_loss * activation.shape[0]"))
    weights, scales = (
        apply.given("attach_and_log_load_balancing_loss", keyword)
        for keyword in ("valid_token_count", "aux_loss_scale_num_tokens")
    )
    # of one of them, over the ranks
    own = weights == ("local_num_tokens",) and set(scales) <= {"total_num_tokens"}
    counted = bool(apply.calls("get_tokens_per_expert_and_token_count"))
    return Presence.told(own and counted, absent=weights == ("local_num_tokens * bsz",))


@reads(_MAINTAIN, _INIT)
def _counts_in_bf16(maintain: Definition, init: Definition) -> Presence:
    """Whether the counts are a buffer, which mixed precision casts, that nobody casts back."""
    counts = "self.local_tokens_per_expert"
    if maintain.assigned(counts) or maintain.assigned(f"{counts}.data"):
        return Presence.ABSENT
    if "local_tokens_per_expert" in maintain.names:
        return Presence.UNKNOWN
    buffer = init.has('self.register_buffer("local_tokens_per_expert", _, persistent=False)')
    return Presence.told(buffer and "expert_bias" in maintain.names)


@asks(_ATTACH, _APPLY)
def _weighed_by_all_tokens(source: Evidence) -> Presence:
    """Whether the weight of a loss per token is tokens that the router sees, learned or not."""
    attach = source[_ATTACH] or source[_APPLY]
    if attach is None:
        return Presence.UNKNOWN
    if "calculate_per_token_loss" not in attach.names:  # it is not weighed at all
        return Presence.told(absent=attach.has("MoEAuxLossAutoScaler.apply(activation, aux_loss)"))
    attached = [call.args[1] for call in attach.calls("apply") if len(call.args) == 2]
    weights = [weighed.right for weighed in attached if isinstance(weighed, ast.BinOp)]
    seen = ("activation.shape[0]", "num_tokens", "self.tp_cp_group.size()", "aux_loss_scale_num_tokens")
    return Presence.told(bool(weights) and all(ast.unparse(weight) in seen for weight in weights))


@asks(_ROUTING, _SEQUENCES, _SEQUENCES_THEN)
def _rows_are_sequences(source: Evidence) -> Presence:
    """Whether a sequence is a row of the logits, and nobody looks for boundaries inside it."""
    routing, loss = source[_ROUTING], source[_SEQUENCES] or source[_SEQUENCES_THEN]
    if routing is None or loss is None:
        return Presence.UNKNOWN
    bounded = any("cu_seqlens" in name for name in routing.names | loss.names)
    return Presence.told(routing.has("seq_length, bsz = logits.shape[:2]") and not bounded)


@reads(_ROUTING)
def _every_row_is_counted(routing: Definition) -> Presence:
    """Whether a router cannot be told of padding."""
    told = any("mask" in name or "valid" in name for name in routing.names | routing.parameters)
    return Presence.told(not told, absent="padding_mask" in routing.parameters)


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
        defect=_mean_without_context,
    ),
    Patch(
        id="balancing-per-token-rows",
        replacements=(Replacement(_SEQUENCES, "moe:every_sequence"),),
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
        defect=_one_row,
    ),
    Patch(
        id="expert-bias-counts",
        replacements=(Replacement(_MAINTAIN, "moe:exact_counts"),),
        why=(
            "In bf16 the tokens of each expert are counted in bf16, which has no 257: the bias that steers "
            "the choice moves the wrong way."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#7081",
        range="",
        when=frozenset({"expert-bias", "bf16"}),
        assumes=NOTHING,
        defect=_counts_in_bf16,
    ),
)
TRAPS = (
    Trap(
        id="balancing-of-prompts",
        range="",
        defect=_weighed_by_all_tokens,
        when=_LOSSES | {"per-token-loss"},
        why=(
            "Under a loss per token the coefficients of the experts' balancing loss and z-loss count as many "
            "times as there are tokens to a learned one: four times where a quarter is learned, silently."
        ),
        cause=(
            "the router multiplies by the tokens that it sees (transformer/moe/router.py), "
            "finalize_model_grads divides by those that the loss counts; #5047 takes both for the same"
        ),
        silent=True,
        instead="Take a mean loss, or bring the coefficients to the share of tokens that is learned.",
    ),
    Trap(
        id="balancing-of-packs",
        range="",
        defect=_rows_are_sequences,
        when=_LOSSES | {"seq-aux-loss", "packed"},
        why="The balancing loss over sequences (seq_aux_loss) takes a pack for one sequence.",
        cause=(
            "TopKRouter.routing takes rows of the logits for sequences, and a pack is one; #6108, #6115 "
            "(open); tokens_per_sample of 0.19 helps where all sequences of a pack are equally long"
        ),
        silent=True,
        instead="Do not pack, or take aux_loss.",
    ),
    Trap(
        id="balancing-of-padding",
        range="<0.16",
        defect=_every_row_is_counted,
        when=_LOSSES | {"padding"},
        why="Rows of padding are balanced like tokens: the emptier a pack, the less its tokens are balanced.",
        cause="TopKRouter.routing takes no padding mask; #1984, one since #2142 in 0.16.0",
        silent=True,
        instead="Leave padding out of micro-batches, or use megatron-core 0.16 or later, with the mask.",
    ),
)
