"""The replacement functions of the patches, one module for each upstream area.

Each is `wrapper(original) -> replacement`, calls `original`, and copies nothing of it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def make_wrapper(function: Function) -> Callable[[Function], Function]:
    """Return the wrapper of a function that is called as the replacement is, with the original in front."""

    @functools.wraps(function)
    def wrapper(original: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return wrapper


def bind_passed_arguments(original: Function, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """Return the arguments of a call by the original's parameters. Raises TypeError as the call would."""
    return _read_signature(original).bind(*args, **kwargs)


_read_signature = functools.cache(inspect.signature)
