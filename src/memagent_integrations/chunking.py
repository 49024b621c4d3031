"""Text into chunks of at most N tokens. Joined they are the text again, character for character.

The chunker does no I/O: text is pushed in, chunks come out, so one implementation serves sync and async documents, and memory stays
bounded by a few chunks whatever the length.
"""

from __future__ import annotations

import itertools
import re
import threading
import unicodedata
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from functools import lru_cache
from hashlib import sha256

from memagent_integrations.documents import Piece, in_threads
from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.records import Chunk, Source, Span
from memagent_integrations.tokens import Counter, fit

FULL = 0.9
"""Every chunk but the last holds at least this share of its tokens."""

TAIL = 0.08
"""The share of a chunk in which a good place for its end is sought."""

_BREAKS = (  # where to cut, best first; the cut comes after the match
    re.compile(r"(?:\r?\n[ \t]*){2,}"),
    re.compile(r"[.!?…]['\")\]’”»]*\s+|[。！？]['\")\]’”」』]*\s*|\r?\n"),
    re.compile(r"\s+|[、，；：]"),
)


class Chunker:
    """Push text in with `feed`, end with `finish`; both give the chunks that are complete.

    `count` is the tokenizer's count. A chunk has at most `chunk_tokens` tokens and, unless it is the last, at least 90 % of that;
    it ends at a paragraph, a sentence or a word where one ends near its end (`TAIL`). With `overlap_tokens`, a chunk begins with up to
    that many tokens of the one before, and its span says so.

    Raises:
        UsageError: one character alone has more than `chunk_tokens` tokens.
    """

    def __init__(self, count: Counter, chunk_tokens: int, overlap_tokens: int = 0) -> None:
        self._count = lru_cache(maxsize=8)(count)  # the same candidate is counted up to three times
        self._limit = chunk_tokens
        self._overlap = overlap_tokens
        self._text = ""  # not yet in a chunk, the overlap included
        self._start = 0  # where `_text` starts in the whole text
        self._fresh = 0  # characters at the start of `_text` that the previous chunk holds too
        self._index = 0
        self._per_token = 4.0  # characters, as seen so far
        self._reach = 0  # characters to have before the next cut is tried
        self._sources: deque[tuple[int, Source]] = deque()  # where each begins in the whole text

    @property
    def room(self) -> int:
        """Characters to take before the next cut is tried."""
        return max(self._reach, int(self._limit * self._per_token * 1.5), 64) - len(self._text)

    def feed(self, piece: Piece) -> Iterator[Chunk]:
        """Take a piece of text; yield the chunks that it completes."""
        position = 0
        while position < len(piece.text):
            part = piece.text[position : position + max(self.room, 1)]
            self._note_source(piece, position, len(part))
            self._text += part
            position += len(part)
            if self.room <= 0:
                yield from self._cut(final=False)

    def finish(self) -> Iterator[Chunk]:
        """The text is complete; yield what is left of it."""
        while len(self._text) > self._fresh:
            yield from self._cut(final=True)

    def _cut(self, *, final: bool) -> Iterator[Chunk]:
        text = self._text
        size = fit(
            self._limit,
            len(text),
            lambda n: self._count(text[:n]),
            guess=int(self._limit * self._per_token * 0.99),
            enough=0.98,
        )
        if size == 0 or size <= self._fresh:
            raise UsageError(
                f"chunk_tokens={self._limit} is too small for the text at character {self._start + self._fresh}"
            )
        if size == len(text) and not final:
            self._reach = 2 * len(text)
            return
        if size < len(text):
            size = self._boundary(size)
        yield self._emit(size)

    def _boundary(self, size: int) -> int:
        """The best place to end the chunk in its tail; `size` if none is."""
        text, least = self._text, FULL * self._limit
        floor = max(int(size * (1 - TAIL)), self._fresh)
        for pattern in _BREAKS:
            ends = [
                match.end()
                for match in pattern.finditer(text, floor, min(len(text), size + 1))
                if floor < match.end() <= size
            ]
            if ends and least <= self._count(text[: ends[-1]]) <= self._limit:
                return ends[-1]
        place = size
        while place > floor and _inside(text, place):
            place -= 1
        return place if place > floor and least <= self._count(text[:place]) <= self._limit else size

    def _emit(self, size: int) -> Chunk:
        text, end = self._text[:size], self._start + size
        tokens = self._count(text)
        span = Span(
            index=self._index, start=self._start, end=end, tokens=tokens, sources=tuple(self._sources_until(end))
        )
        self._per_token = size / max(tokens, 1)
        keep = 0
        if self._overlap:
            keep = fit(
                self._overlap,
                size - 1,
                lambda n: self._count(text[size - n :]),
                guess=int(self._overlap * self._per_token),
            )
        self._text = self._text[size - keep :]
        self._start = end - keep
        self._fresh, self._reach = keep, 0
        self._index += 1
        while len(self._sources) > 1 and self._sources[1][0] <= self._start:
            self._sources.popleft()
        return Chunk(span=span, text=text)

    def _note_source(self, piece: Piece, position: int, length: int) -> None:
        if piece.document_id is None:
            return
        at = self._start + len(self._text)
        source = Source(
            document_id=piece.document_id, start=piece.start + position, end=piece.start + position + length
        )
        if self._sources:
            begin, last = self._sources[-1]
            if (
                last.document_id == source.document_id
                and last.end == source.start
                and begin + last.end - last.start == at
            ):
                self._sources[-1] = (begin, Source(document_id=last.document_id, start=last.start, end=source.end))
                return
        self._sources.append((at, source))

    def _sources_until(self, end: int) -> Iterator[Source]:
        for begin, source in self._sources:
            first, last = max(begin, self._start), min(begin + source.end - source.start, end)
            if first < last:
                yield Source(
                    document_id=source.document_id, start=source.start + first - begin, end=source.start + last - begin
                )


