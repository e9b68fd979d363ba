"""Documents and rows out of text, JSONL and parquet files; what is wrong with them is listed, not a crash."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bundle.errors import EnvironmentUnfit, UsageError, shown
from bundle.planning.inputs import Source
from bundle.recipe.data import Data

# Enough to see the pattern; data that is wrong in every row would otherwise print a line for each.
SHOWN = 20  # reasons
PLACES = 3  # of each reason
PARQUET_ROWS = 4096
# What of a reason differs from row to row though the cause is one: numbers, quoted names, values.
_VARIES = re.compile(r"""0x[0-9a-f]+|\d[\d,.]*|(?<!\w)'[^']*('|$)|(?<!\w)"[^"]*("|$)|\bis [\[{].*""")
_OF_FIRST = " (and others like it)"

Values = dict[str, Any]
# Of corrupt, deleted, cut and read rows: how many, and for each of the first reasons (formats) how many and
# the first places.
Noted = list[tuple[int, list[tuple[str, int, list[str]]]]]
A = TypeVar("A")
B = TypeVar("B")


class Corrupt(Exception):
    """Why a row or file cannot be used; `line` where only a reader of the whole file knows it."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(reason)


class Told:
    """How many rows or files something happened to, and of each cause how many and the first places.

    Reasons that differ in numbers or names alone have one cause, which is shown as the first of them is.
    """

    def __init__(self) -> None:
        self.count = 0
        self._causes: dict[str, tuple[str, int, list[str]]] = {}  # reason, how many, places

    def add(self, place: str, reason: object) -> None:
        """Counts one more; `place` is "file:line" or "file"."""
        self.extend(1, [(str(reason), 1, [place])])

    def extend(self, count: int, reasons: Iterable[tuple[str, int, list[str]]]) -> None:
        """Adds what `dump` gave of others, which came later."""
        self.count += count
        for reason, more, places in reasons:
            cause = _VARIES.sub("#", reason.removesuffix(_OF_FIRST))
            if cause not in self._causes:
                if len(self._causes) < SHOWN:
                    self._causes[cause] = reason, more, list(places[:PLACES])
                continue
            first, many, before = self._causes[cause]
            if reason not in (first, first.removesuffix(_OF_FIRST)):
                first = first.removesuffix(_OF_FIRST) + _OF_FIRST
            self._causes[cause] = first, many + more, [*before, *places][:PLACES]

    def dump(self) -> tuple[int, list[tuple[str, int, list[str]]]]:
        """What was counted so far, as JSON values."""
        return self.count, list(self._causes.values())

    def lines(self) -> list[str]:
        """A line for each cause, after the first places that have it."""
        return [
            f"{', '.join(places)}{f' and {many - PLACES:,} more' if many > PLACES else ''}: {reason}"
            for reason, many, places in self._causes.values()
        ]

    @property
    def unlisted(self) -> int:
        """How many have a cause that came when there were enough."""
        return self.count - sum(many for _, many, _ in self._causes.values())


class DataErrors:
    """Collects corrupt rows and files; whether they stop the job is the recipe's `data.on_error`."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.corrupt = Told()
        self.deleted, self.cut = Told(), Told()  # rows that were too long
        self.formats = Told()  # how rows were read

    def add(self, place: str, reason: object) -> None:
        """Counts a corrupt one."""
        self.corrupt.add(place, reason)

    def passed(self, given: Iterable[tuple[str, A]], make: Callable[[A], B]) -> Iterator[tuple[str, B]]:
        """Each place with what `make` makes of its value; where that raises Corrupt, it is recorded."""
        for place, value in given:
            try:
                made = make(value)
            except Corrupt as error:
                self.add(place, error)
            except RecursionError:
                self.add(place, "nested too deep")
            else:
                yield place, made

    def dump(self) -> Noted:
        """What was found so far, as JSON values."""
        return [counter.dump() for counter in (self.corrupt, self.deleted, self.cut, self.formats)]

    def extend(self, noted: Noted) -> None:
        """Adds what `dump` gave of others, which came later."""
        counters = (self.corrupt, self.deleted, self.cut, self.formats)
        for counter, (count, reasons) in zip(counters, noted, strict=True):
            counter.extend(count, reasons)

    def taken(self) -> Noted:
        """What was found so far, which is forgotten here."""
        noted = self.dump()
        self.corrupt, self.deleted, self.cut, self.formats = Told(), Told(), Told(), Told()
        return noted

    def conclude(self) -> dict[str, Any]:
        """What to keep beside the tokens. Raises UsageError for corrupt rows, unless they are skipped."""
        corrupt = self.corrupt
        if corrupt.count and self.policy == "stop":
            more = [f"and {corrupt.unlisted:,} more"] if corrupt.unlisted else []
            what = f"the data has {corrupt.count} corrupt rows or files"
            raise UsageError(f"{what}; mend them, or set data.on_error: skip", [*corrupt.lines(), *more])
        long = [*self.deleted.lines(), *self.cut.lines()]
        counts = {"skipped_count": corrupt.count, "deleted": self.deleted.count, "cut": self.cut.count}
        formats = {name: count for name, count, _ in self.formats.dump()[1]}
        return {"skipped": corrupt.lines(), "long": long, "formats": formats, **counts}


def texts(data: Data, sources: Sequence[Source], errors: DataErrors) -> Iterator[tuple[str, str]]:
    """The documents of pre-training data, after their places: parts of text files, or a field of each row."""
    if data.source == "text":
        return _read(sources, lambda path: _documents(path, data.separator), errors)
    name = data.fields.text
    given = rows(data.source, sources, (name,), errors)
    return errors.passed(given, lambda values: text_of(values, name))


def rows(
    kind: str, sources: Sequence[Source], wanted: Sequence[str], errors: DataErrors
) -> Iterator[tuple[str, Values]]:
    """The rows of JSONL or parquet files, after their places: "file:line". At least the `wanted` fields."""
    if kind == "jsonl":
        return errors.passed(_read(sources, _lines, errors), _object)
    return _read(sources, lambda path: _table(path, wanted), errors)


def text_of(values: Values, name: str) -> str:
    """The text in field `name` of a row. Raises Corrupt where there is none, or a blank one."""
    if name not in values:
        raise Corrupt(f"field {name}: missing; the row has {', '.join(values)[:200] or 'no fields'}")
    text = values[name]
    if not isinstance(text, str) or not text.strip():
        raise Corrupt(f"field {name}: must be text, is {shown(text)}")
    return text


def _read(
    sources: Sequence[Source], reader: Callable[[Path], Iterator[tuple[int, A]]], errors: DataErrors
) -> Iterator[tuple[str, A]]:
    """What `reader` finds in each file, after its place; it gives lines with what begins there."""
    for source in sources:
        empty = not source.may_be_empty
        try:
            for line, content in reader(source.path):
                empty = False
                yield f"{source.name}:{line}", content
            if empty:
                raise Corrupt("empty")
        except OSError as error:
            errors.add(source.name, error.strerror)
        except Corrupt as error:
            errors.add(f"{source.name}:{error.line}" if error.line else source.name, error)


def _documents(path: Path, separator: str | None) -> Iterator[tuple[int, str]]:
    """The parts of a text file between separators, those that are not blank."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Corrupt(f"not UTF-8: byte {content[error.start]:#04x}", line) from error
    line = 1
    for part in text.split(separator) if separator else [text]:
        if part.strip():
            yield line, part
        line += part.count("\n") + (separator.count("\n") if separator else 0)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a JSONL file that are not blank; Corrupt for a value over several lines."""
    with path.open("rb") as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        lines = ((number, line.strip()) for number, line in enumerate(file, start=1) if line.strip())
        for at, (number, line) in enumerate(lines):
            if at == 0 and (line == b"{" or (line.startswith(b"[") and not line.endswith(b"]"))):
                raise Corrupt("one JSON value over several lines: write one object a line (jq -c '.[]')")
            yield number, line


def _object(line: bytes) -> Values:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise Corrupt(f"not UTF-8: byte {line[error.start]:#04x} at {error.start + 1}") from error
    except ValueError as error:
        raise Corrupt(f"not JSON: {error}") from error
    if isinstance(value, list):
        raise Corrupt("must be a JSON object, is list; of a list of rows write one a line (jq -c '.[]')")
    if not isinstance(value, dict):
        raise Corrupt(f"must be a JSON object, is {type(value).__name__}")
    return value


def _table(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, Values]]:
    """The rows of a parquet file, as far as they have one of the `wanted` columns."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        message = f"parquet data needs pyarrow (pip install 'mcore-bundle[data]'): {error}"
        raise EnvironmentUnfit(message) from error
    try:
        with parquet.ParquetFile(path) as file:
            have = file.schema_arrow.names
            if not (columns := [name for name in have if name in wanted]):
                raise Corrupt(f"has none of the columns {', '.join(wanted)}; it has {', '.join(have)}")
            batches = file.iter_batches(PARQUET_ROWS, columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield number, {name: _given(value) for name, value in row.items()}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise Corrupt(f"not parquet that can be read: {error}") from error


def _given(value: Any) -> Any:
    """The value without what is null in it: structs of a table have every field in each row."""
    if isinstance(value, dict):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value
