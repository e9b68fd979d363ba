"""Mixture of experts without an accelerator and without Transformer Engine."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def splits_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `maybe_move_tensor_to_cpu` that makes numbers of a tensor which is on the cpu already.

    The original converts only what it has moved, and the all-to-all wants its split sizes as numbers.
    """

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
        moved = original(tensor, as_numpy, *args, **kwargs)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    return maybe_move_tensor_to_cpu


def without_te_gemm(original: Any) -> None:
    """Returns None for `te_general_gemm`, as the router expects without Transformer Engine.

    There it asks whether the name is None, and nothing has bound it.
    """
