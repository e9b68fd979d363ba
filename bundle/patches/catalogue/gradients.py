"""Gradients over ranks: what they are divided by, where they lie, whose are in the norm; what stages send."""

import ast

from bundle.patches.definitions import Definition
from bundle.patches.entry import (
    MEGATRONS_TIED_HEAD,
    NOTHING,
    Patch,
    Presence,
    Replacement,
    Trap,
    called,
    reads,
)
from bundle.patches.syntax import found

_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__"
_TE = "megatron.core.extensions.transformer_engine"
_LINEAR = f"{_TE}:TELinear.__init__"
_GROUPED_LINEAR = f"{_TE}:TEGroupedLinear.__init__"
_EXPERT_ATTRIBUTES = f"{_TE}:_set_expert_parameter_attributes"
_COLUMN = "megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__"
_READY = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready"
_BATCHED = "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops"


@reads(_FINALIZE)
def _tokens_of_data_ranks(finalize: Definition) -> Presence:
    """Whether the token count is summed over a data-parallel group without the context-parallel ranks."""
    counted = [call for call in finalize.calls("all_reduce") if call.args and _is_count(call.args[0])]
    if len(counted) != 1:
        return Presence.UNKNOWN
    group = next((keyword.value for keyword in counted[0].keywords if keyword.arg == "group"), counted[0])
    over_all = found("parallel_state.get_data_parallel_group(with_context_parallel=True)", [group])
    return Presence.told(
        found("parallel_state.get_data_parallel_group()", [group]),
        absent=over_all or found("dp_cp_group", [group]),
    )


def _is_count(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Name) and argument.id == "num_tokens"


@reads(_BUFFER)
def _start_padded_sometimes(buffer: Definition) -> Presence:
    """Whether a shared parameter starts behind padding only where ranks do not divide its start."""
    sometimes = buffer.has("param_start_index % self.data_parallel_world_size != 0")
    remainders = [n for n in buffer.each(ast.BinOp) if isinstance(n.op, ast.Mod)]
    asked = any(
        isinstance(n, ast.Name) and n.id == "param_start_index" for r in remainders for n in ast.walk(r)
    )
    closes = buffer.has("param_start_index = _update_bucket_metadata(param_start_index)")
    given = buffer.has("self.param_index_map = param_layout.param_index_map")  # worked out elsewhere
    return Presence.told(sometimes, absent=(closes or given) and not asked)


@reads(_LINEAR)
def _whole_weights_stay_marked(linear: Definition) -> Presence:
    """Whether duplicated weights keep the mark that Transformer Engine gives to every weight."""
    if "sequence_parallel" not in _set_by_name(linear):
        return Presence.UNKNOWN
    unmarked = linear.has('setattr(param, "tensor_model_parallel", False)')
    return Presence.told(not unmarked and not _mentions_mark(linear), absent=unmarked)


@reads(_GROUPED_LINEAR, also=(_EXPERT_ATTRIBUTES,))
def _expert_weights_unmarked(grouped: Definition, attributes: Definition | None) -> Presence:
    """Whether the grouped layer says where its weights are reduced, but not that they are split."""
    if attributes is not None and grouped.calls("_set_expert_parameter_attributes"):
        return Presence.told(absent=attributes.has("param.tensor_model_parallel = is_partitioned"))
    return Presence.told("allreduce" in _set_by_name(grouped) and not _mentions_mark(grouped))


def _mentions_mark(code: Definition) -> bool:
    return "tensor_model_parallel" in code.names | _set_by_name(code)


def _set_by_name(code: Definition) -> set[object]:
    """The attributes that the code gives to something by `setattr`."""
    names = (call.args[1] for call in code.calls("setattr") if len(call.args) == 3)
    return {name.value for name in names if isinstance(name, ast.Constant)}


@reads(_COLUMN)
def _marked_without_expert_tensor_parallel(column: Definition) -> Presence:
    """Whether expert parallelism alone decides over which ranks an expert's gradient is summed."""
    marked = 'setattr(self.weight, "allreduce", not {})'.format
    minds = "expert_tensor_parallel_size" in column.names
    return Presence.told(
        column.has(marked("(self.is_expert and self.expert_parallel)")),
        absent=minds and column.has(marked("use_expert_pgs")),
    )


@reads(_READY)
def _waits_for_every_weight(ready: Definition) -> Presence:
    """Whether a bucket is sent only when every one of its weights has a gradient."""
    counts = ready.has("self.per_param_grad_ready_counts == self.golden_per_param_grad_ready_counts")
    return Presence.told(ready.has("len(self.params_with_grad) == len(self.params)"), absent=counts)


