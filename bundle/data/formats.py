"""The format of a row: found by the fields that it has, or named by data.fields.format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from bundle.data.sources import CorruptData, Values, format_field_names
from bundle.recipe.data import Fields, RowFormat

T = TypeVar("T")
_FIELDS_SECTION_DEFAULTS = Fields()


@dataclass(frozen=True)
class Format(Generic[T]):
    """One way to read a row."""

    name: RowFormat
    fields: tuple[str, ...]  # a row must have them all
    read: Callable[[Values], T]  # raises CorruptData
    optional: tuple[str, ...] = ()  # fields that are read where a row has them
    is_renamed: bool = False  # whether the recipe gives one of its fields another name than the default
    fits: Callable[[Values], bool] = lambda values: (
        True
    )  # whether the values of its fields are of this format

    def is_complete(self, values: Values) -> bool:
        """Return whether a row has all fields; null is missing, as in a table."""
        return all(values.get(name) is not None for name in self.fields) and self.fits(values)

    def format_name_and_filled_fields(self, values: Values, shared: Sequence[str]) -> str:
        """Return the name and the fields that are read of a row, such as "alpaca (instruction, output)"."""
        extra = [name for name in (*self.optional, *shared) if values.get(name) not in (None, "", [])]
        return f"{self.name} ({', '.join(dict.fromkeys((*self.fields, *extra)))})"


def is_renamed(fields: Fields, *keys: str) -> bool:
    """Return whether one of these keys of data.fields has another value than its default."""
    return any(getattr(fields, key) != getattr(_FIELDS_SECTION_DEFAULTS, key) for key in keys)


def read_unambiguous_row(
    values: Values, formats: Sequence[Format[T]], name: RowFormat | None, shared: Sequence[str]
) -> tuple[str, T]:
    """Return how a row is read (its format, with `shared` fields that every format reads) and its content.

    Raises CorruptData where no format reads the row, or two do and come to different things.
    """
    if name is not None:
        formats = [row_format for row_format in formats if row_format.name == name]
    complete = [row_format for row_format in formats if row_format.is_complete(values)]
    readings, errors = [], []
    for row_format in [row_format for row_format in complete if row_format.is_renamed] or complete:
        try:
            readings.append((row_format, row_format.read(values)))
        except CorruptData as error:
            errors.append(error)
    if not readings:
        raise errors[0] if errors else _explain_nearest_format_mismatch(values, formats)
    first, content = readings[0]
    for other, differing in readings[1:]:
        if differing != content:
            both = f"{first.format_name_and_filled_fields(values, ())} and as"
            both += f" {other.format_name_and_filled_fields(values, ())}"
            decision = f"Set data.fields.format: {first.name} or {other.name}"
            if first.name == other.name:
                decision = "Leave the fields of one reading out of the row"
            raise CorruptData(f"the row can be read as {both}, and the readings differ. {decision}")
    return first.format_name_and_filled_fields(values, shared), content


def _explain_nearest_format_mismatch(values: Values, formats: Sequence[Format[T]]) -> CorruptData:
    """Return what keeps a row from being of the format whose fields it has most of."""

    def count_fields(row_format: Format[T]) -> tuple[int, int]:
        has_value = [values.get(name) is not None for name in row_format.fields]
        return sum(has_value), sum(name in values for name in row_format.fields)

    nearest = max(formats, key=count_fields)
    if not any(name in values for name in nearest.fields):
        known = "; ".join(" and ".join(row_format.fields) for row_format in formats)
        return CorruptData(
            f"the row needs one of these sets of fields: {known} ({format_field_names(values)}). Name the"
            " row's fields with data.fields"
        )
    missing = next(name for name in nearest.fields if values.get(name) is None)
    if missing in values:
        return CorruptData(f"field {missing}: is null, but must have a value")
    return CorruptData(f"field {missing}: missing ({format_field_names(values)})")
