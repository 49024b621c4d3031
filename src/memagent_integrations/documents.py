"""Anything that holds text, as a stream of pieces that know where they came from.

Framework objects are recognised by their shape (`page_content`, `get_content`, `lazy_load`, ...), so that no framework has to be
installed. Nothing is read before it is asked for, and nothing is kept.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.files import reason

SEPARATOR = "\n\n"
"""Stands between two documents of a collection, so that the end of one does not run into the start of the next."""

Item = TypeVar("Item")

_log = logging.getLogger(__name__)
_LONGEST_NAME = 255
_BLOCK = 1 << 18  # bytes of a file read at a time
_MARKS = (  # that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_FORMATS = (
    (b"%PDF-", "a PDF"),
    (b"PK\x03\x04", "a ZIP, DOCX or EPUB archive"),
    (b"\x89PNG", "a PNG image"),
    (b"\x1f\x8b", "gzip data"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the text. It starts at character `start` of the document `document_id` (None: text between documents)."""

    text: str
    document_id: str | None
    start: int


def pieces(document: Any) -> Iterator[Piece]:
    """The text of a document, piece by piece and lazily.

    `document` is a `str` (text, never a file name), a `Path` (UTF-8, or UTF-16 with a byte order mark), a LangChain `Document`, a
    LlamaIndex node, a loader with `lazy_load` or `lazy_load_data`, or an iterable of any of these. Strings that follow one another
    in an iterable are one document and are joined as they are (lines of an open file, tokens of a stream); whole documents
    are set apart by a blank line. A sequence of scored nodes is put back into document order first.

    Raises:
        UsageError: an object that is no document, a file that is not text, or an error of the caller's own iterator
            (which is then the cause).
    """
    if isinstance(document, str) and _names_a_file(document):
        _log.warning(
            "the text %r is read as it is, but it is also the name of a file; pass Path(%r) to read that",
            document,
            document,
        )
    joiner = _Joiner()
    yield from _guarded(piece for item in _flatten(document) for piece in joiner.add(item))


async def apieces(document: AsyncIterable[Any]) -> AsyncGenerator[Piece]:
    """`pieces` of an async iterable, which is closed in the end if it can be."""
    joiner = _Joiner()
    source = aiter(document)
    try:
        with _BEGUN.reading(document) if isinstance(document, AsyncIterator) else nullcontext():
            async for item in _aguarded(source):
                found = _guarded(piece for part in _flatten(item) for piece in joiner.add(part))
                async for piece in in_threads(found) if _is_slow(item) else _now(found):
                    yield piece
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()


async def _aguarded(source: AsyncIterator[Any]) -> AsyncIterator[Any]:
    while True:
        try:
            item = await anext(source)
        except StopAsyncIteration:
            return
        except MemAgentError:
            raise
        except Exception as error:
            raise _failed(error) from error
        yield item


async def in_threads(items: Iterator[Item]) -> AsyncGenerator[Item]:
    """The items, each made in a thread: it may take the disk, the network, or a slow tokenizer."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item


async def _now(items: Iterator[Item]) -> AsyncGenerator[Item]:
    for item in items:
        yield item


def files(document: Any) -> list[str]:
    """The files that a document consists of, with their whole paths; none if there is anything else in it."""
    parts = list(document) if isinstance(document, list | tuple) else [document]
    return [str(part.absolute()) for part in parts] if all(isinstance(part, Path) for part in parts) else []


def is_async(document: Any) -> bool:
    """Whether only `apieces` can read the document."""
    return isinstance(document, AsyncIterable)


def is_one_shot(document: Any) -> bool:
    """Whether reading the document uses it up."""
    return isinstance(document, (Iterator, AsyncIterator))


def _is_slow(item: Any) -> bool:
    return not (isinstance(item, str) or hasattr(item, "page_content"))


class _Begun:
    """The iterators that were begun and not read to their end. Nobody else may take the rest of one for the whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, Any] = {}  # the object too, or a reference to it: an id is only its own while it lives

    @contextmanager
    def reading(self, document: Any) -> Iterator[None]:
        with self._lock:
            if (kept := self._kept.get(id(document))) is document or (
                isinstance(kept, weakref.ref) and kept() is document
            ):
                raise UsageError(
                    "this iterator was read from before, so what is left of it is not the whole document; give what can be read again "
                    "(str, Path, list, loader), or collect it first"
                )
            self._kept.pop(id(document), None)
            self._kept[id(document)] = _weak(document)
            while len(self._kept) > _MOST_BEGUN:
                del self._kept[next(iter(self._kept))]
        yield
        with self._lock:
            self._kept.pop(id(document), None)


def _weak(item: Any) -> Any:
    try:
        return weakref.ref(item)
    except TypeError:  # those of lists, map and zip
        return item


_MOST_BEGUN = 256
_BEGUN = _Begun()


class _Joiner:
    """Turns items into pieces: numbers what has no name, puts the separator between documents."""

    def __init__(self) -> None:
        self._documents = 0
        self._position = 0  # characters of the current run of strings
        self._open = False  # the last item was a string

    def add(self, item: Any) -> Iterator[Piece]:
        if isinstance(item, str):
            if not self._open:
                yield from self._next_document()
                self._open, self._position = True, 0
            yield Piece(text=item, document_id=f"text-{self._documents}", start=self._position)
            self._position += len(item)
            return
        self._open = False
        yield from self._next_document()
        if isinstance(item, Path):
            yield from _read(item)
        else:
            yield _from_object(item, self._documents)

    def _next_document(self) -> Iterator[Piece]:
        self._documents += 1
        if self._documents > 1:
            yield Piece(text=SEPARATOR, document_id=None, start=0)


