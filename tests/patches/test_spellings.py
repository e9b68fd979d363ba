"""A defect, or its mending, in other words than megatron's: a predicate claims only what it knows.

Each case changes one release; what is expected is the truth or UNKNOWN, never its opposite.
"""

from collections.abc import Sequence

import pytest

from bundle.patches.definitions import EvidenceDefinitions
from bundle.patches.entry import Presence
from tests.patches.trees import Release, edited
from tools.patches import review

P, A, U = Presence.PRESENT, Presence.ABSENT, Presence.UNKNOWN
ENTRIES = {entry.id: entry for entry in review.ENTRIES}
GPT = "models.gpt.gpt_model"
MTP = "transformer.multi_token_prediction"
MLA = "transformer.multi_latent_attention"
MOE = "transformer.moe.moe_utils"
COMMON = "dist_checkpointing.strategies.common"
BUFFER = "distributed.param_and_grad_buffer"
LAYERS = "extensions.transformer_engine"
ZERO = "if self.config.mtp_num_layers is not None:"
SOME_LABELS = "if mtp_in_postprocess and mtp_kwargs.get('mtp_labels', None) is not None:"
CHECKPOINT = "forward_func, self.config.distribute_saved_activations, *args, *kwargs.values()"
LIST = "in [TELinear]:"
LENGTHS = "packed_seq_params.cu_seqlens_q"
PADDED = f"{LENGTHS}_padded"
CUTS = f"cu_seqlens = {LENGTHS}"
BEFORE = "    original_num_tokens = loss_mask.sum()"
MARKED = 'setattr(param, "sequence_parallel", self.config.sequence_parallel)'
DISPATCHER = "transformer.moe.token_dispatcher"
ROUTER = "transformer.moe.router"
ATTENTION = "transformer.attention"
OPTIMIZER = "optimizer.distrib_optimizer"
SCHEDULES = "pipeline_parallel.schedules"
HYBRID = "if isinstance(self.optimizer, HybridDeviceOptimizer):\n            self.optimizer.update"
SIZES = "seq_length, bsz = logits.shape[:2]"
ROPE = "models.common.embeddings.rope_utils"
EXCHANGE = "pipeline_parallel.p2p_communication"
FINALIZE = "distributed.finalize_model_grads"
COUNTED = "num_tokens, group=parallel_state.get_data_parallel_group()"
UNDER = "if param_start_index % self.data_parallel_world_size != 0:"
Edit = tuple[str, str]

