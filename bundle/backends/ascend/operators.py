"""Where torch-npu's operators are found: in torch.ops, whoever has registered them."""

from collections.abc import Callable
from typing import Any

import torch

from bundle.errors import EnvironmentUnfit


def find_operator(name: str) -> Callable[..., Any]:
    """Return torch.ops.npu's operator of that name. Raises EnvironmentUnfit where torch-npu is not loaded."""
    function: Callable[..., Any] | None = getattr(torch.ops.npu, name, None)
    if function is None:
        raise EnvironmentUnfit(
            f"torch has no operator npu::{name}. Install the torch-npu for this torch and CANN, and import"
            " it before the model is built"
        )
    return function
