"""Read documents and rows of text, JSON, parquet and arrow files, and list what is wrong with them."""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bundle.errors import EnvironmentUnfit, UsageError, format_value
from bundle.recipe.data import Data
from bundle.recipe.datafiles import DataFile

# Enough to see the pattern; data that is wrong in every row would otherwise print a line for each.
MAX_REASONS = 20  # reasons
MAX_PLACES = 3  # of each reason
TABLE_BATCH_ROWS = 4096
# The parts of a reason that differ between rows with one cause: numbers, quoted names, values.
_REASON_VARIABLES_PATTERN = re.compile(
    r"""0x[0-9a-f]+|\d[\d,.]*|(?<!\w)'[^']*('|$)|(?<!\w)"[^"]*("|$)|\bis [\[{].*"""
)
_FIRST_PROBLEM_SUFFIX = " (the first of several similar problems)"
_JSON_BLOCK_CHARACTERS = 2**20  # characters of a JSON array that are read at once
_LONGEST_JSON_WORD_CHARACTERS = 16  # characters: no word or escape of JSON is longer
_ARRAY_DELIMITER_PATTERN = re.compile(r"\s*([\[,\]])\s*")  # of two values of an array
_ARROW_MAGIC = b"ARROW1"  # how a file with a footer begins; a stream does not

Values = dict[str, Any]
# For corrupt, deleted, cut and read rows: their number, and the first reasons (formats). Each reason has
# its text, its number and its first places.
RowReport = list[tuple[int, list[tuple[str, int, list[str]]]]]
ValueT = TypeVar("ValueT")
ConvertedT = TypeVar("ConvertedT")


class CorruptData(Exception):
    """The reason why a row or file cannot be used; `line` where only a reader of the whole file knows it."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(reason)


class ReasonCounter:
    """The number of rows or files of one kind, and for each cause its number and its first places.

    Reasons that differ only in numbers or names have one cause, which is shown as the first of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self._causes: dict[str, tuple[str, int, list[str]]] = {}  # reason, how many, places

    def add(self, place: str, reason: object) -> None:
        """Count one more; `place` is "file:line" or "file"."""
        self.extend(1, [(str(reason), 1, [place])])

    def extend(self, count: int, reasons: Iterable[tuple[str, int, list[str]]]) -> None:
        """Add the `dump` of another counter, whose rows came later."""
        self.count += count
        for reason, more, places in reasons:
            cause = _REASON_VARIABLES_PATTERN.sub("#", reason.removesuffix(_FIRST_PROBLEM_SUFFIX))
            if cause not in self._causes:
                if len(self._causes) < MAX_REASONS:
                    self._causes[cause] = reason, more, list(places[:MAX_PLACES])
                continue
            first, many, before = self._causes[cause]
            if reason not in (first, first.removesuffix(_FIRST_PROBLEM_SUFFIX)):
                first = first.removesuffix(_FIRST_PROBLEM_SUFFIX) + _FIRST_PROBLEM_SUFFIX
            self._causes[cause] = first, many + more, [*before, *places][:MAX_PLACES]

    def dump(self) -> tuple[int, list[tuple[str, int, list[str]]]]:
        """Return the counts so far as JSON values."""
        return self.count, list(self._causes.values())

    def format_lines(self) -> list[str]:
        """Return a line for each cause, which begins with the first places that have it."""
        return [
            f"{', '.join(places)}{f' and {many - MAX_PLACES:,} more' if many > MAX_PLACES else ''}: {reason}"
            for reason, many, places in self._causes.values()
        ]

    @property
    def unlisted_row_count(self) -> int:
        """The number of those whose cause is not listed, because `MAX_REASONS` causes came before it."""
        return self.count - sum(many for _, many, _ in self._causes.values())


