"""Cut a text into chunks of at most N tokens; without overlap, the joined chunks are the text, character for character.

The chunker does no I/O: text is pushed in and chunks come out. So one implementation serves sync and async documents,
and never holds more than a few chunks of text, however long the document is.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache

from memagent_integrations.documents import Piece, in_threads
from memagent_integrations.errors import UsageError
from memagent_integrations.records import Chunk, Source, Span
from memagent_integrations.statements import SENTENCE_END
from memagent_integrations.tokens import Counter, fit

FULL = 0.9
"""Every chunk but the last is filled to at least this share of `chunk_tokens`."""

TAIL = 0.08
"""The last part of a chunk, as a share of it, in which the chunker looks for a good place to end the chunk."""

_BREAKS = (  # where to cut, best first (a paragraph, a sentence, a word); the cut comes after the match
    re.compile(r"(?:\r?\n[ \t]*){2,}"),
    re.compile(SENTENCE_END),
    re.compile(r"\s+|[、，；：]"),
)


class Chunker:
    """Cuts text into chunks: push it in with `feed`, end with `finish`; both yield the chunks that are complete.

    `count` counts tokens, of the text as `harmless` returns it, which is as long. A chunk has at most `chunk_tokens`
    tokens and, unless it is the last, at least 90 % of them. It ends after a paragraph, a sentence or a word if one
    ends in its last part (`TAIL`). With `overlap_tokens`, it begins with up to that many tokens of the previous chunk,
    and its span includes them.

    Raises:
        UsageError: a single character has more than `chunk_tokens` tokens.
    """

    def __init__(
        self, count: Counter, chunk_tokens: int, overlap_tokens: int = 0, harmless: Callable[[str], str] = str
    ) -> None:
        self._count = lru_cache(maxsize=8)(count)  # the same candidate is counted up to three times
        self._harmless = harmless
        self._limit = chunk_tokens
        self._overlap_limit = overlap_tokens
        self._text = ""  # what is not yet in a chunk, after the overlap
        self._counted = ""  # the same, while the end of a chunk is looked for; harmless if a chunk of it is not
        self._start = 0  # where `_text` starts in the whole text
        self._overlap = 0  # characters at the start of `_text` that the previous chunk holds too
        self._index = 0
        self._characters_per_token = 4.0  # in the previous chunk
        self._least_text = 0  # characters to have before the next cut is tried
        self._sources: deque[tuple[int, Source]] = deque()  # each with its start in the whole text

    @property
    def room(self) -> int:
        """The number of characters to take before the next cut is tried."""
        return max(self._least_text, int(self._limit * self._characters_per_token * 1.5), 64) - len(self._text)

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
        """Yield the chunks that are left, now that the text is complete."""
        while len(self._text) > self._overlap:
            yield from self._cut(final=True)

    def _cut(self, *, final: bool) -> Iterator[Chunk]:
        """Yield a chunk from the start of the text; none if all of it fits and more text may follow."""
        text = self._text
        self._counted = self._harmless(text) if "<|" in text else text  # tiktoken's `encode` refuses control tokens
        size = self._best_size()
        if self._harmless(text[:size]) != self._counted[:size]:
            self._counted = self._harmless(text)
            size = self._best_size()
        if size == 0 or size <= self._overlap:
            position = self._start + self._overlap
            raise UsageError(f"chunk_tokens={self._limit} is too small for the text at character {position}")
        if size == len(text) and not final:
            self._least_text = 2 * len(text)
            return
        yield self._make_chunk(size)

    def _best_size(self) -> int:
        """Return the size of the next chunk; 0 or no more than the overlap if not one more character fits."""
        guess = int(self._limit * self._characters_per_token * 0.99)
        size = fit(self._limit, len(self._text), self._tokens, guess=guess, enough=0.98)
        return self._best_end(size) if self._overlap < size < len(self._text) else size

    def _best_end(self, size: int) -> int:
        """Return the best place to end a chunk of at most `size` characters; `size` itself if there is none near."""
        text, floor = self._text, max(int(size * (1 - TAIL)), self._overlap)
        for pattern in _BREAKS:
            matches = pattern.finditer(text, floor, min(len(text), size + 1))
            ends = [match.end() for match in matches if floor < match.end() <= size]
            if ends and self._is_full(ends[-1]):
                return ends[-1]
        end = size
        while end > floor and _splits_character(text, end):
            end -= 1
        return end if end > floor and self._is_full(end) else size

    def _is_full(self, size: int) -> bool:
        return FULL * self._limit <= self._tokens(size) <= self._limit

    def _tokens(self, size: int) -> int:
        return self._count(self._counted[:size])

    def _make_chunk(self, size: int) -> Chunk:
        """Return the first `size` characters as a chunk, and keep what the next chunk needs."""
        text, end = self._text[:size], self._start + size
        tokens, sources = self._tokens(size), tuple(self._sources_until(end))
        span = Span(index=self._index, start=self._start, end=end, tokens=tokens, sources=sources)
        self._characters_per_token = size / max(tokens, 1)
        self._overlap = self._overlap_of(size) if self._overlap_limit else 0
        self._text = self._text[size - self._overlap :]
        self._start = end - self._overlap
        self._least_text = 0
        self._index += 1
        while len(self._sources) > 1 and self._sources[1][0] <= self._start:
            self._sources.popleft()
        return Chunk(span=span, text=text)

    def _overlap_of(self, size: int) -> int:
        """Return how many characters at the end of a chunk of `size` characters the next chunk repeats."""
        guess, text = int(self._overlap_limit * self._characters_per_token), self._counted[:size]
        return fit(self._overlap_limit, size - 1, lambda n: self._count(text[size - n :]), guess=guess)

    def _note_source(self, piece: Piece, position: int, length: int) -> None:
        """Remember where the next `length` characters of the text come from; `position` is theirs in the piece."""
        if piece.document_id is None:
            return
        text_start, start = self._start + len(self._text), piece.start + position
        source = Source(document_id=piece.document_id, start=start, end=start + length, page=piece.page)
        if self._sources:
            last_start, last = self._sources[-1]
            same = (last.document_id, last.page, last.end) == (source.document_id, source.page, source.start)
            if same and last_start + last.end - last.start == text_start:
                self._sources[-1] = (last_start, replace(last, end=source.end))
                return
        self._sources.append((text_start, source))

    def _sources_until(self, end: int) -> Iterator[Source]:
        """Yield the sources of the text up to `end`, a position in the whole text."""
        for text_start, source in self._sources:
            first = max(text_start, self._start)
            last = min(text_start + source.end - source.start, end)
            if first < last:
                shift = source.start - text_start
                yield replace(source, start=first + shift, end=last + shift, offset=first - self._start)


def _splits_character(text: str, position: int) -> bool:
    """Return whether a cut at `position` would separate a character from its accents, or a CR from its LF."""
    following = text[position]
    return (
        bool(unicodedata.combining(following))
        or following in "\ufe0f\u200d"
        or text[position - 1] == "\u200d"
        or text[position - 1 : position + 1] == "\r\n"
    )


def chunks(pieces: Iterable[Piece], chunker: Chunker) -> Iterator[Chunk]:
    """Yield the chunks of a document, lazily."""
    for piece in pieces:
        yield from chunker.feed(piece)
    yield from chunker.finish()


async def achunks(pieces: AsyncGenerator[Piece], chunker: Chunker) -> AsyncGenerator[Chunk]:
    """Yield the chunks of an async document. `pieces` is closed at the end."""
    async with aclosing(pieces):
        async for piece in pieces:
            if len(piece.text) < chunker.room:
                list(chunker.feed(piece))  # completes no chunk and counts no tokens, so it needs no thread
                continue
            async for chunk in in_threads(chunker.feed(piece)):
                yield chunk
        async for chunk in in_threads(chunker.finish()):
            yield chunk
