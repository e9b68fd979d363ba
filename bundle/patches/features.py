"""The words for what a job uses that patches and traps ask for; a recipe says them in `Recipe.features`."""

from collections.abc import Iterable

from bundle.errors import UsageError, did_you_mean, nearest
from bundle.patches.entry import LEFT_TO_MEGATRON

# What a job on accelerators does that nobody would think of naming; losses are megatron's in jobs of others.
ALWAYS = frozenset({"attention-flash", "bf16", "distributed-checkpoint"}) | LEFT_TO_MEGATRON

# word -> what it says of a job
WORDS: dict[str, str] = {
    "attention-flash": "core attention by a flash kernel",
    "attention-sinks": "learned attention sinks (softmax_type: learnable), as in gpt-oss",
    "batched-exchange": "pipeline stages exchange in batches (batch_p2p_comm)",
    "bf16": "computes in bfloat16",
    "cp": "context parallelism above 1",
    "cross-attention": "cross attention, as in T5",
    "distributed-checkpoint": "megatron's distributed checkpoints",
    "dp-reshardable": "optimizer checkpoints by buckets (dp_reshardable)",
    "ep": "expert parallelism above 1",
    "etp-unlike-tp": "experts cut into more or fewer parts than other weights",
    "expert-bias": "routers with an expert bias (moe_router_enable_expert_bias)",
    "explicit-groups": "process groups given to modules (pg_collection), other than those of the layout",
    "fp8": "FP8 training",
    "gated-delta-net": "gated delta net layers (Qwen3-Next, Qwen3.5)",
    "gathered-logits": "the model gathers its logits (parallel_output=False)",
    "global-aux-loss": "the balancing loss global_aux_loss",
    "gqa": "fewer groups of keys than heads",
    "label-smoothing": "label smoothing",
    "llava": "megatron's LLaVAModel",
    "megatron-balancing": "megatron's own balancing losses",
    "megatron-fsdp": "Megatron-FSDP",
    "megatron-mtp-loss": "megatron's own loss of multi-token prediction",
    "megatron-tied-head": "megatron's own weight for a tied head behind the first stage",
    "mla": "multi-latent attention",
    "moe": "mixture of experts",
    "mrope": "multimodal rotary positions (mrope)",
    "mtp": "multi-token prediction",
    "multimodal": "embeddings of others than tokens among those of the text",
    "mxfp8-param-gather": "weights gathered in MXFP8",
    "optimizer-cpu-offload": "the optimizer on the host (optimizer_cpu_offload)",
    "optimizer-default-sharding": "optimizer checkpoints whose form is not asked for",
    "output-gate": "attention with an output gate (Qwen3-Next, Qwen3.5)",
    "overlap-grad-reduce": "gradients reduced during the backward pass",
    "overlap-param-gather": "weights gathered during the forward pass",
    "packed": "several sequences in one row (thd, cu_seqlens)",
    "padding": "rows of padding in micro-batches",
    "padding-mask": "a padding mask given to the model",
    "per-token-loss": "a loss per token (calculate_per_token_loss)",
    "pp": "pipeline parallelism above 1",
    "recompute-full": "full recomputation of activations",
    "resume-other-layout": "resumed with another layout",
    "router-replay": "routers that replay recorded experts",
    "seq-aux-loss": "the balancing loss seq_aux_loss",
    "sp": "sequence parallelism",
    "tied-embeddings": "embedding and output layer share their weight",
    "tp": "tensor parallelism above 1",
    "unequal-head-dims": "values of another width than queries",
    "vpp": "an interleaved pipeline",
}


def parse(said: str) -> frozenset[str] | None:
    """The words of a list with commas, as `known` gives them."""
    return known(said.split(","))


def named(said: str) -> tuple[str, ...]:
    """The words of a list with commas, as they are spelled here. Raises UsageError as `known`."""
    words = tuple(word.strip().lower() for word in said.split(",") if word.strip())
    known(words)
    return words


def known(said: Iterable[str]) -> frozenset[str] | None:
    """The words, with what is always so; None where there are none: everything.

    Raises UsageError for words that no patch and no trap asks for.
    """
    words = [word.strip().lower() for word in said if word.strip()]
    unknown = [f"{word[:100]}{did_you_mean(nearest(word, WORDS))}" for word in words if word not in WORDS]
    if unknown:
        raise UsageError(f"features: no such words; there are {', '.join(sorted(WORDS))}:", unknown)
    return frozenset(words) | ALWAYS if words else None


def shown(words: Iterable[str]) -> str:
    """Words in a sentence, those that are always so left out: "cp and mtp"."""
    return " and ".join(sorted(set(words) - ALWAYS))