class DataErrors:
    """Collects corrupt rows and files; the recipe's `data.on_error` decides whether they stop the job."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.corrupt = ReasonCounter()
        self.deleted, self.cut = ReasonCounter(), ReasonCounter()  # rows that were too long
        self.formats = ReasonCounter()  # how rows were read

    def record_corrupt_data(self, place: str, reason: object) -> None:
        """Count a corrupt row or file."""
        self.corrupt.add(place, reason)

    def convert_rows(
        self, rows: Iterable[tuple[str, ValueT]], convert: Callable[[ValueT], ConvertedT]
    ) -> Iterator[tuple[str, ConvertedT]]:
        """Yield each place with the converted value; record rows for which `convert` raises CorruptData."""
        for place, value in rows:
            try:
                result = convert(value)
            except CorruptData as error:
                self.record_corrupt_data(place, error)
            except RecursionError:
                self.record_corrupt_data(place, "the JSON is nested too deeply")
            else:
                yield place, result

    def dump(self) -> RowReport:
        """Return the errors and formats so far as JSON values."""
        return [counter.dump() for counter in (self.corrupt, self.deleted, self.cut, self.formats)]

    def extend(self, report: RowReport) -> None:
        """Add the `dump` of others, whose rows came later."""
        counters = (self.corrupt, self.deleted, self.cut, self.formats)
        for counter, (count, reasons) in zip(counters, report, strict=True):
            counter.extend(count, reasons)

    def drain_report(self) -> RowReport:
        """Return the errors and formats so far, and forget them."""
        report = self.dump()
        self.corrupt, self.deleted, self.cut, self.formats = (
            ReasonCounter(),
            ReasonCounter(),
            ReasonCounter(),
            ReasonCounter(),
        )
        return report

    def summarize_or_raise_by_policy(self) -> dict[str, Any]:
        """Return the facts to store with the tokens. Raise UsageError for corrupt rows, unless skipped."""
        corrupt = self.corrupt
        if corrupt.count and self.policy == "stop":
            more = [f"and {corrupt.unlisted_row_count:,} more"] if corrupt.unlisted_row_count else []
            summary = f"the data has corrupt rows or files ({corrupt.count:,})"
            raise UsageError(
                f"{summary}. Correct them, or set data.on_error: skip.", [*corrupt.format_lines(), *more]
            )
        long = [*self.deleted.format_lines(), *self.cut.format_lines()]
        counts = {"skipped_count": corrupt.count, "deleted": self.deleted.count, "cut": self.cut.count}
        formats = {name: count for name, count, _ in self.formats.dump()[1]}
        return {"skipped": corrupt.format_lines(), "long": long, "formats": formats, **counts}


def read_texts(data: Data, sources: Sequence[DataFile], errors: DataErrors) -> Iterator[tuple[str, str]]:
    """Yield the documents of pre-training data after their places.

    Documents are parts of text files, or a field of each row.
    """
    if sources and sources[0].kind == "text":
        return _read_sources(
            sources, lambda source: _split_at_optional_separator(source.path, data.separator), errors
        )
    name = data.fields.text
    return errors.convert_rows(read_rows(sources, (name,), errors), lambda values: read_text(values, name))


def read_rows(
    sources: Sequence[DataFile], field_names: Sequence[str] | None, errors: DataErrors
) -> Iterator[tuple[str, Values]]:
    """Yield the rows of files of one kind after their places ("file:line").

    A row has at least the fields of `field_names`; None: all fields.
    """
    if sources and sources[0].kind == "jsonl":
        return errors.convert_rows(_read_sources(sources, _read_jsonl_or_array, errors), _to_row_values)
    return _read_sources(sources, lambda source: _read_columnar_file(source, field_names), errors)


def read_text(values: Values, name: str) -> str:
    """Return the text in field `name` of a row. Raise CorruptData where the field is missing or blank."""
    if name not in values:
        raise CorruptData(f"field {name}: missing ({format_field_names(values)})")
    text = values[name]
    if not isinstance(text, str) or not text.strip():
        problem = "must not be blank" if isinstance(text, str) else "must be text"
        raise CorruptData(f"field {name}: {problem}, but is {format_value(text)}")
    return text


def format_field_names(values: Values) -> str:
    """Return the names of a row's fields as a message shows them."""
    return f"fields of the row: {', '.join(map(str, values))[:200]}" if values else "the row has no fields"


def _read_sources(
    sources: Sequence[DataFile],
    reader: Callable[[DataFile], Iterator[tuple[int, ValueT]]],
    errors: DataErrors,
) -> Iterator[tuple[str, ValueT]]:
    """Yield the values that `reader` finds in each file, after their places.

    `reader` yields the line that a value begins in, and the value.
    """
    for source in sources:
        is_empty = not source.may_be_empty
        try:
            for line, content in reader(source):
                is_empty = False
                yield f"{source.name}:{line}", content
            if is_empty:
                raise CorruptData("empty")
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            errors.record_corrupt_data(source.name, f"cannot be read as gzip: {error}")
        except OSError as error:
            errors.record_corrupt_data(source.name, error.strerror or error)
        except CorruptData as error:
            errors.record_corrupt_data(f"{source.name}:{error.line}" if error.line else source.name, error)


def _split_at_optional_separator(path: Path, separator: str | None) -> Iterator[tuple[int, str]]:
    """Yield the parts of a text file between separators, without blank ones."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CorruptData(f"not UTF-8: byte {content[error.start]:#04x}", line) from error
    line = 1
    for part in text.split(separator) if separator else [text]:
        if part.strip():
            yield line, part
        line += part.count("\n") + (separator.count("\n") if separator else 0)


def _read_jsonl_or_array(source: DataFile) -> Iterator[tuple[int, Any]]:
    """Yield the lines of a JSONL file that are not blank, or the values of a file with one JSON array."""
    with _open_decompressed(source.path) as file:
        if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        yield from (
            _read_array_with_line_numbers if file.peek(1).lstrip().startswith(b"[") else _read_jsonl_lines
        )(file)


def _open_decompressed(path: Path) -> io.BufferedReader:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path))
    if path.suffix == ".zst":
        pyarrow = _import_pyarrow()
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    return path.open("rb")


def _read_jsonl_lines(file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank. Raise CorruptData for an object over several lines."""
    lines = ((number, line.strip()) for number, line in enumerate(file, start=1) if line.strip())
    for at, (number, line) in enumerate(lines):
        if at == 0 and line == b"{":
            raise CorruptData("one JSON object over several lines. Write one object a line (jq -c .)")
        yield number, line


