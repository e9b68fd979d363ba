"""What nearly everything here is: a value that never changes, whose class says what it holds."""

from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """The class as `dataclass(frozen=True)` makes it, at a quarter of the price.

    A dataclass writes and compiles six methods of its own, and a verb makes eighty classes before it answers:
    that was a quarter of `mcore-bundle plan`. Here `__init__` alone is compiled, the others are everybody's.
    """
    return _shared(dataclass(repr=False, eq=False)(cls))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen_by_name(cls: type[T]) -> type[T]:
    """The class as `frozen` makes it; every field is given by its name."""
    return _shared(dataclass(repr=False, eq=False, kw_only=True)(cls))


def _shared(cls: type[T]) -> type[T]:
    for method in (__setattr__, __delattr__, __eq__, __hash__, __repr__):
        setattr(cls, method.__name__, method)
    return cls


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def __setattr__(self: Any, name: str, value: Any) -> None:
    held = self.__dict__
    if name in held or name not in self.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    held[name] = value  # __init__'s


def __delattr__(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def __eq__(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def __hash__(self: Any) -> int:
    return hash(_values(self))


def __repr__(self: Any) -> str:
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
    return f"{self.__class__.__qualname__}({values})"
