"""The object through which the rooms above use the cpu (mcore.runtime.Runtime)."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends.cpu.runtime.mode import megatron_calls
from bundle.backends.cpu.runtime.specs import adapted
from bundle.capabilities import CPU
from bundle.mcore import gpt
from bundle.recipe import Recipe


class CpuRuntime:
    """Everything that megatron needs to know of a cpu."""

    collectives = CPU.collectives

    def device(self, local_rank: int) -> torch.device:
        """The cpu, for every rank of this machine."""
        return torch.device(CPU.device)

    def megatron(self) -> AbstractContextManager[None]:
        """The context in which megatron is called."""
        return megatron_calls()

    def options(self, recipe: Recipe) -> dict[str, Any]:
        """TransformerConfig fields for this recipe: the attention kernel; fusions stay off, as by default.

        FP8 is not told to megatron, which would look for Transformer Engine's contexts and checkpoints: it is
        in the layers of the specs.
        """
        return {"attention_backend": AttnBackend[CPU.attention(recipe, None).value]}

    def specs(self, recipe: Recipe, config: TransformerConfig, chunk: int | None) -> gpt.Specs:
        """Megatron's specs of model chunk `chunk` (None without interleaving), in the cpu's layers."""
        given, fp8 = gpt.specs(config, chunk, transformer_engine=False), recipe.model.fp8
        return gpt.Specs(adapted(given.decoder, fp8), adapted(given.mtp, fp8))
