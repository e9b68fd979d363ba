"""Multi-token prediction: its roll to the next token, its loss, and when it runs."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definition import Definition
    from bundle.patches.definitions import Evidence

_MODULE = "megatron.core.transformer.multi_token_prediction"
_GPT = "megatron.core.models.gpt.gpt_model"
_ROLL = f"{_MODULE}:roll_tensor"
_ROLL_PACKED = f"{_MODULE}:_roll_tensor_packed_seq"
_LOSS = f"{_MODULE}:process_mtp_loss"
_POSTPROCESS = f"{_GPT}:GPTModel._postprocess"
_FORWARD = f"{_GPT}:GPTModel.forward"


def _roll_within_rank(source: "Evidence") -> Presence:
    roll = source[_ROLL]
    if roll is None or "shifts" not in roll.parameters:
        return Presence.UNKNOWN
    return Presence.of("cp_group" not in roll.parameters)


def _boundaries(source: "Evidence") -> Presence:
    roll, packed = source[_ROLL], source[_ROLL_PACKED]
    if packed is not None and "cu_seqlens_q" in packed.names:
        return Presence.of("cu_seqlens_q_padded" not in packed.names)
    if packed is None and roll is not None and "packed_seq_params" not in roll.parameters:
        return Presence.ABSENT
    return Presence.UNKNOWN


def _count_of_one_rank(source: "Evidence") -> Presence:
    """Whether the loss is scaled by two token counts of which neither is summed over the ranks."""
    loss = source[_LOSS]
    if loss is None:
        return Presence.of(False) if source[_POSTPROCESS] or source[_FORWARD] else Presence.UNKNOWN
    if loss.calls("all_reduce"):
        return Presence.ABSENT
    divided = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) for node in loss.walk())
    return (
        Presence.PRESENT if divided and loss.calls("roll_tensor") and loss.calls("sum") else Presence.UNKNOWN
    )


def _count_of_one_rank_divides(source: "Evidence") -> Presence:
    """Whether the model itself divides a depth's loss by the count that the roll of one rank returns."""
    roll, postprocess = source[_ROLL], source[_POSTPROCESS]
    if roll is None or (postprocess is None and source[_FORWARD] is None):
        return Presence.UNKNOWN
    if postprocess is None or "cp_group" not in roll.parameters or roll.calls("all_reduce"):
        return Presence.ABSENT
    return Presence.of(bool(postprocess.calls("roll_tensor")))


def _zero_is_some(source: "Evidence") -> Presence:
    postprocess = source[_POSTPROCESS]
    if postprocess is None:
        return Presence.of(False) if source[_FORWARD] else Presence.UNKNOWN
    tests = [node.test for node in postprocess.walk() if isinstance(node, ast.If)]
    return Presence.of(any(_is_not_none(test, "mtp_num_layers") for test in tests))


def _is_not_none(test: ast.expr, attribute: str) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and isinstance(test.left, ast.Attribute)
        and test.left.attr == attribute
    )


def _runs_without_labels(source: "Evidence") -> Presence:
    """Whether the MTP block is called under no condition that asks for labels."""
    for code in (source[_POSTPROCESS], source[_FORWARD]):
        if code is not None and code.calls("mtp"):
            return Presence.of(not set(code.calls("mtp")) <= _asking_for_labels(code))
    return Presence.UNKNOWN


def _asking_for_labels(code: "Definition") -> set[ast.AST]:
    return {
        inner
        for node in code.walk()
        if isinstance(node, ast.If)
        and any(isinstance(name, ast.Name) and name.id == "labels" for name in ast.walk(node.test))
        for statement in node.body
        for inner in ast.walk(statement)
    }


