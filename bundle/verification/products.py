"""Matrix products that torch runs as many small ones."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class BroadcastProductRecorder(TorchDispatchMode):
    """A mode that records the shapes of batched products in which one matrix is repeated for every entry.

    torch runs such a product where it cannot fold a batch of rows into one matrix: thousands of products of
    one row each. A batch with an unusual stride in a size-1 dimension is enough.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record it."""
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            left, right = args[-2:]
            if any(_is_repeated(operand) for operand in (left, right)):
                self.shapes.append((tuple(left.shape), tuple(right.shape)))
        return func(*args, **(kwargs or {}))


def _is_repeated(operand: Tensor) -> bool:
    return bool(operand.shape[0] > 1 and operand.stride(0) == 0)
