"""Turn anything that holds text into a stream of pieces that know where they came from.

Objects of frameworks are recognised by their attributes (`page_content`, `get_content`, `lazy_load`, ...), so that no
framework has to be installed. Text is read when it is needed and not kept.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from typing import Any, TypeVar

from memagent_integrations.errors import MemAgentError, UsageError, is_control_flow
from memagent_integrations.places import in_document_order, is_node, node_of, place_of, text_of
from memagent_integrations.scopes import in_thread
from memagent_integrations.text_files import text_blocks

SEPARATOR = "\n\n"
"""The text between two documents of a collection, which keeps them apart."""

Item = TypeVar("Item")

_log = logging.getLogger(__name__)
_LONGEST_FILE_NAME = 255
_ASYNC_LOADERS = {  # the async method of a loader, and the sync ones that it may have besides
    "alazy_load": ("lazy_load", "load"),
    "alazy_load_data": ("lazy_load_data", "load_data", "iter_data"),
    "aload_data": ("lazy_load_data", "load_data", "iter_data"),
}
_READ_ASYNC = "read it with aread, astream or aread_many; in LangChain with ainvoke or astream"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the text. It starts at character `start` of the document `document_id` (None: it is a separator)."""

    text: str
    document_id: str | None
    start: int
    page: str | None = None


def pieces(document: Any, joiner: Joiner | None = None) -> Iterator[Piece]:
    """Yield the text of a document, piece by piece and lazily.

    `document` is a `str` (text, never a file name), a `Path` (UTF-8, or UTF-16 or UTF-32 with a byte order mark), a
    LangChain `Document` or `Blob`, a LlamaIndex node, a loader (`lazy_load`, `lazy_load_data`, `yield_blobs`), or an
    iterable of any of these. Strings that follow one another in an iterable are one document and are joined unchanged
    (lines of an open file, tokens of a stream); whole documents are separated by a blank line. A sequence of
    LlamaIndex nodes is put back into document order first. A `Piece` is passed on. A `joiner` may do it otherwise.

    Raises:
        UsageError: an object is no document, a file is not text, or the caller's own iterator raised an error (which
            is then the cause).
    """
    if isinstance(document, str) and _is_name_of_file(document):
        _log.warning(
            "the text %r is read as it is, but it is also the name of a file; pass Path(%r) to read that",
            document,
            document,
        )
    joiner = joiner or Joiner()
    yield from joiner.pieces(document)
    joiner.end()


async def apieces(document: Any, joiner: Joiner | None = None) -> AsyncGenerator[Piece]:
    """Yield the text of an async document as `pieces` does. An async generator is closed at the end.

    An async document is an async iterable, a loader that loads only async (`alazy_load`, `alazy_load_data`), an
    awaitable of a document, or a list that has one of these in it.
    """
    joiner = joiner or Joiner()
    async with aclosing(aflattened(document)) as items:
        async for item in items:
            item_pieces = joiner.pieces(item)
            async for piece in in_threads(item_pieces) if _is_slow(item) else _as_async(item_pieces):
                yield piece
    joiner.end()


async def aflattened(document: Any) -> AsyncGenerator[Any]:
    """Yield the sync documents that an async one consists of."""
    if isinstance(document, Awaitable):
        with _reading_errors():
            document = [await document]
    if isinstance(document, list | tuple):
        for item in document:
            async for part in aflattened(item) if is_async(item) else _as_async((item,)):
                yield part
        return
    with _reading_errors():
        source = await _aloaded(document) if loads_only_async(document) else aiter(document)
    try:
        with _UNFINISHED.reading(document) if isinstance(document, AsyncIterator) else nullcontext():
            async for item in _with_reading_errors(source):
                async for part in aflattened(item) if is_async(item) else _as_async((item,)):
                    yield part
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()


async def in_threads(items: Iterator[Item]) -> AsyncGenerator[Item]:
    """Yield the items, each computed in a thread, because it may wait for the disk, the network or a slow tokenizer."""
    while (item := await in_thread(next, items, None)) is not None:
        yield item


async def _as_async(items: Iterable[Item]) -> AsyncGenerator[Item]:
    for item in items:
        yield item


def file_paths(document: Any) -> list[str]:
    """Return the absolute paths of the files that make up the document; none if it holds anything else."""
    parts = list(document) if isinstance(document, list | tuple) else [document]
    return [str(part.absolute()) for part in parts] if all(isinstance(part, Path) for part in parts) else []


def is_async(document: Any) -> bool:
    """Return whether the document needs `apieces`."""
    if isinstance(document, list | tuple):
        return any(map(is_async, document))
    return isinstance(document, (AsyncIterable, Awaitable)) or loads_only_async(document)


