"""Routers that are told which rows are padding."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Definition, Evidence

_ROUTER = "megatron.core.transformer.moe.router"
_BIAS = f"{_ROUTER}:TopKRouter._apply_expert_bias"
_GLOBAL = f"{_ROUTER}:TopKRouter._apply_global_aux_loss"
_BALANCE = f"{_ROUTER}:switch_load_balancing_loss_func"
_UTILS = "megatron.core.transformer.moe.moe_utils"
_COUNT = f"{_UTILS}:get_tokens_per_expert_and_token_count"
_REDUCE = f"{_UTILS}:reduce_from_tensor_model_parallel_region"
_IN_PLACE = "megatron.core.tensor_parallel.mappings:_reduce"
_MASK = "megatron.core.transformer.moe.router:TopKRouter.routing"


def _mask_of_another_shape(source: "Evidence") -> Presence:
    """Whether the map [tokens, experts] is combined with the mask [tokens] as it is."""
    routing, bias = source[_MASK], source[_BIAS]
    if routing is None:
        return Presence.UNKNOWN
    if "padding_mask" not in routing.parameters:
        return Presence.ABSENT  # nobody can tell a router of padding
    combined = {
        ast.unparse(node.right)
        for node in (bias.walk() if bias else ())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.Mult)
    }
    if bias is not None and combined == {"~padding_mask"}:
        given = routing.has("self._apply_expert_bias(routing_map, padding_mask=padding_mask)")
        return Presence.PRESENT if given and not bias.assigned("padding_mask") else Presence.UNKNOWN
    return Presence.ABSENT if any("unsqueeze" in right for right in combined) else Presence.UNKNOWN


def _own_count_is_overwritten(source: "Evidence") -> Presence:
    """Whether a count is summed over the ranks in place, and the rank's own is read from it afterwards."""
    count, reduce = source[_COUNT], source[_IN_PLACE]
    if count is None:
        routing = source[_MASK]
        return Presence.ABSENT if routing and "padding_mask" not in routing.parameters else Presence.UNKNOWN
    summed = [call.args[0] for call in count.calls("reduce_from_tensor_model_parallel_region") if call.args]
    if len(summed) != 1 or reduce is None or not reduce.calls("all_reduce"):
        return Presence.UNKNOWN
    if not isinstance(summed[0], ast.Name):
        copy = ast.unparse(summed[0]).endswith(".clone()")
        return Presence.ABSENT if copy else Presence.UNKNOWN
    name = summed[0].id
    if _is_read_after(count, name):
        return Presence.PRESENT
    read = [
        n for n in count.walk() if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
    ]
    return Presence.ABSENT if len(read) == 1 else Presence.UNKNOWN


def _is_read_after(code: "Definition", name: str) -> bool:
    """Whether the sum of a variable is taken under an `if`, behind the call that has changed it."""
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == f"{name}.sum"
        for branch in code.walk()
        if isinstance(branch, ast.If)
        for node in ast.walk(branch)
    )


def _divided_by_other_tokens(source: "Evidence") -> Presence:
    """Whether the experts' counts, and no count of tokens, are added up over micro-batches."""
    loss = source[_GLOBAL]
    if loss is None:
        return Presence.ABSENT if source[_MASK] else Presence.UNKNOWN
    summed = {ast.unparse(node.target) for node in loss.walk() if isinstance(node, ast.AugAssign)}
    known = {"self.global_tokens_per_expert", "self.ga_steps"}
    if not known <= summed or not loss.calls("switch_load_balancing_loss_func"):
        return Presence.UNKNOWN
    return Presence.PRESENT if summed == known else Presence.UNKNOWN


PATCHES = (
    Patch(
        id="padding-mask-expert-bias",
        replacements=(Replacement(_BIAS, "bundle.wrappers.moe:one_mask_for_all_experts", by_signature=True),),
        why=(
            "A padding mask ends in a RuntimeError where routers have an expert bias, and leaves out experts "
            "instead of tokens if there are as many of one as of the other: [t, e] meets a mask [t]."
        ),
        silent=False,
        upstream="NVIDIA/Megatron-LM#6111, fixed by #6114 on main",
        range=">=0.16",
        when=frozenset({"moe", "expert-bias", "padding-mask"}),
        assumes=NOTHING,
        evidence=(_BIAS, _MASK),
        defect=_mask_of_another_shape,
    ),
    Patch(
        id="padding-mask-own-count",
        replacements=(Replacement(_REDUCE, "bundle.wrappers.moe:sum_of_a_copy", by_signature=True),),
        why=(
            "With a padding mask the balancing gradient under a loss per token is tp x cp times what it is "
            "without: the sum over those ranks is taken in place, and read as the rank's own count of tokens."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#7452 (finding 10), #7481 (open)",
        range=">=0.16",
        when=frozenset({"moe", "padding-mask"}),
        assumes=(
            "below 0.19 the loss of a rank is brought to the scale of the tokens of all tp x cp ranks by "
            "someone: there this defect makes up for that one in sequence-parallel jobs"
        ),
        evidence=(_COUNT, _IN_PLACE, _MASK),
        defect=_own_count_is_overwritten,
    ),
    Patch(
        id="global-aux-loss-tokens",
        replacements=(
            Replacement(_GLOBAL, "bundle.wrappers.moe:over_the_window", by_signature=True),
            Replacement(_BALANCE, "bundle.wrappers.moe:counts_like_these_tokens"),
        ),
        why=(
            "The global balancing loss depends on how tokens are shared out among micro-batches, so on "
            "padding: the experts' counts of all micro-batches so far are divided by the tokens of the last."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#7213, #7214 (open)",
        range=">=0.15",
        when=frozenset({"moe", "global-aux-loss"}),
        assumes=NOTHING,
        evidence=(_GLOBAL, _MASK),
        defect=_divided_by_other_tokens,
    ),
)
