"""Which weights a rank counts in the gradient norm: those that are marked as its share of a split weight."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def count_whole_weights_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns TELinear's `__init__` that marks no duplicated weight as one rank's share (to 0.16).

    Transformer Engine marks the weight of every linear layer.
    """

    @functools.wraps(original)
    def __init__(self: torch.nn.Module, *args: Any, parallel_mode: str | None, **kwargs: Any) -> None:
        original(self, *args, parallel_mode=parallel_mode, **kwargs)
        if parallel_mode == "duplicated":
            for parameter in self.parameters():
                parameter.tensor_model_parallel = False  # type: ignore[attr-defined]

    return __init__


def count_expert_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns TEGroupedLinear's `__init__` that marks every expert's weights as one rank's share (to 0.18).

    They are, whether experts are split or shared out. Transformer Engine marks them itself to 2.12. A bias
    behind a row-parallel product is whole on every rank.
    """

    @functools.wraps(original)
    def __init__(self: torch.nn.Module, *args: Any, parallel_mode: str | None, **kwargs: Any) -> None:
        original(self, *args, parallel_mode=parallel_mode, **kwargs)
        for name, parameter in self.named_parameters(recurse=False):
            if parallel_mode == "column" or (parallel_mode == "row" and name.startswith("weight")):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    return __init__
