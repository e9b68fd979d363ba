"""What experts' losses, ranks, checkpoints and multimodal models look like in other words than megatron's.

As in `test_spellings`: a predicate claims only what it knows.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bundle.patches.definitions import EvidenceDefinitions
from bundle.patches.entry import Presence
from tests.patches.test_spellings import ENTRIES, Edit
from tests.patches.trees import Release, edited, written

P, A, U = Presence.PRESENT, Presence.ABSENT, Presence.UNKNOWN
ROPE = "models.common.embeddings.rotary_pos_embedding"
MTP = "transformer.multi_token_prediction"
MLA = "transformer.multi_latent_attention"
ROUTER, MOE = "transformer.moe.router", "transformer.moe.moe_utils"
DOT = "transformer.dot_product_attention"
LANGUAGE = "models.common.language_module.language_module"
MAPPING, OPTIMIZER = "dist_checkpointing.mapping", "optimizer.distrib_optimizer"
HYBRID = "optimizer.cpu_offloading.hybrid_optimizer"
GATED = "ssm.gated_delta_net"
TO = "cp_group: Optional[torch.distributed.ProcessGroup] = None,\n    ) -> Tensor:"
PACKED = TO.replace(",\n", ",\n        packed_seq=False,\n")
CUT = "if cp_group is not None and cp_group.size() > 1:\n            # slice"
EMBED = "decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)"
KEYS = "k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb, group=self.tp_group)"
MASKED = "routing_map = routing_map & (~padding_mask)"
SUMMED = "reduce_from_tensor_model_parallel_region(\n        local_tokens_per_expert,"
LOCAL = "local_num_tokens = local_tokens_per_expert.sum() / topk"
ADDED = "self.ga_steps += 1"
LABELS = "labels = labels.transpose(0, 1).contiguous()"
REFUSED = "if self.flattened_range is not None:\n            raise"
STEP = "tensors[key] = LocalNonpersistentObject(tensors[key])\n                                continue"
COPY = "self.param_to_fp32_param[param]\n            fp32_param.data.copy_"
HELD = "if param not in self.param_to_fp32_param"
SINKS = 'if self.config.softmax_type == "vanilla":'
KEPT = "if hasattr(self, 'expert_bias') and self.expert_bias is not None:"
REFUSES = "if packed_seq_params is not None:\n            # TODO: support packed sequence"

CASES: list[tuple[str, str, str, Sequence[Edit], Presence]] = [
    # tables of positions
    ("mrope-packed", "0.16.1", ROPE, [(CUT, CUT.replace("1:", "1 and not self.whole:"))], U),
    (
        "mrope-packed",
        "0.16.1",
        ROPE,
        [(CUT, CUT.replace("cp_group is not None", "self.cuts(position_ids)"))],
        U,
    ),
    ("mrope-packed", "0.16.1", ROPE, [(TO, PACKED)], P),
    ("mrope-packed", "0.16.1", ROPE, [(TO, PACKED), (CUT, CUT.replace("1:", "1 and not packed_seq:"))], A),
    # embeddings of prediction layers
    (
        "mtp-whole-embeddings",
        "0.16.1",
        MTP,
        [(EMBED, f"{EMBED}\n        decoder_input = own(decoder_input)")],
        U,
    ),
    ("mtp-whole-embeddings", "0.16.1", MTP, [(EMBED, EMBED.replace("embedding(", "shared(embedding)("))], U),
    (
        "mtp-whole-embeddings",
        "0.16.1",
        MTP,
        [(EMBED, f"{EMBED}\n        decoder_input = scatter_to_sequence_parallel_region(decoder_input)")],
        A,
    ),
    # masks of padding
    (
        "padding-mask-expert-bias",
        "0.16.1",
        ROUTER,
        [(MASKED, f"padding_mask = wide(padding_mask); {MASKED}")],
        U,
    ),
    (
        "padding-mask-expert-bias",
        "0.16.1",
        ROUTER,
        [(MASKED, MASKED.replace("~padding_mask", "~m[:, None]"))],
        U,
    ),
    (
        "padding-mask-expert-bias",
        "0.16.1",
        ROUTER,
        [(", padding_mask=padding_mask)", ", wide(padding_mask))")],
        U,
    ),
    (
        "padding-mask-expert-bias",
        "0.16.1",
        ROUTER,
        [(MASKED, MASKED.replace("~padding_mask", "~padding_mask.unsqueeze(-1)"))],
        A,
    ),
    ("padding-mask-own-count", "0.16.1", MOE, [(SUMMED, SUMMED.replace("_expert,", "_expert.clone(),"))], A),
    ("padding-mask-own-count", "0.16.1", MOE, [(SUMMED, SUMMED.replace("_expert,", "_expert[:],"))], U),
    (
        "padding-mask-own-count",
        "0.16.1",
        MOE,
        [(LOCAL, "local_num_tokens = own(local_tokens_per_expert)")],
        U,
    ),
    ("padding-mask-own-count", "0.16.1", MOE, [(SUMMED, SUMMED.replace("reduce_", "sum_"))], U),
    ("global-aux-loss-tokens", "0.16.1", ROUTER, [(ADDED, f"{ADDED}; self.calls += 1")], U),
    ("global-aux-loss-tokens", "0.16.1", ROUTER, [(ADDED, f"{ADDED}; self.global_num_tokens += 1")], U),
    ("global-aux-loss-tokens", "0.16.1", ROUTER, [(ADDED, "self.ga_steps = self.ga_steps + 1")], U),
    # logits, labels
    (
        "loss-of-gathered-logits",
        "0.16.1",
        LANGUAGE,
        [(LABELS, f"{LABELS}\n        logits = logits.float()")],
        U,
    ),
    (
        "loss-of-gathered-logits",
        "0.16.1",
        LANGUAGE,
        [(LABELS, f"{LABELS}\n        logits = scatter_to_tensor_model_parallel_region(logits)")],
        A,
    ),
    # ranks of latent attention
    (
        "mla-rotary-key-gradient",
        "0.16.1",
        MLA,
        [(KEYS, f"{KEYS}\n            k_pos_emb = summed(k_pos_emb)")],
        U,
    ),
    (
        "mla-rotary-key-gradient",
        "0.16.1",
        MLA,
        [(KEYS, f"{KEYS}\n            k_pos_emb = copy_to_tensor_model_parallel_region(k_pos_emb)")],
        A,
    ),
    ("mla-query-norm-gradient", "0.16.1", MLA, [(KEYS, "k_pos_emb = gathered(k_pos_emb)")], U),
    (
        "mla-query-norm-gradient",
        "0.16.1",
        "distributed.finalize_model_grads",
        [('config.qk_layernorm and ("q_layernorm"', 'config.qk_layernorm and own(param) and ("q_layernorm"')],
        U,
    ),
    (
        "mla-tensor-without-sequence-parallel",
        "0.13.1",
        MLA,
        [("if parallel_state.get_tensor_model_parallel_world_size() > 1:", "if self.shared_out():")],
        U,
    ),
    # attention's sinks
    ("attention-sinks-norm", "0.16.1", DOT, [(SINKS, f"setattr(self, 'other', 1)\n        {SINKS}")], P),
    (
        "attention-sinks-norm",
        "0.16.1",
        DOT,
        [("self.softmax_offset = config.init_method(", "self.softmax_offset = split_over_ranks(")],
        U,
    ),
    # counts in bf16
    (
        "expert-bias-counts",
        "0.16.1",
        ROUTER,
        [(KEPT, f"assert self.local_tokens_per_expert is not None\n        {KEPT}")],
        U,
    ),
    (
        "balancing-per-token-rows",
        "0.16.1",
        ROUTER,
        [("valid_token_count=local_num_tokens", "valid_token_count=own(bsz)")],
        U,
    ),
    (
        "balancing-per-token-rows",
        "0.16.1",
        ROUTER,
        [
            (
                "valid_token_count=local_num_tokens",
                "valid_token_count=local_num_tokens, aux_loss_scale_num_tokens=1",
            )
        ],
        U,
    ),
    # checkpoints
    (
        "optimizer-checkpoint-default",
        "0.16.1",
        MAPPING,
        [(REFUSED, REFUSED.replace("self.flattened_range is not None", "has_flattened_range"))],
        U,
    ),
    ("optimizer-checkpoint-default", "0.16.1", OPTIMIZER, [("'fully_sharded_model_space'", "DEFAULT")], U),
    ("dp-reshardable-steps", "0.16.1", OPTIMIZER, [(STEP, "continue")], A),
    ("dp-reshardable-steps", "0.16.1", OPTIMIZER, [(STEP, STEP.replace("tensors[key] =", "own ="))], U),
    ("optimizer-gather-memory", "0.16.1", OPTIMIZER, [("send_tensor = send_tensor.cuda()", "pass")], U),
    # the optimizer on the host
    (
        "offload-resume-fp32",
        "0.16.1",
        HYBRID,
        [(COPY, COPY.replace("self.param_to_fp32_param[param]", "self.copy_of(param)"))],
        U,
    ),
    (
        "offload-resume-fp32",
        "0.16.1",
        HYBRID,
        [(f"fp32_param = {COPY}", f"{HELD}: continue\n            fp32_param = {COPY}")],
        U,
    ),
    (
        "offload-stale-weights",
        "0.16.1",
        OPTIMIZER,
        [("self.optimizer.update_fp32_param_by_new_param()", "self.optimizer.fill()")],
        U,
    ),
    # the gated delta net
    (
        "gated-delta-net-packed",
        "0.16.1",
        GATED,
        [(REFUSES, REFUSES.replace("packed_seq_params is not None", "packed_seq_params"))],
        U,
    ),
    (
        "gated-delta-norm-gradient",
        "0.16.1",
        GATED,
        [("self.out_norm = build_module(", "self.out_norm = summed(build_module)(")],
        U,
    ),
]


@pytest.mark.parametrize(("entry", "version", "module", "edits", "expected"), CASES)
def test_a_spelling(
    release: Release, entry: str, version: str, module: str, edits: Sequence[Edit], expected: Presence
):
    found = ENTRIES[entry]
    definitions = edited(release(version), {module: edits})
    assert found.defect(EvidenceDefinitions(definitions, frozenset(found.evidence_targets))) is expected


ROUTED = (
    "class TopKRouter:\n    def apply_load_balancing_loss(self, activation, aux_loss):\n        return {}\n"
)


@pytest.mark.parametrize(
    ("entry", "loss", "expected"),
    [
        ("mtp-packed", "", A),
        ("mtp-tensor-parallel", "", A),
        ("balancing-of-prompts", "MoEAuxLossAutoScaler.apply(activation, aux_loss)", A),
        ("balancing-of-prompts", "MoEAuxLossAutoScaler.apply(activation, weighed(aux_loss))", U),
    ],
)
def test_what_a_tree_does_not_know_yet_is_not_wrong_there(
    tmp_path: Path, entry: str, loss: str, expected: Presence
):
    """A tree from before multi-token prediction and losses per token, as projects still pin them."""
    tree = {
        "megatron.core.models.gpt.gpt_model": "class GPTModel:\n    def forward(self): self.decoder()\n",
        "megatron.core.transformer.moe.router": ROUTED.format(loss),
    }
    found = ENTRIES[entry]
    assert (
        found.defect(EvidenceDefinitions(written(tmp_path, tree), frozenset(found.evidence_targets)))
        is expected
    )
