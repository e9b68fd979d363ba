"""Distributed checkpoints of old releases: newer torch and numpy, and files that could run code."""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from bundle.mcore import unpickling


def name_the_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `FileSystemWriterAsync.write_preloaded_data` that works with torch 2.8 and later (0.12).

    There torch's `_write_item` has one more argument, which 0.12 does not pass.
    """
    module: Any = sys.modules[original.__module__]

    @functools.wraps(original)
    def write_preloaded_data(*args: Any, **kwargs: Any) -> Any:
        write_item = module._write_item
        if "serialization_format" not in inspect.signature(write_item).parameters:
            return original(*args, **kwargs)
        from torch.distributed.checkpoint.filesystem import SerializationFormat

        module._write_item = functools.partial(
            write_item, serialization_format=SerializationFormat.TORCH_SAVE
        )
        try:  # mcore calls this in a child process of its own, so that no thread sees the name change
            return original(*args, **kwargs)
        finally:
            module._write_item = write_item

    return write_preloaded_data


def with_product(original: types.ModuleType) -> types.ModuleType:
    """Returns numpy as it is called before 2.0, with `product`, in one module of megatron only (to 0.15)."""
    older = types.ModuleType(original.__name__, original.__doc__)
    vars(older).update(vars(original), product=original.prod)
    return older


def data_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loader of common state that unpickles data only, as 0.14 does.

    A checkpoint is somebody's file, and unpickling it freely runs whatever is in it.
    """

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        with unpickling.weights_only():
            return original(*args, **kwargs)

    return load
