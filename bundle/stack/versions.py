"""Version numbers as decisions compare them: on the base version, because the rest of the string lies.

The tag core_v0.17.0 calls itself 0.17.0rc0, which PEP 440 puts neither in `>=0.17` nor in `<0.17`.
"""

import operator
import re
from collections.abc import Callable
from typing import Any

from packaging.version import InvalidVersion, Version

_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def parse(version: str) -> Version | None:
    """The version, or None when PEP 440 cannot read it."""
    try:
        return Version(version)
    except InvalidVersion:
        return None


def base(version: str) -> str | None:
    """The release number alone ("0.16.0" of "0.16.0rc0+g1234abc"); None when PEP 440 cannot read it."""
    parsed = parse(version)
    return parsed.base_version if parsed else None


def minor(version: str) -> tuple[int, int] | None:
    """The first two numbers of the release ((0, 16) of "0.16.1rc0"); None when PEP 440 cannot read it."""
    parsed = parse(version)
    return (parsed.major, parsed.minor) if parsed else None


def within(version: str, specifier: str) -> bool | None:
    """Whether the base version is inside a PEP 508 range ("" is every one); None when it cannot be read."""
    number = base(version)
    if number is None:
        return None
    return all(_meets(Version(number), clause) for clause in specifier.split(",") if clause.strip())


def _meets(number: Version, clause: str) -> bool:
    """One clause for a release number. Not by packaging.specifiers, whose import costs every verb 0.02 s."""
    parts = re.fullmatch(r"\s*([<>]=?|[=!]=)\s*([0-9.]+?)(\.\*)?\s*", clause)
    if parts is None:
        raise ValueError(f"{clause!r} is no range that we read: one of {' '.join(_ORDERS)} and a number")
    order, bound, star = _ORDERS[parts[1]], Version(parts[2]), parts[3]
    if not star:
        return order(number, bound)
    length = len(bound.release)
    return order((number.release + (0,) * length)[:length], bound.release)
