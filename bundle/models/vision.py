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
from bundle.architectures import VisionArchitecture as Tower
from bundle.errors import EnvironmentUnfit, JobFailed
from bundle.mcore import gpt
from bundle.mcore.deepstack import Deepstack
from bundle.packing.images import ImageInputs
from bundle.transfers import copy_to_device


class VisionTower(torch.nn.Module):
    """The tower of a model that sees images."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, attention: Callable[..., Tensor] | None = None
    ) -> None:
        """`attention` of packed sequences, as in `backends.Runtime`.

        Raises EnvironmentUnfit where transformers has no such tower.
        """
        super().__init__()
        assert architecture.vision is not None
        self.tower = _build_tower(architecture, architecture.vision, attention)
        self.deepstack = Deepstack()
        self.to(dtype)

    def forward(self, images: ImageInputs) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the concatenated embeddings [n, h] of all images, and those of each of the first layers."""
        pixels = images.pixels.to(next(self.tower.parameters()).dtype)
        output = self.tower(
            pixels, grid_thw=images.grids, **self._prepare_inputs(images.grids, pixels.device)
        )
        if isinstance(output, tuple):  # Qwen3-VL's before transformers 5
            embeddings, deepstack = output
            return embeddings, deepstack
        return getattr(output, "pooler_output", output), getattr(output, "deepstack_features", ())

    def _prepare_inputs(self, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs that follow from sizes alone, computed on the host.

        Empty for transformers before 5, which computes them by itself.
        """
        try:
            from transformers import vision_utils
        except ImportError:
            return {}
        merge_size = self.tower.spatial_merge_size
        inputs = {"position_ids": vision_utils.get_vision_position_ids(grids, merge_size)}
        if hasattr(self.tower, "pos_embed"):
            inputs |= _compute_interpolation(vision_utils, self.tower, grids)
        moved = {name: copy_to_device(value, device) for name, value in inputs.items()}
        if hasattr(self.tower, "window_size"):
            order, ends = vision_utils.get_vision_window_index(
                grids, merge_size, self.tower.window_size, self.tower.patch_size
            )
            moved |= {"window_index": copy_to_device(order, device), "cu_window_seqlens": ends}
        return moved

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "VisionTower":
        """Move everything and convert parameters alone: transformers leaves frequencies in fp32, too."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            if buffer.dtype != before[name].dtype:
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, before[name].to(buffer.device))
        return self


def build_multimodal_decoder_input(
    model: torch.nn.Module, ids: Tensor, images: ImageInputs | None
) -> Tensor | None:
    """Return the input of a model's first chunk, with images in place; None: it embeds tokens itself."""
    vision = getattr(model, "vision", None)
    if vision is None:
        return None
    if images is None:
        raise JobFailed("a vision tower needs `MicroBatch.images`; give blank images for none")
    embeddings, features = vision(images)
    return vision.deepstack.begin_forward(*gpt.merge_images(model, ids, embeddings, features, images.index))


def _build_tower(architecture: Architecture, vision: Tower, attention: Callable[..., Tensor] | None) -> Any:
    try:
        kind, config = _TOWER_IMPORTERS[vision.family](vision)
    except ImportError as error:
        raise EnvironmentUnfit(
            f"the vision tower of {architecture.model_type} comes from transformers, which is not"
            f" installed: pip install 'mcore-bundle[data]' ({error})"
        ) from error
    tower_config = config(
        depth=vision.num_layers,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.ffn_hidden_size,
        num_heads=vision.num_attention_heads,
        in_channels=vision.channels,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        spatial_merge_size=vision.merge_size,
        out_hidden_size=architecture.hidden_size,
    )
    tower = kind._from_config(tower_config, attn_implementation="sdpa", dtype=torch.float32)
    # Old towers take nothing that is registered.
    if attention is not None and hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):
        tower.config._attn_implementation = _register_attention(attention)
    return tower


def _compute_interpolation(vision_utils: Any, tower: Any, grids: Tensor) -> dict[str, Tensor]:
    """Return the positions that a tower looks up and their weights, by its arguments' names."""
    try:
        compute = vision_utils.get_vision_interpolation_indices_and_weights
    except AttributeError:  # transformers before 5.17
        arguments = (grids, tower.num_grid_per_side, tower.spatial_merge_size)
        indices_and_weights = vision_utils.get_vision_bilinear_indices_and_weights(*arguments)
        return dict(zip(("bilinear_indices", "bilinear_weights"), indices_and_weights, strict=True))
    indices_and_weights = compute(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    return dict(zip(("interp_indices", "interp_weights"), indices_and_weights, strict=True))


def _register_attention(attention: Callable[..., Tensor]) -> str:
    """Register the attention with transformers and return its name.

    Layers get boundaries where "flash" is in the name, and parts otherwise. transformers' own choice would
    look for the kernels of Flash Attention.
    """
    from transformers import AttentionInterface

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        """Return [1, t, n, d] of [1, n, t, d] each; boundaries are on the host."""
        inputs = (x[0].transpose(0, 1) for x in (query, key, value))
        ends = options.get("cu_seq_lens_q")
        boundaries = (0, query.shape[2]) if ends is None else tuple(ends.tolist())
        return attention(*inputs, boundaries, scale=scaling)[None], None

    name = "flash_of_the_backend"
    AttentionInterface.register(name, attend)
    return name


def _import_windowed_tower(vision: Tower) -> tuple[Any, Any]:
    """Return transformers' class of a tower, and the function that makes its config."""
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as configs
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as towers

    full = list(vision.full_layers)
    config = partial(
        configs.Qwen2_5_VLVisionConfig, window_size=vision.window_size, fullatt_block_indexes=full
    )
    return towers.Qwen2_5_VisionTransformerPretrainedModel, config


def _import_deepstack_tower(vision: Tower) -> tuple[Any, Any]:
    from transformers.models.qwen3_vl import configuration_qwen3_vl as configs
    from transformers.models.qwen3_vl import modeling_qwen3_vl as towers

    config = partial(
        configs.Qwen3VLVisionConfig,
        num_position_embeddings=vision.positions,
        deepstack_visual_indexes=list(vision.deepstack),
    )
    return towers.Qwen3VLVisionModel, config


_TOWER_IMPORTERS = {"qwen2_5_vl": _import_windowed_tower, "qwen3_vl": _import_deepstack_tower}
