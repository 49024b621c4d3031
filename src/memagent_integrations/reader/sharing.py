"""Chunks of one document for several loops: each is made once.

`SharedChunks` are dropped when all loops have read them, for loops that one schedule keeps together. Those of a
`SharedDocument` are kept on the disk, for readings that begin and end when they like.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.records import Chunk
from memagent_integrations.scopes import Scope, in_thread
from memagent_integrations.spool import Spool


def stands_for(document: Any) -> Hashable:
    """Return what is equal for readings of one document: a text or a path itself, the identity of anything else."""
    return document if isinstance(document, str | Path) else id(document)


@dataclass(eq=False)
class _Kept:
    """A chunk, or what the document ended with, and how many readers have yet to come to it."""

    item: Chunk | MemAgentError | None
    readers: int


class SharedChunks:
    """Chunks that several loops read, in several threads: `source` is read once, as far as the first of them is.

    Args:
        source: the chunks; those of an async document are an async generator.
        readers: how many loops read them.
    """

    def __init__(self, source: Iterator[Chunk] | AsyncGenerator[Chunk], readers: int) -> None:
        self._source, self._readers = source, readers
        self._kept: deque[_Kept] = deque()
        self._first = 0  # the number of the first one that is kept
        self._lock, self._fetching = threading.Lock(), asyncio.Lock()

    @property
    def kept(self) -> int:
        """How many chunks are kept for readers that have not come to them."""
        return len(self._kept)

    def get(self, number: int) -> Chunk | None:
        """Return the chunk of this number to a reader that has those before it; None after the last chunk.

        Raises:
            MemAgentError: the document cannot be read that far.
        """
        with self._lock:
            if number == self._first + len(self._kept):
                self._kept.append(_Kept(self._fetch(), self._readers))
            return self._pass(number)

    async def aget(self, number: int) -> Chunk | None:
        """`get`, where the source is async."""
        async with self._fetching:
            missing = number == self._first + len(self._kept)
            item = await self._afetch() if missing else None
            with self._lock:  # a reader may leave in another thread
                if missing:
                    self._kept.append(_Kept(item, self._readers))
                return self._pass(number)

    def leave(self, number: int) -> None:
        """Note that a reader that would take this number next takes no more."""
        with self._lock:
            self._readers -= 1
            for kept in itertools.islice(self._kept, number - self._first, None):
                kept.readers -= 1
            self._drop()

    async def aclose(self) -> None:
        """Close an async source."""
        if isinstance(self._source, AsyncGenerator):
            await self._source.aclose()

    def _fetch(self) -> Chunk | MemAgentError | None:
        assert isinstance(self._source, Iterator)
        try:
            with Scope(extend=True):  # the time of one reading is not that of the others
                return next(self._source, None)
        except MemAgentError as error:
            return error

    async def _afetch(self) -> Chunk | MemAgentError | None:
        assert isinstance(self._source, AsyncGenerator)
        try:
            return await anext(self._source, None)
        except MemAgentError as error:
            return error

    def _pass(self, number: int) -> Chunk | None:
        kept = self._kept[number - self._first]
        kept.readers -= 1
        self._drop()
        if isinstance(kept.item, MemAgentError):
            raise kept.item
        return kept.item

    def _drop(self) -> None:
        while self._kept and not self._kept[0].readers:
            self._kept.popleft()
            self._first += 1


class ChunkReader:
    """The way of one loop through shared chunks. It has to be closed, however far the loop has come."""

    def __init__(self, shared: SharedChunks) -> None:
        self._shared: SharedChunks | None = shared
        self._number = 0

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._shared is None:
            raise StopIteration
        number, self._number = self._number, self._number + 1
        if (chunk := self._shared.get(number)) is None:
            self.close()
            raise StopIteration
        return chunk

    async def aiter(self) -> AsyncGenerator[Chunk]:
        """Yield the chunks of an async source."""
        while self._shared:
            number, self._number = self._number, self._number + 1
            if (chunk := await self._shared.aget(number)) is None:
                self.close()
                return
            yield chunk

    def close(self) -> None:
        """Let go of the chunks that are left."""
        shared, self._shared = self._shared, None
        if shared:
            shared.leave(self._number)


class SharedDocument:
    """A document that is read and cut once, for several readings of one setup, each of which goes its own way.

    A `Reader` takes it in place of the document. It has to be closed when the readings have ended, by `aclose` if the
    document is async.
    """

    def __init__(self, document: Any) -> None:
        self.document = document
        self._chunks: Iterator[Chunk] | None = None
        self._async_chunks: AsyncGenerator[Chunk] | None = None
        self._spool = Spool()
        self._ended = self._closed = False
        self._error: Exception | None = None
        self._lock, self._fetching = threading.Lock(), asyncio.Lock()

    def chunks(self, cut: Callable[[Any], Iterator[Chunk]]) -> Iterator[Chunk]:
        """Yield the chunks, for one reading; the first reading has them made by `cut`."""
        for number in itertools.count():
            with self._lock:
                if number == len(self._spool) and not self._ended:
                    self._fetch(cut)
            if (chunk := self._kept(number)) is None:
                return
            yield chunk

    async def achunks(self, cut: Callable[[Any], AsyncGenerator[Chunk]]) -> AsyncGenerator[Chunk]:
        """`chunks` of an async document."""
        for number in itertools.count():
            async with self._fetching:
                if number == len(self._spool) and not self._ended:
                    await self._afetch(cut)
            if (chunk := await in_thread(self._kept, number)) is None:
                return
            yield chunk

    def close(self) -> None:
        """Remove the chunks."""
        with self._lock:
            self._ended = self._closed = True
            self._error = UsageError("the readings that shared the document have ended")
            self._chunks = None
            self._spool.close()

    async def aclose(self) -> None:
        """`close`, and close an async document too."""
        if self._async_chunks:
            await self._async_chunks.aclose()
        await in_thread(self.close)

    def _fetch(self, cut: Callable[[Any], Iterator[Chunk]]) -> None:
        with self._ending(), Scope(extend=True):  # the time of one reading is not that of the others
            self._chunks = self._chunks or cut(self.document)
            self._keep(next(self._chunks, None))

    async def _afetch(self, cut: Callable[[Any], AsyncGenerator[Chunk]]) -> None:
        with self._ending():
            self._async_chunks = self._async_chunks or cut(self.document)
            chunk = await anext(self._async_chunks, None)
            with self._lock:
                self._keep(chunk)

    def _keep(self, chunk: Chunk | None) -> None:
        if chunk is None:
            self._ended = True
        else:
            self._spool.fill([chunk])

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the document with an error of the block; what interrupts one reading must not look like its end."""
        try:
            yield
        except Exception as error:
            self._end(error)
        except BaseException:
            self._end(UsageError("the document was not read to its end: a reading that shared it was stopped"))
            raise

    def _end(self, error: Exception) -> None:
        if not self._ended:
            self._ended, self._error = True, error

    def _kept(self, number: int) -> Chunk | None:
        """Return a chunk that was fetched, None after the last one.

        Raises:
            Exception: what reading the document raised after the last chunk.
        """
        with self._lock:
            if number < len(self._spool) and not self._closed:
                return next(self._spool.between(number, number + 1))
        if self._error:  # each reading gets one of its own, on which it leaves its steps
            raise copy(self._error) if isinstance(self._error, MemAgentError) else self._error
        return None


