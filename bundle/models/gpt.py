"""Builds the GPT model chunks of this rank, dense or MoE, with MLA and MTP, from a recipe.

Filled from a Hugging Face directory, or from (seed, parameter name): the same weights in every layout and
release. Megatron draws each rank's shard from that rank's random state, so that the same seed gives another
model at tp 2 than at tp 1. Here the whole tensor is drawn and the rank keeps its part: runs compare across
layouts.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from bundle.backends import Runtime
from bundle.mcore import gpt
from bundle.mcore.groups import Groups
from bundle.models import adapters, loading, naming
from bundle.models.naming import GloballyNamedTensor
from bundle.models.vision import VisionTower
from bundle.pretrained import PretrainedWeights
from bundle.pretrained.matching import build_published_table
from bundle.recipe import Recipe

# Projections back onto the residual stream are drawn narrower, as in GPT-2 and Megatron-LM.
_RESIDUAL_SUFFIXES = (".linear_proj.weight", ".linear_fc2.weight", ".out_proj.weight")


def build_chunks(
    recipe: Recipe, config: Any, runtime: Runtime, groups: Groups, weights: PretrainedWeights | None = None
) -> list[torch.nn.Module]:
    """Return the model chunks of this rank (one without interleaving), filled with `weights`.

    The seed fills parameters that the weights lack: MTP layers beyond the published ones, or with None all.
    """
    architecture = recipe.architecture
    chunks = []
    for index in range(groups.vpp):
        stage = index if groups.vpp > 1 else None
        gpt.set_chunk_if_interleaved(stage)
        chunk = gpt.build_model(
            config,
            runtime.build_specs(recipe, config, stage),
            architecture,
            groups,
            index,
            max_sequence_length=recipe.data.sequence_length,
        )
        if architecture.vision is not None and groups.is_first_stage(index):
            chunk.add_module(
                "vision", VisionTower(architecture, config.params_dtype, runtime.noncausal_packed_attention)
            )
            for name, parameter in chunk.vision.named_parameters(prefix="vision"):
                parameter.requires_grad_(not recipe.model.vision.is_tensor_frozen(name))
            chunk.vision.deepstack.attach(chunk.decoder.layers[: len(architecture.vision.deepstack)])
        chunks.append(chunk)
    if weights is None:
        drawn = [named for chunk in chunks for named in naming.find_parameters(chunk, groups)]
    else:
        drawn = loading.load_and_list_unpublished(chunks, groups, weights, build_published_table(recipe))
    initialize(
        drawn,
        seed=recipe.seed,
        std=architecture.initializer_range,
        num_layers=architecture.num_layers,
        centered=architecture.zero_centered_norms,
    )
    if recipe.model.lora is not None:
        matrices = adapters.freeze_and_add_adapters(chunks, recipe, groups, recipe.model.lora)
        adapters.initialize_adapters(chunks, recipe.seed)
        loading.load_adapters(matrices, recipe)
    return chunks


def initialize(
    parameters: Iterable[GloballyNamedTensor],
    *,
    seed: int,
    std: float,
    num_layers: int,
    centered: bool = False,
) -> None:
    """Overwrite each parameter in place: ones for norms, zeros for biases, normal draws for matrices.

    `std` is that of the matrices; residual projections get std / sqrt(2 * num_layers). `centered`: norms
    multiply by 1 + weight. Decays of gated delta nets are drawn as transformers draws them, from 0.01 to 16.
    """
    with torch.no_grad():
        for item in parameters:
            item.parameter.copy_(_draw_values(item, seed, std, num_layers, centered))


def _draw_values(
    item: GloballyNamedTensor, seed: int, std: float, num_layers: int, centered: bool
) -> torch.Tensor:
    """Return the local values of one parameter: float32, on the CPU, so the same for every device."""
    if item.name.endswith(".A_log"):
        drawn = torch.rand(item.compute_full_shape(), generator=item.make_generator(seed))
        return item.extract_shard((0.01 + 15.99 * drawn).log())
    if item.parameter.ndim == 1:
        zero = centered and not item.name.endswith((".out_norm.weight", ".dt_bias"))
        zero |= item.name.endswith(".bias")
        return torch.full(item.parameter.shape, 0.0 if zero else 1.0)
    if item.name.endswith(_RESIDUAL_SUFFIXES):
        std /= math.sqrt(2 * num_layers)
    return item.extract_shard(
        torch.randn(item.compute_full_shape(), generator=item.make_generator(seed)) * std
    )
