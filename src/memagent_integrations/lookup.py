"""Look up passages: an index of the chunks already read, on the disk, from which those that match best are taken."""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

from memagent_integrations.chunking import Chunker
from memagent_integrations.documents import Piece
from memagent_integrations.errors import UsageError
from memagent_integrations.records import Chunk, Source
from memagent_integrations.statements import terms
from memagent_integrations.tokens import Counter, cut

PASSAGE_TOKENS = 256
"""The size of a passage, which ends at a sentence or paragraph where possible. Smaller where the window is."""
LEAST_PASSAGE_TOKENS = 32
BETWEEN, BETWEEN_TOKENS = "\n\n", 4
"""What stands between two passages, and the most tokens that it adds."""

# the words alone: the text of a passage stands beside them
_TABLES = "CREATE TABLE passage (chunk BLOB); CREATE VIRTUAL TABLE word USING fts5 (words, content='')"
_BEST = (
    "SELECT chunk FROM passage WHERE rowid IN (SELECT rowid FROM word WHERE word MATCH ? ORDER BY bm25(word), rowid"
    " LIMIT ?) ORDER BY rowid"
)


class PassageIndex:
    """The chunks of a document as passages, ranked by BM25 (SQLite's FTS5: Okapi, k1 = 1.2, b = 0.75).

    Words are the terms of `statements`, which need no dictionary and no spaces. The index is a temporary file that
    SQLite removes, so it takes little memory however long the document is.

    Args:
        passage_tokens: returns the most tokens of a passage, which is known when the first chunk is.
        count: counts them.
    """

    def __init__(self, passage_tokens: Callable[[], int], count: Counter) -> None:
        self._passage_tokens, self._count = passage_tokens, count
        self._end = 0  # of what is indexed, in the whole text
        # the thread that advances a loop may be another one each time
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)

    def indexed(self, source: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks; each is in the index when the next one is asked for.

        Raises:
            UsageError: Python's SQLite lacks FTS5, or the disk is full.
        """
        with _errors():
            self._database.executescript(f"PRAGMA journal_mode = OFF; {_TABLES}")
        for chunk in source:
            yield chunk
            self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        """Add a chunk, without what it repeats of the one before.

        The sizes of its passages are estimated from that of the chunk: counting them all would take longer.
        """
        new = max(self._end - chunk.span.start, 0)
        self._end = chunk.span.end
        size = max(self._passage_tokens() * len(chunk.text) // max(chunk.span.tokens, 1), 1)
        chunker = Chunker(len, size)
        with _errors():
            for passage in (*chunker.feed(Piece(text=chunk.text[new:], document_id=None, start=0)), *chunker.finish()):
                part = _part(chunk, new + passage.span.start, new + passage.span.end)
                row = self._database.execute("INSERT INTO passage VALUES (?)", (pickle.dumps(part),)).lastrowid
                words = " ".join(term for term, *_ in terms(part.text))
                self._database.execute("INSERT INTO word (rowid, words) VALUES (?, ?)", (row, words))

    def best(self, question: str, k: int) -> Chunk | None:
        """Return the k passages that match the question best, in their order, as one chunk; None if none matches."""
        query = " OR ".join(f'"{word}"' for word in dict.fromkeys(term for term, *_ in terms(question)))
        with _errors():
            rows = self._database.execute(_BEST, (query, k)).fetchall() if query else []
        return _joined([pickle.loads(row) for (row,) in rows], self._passage_tokens(), self._count)

    def close(self) -> None:
        """Remove the index."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise UsageError(f"lookup cannot keep its index of passages, a temporary file of SQLite: {error}") from error


def _part(chunk: Chunk, start: int, end: int) -> Chunk:
    """Return the characters `start` to `end` of a chunk as a chunk."""
    sources = []
    for source in chunk.span.sources:
        first, last = max(source.offset, start), min(source.offset + source.end - source.start, end)
        if first < last:
            shift = source.start - source.offset
            sources.append(replace(source, start=first + shift, end=last + shift, offset=first - start))
    span = replace(chunk.span, start=chunk.span.start + start, end=chunk.span.start + end, sources=tuple(sources))
    return Chunk(span=span, text=chunk.text[start:end])


def _joined(passages: list[Chunk], most: int, count: Counter) -> Chunk | None:
    """Return the passages as one chunk, each cut to `most` tokens; None if there are none."""
    text, tokens = "", 0
    sources: list[Source] = []
    for passage in passages:
        text += BETWEEN if text else ""
        kept = _part(passage, 0, len(cut(passage.text, most, count)))
        sources += [replace(source, offset=source.offset + len(text)) for source in kept.span.sources]
        text, tokens = text + kept.text, tokens + count(kept.text)
    if not text:
        return None
    span = replace(passages[0].span, end=passages[-1].span.end, tokens=tokens, sources=tuple(sources))
    return Chunk(span=span, text=text)
