"""The configuration, the specs, the GPTModel and the loss of a model chunk, for every supported release.

It also builds single attention layers.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from bundle.architectures import MLA, Architecture, MoE, pad_vocab_to_lcm
from bundle.architectures.tensors import SINKS_NAME
from bundle.errors import EnvironmentUnfit
from bundle.mcore import filter_keywords, gated_delta, rotary, routers
from bundle.mcore.groups import Groups
from bundle.recipe import Parallel, Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_transformer_config(recipe: Recipe, backend_options: Mapping[str, Any]) -> TransformerConfig:
    """Return the configuration of the whole model.

    `backend_options` are the backend's (fusions, grouped GEMM, FP8). Raise whatever megatron-core raises for
    a combination that it refuses.
    """
    architecture, model, parallel = recipe.architecture, recipe.model, recipe.parallel
    dtype = DTYPES[model.dtype]
    options: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.kv_channels,
        "layernorm_epsilon": architecture.norm_epsilon,
        "normalization": "RMSNorm",
        "qk_layernorm": architecture.qk_layernorm,
        "add_bias_linear": architecture.linear_bias,
        "add_qkv_bias": architecture.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": architecture.attention_dropout,
        "hidden_dropout": 0.0,
        "init_method_std": architecture.initializer_range,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sequence_parallel,
        "calculate_per_token_loss": True,
        "deterministic_mode": recipe.train.deterministic,
        # The schedules' default (batched) exchange swaps the two directions when pp is 2 and chunks
        # interleave, on a collective backend that matches messages by order (a known trap).
        "batch_p2p_comm": parallel.vpp is None,
        "overlap_p2p_comm": parallel.vpp is not None,
    }
    if parallel.pp > 1:
        options |= _build_stage_layout_options(parallel)
    if parallel.cp > 1:
        options["cp_comm_type"] = "p2p"
    if architecture.mtp_layers:
        options |= {
            "mtp_num_layers": architecture.mtp_layers,
            "mtp_loss_scaling_factor": model.mtp.loss_scale,
        }
    if model.recompute is not None:
        options |= _build_recompute_options(model.recompute)
    if architecture.gate_limit is not None:
        options |= _build_clamped_activation_options(architecture.gate_limit)
    if architecture.sinks:
        options["softmax_type"] = "learnable"
    if architecture.zero_centered_norms:
        options["layernorm_zero_centered_gamma"] = True
    if architecture.output_gate:
        options["attention_output_gate"] = True  # since 0.16
    if architecture.delta_net is not None:
        options |= gated_delta.build_config_fields(architecture.delta_net)
    if architecture.window is not None:
        # The number of keys before the query's own; each layer says whether it has a window.
        options["window_size"] = (architecture.window - 1, 0)
        options["window_attn_skip_freq"] = list(architecture.windows)
    if architecture.moe is not None:
        options |= _build_expert_options(architecture.moe) | {
            "moe_router_bias_update_rate": model.moe.bias_update_rate,
        }
        # With this option 0.16 and later ask RouterReplay for experts; earlier releases ask the router.
        options |= filter_keywords(TransformerConfig, moe_enable_routing_replay=model.router_replay)
    kind = TransformerConfig
    if architecture.mla is not None:
        kind = MLATransformerConfig
        fused = bool(backend_options.get("apply_rope_fusion"))
        options |= _build_mla_options(architecture, architecture.mla, is_fused=fused)
    return kind(**{**options, **backend_options})


def _build_clamped_activation_options(limit: float) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu  # since 0.15

    return {
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": limit,
    }


def _build_stage_layout_options(parallel: Parallel) -> dict[str, Any]:
    """Return the layout of the stages, or the lengths of the end stages.

    With two stages one length is enough. Where both are given, megatron divides the rest by the number of
    stages between, which is 0 (0.12; with interleaving, every release).
    """
    if parallel.pipeline_model_parallel_layout is not None:
        return {"pipeline_model_parallel_layout": parallel.pipeline_model_parallel_layout}  # since 0.13
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if parallel.pp == 2 and first is not None:
        last = None
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


def _build_recompute_options(recompute: Any) -> dict[str, Any]:
    if recompute.granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": recompute.method,
            "recompute_num_layers": recompute.layers,
        }
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}


def _build_expert_options(moe: MoE) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.topk,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        **({"moe_shared_expert_gate": True} if moe.shared_gate else {}),  # a field from 0.16 on
        "moe_layer_freq": list(moe.layer_pattern),
        "moe_router_score_function": moe.score_function,
        "moe_router_pre_softmax": moe.pre_softmax,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        "moe_router_num_groups": moe.groups,
        "moe_router_group_topk": moe.group_topk,
        "moe_router_enable_expert_bias": moe.expert_bias,
        # The engine adds the losses that balance experts itself, with the same numbers in every layout.
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


def _build_mla_options(architecture: Architecture, mla: MLA, *, is_fused: bool) -> dict[str, Any]:
    """Return the options of latent attention.

    Rotary settings are passed whole: their defaults changed in 0.14 and would change the softmax scale.
    Frequencies are not among them (`mcore.rotary`). Megatron is asked for plain positions, or for the class
    of embedding that its fused kernel takes.
    """
    scaling = architecture.rope_scaling
    softmax_mscale = scaling.softmax_mscale if scaling else 0.0
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": architecture.rotary_base,
        "rope_type": "yarn" if is_fused else "rope",
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        # Up to 0.13 the first scales the softmax, from 0.14 the second; equal values add no other scaling.
        "mscale": softmax_mscale,
        "mscale_all_dim": softmax_mscale,
    }


# Each norm, and the projection behind it, into which Transformer Engine folds it.
_LATENT_NORM_PROJECTIONS = (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj"))


@dataclasses.dataclass(frozen=True)
class Specs:
    """The specs from which megatron builds a chunk: the decoder's block spec and the MTP layers', if any."""

    decoder: Any
    mtp: Any | None


def build_softmax_attention_specs(
    config: TransformerConfig, chunk: int | None, *, transformer_engine: bool
) -> Specs:
    """Return megatron's own specs of model chunk `chunk` (None without interleaving), all with attention."""
    config = gated_delta.with_attention_only(config)
    build_block = gpt_layer_specs.get_gpt_decoder_block_spec
    decoder = build_block(
        config,
        use_transformer_engine=transformer_engine,
        **filter_keywords(build_block, normalization=config.normalization, vp_stage=chunk),
    )
    if not config.mtp_num_layers:
        return Specs(decoder, None)
    build_mtp_block = gpt_layer_specs.get_gpt_mtp_block_spec
    template = decoder
    build_layers = getattr(
        gpt_layer_specs, "get_gpt_decoder_layer_specs", None
    )  # since 0.16, as are MTP layers here
    if not decoder.layer_specs and build_layers is not None:
        # One more like the last of the decoder, wherever that is.
        last = build_layers(
            config, transformer_engine, **filter_keywords(build_layers, normalization=config.normalization)
        )[-1]
        template = dataclasses.replace(decoder, layer_specs=[last])
    mtp = build_mtp_block(
        config,
        template,
        use_transformer_engine=transformer_engine,
        **filter_keywords(build_mtp_block, vp_stage=chunk),
    )
    return Specs(decoder, mtp)


