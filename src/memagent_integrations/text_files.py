"""Read files of text, whatever their encoding; say what a file is that is no text."""

from __future__ import annotations

import codecs
from collections.abc import Generator
from pathlib import Path
from typing import IO

from memagent_integrations import files
from memagent_integrations.errors import UsageError

_BLOCK_SIZE = 1 << 18  # bytes of a file that are read at a time
_BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with the one of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_BINARY_FORMATS = (
    (b"%PDF-", "a PDF"),
    (b"PK\x03\x04", "a ZIP, DOCX or EPUB archive"),
    (b"\x89PNG", "a PNG image"),
    (b"\x1f\x8b", "gzip data"),
)


def text_blocks(path: Path) -> Generator[str]:
    """Yield the text of a file, block by block, with unchanged line ends.

    It is UTF-8, or UTF-16 or UTF-32 with a byte order mark.

    Raises:
        UsageError: the file cannot be read, or is not such text.
    """
    with files.accessing("read", path), path.open("rb") as file:
        yield from _decoded(path, file)


def _decoded(path: Path, file: IO[bytes]) -> Generator[str]:
    block = file.read(_BLOCK_SIZE)
    if binary := next((name for magic, name in _BINARY_FORMATS if block.startswith(magic)), None):
        raise UsageError(
            f"{path} is {binary}, not a text file; extract its text first, for example with a document loader"
        )
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if block.startswith(mark)), "utf-8")
    if encoding == "utf-8" and block.count(0) > len(block) // 10:
        raise UsageError(
            f"{path} is not UTF-8 text: it is full of NUL bytes (binary data, or UTF-16 without a byte order mark); "
            "convert it"
        )
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while block:
            yield decoder.decode(block)
            block = file.read(_BLOCK_SIZE)
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise UsageError(
            f"{path} is not {encoding} text ({error}); convert it, or decode it yourself and pass the str"
        ) from error
