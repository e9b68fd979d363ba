"""Version-adapted access to the real megatron-core, 0.12 to the newest.

Differences between releases are settled here, by what their signatures accept, never by the version number.
Private names are reached through their module at call time, because a patch may have replaced them.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=256)
def _read_parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the parameters; None when the function takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def can_take_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` has a parameter of this name (or takes any keyword)."""
    names = _read_parameters(function)
    return names is None or name in names


def filter_keywords(function: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """Return the keywords that `function` accepts here.

    Use it only for keywords that mean nothing to a release that lacks them (`vp_stage` before 0.13). A
    keyword that changes the result must be passed plainly: a release without it then fails by name.
    """
    return {name: value for name, value in keywords.items() if can_take_keyword(function, name)}
