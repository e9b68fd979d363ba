"""The specs, the GPTModel and the loss of one model chunk."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.architectures import Architecture, padded_vocabulary
from bundle.errors import EnvironmentUnfit
from bundle.mcore import rotary
from bundle.mcore.groups import Groups
from bundle.mcore.signatures import known

# Each norm, and the projection behind it, into which Transformer Engine folds it.
_NORMS = (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj"))


@dataclass(frozen=True)
class Specs:
    """What megatron builds a chunk from: the decoder's block spec and the MTP layers', if there are any."""

    decoder: Any
    mtp: Any | None


def specs(config: TransformerConfig, chunk: int | None, *, transformer_engine: bool) -> Specs:
    """Megatron's own specs of model chunk `chunk` (None without interleaving)."""
    block = gpt_layer_specs.get_gpt_decoder_block_spec
    decoder = block(
        config,
        use_transformer_engine=transformer_engine,
        **known(block, normalization=config.normalization, vp_stage=chunk),
    )
    if not config.mtp_num_layers:
        return Specs(decoder, None)
    layers = gpt_layer_specs.get_gpt_mtp_block_spec
    mtp = layers(config, decoder, use_transformer_engine=transformer_engine, **known(layers, vp_stage=chunk))
    return Specs(decoder, mtp)


def enter_chunk(chunk: int | None) -> None:
    """Tells megatron's global state which model chunk is being built or run; None without interleaving."""
    if chunk is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)


def model(
    config: TransformerConfig,
    of: Specs,
    architecture: Architecture,
    groups: Groups,
    chunk: int,
    *,
    max_sequence_length: int,
) -> torch.nn.Module:
    """The GPTModel of model chunk `chunk`, on the current device, with megatron's own random weights."""
    built: torch.nn.Module = GPTModel(
        config,
        of.decoder,
        vocab_size=padded_vocabulary(architecture.vocab_size, groups.tp.size),
        max_sequence_length=max_sequence_length,
        pre_process=groups.is_first_stage(chunk),
        post_process=groups.is_last_stage(chunk),
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rotary_base,
        rotary_percent=architecture.rotary_fraction,
        mtp_block_spec=of.mtp,
        **known(GPTModel, vp_stage=chunk if groups.vpp > 1 else None),
    )
    built.model_type = ModelType.encoder_or_decoder
    rotary.stretch(built, architecture)
    if architecture.mla is not None:
        _set_norm_epsilon(built, architecture.mla.norm_epsilon)
    return built


def _set_norm_epsilon(chunk: torch.nn.Module, epsilon: float) -> None:
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


def smoothed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Megatron's loss [s, b] of this rank's columns of the logits [s, b, v / tp], in the current groups."""
    loss: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits, labels, smoothing)
    return loss
