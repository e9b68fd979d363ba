"""What every section of a recipe is: frozen, closed to unknown keys, and strict about types."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One mapping of the recipe. Every field has a description, from which docs/recipe.md is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


def _as_tuple(value: Any) -> Any:
    """One string means a list of one: `--set data.path=train.jsonl` needs no brackets."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Pair = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]
