"""Builds the GPT model chunks of this rank, dense or MoE, with MLA and MTP, from a recipe."""

from typing import Any

import torch

from bundle.backends import Runtime
from bundle.mcore import gpt
from bundle.mcore.groups import Groups
from bundle.models import initialization, naming
from bundle.recipe import Recipe


def build(recipe: Recipe, config: Any, runtime: Runtime, groups: Groups) -> list[torch.nn.Module]:
    """The model chunks of this rank (one without interleaving), filled from the recipe's seed."""
    architecture = recipe.architecture
    chunks = []
    for index in range(groups.vpp):
        stage = index if groups.vpp > 1 else None
        gpt.enter_chunk(stage)
        chunk = gpt.model(
            config,
            runtime.specs(recipe, config, stage),
            architecture,
            groups,
            index,
            max_sequence_length=recipe.data.sequence_length,
        )
        initialization.initialize(
            naming.parameters(chunk, groups),
            seed=recipe.seed,
            std=architecture.initializer_range,
            num_layers=architecture.num_layers,
        )
        chunks.append(chunk)
    return chunks
