"""The distributed optimizer without Transformer Engine."""

import functools
from collections.abc import Callable, Sized
from typing import Any


def quantize_only_what_there_is(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `quantize_param_shard` that does nothing for no FP8 parameters.

    Every optimizer step calls it, and the original refuses without Transformer Engine before it looks.
    """

    @functools.wraps(original)
    def quantize_param_shard(model_params: Sized, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if len(model_params) else None

    return quantize_param_shard
