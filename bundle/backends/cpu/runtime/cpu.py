"""The object through which the rooms above use the cpu (mcore.runtime.Runtime)."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.backends.cpu.capabilities import CPU
from bundle.backends.cpu.runtime.mode import megatron_calls
from bundle.backends.cpu.runtime.specs import adapted
from bundle.errors import UsageError
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
        """TransformerConfig fields for this recipe: the attention kernel; fusions stay off, as by default."""
        fp8 = recipe.model.fp8
        if fp8 is not None:
            raise UsageError(f"model.fp8: {CPU.fp8_refusal(fp8.scaling, fp8.format, None)}")
        return {"attention_backend": AttnBackend[recipe.model.attention]}

    def specs(self, config: TransformerConfig, chunk: int | None) -> gpt.Specs:
        """Megatron's specs of model chunk `chunk` (None without interleaving), in the cpu's layers."""
        given = gpt.specs(config, chunk, transformer_engine=False)
        return gpt.Specs(adapted(given.decoder), adapted(given.mtp))
