"""Rotary positions, stretched or in three dimensions, as `transformers` computes them, for every release.

Megatron's releases know these kinds of stretching: linear, a llama3 whose bounds are fixed, and yarn. Yarn
has two meanings of mscale for latent attention, and exists for other attention from 0.15. Here megatron
builds plain positions and gets the frequencies. The factor by which yarn multiplies sines and cosines goes
into the keys.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.attention import Attention
from torch import Tensor

from bundle.architectures import Architecture, RopeScaling
from bundle.errors import EnvironmentUnfit
from bundle.mcore import filter_keywords


def apply_rope_scaling(chunk: torch.nn.Module, architecture: Architecture) -> None:
    """Give every rotary embedding of a new GPTModel the frequencies of the architecture's stretching.

    Latent attention has its own embedding: a chunk with only the embedding or the head has none. Raise
    EnvironmentUnfit where megatron-core has no rotary embedding that takes them.
    """
    scaling, mla = architecture.rope_scaling, architecture.mla
    if scaling is None:
        return
    rotary_channels = architecture.kv_channels * architecture.rotary_fraction
    width = mla.qk_pos_emb_head_dim if mla else int(rotary_channels)
    table = compute_frequencies(architecture.rotary_base, width, scaling)
    kinds = RotaryEmbedding, MropeEmbedding
    embeddings = [module for module in chunk.modules() if isinstance(module, kinds)]
    has_attention = any(isinstance(module, Attention) for module in chunk.modules())
    if (has_attention and not embeddings) or any(
        embedding.inv_freq.shape != table.shape for embedding in embeddings
    ):
        raise EnvironmentUnfit(
            f"model.config: this megatron-core has no rotary embedding of {width} values to scale. Install"
            " a release that `mcore-bundle patches list` knows, or leave rope_scaling out"
        )
    for embedding in embeddings:
        _set_frequencies(embedding, table)
    if scaling.concentration != 1.0:
        rotated = slice(-width, None) if mla else slice(width)
        for module in chunk.modules():
            if isinstance(module, Attention):
                concentrate = _YarnKeyScaleHook(rotated, scaling.concentration**2)
                module.core_attention.register_forward_pre_hook(concentrate)


def compute_frequencies(base: float, width: int, scaling: RopeScaling | None) -> Tensor:
    """Return radians per position of each pair of a head's `width` rotated values.

    The result is float32 [width / 2], on the CPU. The order of operations is that of
    `transformers.modeling_rope_utils`: a rounding of the last bit is a hundredth of a radian at position
    100,000.
    """
    grown = base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    plain = 1.0 / grown
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_position_embeddings / (2 * math.pi / plain)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        plain_share = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - plain_share) * plain / scaling.factor + plain_share * plain
    plain_share = 1 - _compute_yarn_ramp(base, width, scaling)
    return 1.0 / (scaling.factor * grown) * (1 - plain_share) + plain * plain_share


def _compute_yarn_ramp(base: float, width: int, scaling: RopeScaling) -> Tensor:
    """Return how far each pair is stretched, [width / 2] from 0 to 1: linear between YaRN's two bounds."""

    def find_pair(turns: float) -> float:
        """Return the pair, with fractions, that makes `turns` turns within the original length."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(base))

    low, high = find_pair(scaling.beta_fast), find_pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    steps = torch.arange(width // 2, dtype=torch.float32) - low
    return (steps / (high - low if high != low else 0.001)).clamp(0, 1)


def _set_frequencies(embedding: Any, table: Tensor) -> None:
    """Make `table` the embedding's frequencies, and clear what it has computed from others."""
    embedding.inv_freq = table.to(embedding.inv_freq.device)
    if isinstance(embedding, MropeEmbedding):
        return
    if isinstance(embedding, YarnRotaryEmbedding):  # the one that latent attention's fused kernel takes
        embedding.inv_freq_extra = embedding.inv_freq_inter = embedding.inv_freq
        embedding.max_seq_len_cached = 0
    type(embedding).forward.cache_clear()


class MropeEmbedding(torch.nn.Module):
    """Rotary positions in time, height and width (mrope), in the place of a GPTModel's `rotary_pos_emb`.

    `sections` are the numbers of pairs of a head that turn by each dimension, one after the other. If
    `interleaved`, among every three pairs one turns by each, until a section is used up, and the rest turn by
    time. Megatron's own embedding knows no such order, and cuts the table for context parallel as if a pack
    were one sequence. Here nothing is cut: positions are those of the model's rows. For packs they are those
    of all rows of all ranks, and attention takes its own (mrope-packed).
    """

    def __init__(
        self, base: float, sections: Sequence[int], device: torch.device, *, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.inv_freq = compute_frequencies(base, 2 * sum(sections), None).to(device)
        if interleaved:
            dimensions = torch.zeros(sum(sections), dtype=torch.long)
            for dimension in (1, 2):
                dimensions[dimension : 3 * sections[dimension] : 3] = dimension
        else:
            dimensions = torch.arange(3).repeat_interleave(torch.tensor(sections))
        self._dimensions = dimensions.to(device)  # by which each pair turns

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the angles [s, b, 1, d] of positions [3, b, s]."""
        angles = position_ids.index_select(0, self._dimensions) * self.inv_freq[:, None, None]
        half = angles.permute(2, 1, 0)
        return torch.cat((half, half), -1).unsqueeze(2)


def use_mrope(model: Any, architecture: Architecture) -> None:
    """Make a new GPTModel take positions in time, height and width where the architecture has them."""
    if architecture.rotary_sections:
        config, device = model.config, model.rotary_pos_emb.inv_freq.device
        config.mrope_section = model.mrope_section = list(architecture.rotary_sections)
        model.position_embedding_type = "mrope"
        model.rotary_pos_emb = MropeEmbedding(
            architecture.rotary_base,
            architecture.rotary_sections,
            device,
            interleaved=architecture.rotary_interleaved,
        )


class _YarnKeyScaleHook:
    """Multiplies the rotated part of the keys; queries are left alone, because only the product counts.

    It is a hook on core attention, where every release and every kernel gets rotated keys: Transformer
    Engine's fused rotation has no such factor.
    """

    def __init__(self, rotated: slice, factor: float) -> None:
        self._rotated, self._factor = rotated, factor

    def __call__(self, _attention: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, *rest = args
        width = key.shape[-1]
        first, last, _ = self._rotated.indices(width)
        if last - first == width:
            return query, key * self._factor, *rest
        before, rotated, behind = key.split((first, last - first, width - last), -1)
        return query, torch.cat((before, rotated * self._factor, behind), -1), *rest


def rotate_packed(rows: Tensor, boundaries: Tensor, table: Tensor, group: Any) -> Tensor:
    """Return packed rows [t / cp, n, d] turned by the table's angles [positions, 1, 1, d].

    Megatron's function is looked up at each call: a patch may have replaced it.
    """
    rotate = rope_utils._apply_rotary_pos_emb_thd
    result: Tensor = rotate(rows, boundaries, table, **filter_keywords(rotate, cp_group=group))
    return result


def use_megatron_mrope(model: Any, sections: Sequence[int], base: int) -> None:
    """Make a GPTModel take positions in time, height and width (mrope) as megatron does: ids [3, b, s].

    `sections` divide the pairs of a head's channels.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

    config = model.config
    config.mrope_section = model.mrope_section = list(sections)
    model.position_embedding_type = "mrope"
    model.rotary_pos_emb = MultimodalRotaryEmbedding(config.kv_channels, 1.0, rotary_base=base)
