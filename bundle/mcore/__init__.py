"""Version-adapted access to the real megatron-core, 0.12 to the newest.

What a release names differently is settled here, by what its signatures accept, never by its version number.
Private names are reached through their module at call time, so that an applied patch is always met.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=256)
def _read_parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the parameters; None when the function takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` has a parameter of this name (or takes any keyword)."""
    names = _read_parameters(function)
    return names is None or name in names


def filter_keywords(function: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """The keywords that `function` accepts here.

    Only for keywords that mean nothing to a release that lacks them (`vp_stage` before 0.13). What changes
    the result must be passed plainly, so that a release without it fails by name.
    """
    return {name: value for name, value in keywords.items() if accepts(function, name)}