CASES: list[tuple[str, str, str, Sequence[Edit] | None, Presence]] = [
    # None and zero
    ("mtp-zero-layers", "0.16.1", GPT, [(ZERO, "if not (self.config.mtp_num_layers is None):")], U),
    (
        "mtp-zero-layers",
        "0.16.1",
        GPT,
        [(ZERO, "n = self.config.mtp_num_layers\n        if n is not None:")],
        U,
    ),
    ("mtp-zero-layers", "0.16.1", GPT, [(ZERO, "if None is not self.config.mtp_num_layers:")], U),
    ("mtp-zero-layers", "0.16.1", GPT, [(ZERO, "if has_layers(self):")], U),
    ("mtp-zero-layers", "0.16.1", GPT, [(ZERO, "if self.config.mtp_num_layers and labels is not None:")], A),
    # labels, by other names and places
    ("mtp-without-labels", "0.16.1", GPT, [("if mtp_in_postprocess:", SOME_LABELS)], A),
    (
        "mtp-without-labels",
        "0.16.1",
        GPT,
        [("if mtp_in_postprocess:", "if mtp_in_postprocess and labels:")],
        A,
    ),
    (
        "mtp-without-labels",
        "0.16.1",
        GPT,
        [("if mtp_in_postprocess:", "if mtp_in_postprocess and wanted:")],
        U,
    ),
    ("mtp-without-labels", "0.16.1", GPT, [("self.mtp(", "self.further(")], U),
    # what stands for labels
    ("mtp-labels-from-input", "0.19.2", GPT, [("input_ids=input_ids,\n                )", ")")], A),
    ("mtp-labels-from-input", "0.19.2", GPT, [("if mtp_in_postprocess and", "if labels is not None and")], A),
    ("mtp-labels-from-input", "0.19.2", GPT, [("if mtp_in_postprocess and", "if wanted and")], U),
    ("mtp-without-labels", "0.19.2", GPT, [("if mtp_in_postprocess and", "if wanted and")], A),
    # where sequences are cut
    ("mtp-packed-roll-boundaries", "0.16.1", MTP, [(CUTS, f"{CUTS}\n    assert {PADDED} is None")], P),
    ("mtp-packed-roll-boundaries", "0.16.1", MTP, [(CUTS, "cu_seqlens = lengths(packed_seq_params)")], U),
    (
        "mtp-packed-roll-boundaries",
        "0.16.1",
        MTP,
        [(CUTS, f"cu_seqlens = {PADDED} if {PADDED} is not None else {LENGTHS}")],
        A,
    ),
    # what a depth's loss is divided by
    (
        "mtp-loss-context-parallel-count",
        "0.16.1",
        MTP,
        [("def roll_tensor(", "import rolls\nroll_tensor = rolls.f\ndef _own(")],
        U,
    ),
    ("mtp-loss-context-parallel-count", "0.16.1", GPT, [("/ num_tokens", "/ counted(num_tokens)")], U),
    ("mtp-loss-context-parallel-count", "0.16.1", GPT, [("roll_tensor(", "rolled(")], U),
    (
        "mtp-loss-context-parallel-normalisation",
        "0.19.2",
        MTP,
        [("def process_mtp_loss(", "def process_loss(")],
        U,
    ),
    ("mtp-loss-context-parallel-normalisation", "0.19.2", MTP, [("original_num_tokens", "before")], U),
    (
        "mtp-loss-context-parallel-normalisation",
        "0.19.2",
        MTP,
        [(BEFORE, f"{BEFORE}\n    torch.distributed.all_reduce(x)")],
        U,
    ),
    ("mtp-context-parallel-roll", "0.13.1", MTP, [("(tensor, shifts=-1, dims=-1):", "(tensor, **how):")], U),
    # latent attention
    (
        "mla-packed-qkv",
        "0.13.1",
        MLA,
        [(f"cu_seqlens_q = {LENGTHS}", f"cu_seqlens_q = {PADDED} or {LENGTHS}")],
        U,
    ),
    ("mla-packed-qkv", "0.14.0", MLA, [("or self.config.context_parallel_size == 1", "or self.alone")], U),
    ("mla-packed-qkv", "0.14.0", MLA, [("(rotary_seq_len, packed_seq=packed_seq)", "(rotary_seq_len)")], P),
    (
        "mla-thd-value-padding",
        "0.16.1",
        MLA,
        [("self.kv_layernorm(kv_compressed)", "F.pad(kv_compressed, [0, 64])")],
        U,
    ),
    ("mla-thd-value-padding", "0.18.2", MLA, [("value = F.pad(value,", "value = wider(value,")], P),
    ("mla-without-te-linear", "0.16.1", MLA, [(LIST, "is TELinear:")], U),
    ("mla-without-te-linear", "0.16.1", MLA, [(LIST, "in (TELinear,):")], U),
    ("mla-without-te-linear", "0.16.1", MLA, [(LIST, "in WHOLE:")], U),
    # recomputation
    ("mtp-packed-full-recompute", "0.16.1", MTP, [(CHECKPOINT, "run, 0, *filter(torch.is_tensor, args)")], A),
    ("mtp-packed-full-recompute", "0.16.1", MTP, [(CHECKPOINT, "forward_func, True, *everything")], U),
    ("mtp-packed-full-recompute", "0.16.1", MTP, [("def _checkpointed_forward(", "def _recomputed(")], U),
    ("mtp-full-recompute", "0.18.2", MTP, [("self._checkpointed_forward(", "self.again(")], U),
    (
        "mtp-full-recompute",
        "0.18.2",
        MTP,
        [(" padding_mask=padding_mask,", " **{'padding_mask': padding_mask},")],
        U,
    ),
    ("recompute-reclaim", "0.16.1", DISPATCHER, [("self.probs = probs", "self.probs = probs.detach()")], A),
    ("recompute-reclaim", "0.16.1", DISPATCHER, [("self.probs = probs", "setattr(self, 'probs', probs)")], U),
    # experts
    (
        "sort-of-sorted-tokens",
        "0.16.1",
        DISPATCHER,
        [("if self.num_local_experts > 1:", "if self.num_local_experts > self.alone:")],
        U,
    ),
    ("sort-of-sorted-tokens", "0.16.1", DISPATCHER, [("sort_chunks_by_idxs(", "reorder(")], U),
    ("cpu-moe-splits-on-host", "0.16.1", MOE, [("tensor.is_cuda", "tensor.device.type != 'cpu'")], U),
    (
        "router-without-te-gemm",
        "0.16.1",
        MOE,
        [("HAVE_TE = False", "HAVE_TE, te_general_gemm = False, None")],
        A,
    ),
    ("router-without-te-gemm", "0.16.1", MOE, None, U),
    (
        "router-replay",
        "0.12.3",
        ROUTER,
        [("self.input_jitter = None", "self.input_jitter = None\n        routing_replay.register(self)")],
        U,
    ),
    (
        "router-replay-by-layer",
        "0.16.1",
        "transformer.moe.router_replay",
        [("def get_replay_topk(", "def replay(")],
        U,
    ),
    # gradients, norms, buffers
    ("per-token-loss-context-parallel", "0.12.3", FINALIZE, [(COUNTED, "num_tokens, group=chosen()")], U),
    (
        "per-token-loss-context-parallel",
        "0.12.3",
        FINALIZE,
        [(COUNTED, f"{COUNTED[:-1]}with_context_parallel=True)")],
        A,
    ),
    ("shared-embedding-bucket", "0.12.3", BUFFER, [(UNDER, "if not self._divided(param_start_index):")], U),
    ("shared-embedding-bucket", "0.12.3", BUFFER, [(UNDER, "if param_start_index % ranks:")], U),
    (
        "cuda-norm-of-whole-weights",
        "0.16.1",
        LAYERS,
        [(MARKED, f"param.tensor_model_parallel = {MARKED}")],
        U,
    ),
    (
        "cuda-norm-of-expert-weights",
        "0.19.2",
        LAYERS,
        [("param.tensor_model_parallel = is_partitioned", "pass")],
        U,
    ),
    # checkpoints
    ("restricted-unpickle", "0.13.1", COMMON, [("weights_only=False", "weights_only=TRUSTED")], U),
    ("restricted-unpickle", "0.13.1", COMMON, [("weights_only=False", "**how")], U),
    ("restricted-unpickle", "0.13.1", COMMON, [("weights_only=False", "weights_only=True")], A),
    (
        "restricted-unpickle",
        "0.16.1",
        COMMON,
        [("map_location='cpu'", "map_location='cpu', weights_only=False")],
        P,
    ),
    (
        "optimizer-without-fp8-quantize",
        "0.13.1",
        "fp8_utils",
        [("len(model_params) == 0", "not model_params")],
        U,
    ),
    # balancing, attention over ranks, the optimizer on the host
    ("balancing-per-token-ranks", "0.16.1", ROUTER, [("aux_loss * num_tokens", "aux_loss * weight")], U),
    ("balancing-per-token-ranks", "0.16.1", ROUTER, [("z_loss * num_tokens", "z_loss * weight")], U),
    ("balancing-per-token-ranks", "0.16.1", SCHEDULES, [("set_loss_scale(loss_scale)", "scale()")], U),
    ("balancing-of-prompts", "0.16.1", ROUTER, [("aux_loss * num_tokens", "aux_loss * learned")], U),
    ("balancing-of-packs", "0.16.1", ROUTER, [(SIZES, "seq_length, bsz = sizes(logits)")], U),
    ("balancing-of-packs", "0.16.1", ROUTER, [(SIZES, f"{SIZES}\n        look(p.cu_seqlens_q)")], U),
    (
        "balancing-of-padding",
        "0.15.3",
        ROUTER,
        [("def routing(self, logits", "def routing(self, valid, logits")],
        U,
    ),
    ("output-gate-of-shared-groups", "0.16.1", ATTENTION, [("query = query[", "query = own(query)[")], U),
    (
        "output-gate-of-shared-groups",
        "0.16.1",
        ATTENTION,
        [("return query, key, value, gate", "return query, key, value, own(gate)")],
        U,
    ),
    ("packed-rotary-host-reads", "0.16.1", ROPE, [(".tolist()", ".cpu().numpy()")], U),
    (
        "offload-stale-weights",
        "0.16.1",
        OPTIMIZER,
        [(HYBRID, HYBRID.replace("if is", "if on_host and is"))],
        U,
    ),
    ("offload-stale-weights", "0.16.1", OPTIMIZER, [(HYBRID, f"self.prepare()\n        {HYBRID}")], U),
    ("cross-attention-groups", "0.16.1", ATTENTION, [("tp_group=self.pg_collection.tp", "group=None")], A),
    # traps
    (
        "mtp-packed",
        "0.15.3",
        MTP,
        [("  packed_seq_params is None\n        ), ", "  not packed_seq_params\n        ), ")],
        U,
    ),
    (
        "mtp-packed",
        "0.16.1",
        MTP,
        [("assert context is None", "if packed_seq_params is not None: raise ValueError\n        assert 1")],
        U,
    ),
    ("mtp-tensor-parallel", "0.16.1", MTP, [("gather_from_tensor_model_parallel_region", "gathered")], U),
    (
        "moe-tensor-without-expert-parallel",
        "0.18.2",
        "tensor_parallel.layers",
        [("not (self.is_expert and self.expert_parallel)", "f(self)")],
        U,
    ),
    (
        "interleaved-batched-exchange",
        "0.16.1",
        EXCHANGE,
        [("_pipeline_rank, group\n", "_pipeline_rank, group, 7\n")],
        A,
    ),
    ("interleaved-batched-exchange", "0.16.1", EXCHANGE, [("P2POp(", "message(")], U),
    (
        "tied-mtp-checkpoint",
        "0.16.1",
        "models.gpt.gpt_model",
        [("_allocation=self.pre_process\n", "_allocation=(self.pre_process or self.mtp_process)\n")],
        A,
    ),
    ("tied-mtp-checkpoint", "0.16.1", "models.gpt.gpt_model", [("skip_weight_param_allocation", "skip")], U),
    (
        "overlap-tied-mtp",
        "0.15.3",
        BUFFER,
        [("len(self.params_with_grad) == len(self.params)", "self.complete()")],
        U,
    ),
]


@pytest.mark.parametrize(("entry", "version", "module", "edits", "expected"), CASES)
def test_a_spelling(
    release: Release, entry: str, version: str, module: str, edits: Sequence[Edit] | None, expected: Presence
):
    definitions = edited(release(version), {module: edits})
    found = ENTRIES[entry]
    assert found.defect(EvidenceDefinitions(definitions, frozenset(found.evidence_targets))) is expected


def test_a_module_behind_import_star_is_read_where_it_is(release: Release, tmp_path):
    """MLA moved to another file that is imported whole, in one step and in two."""
    source = (release("0.16.1") / "megatron/core/transformer/multi_latent_attention.py").read_text()
    entry = ENTRIES["mla-without-te-linear"]
    for steps in (1, 2):
        front = "from .impl import *\n" if steps == 1 else "from .middle import *\n"
        definitions = edited(release("0.16.1"), {})
        definitions.tree.texts.update(  # type: ignore[attr-defined]
            {
                "megatron.core.transformer.multi_latent_attention": front,
                "megatron.core.transformer.middle": "from .impl import *\n",
                "megatron.core.transformer.impl": source,
            }
        )
        assert entry.defect(EvidenceDefinitions(definitions, frozenset(entry.evidence_targets))) is P
