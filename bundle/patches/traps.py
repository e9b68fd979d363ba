"""Known traps: defects of megatron-core that no narrow patch mends; recipes that meet one are refused."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.catalogue import gated_delta, mla_ranks, mtp
from bundle.patches.entry import MEGATRONS_BALANCING, Presence, Trap
from bundle.patches.unshown import UNSHOWN

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_COLUMN = "megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__"
_PREDICTION = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer"
_PREDICTION_FORWARD = f"{_PREDICTION}.forward"
_BATCHED = "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ROUTING = f"{_ROUTER}.routing"
_ATTACH = f"{_ROUTER}.attach_and_log_load_balancing_loss"  # from 0.14
_APPLY = f"{_ROUTER}.apply_load_balancing_loss"  # to 0.13
_SEQUENCES = f"{_ROUTER}._apply_seq_aux_loss"  # from 0.14
_SEQUENCES_THEN = f"{_ROUTER}.seq_aux_loss_load_balancing"  # to 0.13
_READY = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready"


def _marked_without_expert_tensor_parallel(source: "Evidence") -> Presence:
    """Whether expert parallelism alone decides over which ranks an expert's gradient is summed."""
    column = source[_COLUMN]
    if column is None:
        return Presence.UNKNOWN
    if column.has('setattr(self.weight, "allreduce", not (self.is_expert and self.expert_parallel))'):
        return Presence.PRESENT
    minds = "expert_tensor_parallel_size" in column.names
    marked = column.has('setattr(self.weight, "allreduce", not use_expert_pgs)')
    return Presence.ABSENT if minds and marked else Presence.UNKNOWN


def _packs_refused(source: "Evidence") -> Presence:
    if mtp.without_prediction(source):
        return Presence.ABSENT
    forward = source[_PREDICTION_FORWARD]
    if forward is None or "packed_seq_params" not in forward.parameters:
        return Presence.UNKNOWN
    if forward.has("assert packed_seq_params is None, _") or forward.has("assert packed_seq_params is None"):
        return Presence.PRESENT
    refusing = [
        node
        for node in forward.walk()
        if isinstance(node, ast.Assert | ast.If)
        and any(isinstance(name, ast.Name) and name.id == "packed_seq_params" for name in ast.walk(node.test))
        and (isinstance(node, ast.Assert) or any(isinstance(n, ast.Raise) for n in ast.walk(node)))
    ]
    return Presence.UNKNOWN if refusing else Presence.ABSENT


def _gather_that_reduces(source: "Evidence") -> Presence:
    """Whether the projection is gathered by the function whose backward pass sums over the ranks."""
    if mtp.without_prediction(source):
        return Presence.ABSENT
    layer = source[_PREDICTION]
    if layer is None:
        return Presence.UNKNOWN
    if layer.calls("all_gather_last_dim_from_tensor_parallel_region"):
        return Presence.PRESENT
    gathers = layer.calls("gather_from_tensor_model_parallel_region")
    return Presence.ABSENT if gathers else Presence.UNKNOWN


def _told_apart_by_order(source: "Evidence") -> Presence:
    """Whether the messages of a batch carry no tag."""
    batched = source[_BATCHED]
    messages = batched.calls("P2POp") if batched else ()
    if batched is None or not messages or not batched.calls("batch_isend_irecv"):
        return Presence.UNKNOWN
    return Presence.of(any(len(m.args) < 5 and all(k.arg != "tag" for k in m.keywords) for m in messages))


def _waits_for_every_weight(source: "Evidence") -> Presence:
    """Whether a bucket is sent only when every one of its weights has a gradient."""
    ready = source[_READY]
    if ready is None:
        return Presence.UNKNOWN
    if ready.has("len(self.params_with_grad) == len(self.params)"):
        return Presence.PRESENT
    counts = ready.has("self.per_param_grad_ready_counts == self.golden_per_param_grad_ready_counts")
    return Presence.ABSENT if counts else Presence.UNKNOWN


def _whole_keys_gathered(source: "Evidence") -> Presence:
    """Whether rotary keys are gathered from ranks that do not share out the sequence."""
    heads = source[mla_ranks.HEADS]
    always = None if heads is None else mla_ranks.gathers_always(heads)
    return Presence.UNKNOWN if always is None else Presence.of(always)