def is_one_shot(document: Any) -> bool:
    """Return whether the document can be read only once."""
    return isinstance(document, (Iterator, AsyncIterator, Awaitable))


def _is_slow(item: Any) -> bool:
    return not (isinstance(item, (str, Piece)) or hasattr(item, "page_content"))


class _UnfinishedIterators:
    """Remembers the iterators that were not read to their end: what is left of one must not pass for the whole text."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By id, which may be used again once the object is gone: hence a weak reference to the object, or the object.
        self._iterators: dict[int, Any] = {}

    @contextmanager
    def reading(self, document: Any) -> Iterator[None]:
        """Remember the iterator until the block has come to its end."""
        key = id(document)
        with self._lock:
            known = self._iterators.get(key)
            if (known() if isinstance(known, weakref.ref) else known) is document or _is_spent(document):
                raise UsageError(
                    "this iterator was read from before, so what is left of it is not the whole document; give what "
                    "can be read again (str, Path, list, loader), or collect it first"
                )
            self._iterators.pop(key, None)
            self._iterators[key] = _weak_reference(document)
            while len(self._iterators) > _MOST_UNFINISHED:
                del self._iterators[next(iter(self._iterators))]
        yield
        with self._lock:
            self._iterators.pop(key, None)


def _is_spent(item: Any) -> bool:
    """Return whether it is a generator that has come to its end, or was closed."""
    return getattr(item, "gi_frame", item) is None or getattr(item, "ag_frame", item) is None


def _weak_reference(item: Any) -> Any:
    try:
        return weakref.ref(item)
    except TypeError:  # iterators of lists, map and zip
        return item


_MOST_UNFINISHED = 256
_UNFINISHED = _UnfinishedIterators()


class Joiner:
    """Turns items into pieces: numbers the documents without a name, and puts the separator between documents."""

    def __init__(self) -> None:
        self._documents = 0
        self._position = 0  # in the current run of strings, in characters
        self._in_strings = False  # the previous item was a string
        self._parents: dict[str, Any] = {}  # by id: nodes from whose text the offsets of other nodes count

    def pieces(self, document: Any) -> Iterator[Piece]:
        """Yield the pieces of the next document or documents."""
        with _reading_errors():
            for item in flattened(document, self.arrange):
                yield from self.pieces_of_item(item)

    def arrange(self, items: Sequence[Any]) -> Iterable[Any]:
        """Return the items of a list in the order in which they are read."""
        if not items or not all(map(is_node, items)):
            return items
        nodes = map(node_of, items)
        self._parents |= {node.node_id: node for node in nodes if getattr(node, "child_nodes", None)}
        return self.in_order(items)

    def in_order(self, nodes: Sequence[Any]) -> Iterable[Any]:
        """Return nodes in the order in which they are read."""
        return in_document_order(nodes, self.find)

    def find(self, node_id: str) -> Any:
        """Return the node with an id, if it is the parent of others; else None."""
        return self._parents.get(node_id)

    def pieces_of_item(self, item: Any) -> Iterator[Piece]:
        """Yield the pieces of a string, a path or a single document."""
        if isinstance(item, Piece):
            yield item
            return
        if isinstance(item, str):
            if not self._in_strings:
                yield from self.next_document()
                self._in_strings, self._position = True, 0
            yield Piece(text=item, document_id=f"text-{self._documents}", start=self._position)
            self._position += len(item)
            return
        yield from self.next_document()
        if isinstance(item, Path):
            yield from _pieces_of_file(item)
        else:
            yield _from_object(item, self._documents, self.find)

    def next_document(self) -> Iterator[Piece]:
        """Begin the next document: yield the separator if there was one before."""
        self._in_strings = False
        self._documents += 1
        if self._documents > 1:
            yield Piece(text=SEPARATOR, document_id=None, start=0)

    def end(self) -> None:
        """Take notice that the document was read to its end."""


def flattened(document: Any, arrange: Callable[[Sequence[Any]], Iterable[Any]]) -> Iterator[Any]:
    """Yield the strings, paths and single documents that the document consists of, in order; lists as arranged."""
    if isinstance(document, (str, Path, Piece)) or _is_document(document):
        yield document
    elif isinstance(document, (bytes, bytearray)):
        raise UsageError("the document is bytes; decode it to str first, with the encoding it was written in")
    elif isinstance(document, dict):
        raise UsageError("the document is a dict; pass the text in it, or a Document or node made from it")
    elif (items := loaded(document)) is not None:
        for item in items:
            yield from flattened(item, arrange)
    elif isinstance(document, Iterator):
        with _UNFINISHED.reading(document):
            for item in document:
                yield from flattened(item, arrange)
    elif hasattr(type(document), "model_fields"):
        raise UsageError(f"{type(document).__name__} is not a document; pass the text in it")
    elif isinstance(document, Iterable):
        for item in arrange(document) if isinstance(document, Sequence) else document:
            yield from flattened(item, arrange)
    elif isinstance(document, (AsyncIterable, Awaitable)):
        kind = "an async iterator" if isinstance(document, AsyncIterable) else "an awaitable"
        raise UsageError(f"the document is {kind}; {_READ_ASYNC}")
    else:
        raise UsageError(
            f"{type(document).__name__} is not a document; "
            "pass a str, a Path, a LangChain Document, a LlamaIndex node, a loader, or an iterable of these"
        )


def loaded(loader: Any) -> Iterable[Any] | None:
    """Return the documents of a LangChain or LlamaIndex loader, lazily if it can; None if it is not a loader.

    Raises:
        UsageError: it loads only async.
    """
    if loads_only_async(loader):
        raise UsageError(f"{type(loader).__name__} loads only async; {_READ_ASYNC}")
    names = ("lazy_load", "lazy_load_data", "yield_blobs", "iter_data", "load_data")
    for load in (load for name in names if callable(load := getattr(loader, name, None))):
        with suppress(NotImplementedError):  # a LlamaIndex reader has most of them, and implements some
            items: Iterable[Any] = load()
            return items
    return None


def loads_only_async(loader: Any) -> bool:
    """Return whether this is a loader whose only method of its own is the async one."""
    if is_node(loader) or hasattr(loader, "page_content"):  # cheap: a list may have many, and the event loop waits
        return False
    names = next((names for name, names in _ASYNC_LOADERS.items() if _has_own(loader, name)), None)
    return names is not None and not any(_has_own(loader, name) for name in names)


async def _aloaded(loader: Any) -> AsyncIterator[Any]:
    items = next(getattr(loader, name) for name in _ASYNC_LOADERS if _has_own(loader, name))()
    items = await items if isawaitable(items) else items
    return aiter(items) if isinstance(items, AsyncIterable) else _as_async(items)


def _has_own(loader: Any, name: str) -> bool:
    """Return whether a loader has a method that is not its framework's, which would call another one or raise."""
    method = getattr(loader, name, None)
    return callable(method) and not str(getattr(method, "__qualname__", "")).startswith(("BaseLoader.", "BaseReader."))


