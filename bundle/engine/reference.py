"""The reference model of a training of full weights: a copy on the host that is swapped in to compute."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class HostReference:
    """A copy of all parameters and buffers of model chunks in host memory, made at construction."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        """Copy the weights: host memory of the size of this rank's weights, twice that during `swap_in`."""
        self._tensors = list(_iterate_tensors(models))
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Give the models the copied values inside the context; restore the current ones exactly after it."""
        current = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]
        self._overwrite_model_tensors(self._copies)
        try:
            yield
        finally:
            self._overwrite_model_tensors(current)

    def _overwrite_model_tensors(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors, values, strict=True):
                tensor.copy_(value)


def _iterate_tensors(models: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()
