"""A reference model for full weights: a copy on the host that takes the place of the weights for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class HostReference:
    """Copies of all parameters and buffers of model chunks, on the host, as they are at construction."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        """Copy them; that takes as much memory of the host as the weights take of the device."""
        self._tensors = list(_iterate_tensors(models))
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Make the copies the weights inside; afterwards the weights are what they were, bit by bit."""
        current = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]
        self._write(self._copies)
        try:
            yield
        finally:
            self._write(current)

    def _write(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors, values, strict=True):
                tensor.copy_(value)


def _iterate_tensors(models: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()