def _flatten(document: Any) -> Iterator[Any]:
    """Strings, paths and single documents, in order."""
    if isinstance(document, (str, Path)) or _is_document(document):
        yield document
    elif isinstance(document, (bytes, bytearray)):
        raise UsageError("the document is bytes; decode it to str first, with the encoding it was written in")
    elif isinstance(document, dict):
        raise UsageError("the document is a dict; pass the text in it, or a Document or node made from it")
    elif (items := loaded(document)) is not None:
        for item in items:
            yield from _flatten(item)
    elif isinstance(document, Iterator):
        with _BEGUN.reading(document):
            for item in document:
                yield from _flatten(item)
    elif hasattr(type(document), "model_fields"):
        raise UsageError(f"{type(document).__name__} is not a document; pass the text in it")
    elif isinstance(document, Iterable):
        for item in _ordered(document):
            yield from _flatten(item)
    elif isinstance(document, AsyncIterable):
        raise UsageError("the document is an async iterator; read it with aread, astream or aread_many")
    else:
        raise UsageError(
            f"{type(document).__name__} is not a document; "
            "pass a str, a Path, a LangChain Document, a LlamaIndex node, a loader, or an iterable of these"
        )


def loaded(loader: Any) -> Iterable[Any] | None:
    """What a loader of LangChain or LlamaIndex loads, lazily if it can; None for what is no loader."""
    load = getattr(loader, "lazy_load", None) or getattr(loader, "lazy_load_data", None)
    if not callable(load):
        return None
    try:
        items: Iterable[Any] = load()
    except NotImplementedError:  # the lazy method of LlamaIndex's readers, where one does not fill it
        items = loader.load_data()
    return items


def _names_a_file(text: str) -> bool:
    try:
        return 0 < len(text) <= _LONGEST_NAME and text.isprintable() and Path(text).is_file()
    except (OSError, ValueError):
        return False


def _guarded(items: Iterator[Piece]) -> Iterator[Piece]:
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except MemAgentError:
            raise
        except Exception as error:
            raise _failed(error) from error
        yield item


def _failed(error: Exception) -> UsageError:
    return UsageError(f"reading the document failed: {type(error).__name__}: {error}")


def _is_document(item: Any) -> bool:
    return hasattr(item, "page_content") or hasattr(item, "get_content") or _is_scored(item)


def _is_scored(item: Any) -> bool:
    return hasattr(item, "node") and hasattr(item, "score")


def _ordered(items: Iterable[Any]) -> Iterable[Any]:
    if not isinstance(items, Sequence) or not items or not all(map(_is_scored, items)):
        return items
    rank: dict[str, int] = {}
    for item in items:
        rank.setdefault(_document_id(item.node), len(rank))
    return sorted(
        items, key=lambda item: (rank[_document_id(item.node)], getattr(item.node, "start_char_idx", None) or 0)
    )


def node_place(node: Any) -> tuple[str, int]:
    """Where a LlamaIndex node's text stands: the id of its document and the first character. A node that does not know its place is its own."""
    start = getattr(node, "start_char_idx", None)
    return (_document_id(node), start) if isinstance(start, int) else (str(getattr(node, "node_id", "")), 0)


def _document_id(node: Any) -> str:
    return str(getattr(node, "ref_doc_id", None) or getattr(node, "node_id", ""))


def _from_object(item: Any, number: int) -> Piece:
    if _is_scored(item):
        item = item.node
    if hasattr(item, "page_content"):
        metadata = getattr(item, "metadata", None) or {}
        name = str(metadata.get("source") or getattr(item, "id", None) or f"document-{number}")
        page = metadata.get("page")
        text, start = item.page_content, metadata.get("start_index")
        name = name if page is None else f"{name}#page={page}"
    else:
        text, (name, start) = item.get_content(), node_place(item)
        name = name or f"document-{number}"
    if not isinstance(text, str):
        raise UsageError(f"the content of {name} is {type(text).__name__}, not text")
    return Piece(text=text, document_id=name, start=start if isinstance(start, int) else 0)


def _read(path: Path) -> Iterator[Piece]:
    """A text file, block by block, with its line ends as they are."""
    try:
        with path.open("rb") as file:
            yield from _decoded(path, file)
    except (OSError, ValueError) as error:  # a path with a NUL or a lone surrogate in it is a ValueError
        raise UsageError(f"cannot read {str(path)!r}: {reason(error)}") from error


def _decoded(path: Path, file: IO[bytes]) -> Iterator[Piece]:
    block, position = file.read(_BLOCK), 0
    if kind := next((name for magic, name in _FORMATS if block.startswith(magic)), None):
        raise UsageError(
            f"{path} is {kind}, not a text file; extract its text first, for example with a document loader"
        )
    encoding = next((name for mark, name in _MARKS if block.startswith(mark)), "utf-8")
    if encoding == "utf-8" and block.count(0) > len(block) // 10:
        raise UsageError(
            f"{path} is not UTF-8 text: it is full of NUL bytes (binary data, or UTF-16 without a byte order mark); convert it"
        )
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while block:
            text = decoder.decode(block)
            yield Piece(text=text, document_id=str(path), start=position)
            position += len(text)
            block = file.read(_BLOCK)
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise UsageError(
            f"{path} is not {encoding} text ({error}); convert it, or decode it yourself and pass the str"
        ) from error
