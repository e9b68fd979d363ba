"""The vision tower of a model: transformers' own module, whole on every rank of the first stage.

It is a part of the model's first chunk, and so of its data parallelism, optimizer and checkpoints. Ranks of a
tensor-parallel group compute the same of it, and get the same gradient from the embeddings that they share
out; context-parallel ranks get their own part, which is summed over them like everybody's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bundle.architectures import Architecture
from bundle.errors import EnvironmentUnfit, JobFailed
from bundle.mcore import gpt
from bundle.sequences.images import Images


class Vision(torch.nn.Module):
    """The tower of a model that sees images."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        """Raises EnvironmentUnfit where transformers has no such tower."""
        super().__init__()
        self.tower = _tower(architecture)
        self.to(dtype)

    def forward(self, images: Images) -> Tensor:
        """The embeddings [n, h] of all images, one after the other."""
        pixels = images.pixels.to(next(self.tower.parameters()).dtype)
        seen = self.tower(pixels, grid_thw=images.grids)
        found: Tensor = getattr(seen, "pooler_output", seen)  # since transformers 5
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Vision":
        """Moves everything and converts parameters alone: transformers leaves frequencies in fp32, too."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            if buffer.dtype != before[name].dtype:
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, before[name].to(buffer.device))
        return self


def decoder_input(model: torch.nn.Module, ids: Tensor, images: Images | None) -> Tensor | None:
    """What the first chunk of a model begins with, images in their places; None: it embeds tokens itself."""
    vision = getattr(model, "vision", None)
    if vision is None:
        return None
    if images is None:
        raise JobFailed("A model with a vision tower needs `MicroBatch.images`; blank ones mean none.")
    return gpt.with_images(model, ids, vision(images), images.index)


def _tower(architecture: Architecture) -> torch.nn.Module:
    try:
        from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as configs
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as towers
    except ImportError as error:
        raise EnvironmentUnfit(
            f"the vision tower of {architecture.model_type} is transformers' own: pip install"
            f" 'mcore-bundle[data]' ({error})"
        ) from error
    of = architecture.vision
    assert of is not None
    config = configs.Qwen2_5_VLVisionConfig(
        depth=of.num_layers,
        hidden_size=of.hidden_size,
        intermediate_size=of.ffn_hidden_size,
        num_heads=of.num_attention_heads,
        in_channels=of.channels,
        patch_size=of.patch_size,
        temporal_patch_size=of.temporal_patch_size,
        spatial_merge_size=of.merge_size,
        window_size=of.window_size,
        fullatt_block_indexes=list(of.full_layers),
        out_hidden_size=architecture.hidden_size,
    )
    kind = towers.Qwen2_5_VisionTransformerPretrainedModel
    made: torch.nn.Module = kind._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return made
