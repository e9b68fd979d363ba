"""Positions in time, height and width (mrope) for a GPTModel that was built with those of text."""

from collections.abc import Sequence
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding


def use_positions(model: Any, sections: Sequence[int], base: int) -> None:
    """Has the model take position ids [3, b, s]; `sections` share out the pairs of a head's channels."""
    config = model.config
    config.mrope_section = model.mrope_section = list(sections)
    model.position_embedding_type = "mrope"
    model.rotary_pos_emb = MultimodalRotaryEmbedding(config.kv_channels, 1.0, rotary_base=base)