class SharedDocuments:
    """The documents of readings that are made side by side: those of several readings are shared by these.

    Args:
        documents: the document of each reading that is to come, and what else has to be equal where it is shared.
    """

    def __init__(self, documents: Iterable[tuple[Any, Hashable]]) -> None:
        self._left: Counter[Hashable] = Counter((stands_for(document), variant) for document, variant in documents)
        self._shared: dict[Hashable, SharedDocument | None] = {
            key: None for key, number in self._left.items() if number > 1
        }
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._shared)

    @contextmanager
    def lent(self, document: Any, variant: Hashable) -> Iterator[Any]:
        """Yield what one of the readings is to read in place of its document: this itself, if no other has it."""
        key = (stands_for(document), variant)
        if key not in self._shared:
            yield document
            return
        with self._lock:
            shared = self._shared[key] = self._shared[key] or SharedDocument(document)
        try:
            yield shared
        finally:
            with self._lock:
                self._left[key] -= 1
                is_last = not self._left[key]
            if is_last:
                shared.close()

    def close(self) -> None:
        """Close what is shared, once all readings have ended."""
        for shared in filter(None, self._shared.values()):
            shared.close()

    async def aclose(self) -> None:
        """`close`, async."""
        for shared in filter(None, self._shared.values()):
            await shared.aclose()
