"""Routers that are told which rows are padding."""

import ast

from bundle.patches.catalogue import mtp
from bundle.patches.definitions import Definition, Evidence
from bundle.patches.entry import NOTHING, Patch, Presence, Replacement, Trap, asks, called, reads

_ROUTER = "megatron.core.transformer.moe.router"
_BIAS = f"{_ROUTER}:TopKRouter._apply_expert_bias"
_GLOBAL = f"{_ROUTER}:TopKRouter._apply_global_aux_loss"
_BALANCE = f"{_ROUTER}:switch_load_balancing_loss_func"
_UTILS = "megatron.core.transformer.moe.moe_utils"
_COUNT = f"{_UTILS}:get_tokens_per_expert_and_token_count"
_REDUCE = f"{_UTILS}:reduce_from_tensor_model_parallel_region"
_IN_PLACE = "megatron.core.tensor_parallel.mappings:_reduce"
_MASK = f"{_ROUTER}:TopKRouter.routing"
_PREPARED = "megatron.core.models.gpt.gpt_model:GPTModel._preprocess"


@reads(_MASK, also=(_BIAS,))
def _mask_of_another_shape(routing: Definition, bias: Definition | None) -> Presence:
    """Whether the map [tokens, experts] is combined with the mask [tokens] as it is."""
    if "padding_mask" not in routing.parameters:
        return Presence.ABSENT  # nobody can tell a router of padding
    if bias is None:
        return Presence.UNKNOWN
    both = (node for node in bias.each(ast.BinOp) if isinstance(node.op, ast.BitAnd | ast.Mult))
    combined = {ast.unparse(node.right) for node in both}
    if combined == {"~padding_mask"}:
        given = routing.has("self._apply_expert_bias(routing_map, padding_mask=padding_mask)")
        return Presence.told(given and not bias.assigned("padding_mask"))
    return Presence.told(absent=any("unsqueeze" in right for right in combined))


@asks(_COUNT, _IN_PLACE, _MASK)
def _own_count_is_overwritten(source: Evidence) -> Presence:
    """Whether a count is summed over the ranks in place, and the rank's own is read from it afterwards."""
    count, reduce = source[_COUNT], source[_IN_PLACE]
    if count is None:
        routing = source[_MASK]
        return Presence.told(absent=routing and "padding_mask" not in routing.parameters)
    summed = [call.args[0] for call in count.calls("reduce_from_tensor_model_parallel_region") if call.args]
    if len(summed) != 1 or reduce is None or not reduce.calls("all_reduce"):
        return Presence.UNKNOWN
    if not isinstance(summed[0], ast.Name):
        return Presence.told(absent=ast.unparse(summed[0]).endswith(".clone()"))
    name = summed[0].id
    # Its sum is taken under an `if`, behind the call that has changed it.
    after = (node for branch in count.each(ast.If) for node in ast.walk(branch))
    again = any(isinstance(node, ast.Attribute) and ast.unparse(node) == f"{name}.sum" for node in after)
    read = [n for n in count.each(ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]
    return Presence.told(again, absent=len(read) == 1)


@asks(_GLOBAL, _MASK)
def _divided_by_other_tokens(source: Evidence) -> Presence:
    """Whether the experts' counts, and no count of tokens, are added up over micro-batches."""
    loss = source[_GLOBAL]
    if loss is None:
        return Presence.told(absent=source[_MASK])
    summed = {ast.unparse(node.target) for node in loss.each(ast.AugAssign)}
    known = summed == {"self.global_tokens_per_expert", "self.ga_steps"}
    return Presence.told(known and loss.calls("switch_load_balancing_loss_func"))


@asks(_PREPARED, mtp.FORWARD)
def _mask_of_the_first_stage(source: Evidence) -> Presence:
    """Whether a mask of padding is shared out by the stage that has the embedding, and by no other."""
    prepared = source[_PREPARED]
    if prepared is None or "padding_mask" not in prepared.parameters:
        older = source[mtp.FORWARD]
        return Presence.told(absent=older and "padding_mask" not in older.names)
    sharing = [
        node
        for node in prepared.each(ast.Assign)
        if ast.unparse(node.targets[0]) == "padding_mask"
        and "scatter_to_sequence_parallel_region" in ast.unparse(node.value)
    ]
    first = [n for n in prepared.each(ast.If) if ast.unparse(n.test) == "self.pre_process"]
    inside = {id(node) for branch in first for statement in branch.body for node in ast.walk(statement)}
    return Presence.told(sharing and all(id(node) in inside for node in sharing))


PATCHES = (
    Patch(
        id="padding-mask-expert-bias",
        replacements=(called(_BIAS, "moe:one_mask_for_all_experts"),),
        why=(
            "A padding mask ends in a RuntimeError where routers have an expert bias, and leaves out experts "
            "instead of tokens if there are as many of one as of the other: [t, e] meets a mask [t]."
        ),
        silent=False,
        upstream="NVIDIA/Megatron-LM#6111, fixed by #6114 on main",
        range=">=0.16",
        when=frozenset({"moe", "expert-bias", "padding-mask"}),
        assumes=NOTHING,
        defect=_mask_of_another_shape,
    ),
    Patch(
        id="padding-mask-own-count",
        replacements=(called(_REDUCE, "moe:sum_of_a_copy"),),
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
        defect=_own_count_is_overwritten,
    ),
    Patch(
        id="global-aux-loss-tokens",
        replacements=(
            called(_GLOBAL, "moe:over_the_window"),
            Replacement(_BALANCE, "moe:counts_like_these_tokens"),
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
        defect=_divided_by_other_tokens,
    ),
)
TRAPS = (
    Trap(
        id="padding-mask-stages",
        range=">=0.16",
        defect=_mask_of_the_first_stage,
        when=frozenset({"moe", "padding-mask", "sp", "pp"}),
        why="From the second stage on routers get the mask of the whole sequence, not of their share.",
        cause=(
            "GPTModel._preprocess shares the mask out where the embedding is, over the layout's ranks; #7452 "
            "(finding 5), #5563, #5088"
        ),
        silent=True,
        instead="Share the mask out before the model is called, or set parallel.pp to 1.",
        unshown="read only: no engine of ours gives a model this mask",
    ),
)
