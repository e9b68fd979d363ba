"""Documents and rows out of text, JSONL and parquet files; what cannot be read is a problem, not a crash."""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bundle.errors import EnvironmentUnfit
from bundle.recipe.sources import Source
from bundle.training.data.problems import Problems

PARQUET_ROWS = 4096


@dataclass(frozen=True)
class Row:
    """One row of a file; `place` is "file:line" for messages."""

    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Text:
    """One document; `place` is "file:line" of its beginning."""

    place: str
    text: str


def texts(sources: Sequence[Source], separator: str | None, problems: Problems) -> Iterator[Text]:
    """The documents of text files: the parts between separators that are not blank."""
    for source in sources:
        content = _bytes_of(source, problems)
        if content is None:
            continue
        content = content.removeprefix(codecs.BOM_UTF8)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            problems.add(f"{source.name}:{line}", f"not UTF-8: byte {content[error.start]:#04x}")
            continue
        if not text.strip():
            if not source.may_be_empty:
                problems.add(source.name, "empty")
            continue
        yield from _documents(source.name, text, separator)


def _documents(name: str, text: str, separator: str | None) -> Iterator[Text]:
    line = 1
    for part in text.split(separator) if separator else [text]:
        if part.strip():
            yield Text(f"{name}:{line}", part)
        line += part.count("\n") + (separator.count("\n") if separator else 0)


def json_lines(sources: Sequence[Source], problems: Problems) -> Iterator[Row]:
    """The objects of JSONL files; blank lines are passed over."""
    for source in sources:
        try:
            with source.path.open("rb") as file:
                yield from _objects(source.name, file, problems)
        except OSError as error:
            problems.add(source.name, str(error.strerror))


def _objects(name: str, lines: Iterator[bytes], problems: Problems) -> Iterator[Row]:
    any_line = False
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        place, first, any_line = f"{name}:{number}", not any_line, True
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            problems.add(place, f"not UTF-8: byte {line[error.start]:#04x} at {error.start + 1}")
        except ValueError as error:
            if first and (line.lstrip().startswith(b"[") or line.strip() == b"{"):
                problems.add(name, "one JSON value over several lines: write one object a line (jq -c '.[]')")
                return
            problems.add(place, f"not JSON: {error}")
        except RecursionError:
            problems.add(place, "not JSON that we read: nested too deep")
        else:
            if isinstance(value, dict):
                yield Row(place, value)
            else:
                problems.add(place, f"must be a JSON object, is {type(value).__name__}")
    if not any_line:
        problems.add(name, "empty")


def parquet_rows(sources: Sequence[Source], wanted: Sequence[str], problems: Problems) -> Iterator[Row]:
    """The rows of parquet files, as far as they have one of the `wanted` columns."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        message = f"parquet data needs pyarrow (pip install 'mcore-bundle[data]'): {error}"
        raise EnvironmentUnfit(message) from error
    for source in sources:
        try:
            with parquet.ParquetFile(source.path) as file:
                columns = [name for name in file.schema_arrow.names if name in wanted]
                if not columns:
                    have = ", ".join(file.schema_arrow.names)
                    problems.add(source.name, f"has none of the columns {', '.join(wanted)}; it has {have}")
                    continue
                number = 0
                for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                    for values in batch.to_pylist():
                        number += 1
                        yield Row(f"{source.name}:{number}", values)
                if not number:
                    problems.add(source.name, "empty")
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            problems.add(source.name, f"not parquet that can be read: {error}")


def _bytes_of(source: Source, problems: Problems) -> bytes | None:
    try:
        return source.path.read_bytes()
    except OSError as error:
        problems.add(source.name, str(error.strerror))
        return None