def _is_name_of_file(text: str) -> bool:
    try:
        return 0 < len(text) <= _LONGEST_FILE_NAME and text.isprintable() and Path(text).is_file()
    except (OSError, ValueError):
        return False


@contextmanager
def _reading_errors() -> Iterator[None]:
    """Turn the errors that a caller's own iterator or loader raises in the block into `UsageError`s.

    A LangGraph interrupt passes: a loader may ask a person.
    """
    try:
        yield
    except MemAgentError:
        raise
    except Exception as error:
        if is_control_flow(error):
            raise
        raise UsageError(f"reading the document failed: {type(error).__name__}: {error}") from error


async def _with_reading_errors(source: AsyncIterator[Any]) -> AsyncIterator[Any]:
    with _reading_errors():
        async for item in source:
            yield item


def _is_document(item: Any) -> bool:
    return hasattr(item, "page_content") or is_node(item) or _is_blob(item)


def _is_blob(item: Any) -> bool:
    return hasattr(item, "as_string") and hasattr(item, "as_bytes_io")


def _from_object(item: Any, number: int, find: Callable[[str], Any]) -> Piece:
    item = node_of(item)
    metadata = getattr(item, "metadata", None) or {}
    if hasattr(item, "page_content"):
        name = str(metadata.get("source") or getattr(item, "id", None) or f"document-{number}")
        page = metadata.get("page", metadata.get("page_label"))
        text, start = item.page_content, metadata.get("start_index")
        name = name if page is None else f"{name}#page={page}"
    elif _is_blob(item):
        text, name, start = item.as_string(), str(item.source or f"document-{number}"), 0
    else:
        text, place = text_of(item), place_of(item, find)
        name, start = place.document_id or f"document-{number}", place.start
    if not isinstance(text, str):
        raise UsageError(f"the content of {name} is {type(text).__name__}, not text")
    return Piece(text=text, document_id=name, start=start if isinstance(start, int) else 0, page=page_of(metadata))


def page_of(metadata: Any) -> str | None:
    """Return the page that the metadata of a document or node name: as it is printed, else as its loader counts."""
    pages = (metadata.get(name) for name in ("page_label", "page")) if isinstance(metadata, Mapping) else ()
    return next((str(page) for page in pages if page not in (None, "")), None)


def _pieces_of_file(path: Path) -> Iterator[Piece]:
    position = 0
    with closing(text_blocks(path)) as blocks:
        for text in blocks:
            yield Piece(text=text, document_id=str(path), start=position)
            position += len(text)
