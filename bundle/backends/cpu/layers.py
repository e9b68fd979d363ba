"""Layers that megatron has in no form for a cpu: norms under sequence parallelism, whole linear layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from bundle.errors import UsageError


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm, as `config.normalization` says, over the last dimension.

    Its weights say whether they see only this rank's part of the sequence (`sequence_parallel`): then
    finalize_model_grads sums their gradients over the tensor parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.layernorm_zero_centered_gamma or config.normalization not in ("RMSNorm", "LayerNorm"):
            raise UsageError(
                f"the cpu has no norm {config.normalization} with zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma}: it has RMSNorm and LayerNorm with plain weights"
            )
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.register_parameter("bias", None)
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        shape = self.weight.shape
        if self.bias is None:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)


class DuplicatedLinear(torch.nn.Module):
    """What TELinear is with parallel_mode="duplicated": the down projections of latent attention.

    Megatron's own specs without Transformer Engine split them by columns, and the gather behind drops the
    other ranks' part of the gradient of the rotary key.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = False,
        **layout: Any,  # how the weight would be split and communicated: it is not
    ) -> None:
        super().__init__()
        if bias:
            raise UsageError("the cpu's duplicated linear layer has no bias")
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            name = tensor_parallel.random.get_data_parallel_rng_tracker_name()
            with tensor_parallel.get_cuda_rng_tracker().fork(name):
                init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., output_size], and no bias to add later."""
        return self._forward_impl(input=x, weight=self.weight), None

    def _forward_impl(self, input: Tensor, weight: Tensor) -> Tensor:
        """The product, under the name that megatron's other linear layers have for it."""
        return F.linear(input, weight)

    def get_extra_state(self) -> None:
        """Nothing; megatron's linear layers keep this place in checkpoints for FP8, and ours uses it."""

    def set_extra_state(self, state: Any) -> None:
        """Ignores what a layer with FP8 has left."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The whole weight, replicated over the tensor parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)
        return sharded
