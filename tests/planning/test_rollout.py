"""The memory of a rollout engine, against transformers' own model and cache."""

import pytest
import torch

from bundle.planning.rollout import RolloutBytes, estimate_rollout
from bundle.recipe import load

pytest.importorskip("transformers")

from tests.rollouts.families import CONFIGS, draw_model


@pytest.mark.parametrize("family", ["tied", "latent", "glm"])
def test_weights_and_cache_are_those_of_transformers(family):
    from transformers import DynamicCache

    overrides = [f"model.config={CONFIGS[family]}", "rl.prompts_per_step=3", "rl.num_generations=5"]
    overrides += ["data.sequence_length=24", "train.global_batch_size=15", "train.micro_batch_size=1"]
    overrides += ["rl.evaluation=null", "model.mtp={layers: 0}", "model.config.vocab_size=258"]
    recipe = load("grpo-arithmetic-cpu", overrides)
    estimate = estimate_rollout(recipe, 1)
    model = draw_model(family)
    extra = (258 - model.config.vocab_size) * 32 * (1 if family == "tied" else 2)
    unique = {id(value): value for value in model.parameters()}
    buffers = [value for name, value in model.named_buffers() if "correction_bias" in name]
    assert estimate.weights == 4 * (sum(v.numel() for v in (*unique.values(), *buffers)) + extra)
    cache = DynamicCache(config=model.config)
    model(torch.ones(15, 24, dtype=torch.long), past_key_values=cache, use_cache=True)
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    logits = 15 * 258 * 4 + 15 * 258 * 16
    assert estimate.transient == max(estimate.weights, 4 * values + logits)
    assert (
        estimate_rollout(recipe, 3).transient < estimate.transient or estimate.transient == estimate.weights
    )


def test_answers_of_files_need_no_engine(tmp_path):
    recipe = load("grpo-arithmetic-cpu", [f"rl.rollout.path={tmp_path}"])
    assert estimate_rollout(recipe, 1) == RolloutBytes()
