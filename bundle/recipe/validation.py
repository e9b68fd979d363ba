"""Sections from plain values by pydantic's engine, every violation at once.

The engine alone: importing the model layer of pydantic and building these classes as models was almost
half of what `mcore-bundle plan` did, for what `section` says in a page.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic_core import CoreSchema, SchemaValidator, core_schema

from bundle.recipe.section import Key, keys_of

T = TypeVar("T")

UNKNOWN = "unexpected_keyword_argument"  # the engine's name for a key that a section does not have
_PLAIN: Mapping[Any, Callable[..., CoreSchema]] = {
    bool: core_schema.bool_schema,
    int: core_schema.int_schema,
    float: core_schema.float_schema,
    str: core_schema.str_schema,
    Any: core_schema.any_schema,
}


def validated(schema: type[T], values: Mapping[str, Any]) -> T:
    """The section that `values` describe. Raises pydantic_core.ValidationError with all that is wrong."""
    validator = _validator(schema)  # type: ignore[arg-type]  # every class is hashable
    made: T = validator.validate_python(dict(values))
    return made


@functools.cache
def _validator(schema: Any) -> SchemaValidator:
    return SchemaValidator(_section(schema))


def _section(schema: type[Any]) -> CoreSchema:
    keys = keys_of(schema)
    arguments = core_schema.dataclass_args_schema(schema.__name__, [_field(key) for key in keys])
    # Strict about every value, but a section comes as a mapping, not as an instance of its class.
    made = core_schema.dataclass_schema(
        schema,
        arguments,
        [key.attribute for key in keys],
        strict=False,
        post_init=hasattr(schema, "__post_init__"),
        config=core_schema.CoreConfig(extra_fields_behavior="forbid", strict=True, allow_inf_nan=False),
    )
    if hasattr(schema, "complete"):
        return core_schema.no_info_before_validator_function(schema.complete, made)
    return made


def _field(key: Key) -> core_schema.DataclassField:
    value = _value(key.kind, dict(key.limits))
    if key.nullable:
        value = core_schema.nullable_schema(value)
    if key.default is not MISSING:
        value = core_schema.with_default_schema(value, default=key.default)
    elif key.default_factory is not MISSING:
        value = core_schema.with_default_schema(value, default_factory=key.default_factory)
    return core_schema.dataclass_field(key.attribute, value, kw_only=True, validation_alias=key.name)


def _value(kind: Any, limits: dict[str, Any]) -> CoreSchema:
    if kind in _PLAIN:
        return _PLAIN[kind](**limits)
    items, origin = list(get_args(kind)), get_origin(kind)
    if origin is Literal:
        return core_schema.literal_schema(items)
    if origin is dict:
        return core_schema.dict_schema(*(_value(item, {}) for item in items))
    if origin is tuple:
        several = items[1:] == [...]
        schemas = [_value(item, {}) for item in items if item is not ...]
        made = core_schema.tuple_schema(schemas, variadic_item_index=0 if several else None, **limits)
        return core_schema.no_info_before_validator_function(_as_tuple, made)
    return _section(kind)


def _as_tuple(value: Any) -> Any:
    """One string means a list of one: `--set data.path=train.jsonl` needs no brackets."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