def _weighed_by_all_tokens(source: "Evidence") -> Presence:
    """Whether the weight of a loss per token is tokens that the router sees, learned or not."""
    attach = source[_ATTACH] or source[_APPLY]
    if attach is None:
        return Presence.UNKNOWN
    if "calculate_per_token_loss" not in attach.names:  # it is not weighed at all
        plain = attach.has("MoEAuxLossAutoScaler.apply(activation, aux_loss)")
        return Presence.ABSENT if plain else Presence.UNKNOWN
    attached = [call.args[1] for call in attach.calls("apply") if len(call.args) == 2]
    weights = [weighed.right for weighed in attached if isinstance(weighed, ast.BinOp)]
    seen = ("activation.shape[0]", "num_tokens", "self.tp_cp_group.size()", "aux_loss_scale_num_tokens")
    known = bool(weights) and all(ast.unparse(weight) in seen for weight in weights)
    return Presence.PRESENT if known else Presence.UNKNOWN


def _rows_are_sequences(source: "Evidence") -> Presence:
    """Whether a sequence is a row of the logits, and nobody looks for boundaries inside it."""
    routing, loss = source[_ROUTING], source[_SEQUENCES] or source[_SEQUENCES_THEN]
    if routing is None or loss is None or not routing.has("seq_length, bsz = logits.shape[:2]"):
        return Presence.UNKNOWN
    bounded = any("cu_seqlens" in name for name in routing.names | loss.names)
    return Presence.UNKNOWN if bounded else Presence.PRESENT


def _every_row_is_counted(source: "Evidence") -> Presence:
    """Whether a router cannot be told of padding."""
    routing = source[_ROUTING]
    if routing is None:
        return Presence.UNKNOWN
    if "padding_mask" in routing.parameters:
        return Presence.ABSENT
    told = any("mask" in name or "valid" in name for name in routing.names | routing.parameters)
    return Presence.UNKNOWN if told else Presence.PRESENT


_LOSSES = frozenset({"moe", MEGATRONS_BALANCING})


def _packs_refused_by_gated_delta(source: "Evidence") -> Presence:
    if not source.has_module(gated_delta.FORWARD):
        return Presence.ABSENT  # there is no such layer
    forward = source[gated_delta.FORWARD]
    if forward is None:
        return Presence.UNKNOWN
    if forward.has("if packed_seq_params is not None:\n    raise NotImplementedError(...)"):
        return Presence.PRESENT
    return Presence.ABSENT if "cu_seqlens_q" in forward.names else Presence.UNKNOWN