PATCHES = (
    Patch(
        id="mtp-context-parallel-roll",
        replacements=(Replacement(_ROLL, "bundle.wrappers.mtp:roll_over_ranks"),),
        why="Under context parallelism the next token is looked for on the own rank: wrong gradients.",
        upstream="fixed upstream in 0.14; found by comparing CP2 with CP1 (gradients off by 5e-1)",
        range="<0.14",
        fixed_in="0.14.0",
        when=frozenset({"mtp", "cp"}),
        assumes=(
            "ids, labels and loss mask arrive cut for context parallel, two chunks a rank, and no "
            "token count has been summed over those ranks"
        ),
        evidence=(_ROLL,),
        defect=_roll_within_rank,
        check="mtp-context-parallel-roll",
    ),
    Patch(
        id="mtp-packed-roll-boundaries",
        replacements=(Replacement(_ROLL_PACKED, "bundle.wrappers.mtp:rolled_by_one_gather"),),
        why=(
            "Tokens are rolled at the unpadded boundaries of packed sequences, and so across sequences as "
            "soon as there is padding between them: wrong gradients, silently. And every boundary is read "
            "back from the device: 3,600 waits in a step that needs none."
        ),
        upstream="not reported; found by comparing padded with unpadded packing (gradients off by 1e+0)",
        range=">=0.16",
        when=frozenset({"mtp", "packed"}),
        assumes="a pack with padding comes with its padded boundaries, cu_seqlens_*_padded",
        evidence=(_ROLL, _ROLL_PACKED),
        defect=_boundaries,
        check="mtp-packed-roll-boundaries",
    ),
    Patch(
        id="mtp-loss-context-parallel-count",
        replacements=(Replacement(_ROLL, "bundle.wrappers.mtp:count_over_ranks"),),
        why=(
            "The loss of each depth is divided by the tokens of one context-parallel rank: the logged loss "
            "is a mean of means, and so are the gradients unless the loss is one per token."
        ),
        upstream="not reported; found by comparing CP2 with CP1 (log off by 5e-3, gradients by 1e-1)",
        range=">=0.14,<0.17",
        fixed_in="0.17.0",  # where the code moved; mtp-loss-context-parallel-normalisation goes on there
        when=frozenset({"mtp", "cp"}),
        assumes=(
            "no token count has been summed over context-parallel ranks, and gradients are averaged "
            "over them, or divided by all tokens under a loss per token"
        ),
        evidence=(_ROLL, _POSTPROCESS, _FORWARD),
        defect=_count_of_one_rank_divides,
        check="mtp-loss-context-parallel-count",
    ),
    Patch(
        id="mtp-loss-context-parallel-normalisation",
        replacements=(
            Replacement(_ROLL, "bundle.wrappers.mtp:count_over_ranks"),
            Replacement(_LOSS, "bundle.wrappers.mtp:count_mask_over_ranks"),
        ),
        why=(
            "The loss of each depth is scaled by the ratio of two token counts of one context-parallel rank, "
            "although the token that the roll removes is missing on one rank only."
        ),
        upstream="not reported; found by comparing CP2 with CP1 (gradients off by 2e-1)",
        range=">=0.17",
        when=frozenset({"mtp", "cp"}),
        assumes=(
            "no token count has been summed over context-parallel ranks; under a loss per token the "
            "loss function returns three values"
        ),
        evidence=(_LOSS, _POSTPROCESS, _FORWARD),
        defect=_count_of_one_rank,
        check="mtp-loss-context-parallel-normalisation",
    ),
    Patch(
        id="mtp-zero-layers",
        replacements=(
            Replacement(
                "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
                "bundle.wrappers.mtp:no_layers",
                by_signature=True,
            ),
        ),
        why="mtp_num_layers=0 enters the branch of multi-token prediction, which then wants labels.",
        upstream="verl-project/verl#6374",
        range=">=0.16,<0.17",
        fixed_in="0.17.0",
        assumes=NOTHING,
        evidence=(_POSTPROCESS, _FORWARD),
        defect=_zero_is_some,
        check="mtp-zero-layers",
    ),
    Patch(
        id="mtp-without-labels",
        replacements=(Replacement(_FORWARD, "bundle.wrappers.mtp:only_with_labels", by_signature=True),),
        why=(
            "Logits without labels, as reinforcement learning wants them: an error to 0.16, wasted work in "
            "0.17 and 0.18, and from 0.19 on the layers are trained on the input, in evaluation too."
        ),
        upstream="NVIDIA/Megatron-LM#4549; measured in every release",
        range="",
        when=frozenset({"mtp"}),
        assumes=(
            "labels are given as `labels`; a fork that gives them in mtp_kwargs (slime, miles) would "
            "train no prediction layers"
        ),
        evidence=(_POSTPROCESS, _FORWARD),
        defect=_runs_without_labels,
        check="mtp-without-labels",
    ),
)
