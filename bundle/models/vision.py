"""The vision tower of a model: transformers' own module, whole on every rank of the first stage.

It is a part of the model's first chunk, and so of its data parallelism, optimizer and checkpoints. Ranks of a
tensor-parallel group compute the same of it, and get the same gradient from the embeddings that they share
out; context-parallel ranks get their own part, which is summed over them like everybody's.

Its attention is torch's, image by image and window by window, or the accelerator's, all of them at once.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bundle.architectures import Architecture
from bundle.architectures import Vision as Tower
from bundle.errors import EnvironmentUnfit, JobFailed
from bundle.mcore import gpt
from bundle.mcore.deepstack import Deepstack
from bundle.sequences.images import Images


class Vision(torch.nn.Module):
    """The tower of a model that sees images."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, attention: Callable[..., Tensor] | None = None
    ) -> None:
        """`attention` of packed sequences, as in `backends.Runtime`.

        Raises EnvironmentUnfit where transformers has no such tower.
        """
        super().__init__()
        assert architecture.vision is not None
        self.tower = _tower(architecture, architecture.vision, attention)
        self.deepstack = Deepstack()
        self.to(dtype)

    def forward(self, images: Images) -> tuple[Tensor, Sequence[Tensor]]:
        """The embeddings [n, h] of all images, one after the other; such of each of the first layers."""
        pixels = images.pixels.to(next(self.tower.parameters()).dtype)
        seen = self.tower(pixels, grid_thw=images.grids, **self._prepared(images.grids, pixels.device))
        if isinstance(seen, tuple):  # Qwen3-VL's before transformers 5
            embeddings, deepstack = seen
            return embeddings, deepstack
        return getattr(seen, "pooler_output", seen), getattr(seen, "deepstack_features", ())

    def _prepared(self, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """What follows from sizes alone, counted on the host; transformers before 5 does so by itself."""
        try:
            from transformers import vision_utils
        except ImportError:
            return {}
        merged = self.tower.spatial_merge_size
        found = {"position_ids": vision_utils.get_vision_position_ids(grids, merged)}
        if hasattr(self.tower, "pos_embed"):
            found |= _interpolation(vision_utils, self.tower, grids)
        moved = {name: value.to(device, non_blocking=True) for name, value in found.items()}
        if hasattr(self.tower, "window_size"):
            order, ends = vision_utils.get_vision_window_index(
                grids, merged, self.tower.window_size, self.tower.patch_size
            )
            moved |= {"window_index": order.to(device, non_blocking=True), "cu_window_seqlens": ends}
        return moved

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
    embeddings, behind = vision(images)
    return vision.deepstack.begin(*gpt.with_images(model, ids, embeddings, behind, images.index))


def _tower(architecture: Architecture, of: Tower, attention: Callable[..., Tensor] | None) -> Any:
    try:
        kind, config = _KINDS[of.family](of)
    except ImportError as error:
        raise EnvironmentUnfit(
            f"the vision tower of {architecture.model_type} is transformers' own: pip install"
            f" 'mcore-bundle[data]' ({error})"
        ) from error
    made = config(
        depth=of.num_layers,
        hidden_size=of.hidden_size,
        intermediate_size=of.ffn_hidden_size,
        num_heads=of.num_attention_heads,
        in_channels=of.channels,
        patch_size=of.patch_size,
        temporal_patch_size=of.temporal_patch_size,
        spatial_merge_size=of.merge_size,
        out_hidden_size=architecture.hidden_size,
    )
    tower = kind._from_config(made, attn_implementation="sdpa", dtype=torch.float32)
    # Old towers take nothing that is registered.
    if attention is not None and hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):
        tower.config._attn_implementation = _registered(attention)
    return tower


def _interpolation(vision_utils: Any, tower: Any, grids: Tensor) -> dict[str, Tensor]:
    """Where a tower looks positions up, and how much each counts, by its arguments' names."""
    try:
        count = vision_utils.get_vision_interpolation_indices_and_weights
    except AttributeError:  # transformers before 5.17
        of = (grids, tower.num_grid_per_side, tower.spatial_merge_size)
        found = vision_utils.get_vision_bilinear_indices_and_weights(*of)
        return dict(zip(("bilinear_indices", "bilinear_weights"), found, strict=True))
    found = count(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    return dict(zip(("interp_indices", "interp_weights"), found, strict=True))


def _registered(attention: Callable[..., Tensor]) -> str:
    """transformers' name of it: layers are given boundaries where "flash" is in that, and else parts.

    Its own way to choose one would look for the kernels of Flash Attention.
    """
    from transformers import AttentionInterface

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, **said: Any
    ) -> tuple[Tensor, None]:
        """[1, t, n, d] of [1, n, t, d] each; boundaries are on the host."""
        given = (x[0].transpose(0, 1) for x in (query, key, value))
        ends = said.get("cu_seq_lens_q")
        boundaries = (0, query.shape[2]) if ends is None else tuple(ends.tolist())
        return attention(*given, boundaries, scale=scaling)[None], None

    name = "flash_of_the_backend"
    AttentionInterface.register(name, attend)
    return name


def _windowed(of: Tower) -> tuple[Any, Any]:
    """transformers' class of a tower, and what makes its config."""
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as configs
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as towers

    full = list(of.full_layers)
    config = partial(configs.Qwen2_5_VLVisionConfig, window_size=of.window_size, fullatt_block_indexes=full)
    return towers.Qwen2_5_VisionTransformerPretrainedModel, config


def _deep(of: Tower) -> tuple[Any, Any]:
    from transformers.models.qwen3_vl import configuration_qwen3_vl as configs
    from transformers.models.qwen3_vl import modeling_qwen3_vl as towers

    config = partial(
        configs.Qwen3VLVisionConfig,
        num_position_embeddings=of.positions,
        deepstack_visual_indexes=list(of.deepstack),
    )
    return towers.Qwen3VLVisionModel, config


_KINDS = {"qwen2_5_vl": _windowed, "qwen3_vl": _deep}
