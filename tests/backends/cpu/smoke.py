"""Two training steps of a tiny dense and a tiny MLA, MoE and MTP model; prints the losses as JSON.

python -m tests.backends.cpu.smoke
"""

from typing import Any

import torch

from bundle.planning import build_plan
from bundle.recipe import Recipe, from_mapping
from tests import world
from tests.ranks import finish_rank, start_rank

STEPS, ROWS, LENGTH, VOCABULARY = 2, 4, 32, 258
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}
MODELS = {
    "dense": SIZES | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "latent": SIZES
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
}


def recipe(model: str, config: dict[str, Any] | None = None, /, **sections: Any) -> Recipe:
    """The job that trains one of the models, with other keys of its config and other sections."""
    arithmetic = {"dtype": "fp32"} | sections.pop("model", {})
    return from_mapping(
        {
            "name": "smoke",
            "backend": "cpu",
            "model": {"config": MODELS[model] | (config or {}), **arithmetic},
            "data": {"source": "text", "path": ["stdlib"], "sequence_length": LENGTH},
            "train": {"steps": STEPS, "micro_batch_size": 2, "global_batch_size": ROWS},
            "optimizer": {"lr": 1e-3, "warmup_steps": 0},
            **sections,
        }
    )


def rows(mtp_layers: int) -> list[Any]:
    """Two micro-batches of two rows of random tokens."""
    from bundle.engine.microbatch import from_rows

    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    mask = torch.ones(ROWS // 2, LENGTH)
    return [
        from_rows(part[:, :-1], part[:, 1:], mask, cp=1, rank=0, mtp_layers=mtp_layers)
        for part in tokens.split(2)
    ]


def train(job: Recipe, runtime, micro_batches: list[Any] | None = None) -> list[list[float]]:
    """[main loss, MTP losses.., gradient norm] of each step on these micro-batches, or on `rows`."""
    from bundle.engine import Engine
    from bundle.mcore import groups

    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(job.parallel, seed=job.seed, timeout_seconds=60)
    try:
        engine = Engine(job, runtime, state, torch.device("cpu"))
        batches = micro_batches or rows(job.architecture.mtp_layers)
        return [_step(engine, batches) for _ in range(STEPS)]
    finally:
        with runtime.megatron_calls():
            groups.destroy_model_parallel_groups()


def _step(engine: Any, batches: list[Any]) -> list[float]:
    engine.forward_backward(batches)
    result = engine.step_optimizer()
    losses = engine.take_losses()
    return [losses.main, *losses.mtp, result.grad_norm]


def main() -> None:
    jobs = {model: recipe(model) for model in MODELS}
    runtime, rank = start_rank(build_plan(jobs["latent"], backend="cpu").patch_plan)
    seen = world.each(jobs.items(), lambda job: train(job, runtime))
    finish_rank(seen, rank)


if __name__ == "__main__":
    main()
