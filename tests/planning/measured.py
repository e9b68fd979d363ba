"""The recipes whose step and memory were measured on a GPU."""

from pathlib import Path

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
TWICE = "train.global_batch_size=16"
PACKS = ("data.packed=true", "data.sequence_length=8192", "train.micro_batch_size=1")
EIGHT_ROWS, FP8 = ("train.micro_batch_size=8",), "model.fp8.scaling=tensorwise"
FOUR_ROWS = (
    "data.packed=false",
    "data.sequence_length=4096",
    "train.micro_batch_size=4",
    "train.global_batch_size=4",
)
# Qwen3-1.7B, laid over gqa.yaml.
QWEN3_1_7B = (
    "model.config.vocab_size=151936", "model.config.hidden_size=2048", "model.config.intermediate_size=6144",
    "model.config.num_hidden_layers=28", "model.config.num_attention_heads=16",
    "model.config.max_position_embeddings=40960", "model.config.tie_word_embeddings=true",
)  # fmt: skip
# Four layers of Qwen3-30B-A3B, laid over gqa.yaml.
QWEN3_EXPERTS = (
    "model.config.model_type=qwen3_moe", "model.config.vocab_size=151936", "model.config.hidden_size=2048",
    "model.config.intermediate_size=6144", "model.config.moe_intermediate_size=768",
    "model.config.num_key_value_heads=4", "model.config.num_experts=128",
    "model.config.num_experts_per_tok=8", "model.config.norm_topk_prob=true",
    "model.config.decoder_sparse_step=1", "model.config.mlp_only_layers=[]",
)  # fmt: skip
# The recipe, its changes and the devices of each row of "What `tune` predicts" in docs/performance.md.
CASES = {
    "`gqa.yaml`": ("gqa", (), 1),
    "`gqa.yaml`, FP8 tensorwise": ("gqa", (FP8,), 1),
    "`gqa.yaml`, 8 rows": ("gqa", EIGHT_ROWS, 1),
    "`gqa.yaml`, 8 rows, FP8 tensorwise": (
        "gqa",
        (*EIGHT_ROWS, FP8),
        1,
    ),
    "`gqa.yaml`, adapters": ("gqa", ("model.lora.rank=8",), 1),
    "`gqa.yaml`, packs of 8,192": ("gqa", (*PACKS, "train.global_batch_size=4"), 1),
    "`gqa.yaml`, DP2 with overlap": ("gqa", (TWICE, "distributed.overlap_grad_reduce=true"), 2),
    "`gqa.yaml`, TP2": ("gqa", (TWICE, "parallel.tp=2"), 2),
    "`gqa.yaml`, PP2": ("gqa", (TWICE, "parallel.pp=2"), 2),
    "`gqa.yaml`, PP2, two chunks a stage": ("gqa", (TWICE, "parallel.pp=2", "parallel.vpp=2"), 2),
    "`gqa.yaml`, packs of 8,192, CP2": ("gqa", (*PACKS, "parallel.cp=2"), 2),
    "`latent.yaml`": ("latent", (), 1),
    "`latent.yaml`, 8 rows": ("latent", EIGHT_ROWS, 1),
    "`latent.yaml`, 8 rows, FP8 tensorwise": (
        "latent",
        (*EIGHT_ROWS, FP8),
        1,
    ),
    "`latent.yaml`, adapters": ("latent", ("model.lora.rank=8",), 1),
    "`latent.yaml`, EP2": ("latent", (TWICE, "parallel.ep=2"), 2),
    "`latent.yaml`, TP2 ETP1 EP2": ("latent", (TWICE, "parallel.ep=2", "parallel.tp=2", "parallel.etp=1"), 2),
    "`adapters.yaml`": ("adapters", (), 1),
    "Qwen3-1.7B, packs of 8,192": ("gqa", (*PACKS, *QWEN3_1_7B), 1),
    "`gqa.yaml`, 8 rows, on H200": ("gqa", EIGHT_ROWS, 1),
    "`gqa.yaml`, 8 rows, FP8 tensorwise, on H200": ("gqa", (*EIGHT_ROWS, FP8), 1),
    "`latent.yaml`, 8 rows, on H200": ("latent", EIGHT_ROWS, 1),
    "`latent.yaml`, 8 rows, FP8 tensorwise, on H200": ("latent", (*EIGHT_ROWS, FP8), 1),
    "Qwen3-1.7B, 4 rows of 4,096, on H200": ("gqa", (TWICE, "train.micro_batch_size=4", *QWEN3_1_7B), 1),
    "LoRA of Qwen3-8B, 4 rows of 4,096, on H200": ("adapters", FOUR_ROWS, 1),
    "LoRA of Qwen3-8B, 4 rows of 4,096, FP8 tensorwise, on H200": ("adapters", (*FOUR_ROWS, FP8), 1),
    "four layers of Qwen3-30B-A3B, 8 rows of 4,096, on H200": (
        "gqa",
        (TWICE, *EIGHT_ROWS, *QWEN3_EXPERTS),
        1,
    ),
    "four layers of Qwen3-30B-A3B, 8 rows of 4,096, FP8 tensorwise, on H200": (
        "gqa",
        (TWICE, *EIGHT_ROWS, *QWEN3_EXPERTS, FP8),
        1,
    ),
}