def _read_array_with_line_numbers(file: io.BufferedReader) -> Iterator[tuple[int, Any]]:
    """Yield the values of a JSON array after the lines that they begin in; read the file part by part."""
    text, decode = io.TextIOWrapper(file, encoding="utf-8"), json.JSONDecoder().raw_decode
    buffer, at, line, mark = "", 0, 1, "["  # the mark comes before the next value
    while True:
        try:
            block = text.read(
                max(_JSON_BLOCK_CHARACTERS, len(buffer) - at)
            )  # as much again for a value that is cut
        except UnicodeDecodeError as error:
            raise CorruptData(f"not UTF-8: byte {error.object[error.start]:#04x}") from error
        buffer, at = buffer[at:] + block, 0
        while between := _ARRAY_DELIMITER_PATTERN.match(buffer, at):
            begin = between.end()
            line += buffer.count("\n", at, begin)
            if between[1] == "]" and mark == ",":
                if (buffer[begin:] + text.read(1)).strip():
                    raise CorruptData("more follows the JSON array", line)
                return
            if between[1] != mark:
                raise CorruptData("not JSON: no comma between two values of the array", line)
            if mark == "[" and buffer.startswith("]", begin):
                at, mark = begin, ","
                continue
            try:
                value, end = decode(buffer, begin)
            except RecursionError:
                raise CorruptData("the JSON is nested too deeply", line) from None
            except json.JSONDecodeError as error:
                if not block or not _is_cut(error, buffer):
                    raise CorruptData(
                        f"not JSON: {error.msg}", line + buffer.count("\n", begin, error.pos)
                    ) from error
                line -= buffer.count("\n", at, begin)
                break
            yield line, value
            line, at, mark = line + buffer.count("\n", begin, end), end, ","
        else:
            if not block or buffer[at:].strip():
                raise CorruptData("not JSON: the array has no end, or no comma between two values", line)


def _is_cut(error: json.JSONDecodeError, buffer: str) -> bool:
    """Return whether the value may become complete when more of the file is read."""
    return error.msg.startswith("Unterminated") or error.pos > len(buffer) - _LONGEST_JSON_WORD_CHARACTERS


def _to_row_values(content: Any) -> Values:
    """Return the row in a line, or in a value."""
    value = content
    try:
        if isinstance(content, bytes):
            value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        at = f"at position {error.start + 1} of the line"
        raise CorruptData(f"not UTF-8: byte {content[error.start]:#04x} {at}") from error
    except ValueError as error:
        raise CorruptData(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptData(f"must be a JSON object, but is of type {type(value).__name__}")
    return value


def _read_columnar_file(source: DataFile, field_names: Sequence[str] | None) -> Iterator[tuple[int, Values]]:
    """Yield the rows of a parquet or arrow file with their columns in `field_names`; None: all columns."""
    pyarrow = _import_pyarrow()
    try:
        with (_open_parquet_table if source.kind == "parquet" else _open_arrow_table)(source.path) as (
            column_names,
            batches,
        ):
            columns = [name for name in column_names if field_names is None or name in field_names]
            if field_names is not None and not columns:
                raise CorruptData(
                    f"has none of the columns {', '.join(field_names)}; it has {', '.join(column_names)}"
                )
            table_rows = (row for batch in batches(columns) for row in batch.to_pylist())
            for number, row in enumerate(table_rows, start=1):
                yield number, {name: _remove_nulls(value) for name, value in row.items()}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CorruptData(f"cannot be read as {source.kind}: {error}") from error


_Table = tuple[list[str], Callable[[list[str]], Iterator[Any]]]  # columns, and the batches of some of them


@contextmanager
def _open_parquet_table(path: Path) -> Iterator[_Table]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield file.schema_arrow.names, lambda columns: file.iter_batches(TABLE_BATCH_ROWS, columns=columns)


@contextmanager
def _open_arrow_table(path: Path) -> Iterator[_Table]:
    """Open a stream, as `datasets` writes it, or a file with a footer; each batch is validated first."""
    import pyarrow

    def batches(columns: list[str]) -> Iterator[Any]:
        read = (reader.get_batch(n) for n in range(reader.num_record_batches)) if has_footer else reader
        for batch in read:
            part = batch.select(columns)
            part.validate(full=True)
            yield from (part.slice(at, TABLE_BATCH_ROWS) for at in range(0, len(part), TABLE_BATCH_ROWS))

    with pyarrow.memory_map(str(path)) as file:
        has_footer = file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        file.seek(0)
        reader = (pyarrow.ipc.open_file if has_footer else pyarrow.ipc.open_stream)(file)
        yield reader.schema.names, batches


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        message = f"these files need pyarrow (pip install 'mcore-bundle[data]'): {error}"
        raise EnvironmentUnfit(message) from error
    return pyarrow


def _remove_nulls(value: Any) -> Any:
    """Return the value without the nulls in it: structs of a table have every field in each row."""
    if isinstance(value, dict):
        return {name: _remove_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_remove_nulls(inner) for inner in value] if isinstance(value, list) else value
