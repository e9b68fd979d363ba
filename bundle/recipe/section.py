"""What a section of a recipe is: a frozen dataclass whose fields say what they mean and what they take."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, dataclass_transform, get_args, get_origin

from bundle.frozen import frozen, frozen_by_name

T = TypeVar("T")

# Limits of a value, by the names that pydantic gives them.
Count = Annotated[int, ("ge", 1), ("le", 2**31 - 1)]
CountOrZero = Annotated[int, ("ge", 0), ("le", 2**31 - 1)]
Positive = Annotated[float, ("gt", 0)]
NotNegative = Annotated[float, ("ge", 0)]
Names = tuple[str, ...]
Pair = tuple[float, float]


def key(
    *,
    description: str,
    default: Any = MISSING,
    default_factory: Callable[[], Any] | Any = MISSING,
    alias: str | None = None,
    **limits: Any,
) -> Any:
    """A field of a section; `alias`: its name in the file, `limits`: ge, gt, le, lt, min_length, pattern."""
    metadata = {"description": description, "alias": alias, "limits": limits}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(key,))
def section(cls: type[T]) -> type[T]:
    """The class as a section. Its static method `complete(given)`, if any, fills in defaults that depend."""
    return frozen_by_name(cls)


@frozen
class Key:
    """One key of a section, as the validator and the reference page see it."""

    name: str  # in the file
    attribute: str
    description: str
    kind: Any  # int, str, a Literal, tuple[str, ...], a section, ...
    limits: Mapping[str, Any]
    nullable: bool
    default: Any  # MISSING where there is none
    default_factory: Any

    @property
    def section(self) -> type | None:
        """The section that stands under this key; None for a plain value."""
        return self.kind if is_dataclass(self.kind) and isinstance(self.kind, type) else None

    @property
    def required(self) -> bool:
        """Whether a recipe must have it."""
        return self.default is MISSING and self.default_factory is MISSING


def keys_of(schema: type[Any]) -> list[Key]:
    """The keys of a section, in order."""
    return [_key(of) for of in fields(schema)]


def _key(of: Field[Any]) -> Key:
    kind: Any = of.type
    limits: dict[str, Any] = {}
    nullable = False
    while (origin := get_origin(kind)) in (Annotated, Union, UnionType):
        if origin is Annotated:
            kind, *said = get_args(kind)
            limits |= dict(said)
        else:
            (kind,) = (option for option in get_args(kind) if option is not type(None))
            nullable = True
    about = of.metadata
    return Key(
        about["alias"] or of.name,
        of.name,
        about["description"],
        kind,
        limits | about["limits"],
        nullable,
        of.default,
        of.default_factory,
    )


def plain(value: Any) -> Any:
    """A section, or a value of one, as JSON has it: sections are mappings by their keys, tuples are lists."""
    if is_dataclass(value):
        names = {of.metadata["alias"] or of.name: of.name for of in fields(value)}
        return {name: plain(getattr(value, attribute)) for name, attribute in names.items()}
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value
