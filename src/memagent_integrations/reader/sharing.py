"""Chunks of one document for several loops: each is made once, and dropped when all of them have read it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from memagent_integrations.errors import MemAgentError
from memagent_integrations.records import Chunk
from memagent_integrations.scopes import Scope


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
