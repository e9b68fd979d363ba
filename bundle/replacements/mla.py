"""Multi-latent attention: packed input, its projections, and its gradients over tensor-parallel ranks."""

import copy
import dataclasses
import functools
from typing import Any

import torch
from torch.nn.functional import pad

from bundle.mcore.context import ProcessWideOverride
from bundle.replacements import Function, make_wrapper

keeps_full_tables = ProcessWideOverride(False)  # those of rotary positions, in `keep_full_rotary_table`


@make_wrapper
def pad_value_heads(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Return `MultiLatentAttention.__init__` that gives packed values the width of the queries.

    Flash kernels take packed input only with one width for all heads. The padding is cut off again
    before the layer flattens its heads. It adds hooks to the new instance, for the attention of any backend.
    """
    original(self, *args, **kwargs)
    if getattr(self.config, "experimental_attention_variant", None) is None:
        width = self.config.v_head_dim
        self.core_attention.register_forward_pre_hook(
            functools.partial(_build_padded_value_arguments, width), with_kwargs=True
        )
        self.core_attention.register_forward_hook(
            functools.partial(_strip_value_padding, width), with_kwargs=True
        )


def _build_padded_value_arguments(width: int, attention: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments with the value [t, n, width] padded to the head width of the query."""
    query, key, value, *rest = args
    if _is_packed(kwargs) and value.shape[-1] == width:
        value = pad(value, (0, query.shape[-1] - width))
    if hasattr(attention, "hidden_size_per_attention_head_v"):  # Transformer Engine compares with it
        attention.hidden_size_per_attention_head_v = value.shape[-1]
    return (query, key, value, *rest), kwargs


def _strip_value_padding(
    width: int, attention: Any, args: Any, kwargs: Any, output: torch.Tensor
) -> torch.Tensor:
    """Return the output [t, n * width], without what `_build_padded_value_arguments` added to each head."""
    padded = args[2].shape[-1]
    if not _is_packed(kwargs) or padded == width:
        return output
    heads = output.unflatten(-1, (-1, padded)) if output.shape[-1] != padded else output
    return heads[..., :width].flatten(-2)


def _is_packed(kwargs: Any) -> bool:
    packed = kwargs.get("packed_seq_params")
    return packed is not None and packed.qkv_format == "thd"


@make_wrapper
def compute_packed_qkv(
    original: Function,
    self: Any,
    hidden_states: torch.Tensor,
    key_value_states: Any = None,
    position_ids: Any = None,
    packed_seq_params: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `MLASelfAttention.get_query_key_value_tensors` for packed input, as 0.14 has it.

    Earlier releases read the boundaries without padding and let YaRN cut its table by context-parallel rank;
    0.12 keeps a batch dimension of 1. The method returns query, key, value: [t, n, width].
    """
    packed = packed_seq_params
    if packed is None or packed.qkv_format != "thd":
        return original(self, hidden_states, key_value_states, position_ids, packed, *args, **kwargs)
    if packed.cu_seqlens_q_padded is not None:
        packed = copy.copy(packed)
        packed.cu_seqlens_q = packed.cu_seqlens_q_padded
        packed.cu_seqlens_kv = packed.cu_seqlens_kv_padded
    with keeps_full_tables.set(True):
        heads = original(self, hidden_states, key_value_states, position_ids, packed, *args, **kwargs)
    return tuple(x.squeeze(1) if x.ndim == 4 else x for x in heads)


@make_wrapper
def keep_full_rotary_table(original: Function, table: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return `get_pos_emb_on_this_cp_rank`, as rotary embeddings see it, that may leave a table whole.

    Each packed sequence then takes its own positions from the table.
    """
    return table if keeps_full_tables.get() else original(table, *args, **kwargs)


@make_wrapper
def rotate_packed_with_full_table(
    original: Function, t: torch.Tensor, freqs: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return `apply_rotary_pos_emb`, as multi-latent attention sees it, for packed input below 0.14.

    Its caller has cut the table to as many rows as this rank has tokens. That is too few for a sequence
    that is spread over several ranks. The memory behind the slice still has the other rows.
    """
    if kwargs.get("cu_seqlens") is None:
        return original(t, freqs, *args, **kwargs)
    rows = freqs.untyped_storage().nbytes() // freqs.element_size() // freqs.stride(0)
    table = freqs.as_strided((rows, *freqs.shape[1:]), freqs.stride(), 0)
    if t.ndim == 4:  # [t, 1, n, width] in 0.12
        return original(t.squeeze(1), table, *args, **kwargs).unsqueeze(1)
    return original(t, table, *args, **kwargs)


def drop_uncompressed_query_norm(original: Function) -> Function:
    """Return `MLASelfAttention._resolve_qk_norm_config` that leaves uncompressed queries without a norm.

    Their projection is the spec's, as it was before 0.19.
    """
    from megatron.core.transformer.identity_op import IdentityOp

    @functools.wraps(original)
    def _resolve_qk_norm_config(self: Any, submodules: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.q_lora_rank is not None:
            return original(self, submodules, *args, **kwargs)
        plain_submodules = dataclasses.replace(submodules, q_layernorm=IdentityOp)
        resolved = original(self, plain_submodules, *args, **kwargs)
        return {**resolved, "linear_q_proj": submodules.linear_q_proj}

    return _resolve_qk_norm_config


def provide_duplicated_linear(original: Any) -> type:
    """Return our duplicated linear layer for `TELinear`, which is not a class without Transformer Engine.

    Latent attention compares a down projection's class with it, and builds an equal one whole on every rank.
    """
    from bundle.backends.local import DuplicatedLinear

    return DuplicatedLinear


@make_wrapper
def sum_rotary_key_gradient(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Return `MLASelfAttention.__init__` whose rotary keys get their gradient from the heads of all ranks.

    A hook on the down projection sums it, since each rank computes the whole rotary key there. The compressed
    part of the same projection is summed already, with the gradient of the up projection's input.
    """
    original(self, *args, **kwargs)
    group = _find_tp_group_without_sp(self)
    widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]

    def hook_rotary_key(_module: Any, _inputs: Any, output: Any) -> Any:
        combined, *rest = output
        if combined.shape[-1] != sum(widths):  # split over the ranks
            return output
        latent, rotary = combined.split(widths, dim=-1)
        if rotary.requires_grad:
            rotary.register_hook(functools.partial(sum_over_ranks, group=group))
        return (torch.cat([latent, rotary], dim=-1), *rest)

    if group is not None:
        self.linear_kv_down_proj.register_forward_hook(hook_rotary_key)


@make_wrapper
def hook_query_norm_gradient_division(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Return `MLASelfAttention.__init__` whose norm of compressed queries gets a share of its gradient.

    The later sum over the ranks is then the whole gradient. A norm that is part of a projection has another
    name and is not summed.
    """
    original(self, *args, **kwargs)
    group = _find_tp_group_without_sp(self)
    if group is None or not self.config.qk_layernorm or self.config.q_lora_rank is None:
        return
    for parameter in self.q_layernorm.parameters():
        parameter.register_hook(lambda gradient: gradient / group.size())


def _find_tp_group_without_sp(attention: Any) -> Any:
    """Return the ranks that share the heads and hold the whole sequence each; None without such a group."""
    collection = getattr(attention, "pg_collection", None) or attention.model_comm_pgs  # the latter to 0.14
    group = collection.tp
    return None if attention.config.sequence_parallel or group.size() == 1 else group


def sum_over_ranks(gradient: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of a gradient over the ranks of a group; `gradient` itself is not changed."""
    gradient = gradient.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(gradient, group=group)
    return gradient
