"""Models and batches that are small enough to compare a release with itself in a second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bundle.errors import BundleError
from bundle.mcore.config import transformer_config
from bundle.mcore.groups import Groups
from bundle.mcore.packed import packed_seq_params
from bundle.models import gpt
from bundle.recipe import Recipe, from_mapping
from bundle.recipe.alignment import Alignment, Padding
from bundle.sequences.packing import Packing, shard
from bundle.verification.bench import Bench, NotProvable

VOCABULARY = 64
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "rope_theta": 10000.0,
}
DENSE = {"model_type": "qwen3", "head_dim": 16, **_SIZES}
EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
    **_SIZES,
}
# Latent attention whose value heads (16) are narrower than its query heads (16 + 8); no experts.
LATENT = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    **_SIZES,
}
YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}


def recipe(config: Mapping[str, Any], groups: Groups, **model: Any) -> Recipe:
    """The job of a tiny model on this layout; `model` are further keys of the recipe's model section."""
    return from_mapping(
        {
            "name": "tiny",
            "model": {"config": dict(config), "dtype": "fp32", **model},
            "parallel": {axis: getattr(groups, axis).size for axis in ("tp", "cp", "ep", "etp")},
            "data": {"source": "text", "path": ["none"], "sequence_length": 128, "tokenizer": "hf:none"},
            "train": {"steps": 1, "global_batch_size": 8},
            "optimizer": {"warmup_steps": 0},
        },
    )


def chunk(
    bench: Bench,
    groups: Groups,
    config: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    **model: Any,
) -> torch.nn.Module:
    """The bare GPTModel of this rank, the same weights in every layout; `options` are megatron's own."""
    job = recipe(config, groups, **model)
    try:
        chosen = bench.runtime.options(job)
    except BundleError as error:  # this backend has no such kernel, or not here
        raise NotProvable(str(error)) from error
    settings = transformer_config(job, {**chosen, **(options or {})})
    return gpt.build(job, settings, bench.runtime, groups)[0].to(bench.device)


@dataclass(frozen=True)
class Batch:
    """What a model is given on this rank: [b, s / cp]; packed: [1, t / cp]."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    packed: Any = None


def texts(lengths: Sequence[int]) -> list[torch.Tensor]:
    """Sequences of these many tokens and one more to predict, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (n + 1,), generator=generator) for n in lengths]


def rows(bench: Bench, groups: Groups, tokens: torch.Tensor, mask: torch.Tensor) -> Batch:
    """Unpacked input from tokens [b, s + 1] and a loss mask [b, s]."""
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    whole = (tokens[:, :-1], positions, tokens[:, 1:], mask)
    return Batch(*(shard(x, groups.cp.size, groups.cp.rank).to(bench.device) for x in whole))


def single(bench: Bench, groups: Groups, texts: Sequence[torch.Tensor]) -> list[Batch]:
    """Each sequence as unpacked input of its own: the reference of everything packed."""
    return [rows(bench, groups, text[None], torch.ones(1, len(text) - 1)) for text in texts]


def packed(bench: Bench, groups: Groups, texts: Sequence[torch.Tensor], multiple: int) -> Batch:
    """All sequences as one packed input, each padded to a multiple (of 2 cp, under context parallelism)."""
    lengths = tuple(len(text) - 1 for text in texts)
    padding = Padding(lengths, tuple(-(-n // multiple) * multiple for n in lengths), tail=0)
    packing = Packing(padding, Alignment("thd", cp=groups.cp.size), groups.cp.rank, bench.device)
    ids, labels = (
        torch.cat([text[i : i + n] for text, n in zip(texts, lengths, strict=True)]) for i in (0, 1)
    )
    ids, labels = ids.to(bench.device), labels.to(bench.device)
    return Batch(
        packing.pack(ids),
        packing.positions,
        packing.pack(labels),
        packing.pack(torch.ones_like(labels, dtype=torch.float32)),
        packed_seq_params(packing),
    )