TRAPS = (
    Trap(
        id="moe-tensor-without-expert-parallel",
        range="<0.19",
        evidence=(_COLUMN,),
        defect=_marked_without_expert_tensor_parallel,
        when=frozenset({"moe", "tp"}),
        unless=frozenset({"ep", "etp"}),
        why="The experts' gradients are not summed over the tensor-parallel ranks: silently wrong.",
        silent=True,
        cause=(
            "tensor_parallel/layers.py marks expert weights `allreduce = not (is_expert and EP > 1)`, "
            "without regard to ETP != TP; mended by #5916 in 0.19.0 (use_expert_pgs)"
        ),
        instead="Set parallel.etp to parallel.tp, or parallel.ep above 1.",
    ),
    Trap(
        id="mtp-packed",
        range="<0.16",
        evidence=(_PREDICTION_FORWARD, mtp.FORWARD, mtp.ROLL),
        defect=_packs_refused,
        when=frozenset({"mtp", "packed"}),
        why="Multi-token prediction refuses packed sequences.",
        silent=False,
        cause="MultiTokenPredictionLayer.forward asserts packed_seq_params is None; lifted in 0.16.0",
        instead="Set data.packed to false, or use megatron-core 0.16 or later.",
    ),
    Trap(
        id="mtp-tensor-parallel",
        range="<0.13",
        evidence=(_PREDICTION, mtp.FORWARD, mtp.ROLL),
        defect=_gather_that_reduces,
        when=frozenset({"mtp", "tp"}),
        why="The gradients of multi-token prediction are reduced once too often over tensor-parallel ranks.",
        silent=True,
        cause=(
            "MultiTokenPredictionLayer.forward gathers with all_gather_last_dim_from_tensor_parallel_region, "
            "whose backward reduces; 0.13.0 uses gather_from_tensor_model_parallel_region"
        ),
        instead="Set parallel.tp to 1, or use megatron-core 0.13 or later.",
    ),
    Trap(
        id="interleaved-batched-exchange",
        range="",
        evidence=(_BATCHED,),
        defect=_told_apart_by_order,
        when=frozenset({"vpp", "batched-exchange"}),
        why="With two stages, activations and gradients of interleaved chunks are swapped: silently wrong.",
        silent=True,
        cause=(
            "previous and next stage are the same rank and the messages have one shape: a backend that "
            "matches batched messages by order confuses them (measured on gloo in 0.12 and 0.16)"
        ),
        instead="Use overlap_p2p_comm without batch_p2p_comm.",
    ),
    Trap(
        id="overlap-tied-mtp",
        range="<0.16",
        evidence=(_READY,),
        defect=_waits_for_every_weight,
        when=frozenset({"overlap-grad-reduce", "mtp", "tied-embeddings", "pp"}),
        why="The last stage holds an output weight that nothing uses and its bucket is never sent: a hang.",
        silent=False,
        cause=(
            "LanguageModule allocates output_layer.weight there although it is tied, and a bucket waits for "
            "a gradient of each of its weights; from 0.16 on only for those that had one in the first step"
        ),
        instead="Set distributed.overlap_grad_reduce to false, or use megatron-core 0.16 or later.",
    ),
    Trap(
        id="mla-tensor-without-sequence-parallel",
        range="<0.14",
        evidence=(mla_ranks.HEADS,),
        defect=_whole_keys_gathered,
        when=frozenset({"mla", "tp"}),
        unless=frozenset({"sp"}),
        why="Latent attention fails over tensor-parallel ranks without sequence parallelism.",
        silent=False,
        cause=(
            "MLASelfAttention gathers the rotary keys of all tensor-parallel ranks as parts of a sequence, "
            "whether it is shared out or not; since 0.14 only if it is"
        ),
        instead="Set parallel.sequence_parallel to true, or use megatron-core 0.14 or later.",
    ),
    Trap(
        id="balancing-of-prompts",
        range="",
        evidence=(_ATTACH, _APPLY),
        defect=_weighed_by_all_tokens,
        when=_LOSSES | {"per-token-loss"},
        why=(
            "Under a loss per token the coefficients of the experts' balancing loss and z-loss count as many "
            "times as there are tokens to a learned one: four times where a quarter is learned, silently."
        ),
        silent=True,
        cause=(
            "the router multiplies by the tokens that it sees (transformer/moe/router.py), "
            "finalize_model_grads divides by those that the loss counts; #5047 takes both for the same"
        ),
        instead="Take a mean loss, or bring the coefficients to the share of tokens that is learned.",
    ),
    Trap(
        id="balancing-of-packs",
        range="",
        evidence=(_ROUTING, _SEQUENCES, _SEQUENCES_THEN),
        defect=_rows_are_sequences,
        when=_LOSSES | {"seq-aux-loss", "packed"},
        why="The balancing loss over sequences (seq_aux_loss) takes a pack for one sequence.",
        silent=True,
        cause=(
            "TopKRouter.routing takes rows of the logits for sequences, and a pack is one; #6108, #6115 "
            "(open); tokens_per_sample of 0.19 helps where all sequences of a pack are equally long"
        ),
        instead="Do not pack, or take aux_loss.",
    ),
    Trap(
        id="balancing-of-padding",
        range="<0.16",
        evidence=(_ROUTING,),
        defect=_every_row_is_counted,
        when=_LOSSES | {"padding"},
        why="Rows of padding are balanced like tokens: the emptier a pack, the less its tokens are balanced.",
        silent=True,
        cause="TopKRouter.routing takes no padding mask; #1984, one since #2142 in 0.16.0",
        instead="Leave padding out of micro-batches, or use megatron-core 0.16 or later, with the mask.",
    ),
    Trap(
        id="gated-delta-net-packed",
        range=">=0.16,<0.18",
        evidence=(gated_delta.FORWARD,),
        defect=_packs_refused_by_gated_delta,
        when=frozenset({"gated-delta-net", "packed"}),
        why="The gated delta net (Qwen3-Next, Qwen3.5) refuses packed sequences.",
        silent=False,
        cause="GatedDeltaNet.forward raises NotImplementedError for any packed_seq_params; #2645 in 0.18.0",
        instead="Set data.packed to false, or use megatron-core 0.18 or later.",
    ),
    *UNSHOWN,
)
