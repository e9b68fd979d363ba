"""The core attention that a backend without Transformer Engine's puts into layer specs."""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from bundle.architectures.tensors import SINKS_NAME
from bundle.capabilities import AttentionKernel
from bundle.errors import UsageError


class BaseCoreAttention(torch.nn.Module, ABC):
    """Takes the place of DotProductAttention in layer specs, with its arguments in every release from 0.12.

    One constructor for all backends: each of them says `name`, `select_kernel` and `attend`. What another
    release gives beside these arguments is refused by Python, not passed over.

    `softmax_offset` [heads of this rank]: learned sinks, by the name of Transformer Engine's; None without.
    `window`: so many keys does a query see, itself the last; None: all before it.
    """

    name: str
    has_sinks_and_windows = False  # whether `attend` computes them

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        model_comm_pgs: Any = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        if wrong := self.find_unsupported(config):
            raise UsageError(
                f"the core attention of mcore-bundle for {self.name} does not support these settings:", wrong
            )
        self.config, self.kernel = config, self.select_kernel(config)
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling divides by the layer's number before the softmax and multiplies inside
        # it, for the range of fp16: the product is this scale.
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.groups = pg_collection if pg_collection is not None else model_comm_pgs
        self.window = _find_window(config, layer_number)
        self.register_parameter(SINKS_NAME, None)
        if getattr(config, "softmax_type", "vanilla") == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            factory_options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, **factory_options))

    @classmethod
    def find_unsupported(cls, config: Any) -> list[str]:
        """Return the settings of this configuration that this attention does not compute."""
        wrong = []
        window, softmax = getattr(config, "window_size", None), getattr(config, "softmax_type", "vanilla")
        causal = window is not None and window[0] >= 0 and window[1] == 0
        if window is not None and not (cls.has_sinks_and_windows and causal):
            wrong.append(f"window_size={window}: sliding windows")
        if softmax != "vanilla" and not (cls.has_sinks_and_windows and softmax == "learnable"):
            wrong.append(f"softmax_type={softmax}: softmax sinks")
        return wrong

    @staticmethod
    @abstractmethod
    def select_kernel(config: Any) -> AttentionKernel:
        """Return the kernel whose refusals apply."""

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, packed: Any, kind: str
    ) -> Tensor:
        """Return [.., n, dv] from the inputs of `forward`: rows [s, b, heads, d], or packed [t, heads, d].

        `packed`: megatron's PackedSeqParams of thd input, or None; `kind`: the name of the AttnMaskType.
        """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return [s, b, n * dv] from [s, b, heads, d]; packed (thd): [t, n * dv] from [t, heads, d].

        `attention_mask`: bool, True = hidden; the backends differ in the shapes that they take.
        """
        if attention_bias is not None:
            raise UsageError(
                f"attention_bias: the core attention of mcore-bundle for {self.name} does not support an"
                " attention bias, which is added to the attention scores. Call it without this argument"
            )
        kind = (attn_mask_type or self.attn_mask_type).name
        packed = packed_seq_params if getattr(packed_seq_params, "qkv_format", None) == "thd" else None
        reasons = self.kernel.list_shape_refusals(
            layout="bshd" if packed is None else "thd",
            mask=kind,
            qk_head_dim=query.shape[-1],
            v_head_dim=value.shape[-1],
        )
        if reasons:
            raise UsageError(
                f"the core attention of mcore-bundle for {self.name} does not support this model:", reasons
            )
        # The latent attention of 0.12 leaves a batch dimension of 1 in packed input, and wants it back.
        batched = packed is not None and query.dim() == 4
        if batched:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        with self._fork_random_state():
            out = self.attend(query, key, value, attention_mask, packed, kind).flatten(-2)
        return out.unsqueeze(1) if batched else out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the sinks, cut by heads; an empty dict without sinks."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {SINKS_NAME: 0}, sharded_offsets
        )
        return sharded

    def find_context_group(self, packed: Any) -> dist.ProcessGroup | None:
        """Return the ranks that share these sequences; None for one rank.

        Dynamic CP has its own in the batch.
        """
        if getattr(packed, "cp_group", None) is not None:
            group = packed.cp_group
        elif getattr(packed, "local_cp_size", None) == 1 or self.config.context_parallel_size == 1:
            return None
        else:
            group = getattr(self.groups, "cp", None) or parallel_state.get_context_parallel_group()
        return group if group.size() > 1 else None

    @property
    def dropout_rate(self) -> float:
        """The share of attention weights that is dropped now."""
        return float(self.dropout) if self.training else 0.0

    def _fork_random_state(self) -> AbstractContextManager[None]:
        """Return the context with the random state of dropout.

        TP ranks have other heads and need other dropout.
        """
        if self.dropout_rate == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        fork: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
        return fork


def _find_window(config: Any, layer_number: int) -> int | None:
    """Return the number of keys that a query of this layer (counted from 1) sees; None: all before it."""
    if getattr(config, "window_size", None) is None:
        return None
    from megatron.core.transformer.utils import is_layer_window_attention  # since 0.15

    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return int(config.window_size[0]) + 1 if windowed else None
