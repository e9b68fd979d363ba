"""Linear layers of megatron whose matrix products are FP8's, with the refusals of Transformer Engine's."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from bundle.backends.cpu.runtime.fp8.delayed import phase_of
from bundle.backends.cpu.runtime.fp8.operands import operands
from bundle.backends.cpu.runtime.fp8.product import product
from bundle.errors import JobFailed
from bundle.fp8 import SCALINGS
from bundle.mcore.signatures import known
from bundle.recipe.model import FP8


@cache
def in_fp8(base: type, fp8: FP8) -> type:
    """The linear layer `base` with FP8 products; equal to `base` in the eyes of megatron's specs."""
    return _SameAsBase(f"Fp8{base.__name__}", (_Products, base), {"fp8": fp8})


class _SameAsBase(type):
    """Megatron asks `linear_q_down_proj in [TELinear]`, and TELinear on cpu is our duplicated layer."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or any(base is other for base in cls.__bases__)

    __hash__ = type.__hash__


class _Products:
    """Stands before a linear layer of megatron and takes the place of its `_forward_impl`."""

    fp8: FP8
    config: Any
    training: bool

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        # Megatron's own choice of the group that Transformer Engine shares amaxes in.
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
        self._operands = operands(self.fp8, group)
        self._pads_rows = bool(options.get("is_expert"))  # so do Transformer Engine's grouped layers
        self._name = options.get("tp_comm_buffer_name") or type(self).__name__

    @property
    def _forward_impl(self) -> Callable[..., Tensor]:
        return self._multiply

    @_forward_impl.setter
    def _forward_impl(self, theirs: Any) -> None:
        """0.12 and 0.13 choose between two functions here, in every forward pass."""

    def get_extra_state(self) -> Any:
        """What checkpoints keep beside the weights (megatron's and Transformer Engine's name for it)."""
        return self._operands.state()

    def set_extra_state(self, state: Any) -> None:
        """Takes that up; a checkpoint of a model without FP8 has None here."""
        self._operands.restore(state or [])

    def _multiply(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **fusions: Any,
    ) -> Tensor:
        """[..., out]: the input of all tensor-parallel ranks where they share the sequence, times the weight.

        Gathered before it is rounded: Transformer Engine rounds each rank's part and gathers that, by one
        scale for all of them.
        """
        share = mappings.gather_from_sequence_parallel_region
        copy = mappings.copy_to_tensor_model_parallel_region
        if sequence_parallel:
            input = share(input, **known(share, group=tp_group))
        elif allreduce_dgrad:
            input = copy(input, **known(copy, group=tp_group))
        self._refuse(input, weight)
        return product(input, weight, bias, self._operands, phase_of(training=self.training))

    def _refuse(self, x: Tensor, weight: Tensor) -> None:
        multiple, source = SCALINGS[self.fp8.scaling].rows, SCALINGS[self.fp8.scaling].source
        outputs, inputs = weight.shape
        resize = "change the model's sizes or parallel.tp"
        sizes = [("input features", inputs, resize), ("output features", outputs, resize)]
        if not self._pads_rows:
            rows = math.prod(x.shape[:-1])
            sizes.append(("rows", rows, "pad the tokens by recipe.alignment with this scaling (Packing)"))
        wrong = [f"{size} {what} on this rank: {change}" for what, size, change in sizes if size % multiple]
        if wrong:
            raise JobFailed(
                f"{self.fp8.scaling} FP8 multiplies in multiples of {multiple} ({source}). Layer"
                f" {self._name}, input {list(x.shape)}, weight {list(weight.shape)}:",
                wrong,
            )