@reads(_BATCHED)
def _told_apart_by_order(batched: Definition) -> Presence:
    """Whether the messages of a batch carry no tag."""
    messages = batched.calls("P2POp")
    if not messages or not batched.calls("batch_isend_irecv"):
        return Presence.UNKNOWN
    return Presence.of(any(len(m.args) < 5 and all(k.arg != "tag" for k in m.keywords) for m in messages))


PATCHES = (
    Patch(
        id="per-token-loss-context-parallel",
        replacements=(Replacement(_FINALIZE, "gradients:count_tokens_of_all_ranks"),),
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
        defect=_tokens_of_data_ranks,
    ),
    Patch(
        id="shared-embedding-bucket",
        replacements=(Replacement(_BUFFER, "gradients:start_behind_padding"),),
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
        defect=_start_padded_sometimes,
    ),
    Patch(
        id="cuda-norm-of-whole-weights",
        replacements=(called(_LINEAR, "gradients:count_whole_weights_once"),),
        why=(
            "The gradient norm is too large, clipping too strong: the down projections of latent attention, "
            "whole on every tensor-parallel rank, keep Transformer Engine's mark of a split weight and are "
            "counted on each."
        ),
        silent=True,
        upstream="fixed upstream in 0.17; found by comparing TP2 with one H200 (norm off by 2e-2)",
        range="<0.17",
        fixed_in="0.17.0",
        backends=("cuda",),
        when=frozenset({"mla", "tp"}),
        assumes=NOTHING,
        defect=_whole_weights_stay_marked,
    ),
    Patch(
        id="cuda-norm-of-expert-weights",
        replacements=(called(_GROUPED_LINEAR, "gradients:count_expert_weights"),),
        why=(
            "The gradient norm is too small, clipping too weak: from Transformer Engine 2.13 on the weights "
            "of grouped experts are not marked as split, and only those of the first tensor-parallel rank "
            "are counted."
        ),
        silent=True,
        upstream="fixed upstream in 0.19; found by comparing TP2 ETP1 EP2 with one H200 (norm off by 3e-2)",
        range="<0.19",
        fixed_in="0.19.0",
        backends=("cuda",),
        when=frozenset({"moe", "tp"}),
        assumes=NOTHING,
        requires=(("transformer-engine", ">=2.13"),),
        defect=_expert_weights_unmarked,
    ),
)
TRAPS = (
    Trap(
        id="moe-tensor-without-expert-parallel",
        range="<0.19",
        defect=_marked_without_expert_tensor_parallel,
        when=frozenset({"moe", "etp-unlike-tp"}),
        unless=frozenset({"ep"}),
        why=(
            "The experts' gradients are summed over the wrong ranks, over none that hold the same part or "
            "over some that hold another: silently wrong."
        ),
        cause=(
            "tensor_parallel/layers.py marks expert weights `allreduce = not (is_expert and EP > 1)`, "
            "without regard to ETP != TP; mended by #5916 in 0.19.0 (use_expert_pgs)"
        ),
        silent=True,
        instead="Set parallel.etp to parallel.tp, or parallel.ep above 1.",
    ),
    Trap(
        id="overlap-tied-mtp",
        range="<0.16",
        defect=_waits_for_every_weight,
        when=frozenset({"overlap-grad-reduce", "mtp", "tied-embeddings", "pp", MEGATRONS_TIED_HEAD}),
        why="The last stage holds an output weight that nothing uses and its bucket is never sent: a hang.",
        cause=(
            "LanguageModule allocates output_layer.weight there although it is tied, and a bucket waits for "
            "a gradient of each of its weights; from 0.16 on only for those that had one in the first step"
        ),
        silent=False,
        instead="Set distributed.overlap_grad_reduce to false, or use megatron-core 0.16 or later.",
    ),
    Trap(
        id="interleaved-batched-exchange",
        range="",
        defect=_told_apart_by_order,
        when=frozenset({"vpp", "batched-exchange"}),
        why="With two stages, activations and gradients of interleaved chunks are swapped: silently wrong.",
        cause=(
            "previous and next stage are the same rank and the messages have one shape: a backend that "
            "matches batched messages by order confuses them (measured on gloo in 0.12 and 0.16)"
        ),
        silent=True,
        instead="Use overlap_p2p_comm without batch_p2p_comm.",
    ),
)