def set_chunk_if_interleaved(chunk: int | None) -> None:
    """Tell megatron's global state which model chunk is being built or run; None without interleaving."""
    if chunk is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)


def build_model(
    config: TransformerConfig,
    specs: Specs,
    architecture: Architecture,
    groups: Groups,
    chunk: int,
    *,
    max_sequence_length: int,
) -> torch.nn.Module:
    """Return the GPTModel of model chunk `chunk`, on the current device, with megatron's random weights."""
    stage = chunk if groups.vpp > 1 else None
    decoder = specs.decoder
    if architecture.delta_net is not None:
        decoder = gated_delta.replace_attention(decoder, architecture.delta_net, config, stage)
    built: torch.nn.Module = GPTModel(
        config,
        decoder,
        vocab_size=pad_vocab_to_lcm(architecture.vocab_size, groups.tp.size),
        max_sequence_length=max_sequence_length,
        pre_process=groups.is_first_stage(chunk),
        post_process=groups.is_last_stage(chunk),
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rotary_base,
        rotary_percent=architecture.rotary_fraction,
        mtp_block_spec=specs.mtp,
        # Images are put among the embeddings of whole sequences.
        scatter_embedding_sequence_parallel=architecture.vision is None,
        **filter_keywords(GPTModel, vp_stage=stage),
    )
    built.model_type = ModelType.encoder_or_decoder
    tie_head_to_mtp_embedding(built)
    if hasattr(built, "embedding"):
        built.embedding.register_forward_hook(_give_usual_strides)
    _mark_sinks_tensor_parallel(built)
    if architecture.linear_bias:
        _clone_expert_outputs(built)
        _mark_expert_biases_tensor_parallel(built)
    rotary.use_mrope(built, architecture)
    rotary.apply_rope_scaling(built, architecture)
    if architecture.moe is not None and architecture.moe.groups is not None:
        routers.set_group_score_topk(built, architecture.moe.group_score_topk)
    if architecture.mla is not None:
        _set_latent_norm_epsilon(built, architecture.mla.norm_epsilon)
    return built