def _inside(text: str, place: int) -> bool:
    """Whether `place` would cut a character from its accents, or a CR from its LF."""
    after = text[place]
    return (
        bool(unicodedata.combining(after))
        or after in "\ufe0f\u200d"
        or text[place - 1] == "\u200d"
        or text[place - 1 : place + 1] == "\r\n"
    )


def chunks(pieces: Iterable[Piece], chunker: Chunker) -> Iterator[Chunk]:
    """The chunks of a document, lazily."""
    for piece in pieces:
        yield from chunker.feed(piece)
    yield from chunker.finish()


async def achunks(pieces: AsyncGenerator[Piece], chunker: Chunker) -> AsyncGenerator[Chunk]:
    """`chunks` of an async document. The pieces are closed in the end."""
    async with aclosing(pieces):
        async for piece in pieces:
            if len(piece.text) < chunker.room:
                list(chunker.feed(piece))  # no chunk is complete yet, nothing is counted
                continue
            async for chunk in in_threads(chunker.feed(piece)):
                yield chunk
        async for chunk in in_threads(chunker.finish()):
            yield chunk


def running_digest(before: str, chunk: Chunk) -> str:
    """A digest of the chunks read so far: `before` is that of those before this one, "" if there are none."""
    return sha256(f"{before}\0{chunk.text}".encode("utf-8", "surrogatepass")).hexdigest()


class SharedChunks:
    """Chunks that several loops read, in several threads: each is made once, and kept until all are through."""

    def __init__(self, source: Iterator[Chunk]) -> None:
        self._source = source
        self._made: list[Chunk] = []
        self._end: StopIteration | MemAgentError | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Chunk]:
        for place in itertools.count():
            with self._lock:
                if place == len(self._made) and not self._end:
                    self._make()
                if place == len(self._made):
                    if isinstance(self._end, MemAgentError):
                        raise self._end
                    return
                chunk = self._made[place]
            yield chunk

    def _make(self) -> None:
        try:
            self._made.append(next(self._source))
        except (StopIteration, MemAgentError) as end:
            self._end = end
