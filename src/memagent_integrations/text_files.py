"""Read files of text, whatever their encoding; say what a file is that is no text."""

from __future__ import annotations

import codecs
import io
import os
import stat
from collections.abc import Generator
from pathlib import Path

from memagent_integrations import files
from memagent_integrations.errors import UsageError

_BLOCK_SIZE = 1 << 18  # bytes of a file that are read at a time
_HEAD = 1 << 12  # bytes by which binary data and encodings are known
_FEW = 16  # NULs in a later block, which may be short, that do not make it binary data
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
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\xd0\xcf\x11\xe0", "a DOC, XLS or PPT file"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3\x00", "an SQLite database"),
)


def text_blocks(path: Path) -> Generator[str]:
    """Yield the text of a file, block by block, with unchanged line ends.

    It is UTF-8, or UTF-16 or UTF-32 with a byte order mark.

    Raises:
        UsageError: the file cannot be read, is not such text, or was cut while it was read.
    """
    with files.accessing("read", path), path.open("rb") as file:
        yield from text_of_stream(path, file)


def text_of_stream(path: Path | str, file: io.BufferedIOBase) -> Generator[str]:
    """Yield the text of an open file or pipe as it comes, as `text_blocks` does; `path` is its name in messages.

    Raises:
        UsageError: it is not such text, or was cut while it was read.
    """
    block = b""
    while len(block) < _HEAD and (more := file.read1(_BLOCK_SIZE)):  # a pipe may give it byte by byte
        block += more
    if binary := next((name for magic, name in _BINARY_FORMATS if block.startswith(magic)), None):
        raise UsageError(
            f"{path} is {binary}, not a text file; extract its text first, for example with a document loader"
        )
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if block.startswith(mark)), "utf-8")
    decoder = codecs.getincrementaldecoder(encoding)()
    size, position = _size(file), 0
    try:
        while block:
            few = _FEW if position else 0
            if encoding.startswith("utf-8") and block.count(0) > max(len(block) // 10, few):
                raise UsageError(
                    f"{path} is not UTF-8 text: it is full of NUL bytes behind byte {position} (binary data, a file "
                    "that was not written to its end, or UTF-16 without a byte order mark); convert it"
                )
            yield decoder.decode(block)
            position += len(block)
            block = file.read1(_BLOCK_SIZE)
        if position < size and _size(file) < size:
            raise UsageError(
                f"{path} was cut while it was read: it had {size} bytes, and only {position} could be read; "
                "read it again when nobody writes to it"
            )
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = position + len(block) - len(error.object) + error.start  # it holds what the block before has left
        name = encoding.removesuffix("-sig").upper()
        raise UsageError(
            f"{path} is not {name} text ({error.reason}, at byte {place}); convert it (to UTF-8 from Latin-1, for one: "
            "iconv -f LATIN1 -t UTF-8 FILE > NEW), or in Python pass its text: path.read_text(encoding=...)"
        ) from error


def _size(file: io.BufferedIOBase) -> int:
    """Return the bytes of an open file; 0 for a pipe or a device, which does not say how much there will be."""
    try:
        status = os.fstat(file.fileno())
    except io.UnsupportedOperation:  # bytes in memory
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
