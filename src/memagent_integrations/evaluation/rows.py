"""Rows of files, read so that whatever is wrong with one of them is named: file, line and field.

What goes wrong is a `UsageError`: a file that cannot be read, that is empty, that is not UTF-8, or a line that is no such row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from memagent_integrations.errors import UsageError
from memagent_integrations.files import reason

Record = TypeVar("Record")
Row = Mapping[str, Any]


def each(path: Path, record: Callable[[Row, str], Record]) -> Iterator[Record]:
    """The records of a jsonl file, made from each row and its place."""
    empty = True
    for number, _, line in lines(path):
        empty = False
        yield record(row_of(line, where_of(path, number)), where_of(path, number))
    if empty:
        raise UsageError(f"{path} has no rows")


def lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """The lines that are not blank: their number from 1, the byte at which they start, and themselves."""
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, start, line
                start += len(line)
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        raise UsageError(f"cannot read {str(path)!r}: {reason(error)}") from error


def where_of(path: Path, number: int) -> str:
    """How an error names a line."""
    return f"{path}, line {number}"


def decoded(line: bytes, where: str) -> str:
    """The text of a line."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: this is not UTF-8 text ({error.reason})") from error


def row_of(line: bytes, where: str) -> Row:
    """The row of a line: a JSON object that holds text alone, no halves of characters."""
    try:
        row = json.loads(decoded(line, where))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: this is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a row is a JSON object, not {type(row).__name__}")
    if b"\\ud" in line.lower():  # no tokenizer takes half a character
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{where}: an escape of the row stands for half a character (a lone surrogate)") from error
    return row


def text_of(path: Path) -> str:
    """The text of a whole file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: this is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise UsageError(f"{path} is empty")
    return text


def string(row: Row, field: str, where: str) -> str:
    """The text of a field."""
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: the field {field!r} has to be a text that is not empty")
    return value


def strings(row: Row, field: str, where: str) -> tuple[str, ...]:
    """The texts of a field that has one or a list of them."""
    value = row.get(field)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(one, str) and one.strip() for one in values):
        raise UsageError(f"{where}: the field {field!r} has to be a list of texts, none of them empty")
    return tuple(values)


def whole(row: Row, field: str, where: str) -> int:
    """The whole number of a field."""
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{where}: the field {field!r} has to be a whole number")
    return value


def pairs(row: Row, field: str, where: str) -> list[tuple[Any, Any]]:
    """The pairs of a field."""
    value = row.get(field)
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(one, list | tuple) and len(one) == 2 for one in value)
    ):
        raise UsageError(f"{where}: the field {field!r} has to be a list of pairs")
    return value
