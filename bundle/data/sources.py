"""Documents and rows out of text, JSONL and parquet files; what is wrong with them is listed, not a crash."""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bundle.errors import EnvironmentUnfit, JobFailed
from bundle.recipe.sections import Data
from bundle.recipe.sources import Source

# Enough to see the pattern; a wholly corrupt file would otherwise print a line per row.
SHOWN = 20
PARQUET_ROWS = 4096


class DataErrors:
    """Collects corrupt rows and files; whether they stop the job is the recipe's `data.on_error`."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.count = 0
        self.first: list[str] = []

    def add(self, place: str, reason: str) -> None:
        """Records one corrupt row or file; `place` is "file:line" or "file"."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(f"{place}: {reason}")

    def shown(self) -> list[str]:
        """The first errors, and how many more there are."""
        more = [f"and {self.count - SHOWN} more"] if self.count > SHOWN else []
        return [*self.first, *more]

    def settle(self) -> None:
        """Raises JobFailed with what was found, unless the policy is to skip."""
        if self.count and self.policy == "stop":
            what = f"the data has {self.count} corrupt rows or files"
            raise JobFailed(f"{what}; mend them, or set data.on_error: skip", self.shown())


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


def texts(data: Data, sources: Sequence[Source], errors: DataErrors) -> Iterator[Text]:
    """The documents of pre-training data: parts of text files, or one field of each row; none is blank."""
    if data.source == "text":
        yield from _text_files(sources, data.separator, errors)
        return
    name = data.fields.text
    for row in rows(data, sources, errors):
        text = row.values.get(name)
        if isinstance(text, str) and text.strip():
            yield Text(row.place, text)
        elif name not in row.values:
            have = ", ".join(map(str, row.values)) or "no fields"
            errors.add(row.place, f"field {name}: missing; the row has {have[:200]}")
        else:
            errors.add(row.place, f"field {name}: must be text, is {text!r:.60}")


def rows(data: Data, sources: Sequence[Source], errors: DataErrors) -> Iterator[Row]:
    """The rows of JSONL or parquet files."""
    if data.source == "jsonl":
        return _json_lines(sources, errors)
    names = data.fields
    return _parquet_rows(sources, (names.text, names.prompt, names.response, names.messages), errors)


def _text_files(sources: Sequence[Source], separator: str | None, errors: DataErrors) -> Iterator[Text]:
    """The documents of text files: the parts between separators that are not blank."""
    for source in sources:
        content = _bytes_of(source, errors)
        if content is None:
            continue
        content = content.removeprefix(codecs.BOM_UTF8)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            errors.add(f"{source.name}:{line}", f"not UTF-8: byte {content[error.start]:#04x}")
            continue
        if not text.strip():
            if not source.may_be_empty:
                errors.add(source.name, "empty")
            continue
        yield from _documents(source.name, text, separator)


def _documents(name: str, text: str, separator: str | None) -> Iterator[Text]:
    line = 1
    for part in text.split(separator) if separator else [text]:
        if part.strip():
            yield Text(f"{name}:{line}", part)
        line += part.count("\n") + (separator.count("\n") if separator else 0)


def _json_lines(sources: Sequence[Source], errors: DataErrors) -> Iterator[Row]:
    """The objects of JSONL files; blank lines are passed over."""
    for source in sources:
        try:
            with source.path.open("rb") as file:
                yield from _objects(source.name, file, errors)
        except OSError as error:
            errors.add(source.name, str(error.strerror))


def _objects(name: str, lines: Iterator[bytes], errors: DataErrors) -> Iterator[Row]:
    any_line = False
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        place, first, any_line = f"{name}:{number}", not any_line, True
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            errors.add(place, f"not UTF-8: byte {line[error.start]:#04x} at {error.start + 1}")
        except ValueError as error:
            if first and (line.lstrip().startswith(b"[") or line.strip() == b"{"):
                errors.add(name, "one JSON value over several lines: write one object a line (jq -c '.[]')")
                return
            errors.add(place, f"not JSON: {error}")
        except RecursionError:
            errors.add(place, "not JSON that we read: nested too deep")
        else:
            if isinstance(value, dict):
                yield Row(place, value)
            else:
                errors.add(place, f"must be a JSON object, is {type(value).__name__}")
    if not any_line:
        errors.add(name, "empty")


def _parquet_rows(sources: Sequence[Source], wanted: Sequence[str], errors: DataErrors) -> Iterator[Row]:
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
                    errors.add(source.name, f"has none of the columns {', '.join(wanted)}; it has {have}")
                    continue
                number = 0
                for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                    for values in batch.to_pylist():
                        number += 1
                        yield Row(f"{source.name}:{number}", values)
                if not number:
                    errors.add(source.name, "empty")
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            errors.add(source.name, f"not parquet that can be read: {error}")


def _bytes_of(source: Source, errors: DataErrors) -> bytes | None:
    try:
        return source.path.read_bytes()
    except OSError as error:
        errors.add(source.name, str(error.strerror))
        return None
