"""Read rows from files and check their fields; every error names the file, the line and the field.

All functions raise `UsageError`: for a file that cannot be read, is empty or is not UTF-8, and for a line that is not a
valid row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from memagent_integrations import files
from memagent_integrations.errors import UsageError

Record = TypeVar("Record")
Row = Mapping[str, Any]


def each(path: Path, record: Callable[[Row, str], Record]) -> Iterator[Record]:
    """Yield `record(row, where)` for each row of a jsonl file; `where` names the row in error messages."""
    empty = True
    for number, _, line in lines(path):
        empty = False
        where = where_of(path, number)
        yield record(row_of(line, where), where)
    if empty:
        raise UsageError(f"{path} has no rows")


def lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the lines that are not blank: the number, from 1, the offset of the first byte, and the line."""
    start = 0
    with files.accessing("read", path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, start, line
            start += len(line)


def where_of(path: Path, number: int) -> str:
    """Return the name of a line for error messages."""
    return f"{path}, line {number}"


def decoded(line: bytes, where: str) -> str:
    """Return the text of a line."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: this is not UTF-8 text ({error.reason})") from error


def row_of(line: bytes, where: str) -> Row:
    """Parse a line: a JSON object without lone surrogates."""
    try:
        row = json.loads(decoded(line, where))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: this is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a row is a JSON object, not {type(row).__name__}")
    if b"\\ud" in line.lower():  # no tokenizer accepts half a character
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{where}: an escape of the row stands for half a character (a lone surrogate)") from error
    return row


def text_of(path: Path) -> str:
    """Read a whole text file, which must not be empty."""
    content = files.read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: this is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise UsageError(f"{path} is empty")
    return text


def string(row: Row, field: str, where: str) -> str:
    """Return a field that holds a text that is not empty."""
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: the field {field!r} has to be a text that is not empty")
    return value


def strings(row: Row, field: str, where: str) -> tuple[str, ...]:
    """Return a field that holds one text or a list of texts, none of them empty."""
    value = row.get(field)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(text, str) and text.strip() for text in values):
        raise UsageError(f"{where}: the field {field!r} has to be a list of texts, none of them empty")
    return tuple(values)


def integer(row: Row, field: str, where: str) -> int:
    """Return a field that holds a whole number."""
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{where}: the field {field!r} has to be a whole number")
    return value


def pairs(row: Row, field: str, where: str) -> list[tuple[Any, Any]]:
    """Return a field that holds a list of pairs, which is not empty."""
    value = row.get(field)
    are_pairs = isinstance(value, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    if not value or not are_pairs:
        raise UsageError(f"{where}: the field {field!r} has to be a list of pairs")
    result: list[tuple[Any, Any]] = value
    return result
