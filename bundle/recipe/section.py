"""Define the base of every section of a recipe, and the types of the values of its keys."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from bundle.errors import format_value


def make_default_section(description: str) -> Any:
    """Return the field of a section that the recipe's validator makes with defaults where it is left out."""
    return Field(default={}, validate_default=True, description=description)


class Section(BaseModel):
    """A part of a recipe: it never changes, takes no unknown key, and converts no value of another type."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        defer_build=True,  # of all sections one validator is made, the recipe's
    )

    @classmethod
    def list_key_paths(cls, prefix: str = "") -> Iterator[str]:
        """Yield every dotted key, sections included."""
        for name, field in cls.model_fields.items():
            key = prefix + (field.alias or name)
            yield key
            for kind in (field.annotation, *get_args(field.annotation)):
                if isinstance(kind, type) and issubclass(kind, Section):
                    name_part = "NAME." if get_origin(field.annotation) is dict else ""
                    yield from kind.list_key_paths(f"{key}.{name_part}")

    def dump(self) -> dict[str, Any]:
        """Return the section as plain JSON values, every key present."""
        return self.model_dump(mode="json", by_alias=True)


class DerivedDefaultsSection(Section):
    """A section some of whose keys follow others of it, where they are left out."""

    @classmethod
    def derive_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return values for keys that were left out or are null, derived from the values of other keys."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return values | {
            key: value for key, value in cls.derive_defaults(values).items() if values.get(key) is None
        }


def add_null(schema: dict[str, Any]) -> None:
    """Add null to the JSON schema of a key that `_complete` fills in."""
    kind = {
        keyword: schema.pop(keyword)
        for keyword in list(schema)
        if keyword not in ("default", "description", "title")
    }
    schema["anyOf"] = [kind, {"type": "null"}]


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


AS_TUPLE = BeforeValidator(_to_tuple)


def _wrap_single_string(value: Any) -> Any:
    """Return a list as a tuple, and one string as a tuple of one.

    `--set data.path=train.jsonl` then needs no brackets.
    """
    return (value,) if isinstance(value, str) else _to_tuple(value)


def _stringify_integer(value: Any) -> Any:
    """Return a number as the text of a variable."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


# What is a job's to set: variables of communication, allocators, kernels and threads.
_VARIABLE_PREFIXES = (
    "NCCL HCCL GLOO UCX FI OMP MKL KMP CUDA CUDNN CUBLAS TORCH PYTORCH NVTE ASCEND TASK CPU MALLOC"
)
_SETTABLE_VARIABLE_PATTERN = re.compile(rf"({_VARIABLE_PREFIXES.replace(' ', '|')})_[A-Z0-9_]{{1,80}}")
_REFUSED_VARIABLE_NAME_PATTERN = re.compile(r"PLUGIN|LIB|PATH|DIR|FILE|HOME|VISIBLE_DEVICES")


def _check_settable_variable(name: str) -> str:
    """Return the name of a variable that a job may set. Raise ValueError for any other."""
    if not _SETTABLE_VARIABLE_PATTERN.fullmatch(name):
        raise ValueError(
            "a recipe cannot set this variable, because its name begins with none of"
            f" {', '.join(_VARIABLE_PREFIXES.split())}. Set it in the environment that starts the ranks"
        )
    if _REFUSED_VARIABLE_NAME_PATTERN.search(name):
        raise ValueError(
            "a recipe cannot set this variable, because it names devices, or a file that may contain code."
            " Set it in the environment that starts the ranks"
        )
    return name


def _check_count_or_auto(value: Any) -> Any:
    """Return a number from 1 or `auto`; one error names both, where a union would have two."""
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_COUNT):
        return value
    raise ValueError(f"must be a number from 1 or auto, but is {format_value(value)}")


MOST_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
CountOrAuto = Annotated[Count | Literal["auto"], BeforeValidator(_check_count_or_auto)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
VariableName = Annotated[str, AfterValidator(_check_settable_variable)]
VariableValue = Annotated[
    str,
    BeforeValidator(_stringify_integer, json_schema_input_type=str | int),
    Field(pattern=r"^[ -~]{0,1000}$"),
]
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[
    tuple[Text, ...], BeforeValidator(_wrap_single_string, json_schema_input_type=str | tuple[str, ...])
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
Pair = Annotated[tuple[float, float], AS_TUPLE]