def _give_usual_strides(_module: torch.nn.Module, _inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [s, b, h] with the strides of a new tensor.

    megatron transposes them: with b = 1 the stride of that dimension is unusual, norms hand it on, and torch
    multiplies such rows one by one where no weight is trained.
    """
    return hidden.reshape(hidden.shape)


def _mark_sinks_tensor_parallel(built: torch.nn.Module) -> None:
    """Make the norm of gradients count every rank's learned sinks: each of its heads has one.

    Megatron takes an unmarked parameter for a copy of the first rank's.
    """
    for name, parameter in built.named_parameters():
        if name.endswith(f".{SINKS_NAME}") and not getattr(parameter, "tensor_model_parallel", False):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def _clone_expert_outputs(built: torch.nn.Module) -> None:
    """Give each of megatron's local experts a result of its own, to which it adds its bias in place.

    A layer that has nothing to reduce returns what autograd calls a view, and autograd refuses the change in
    place.
    """
    for name, module in built.named_modules():
        if re.search(r"\.local_experts\.\d+\.linear_fc2$", name):
            module.register_forward_hook(lambda _module, _inputs, output: (output[0].clone(), output[1]))


def _mark_expert_biases_tensor_parallel(built: torch.nn.Module) -> None:
    """Make the biases of experts be reduced and counted in the norm of gradients as their weights are.

    Megatron takes the bias of every row-parallel layer for a copy that tensor-parallel ranks share. Under
    sequence parallelism it adds up their gradients, and it counts the first rank's. But the biases belong to
    different experts.
    """
    for name, parameter in built.named_parameters():
        if ".experts." in name and "bias" in name.rpartition(".")[2]:
            parameter.sequence_parallel = False
            if not getattr(parameter, "tensor_model_parallel", False):
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def merge_images(
    model: Any, ids: torch.Tensor, images: torch.Tensor, features: Sequence[torch.Tensor], index: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the decoder's input [s, b, h] for tokens `ids` [b, s], and the features to add to it.

    Where `index` [b, s] is not negative, that row of `images` [n, h] takes the token's place, and that row of
    `features` is added there. Under sequence parallelism the results are this rank's part. Nothing is read
    back from the device, and no shape depends on the numbers.
    """
    index = index.t()
    is_image, rows = (index >= 0).unsqueeze(-1), index.clamp(min=0)
    embedded = model.embedding(input_ids=ids, position_ids=None)
    backgrounds = [embedded, *[embedded.new_zeros(())] * len(features)]
    placed = [
        torch.where(is_image, source[rows].to(embedded.dtype), other).contiguous()  # as stages want it
        for source, other in zip((images, *features), backgrounds, strict=True)
    ]
    if model.config.sequence_parallel:
        placed = [tensor_parallel.scatter_to_sequence_parallel_region(tensor) for tensor in placed]
    return placed[0], placed[1:]


def tie_head_to_mtp_embedding(built: Any) -> None:
    """Let a tied head behind the first stage use the copy of the embedding that MTP has there.

    Megatron allocates another one beside it, which no pass reads. It refuses to save a model that has it, and
    waits for its gradient where gradients are reduced in the backward pass. The copy is the head in passes
    that leave MTP out as well (`mcore.mtp.disable_mtp`), where megatron asks for the other.
    """
    tied = built.share_embeddings_and_output_weights
    if tied and built.post_process and built.mtp_process and not built.pre_process:
        built.output_layer.weight = None
        weight = built.embedding.word_embeddings.weight
        built.shared_embedding_or_output_weight = lambda: weight
        # The head may add its gradient itself. The embedding's own gradient must then be added, too.
        weight.zero_out_wgrad = True


def _set_latent_norm_epsilon(chunk: torch.nn.Module, epsilon: float) -> None:
    """Set the epsilon of the norms between the projections of every attention of a new GPTModel.

    Raise EnvironmentUnfit where megatron-core keeps them elsewhere.
    """
    for attention in chunk.modules():
        if isinstance(attention, MLASelfAttention):
            compressed = (
                _LATENT_NORM_PROJECTIONS
                if attention.config.q_lora_rank is not None
                else _LATENT_NORM_PROJECTIONS[1:]
            )
            for names in compressed:
                candidates: list[Any] = [getattr(attention, name, None) for name in names]
                norms = [module for module in candidates if hasattr(module, "eps")]
                if len(norms) != 1:
                    raise EnvironmentUnfit(
                        f"this megatron-core has {len(norms)} norms in {' and '.join(names)} of latent"
                        " attention, not 1. Install a release that this version supports"
                    )
                norms[0].eps = epsilon


def compute_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return megatron's loss [s, b] of this rank's columns of the logits [s, b, v / tp].

    The groups are the current ones.
    """
    loss: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits, labels, smoothing)
    return loss


def bypass_head_and_report_weight(model: Any, receive: Callable[[torch.Tensor], None]) -> None:
    """Make the head of a bare GPTModel return its input [s, b, h] for the logits.

    All tensor-parallel ranks get the same, and add up their gradients. `receive` is called with the weight
    of each pass: the head's own, the embedding's if tied, or a constant (`mcore.mtp.detach_mtp`).
    """
    layer = model.output_layer

    def return_input(hidden: torch.Tensor, weight: torch.Tensor | None = None, **_: Any) -> Any:
        receive(layer.weight if weight is None else weight)
        if layer.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(hidden), None
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden), None

    layer.forward = return_input


def build_sink_attention(config: TransformerConfig) -> torch.nn.Module:
    """Return the unfused attention of a layer, with the heads of this rank and a learned sink for each."""
    config = copy.copy(config)
    config.softmax_type = "learnable"
    attention: torch.nn.Module = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    return attention


def build_cross_attention_layer(
    config: TransformerConfig, tp: dist.ProcessGroup, cp: dist.ProcessGroup
) -> torch.nn.Module:
    """Return a layer whose heads are divided over `tp`, whatever the layout's own groups are (since 0.13)."""
    from megatron.core import process_groups_config

    kinds = ("ProcessGroupCollection", "ModelCommProcessGroups")  # the latter to 0.14
    kind = next(kind for kind in kinds if hasattr(process_groups_config, kind))
    groups = getattr(process_groups_config, kind)()
    groups.tp, groups.cp = tp, cp
    parts = CrossAttentionSubmodules(
        ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear
    )
    group_options = filter_keywords(CrossAttention.__init__, pg_collection=groups, model_comm_pgs=groups)
    attention: torch.nn.Module = CrossAttention(config, parts, 1, **group_options)
    return attention
