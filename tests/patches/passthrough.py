"""A wrapper that changes nothing, to put on every target of every release."""

import functools
import inspect
from typing import Any


def through(original: Any) -> Any:
    """Returns a function that calls the original; what is no function stays as it is."""
    if not inspect.isfunction(original):
        return original

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return wrapped
