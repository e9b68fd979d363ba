"""Version numbers as decisions compare them: on the base version, because the rest of the string lies.

The tag core_v0.17.0 calls itself 0.17.0rc0, which PEP 440 puts neither in `>=0.17` nor in `<0.17`.
"""

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


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
    """Whether the base version is inside a PEP 440 range ("" is every one); None when it cannot be read.

    Raises packaging.specifiers.InvalidSpecifier for a range that is none.
    """
    number = base(version)
    return None if number is None else SpecifierSet(specifier).contains(number)
