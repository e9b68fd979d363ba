"""The norms inside multi-head latent attention, which megatron-core builds with the epsilon of all norms."""

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from bundle.errors import EnvironmentUnfit

# Each norm, and the projection behind it, into which Transformer Engine folds it.
_NORMS = (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj"))


def set_norm_epsilon(chunk: torch.nn.Module, epsilon: float) -> None:
    """Gives the norms between the projections of every attention of a new GPTModel their own epsilon.

    Raises EnvironmentUnfit where megatron-core keeps them elsewhere.
    """
    for attention in chunk.modules():
        if isinstance(attention, MLASelfAttention):
            compressed = _NORMS if attention.config.q_lora_rank is not None else _NORMS[1:]
            for names in compressed:
                held: list[Any] = [getattr(attention, name, None) for name in names]
                norms = [module for module in held if hasattr(module, "eps")]
                if len(norms) != 1:
                    raise EnvironmentUnfit(
                        f"this megatron-core has {len(norms)} norms in {' and '.join(names)} of latent "
                        "attention, not 1: install a release that this version supports"
                    )
                norms[0].eps = epsilon
