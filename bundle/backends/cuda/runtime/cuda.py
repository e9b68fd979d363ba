"""The object through which the rooms above use NVIDIA GPUs (mcore.runtime.Runtime)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends.cuda.runtime.options import options
from bundle.capabilities import CUDA
from bundle.errors import EnvironmentUnfit
from bundle.mcore import gpt
from bundle.recipe import Recipe


class CudaRuntime:
    """Everything that megatron needs to know of an NVIDIA GPU."""

    collectives = CUDA.collectives

    def device(self, local_rank: int) -> torch.device:
        """The GPU with this rank's number among the visible ones, made current: megatron builds on that."""
        visible = torch.cuda.device_count()
        if local_rank >= visible:
            raise EnvironmentUnfit(
                f"local rank {local_rank} has no GPU: {visible} visible; start at most {visible} ranks on"
                " this node (devices.per_node), or show more of them (CUDA_VISIBLE_DEVICES)"
            )
        torch.cuda.set_device(local_rank)
        return torch.device(CUDA.device, local_rank)

    def megatron(self) -> AbstractContextManager[None]:
        """The context in which megatron is called: nothing is needed here."""
        return nullcontext()

    def options(self, recipe: Recipe) -> dict[str, Any]:
        """TransformerConfig fields for this recipe: attention, grouped GEMM, fusions, FP8."""
        major, minor = torch.cuda.get_device_capability()
        return options(recipe, generation=f"{major}.{minor}")

    def specs(self, recipe: Recipe, config: TransformerConfig, chunk: int | None) -> gpt.Specs:
        """Megatron's specs of model chunk `chunk` (None without interleaving), of Transformer Engine."""
        return gpt.specs(config, chunk, transformer_engine=True)
