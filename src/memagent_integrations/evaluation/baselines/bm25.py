"""Retrieval: the K passages of a document that BM25 ranks highest for the question."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import overload

import bm25s

from memagent_integrations.chunking import Chunker, chunks
from memagent_integrations.documents import pieces
from memagent_integrations.errors import ContextOverflow, EmptyDocument, UsageError
from memagent_integrations.evaluation.baselines.base import Answer, Baseline, Model
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.records import Chunk

PASSAGE_TOKENS = 512
"""Size of a passage, which ends at a sentence or paragraph where possible. Smaller where K of them do not fit."""
_DEFAULT_K = 5
_MIN_PASSAGE_TOKENS = 16
_SEPARATOR = "\n\n"

Extent = tuple[int, int]
"""The characters of a passage in the document: the first, and the one after the last."""


class BM25(Baseline):
    """One call with the K passages (option, default 5) that match the question best, in document order.

    The document is read twice, piece by piece. The first pass keeps, for each passage, its extent and how often it
    holds each word of the question. That gives the scores of an index over all words, with bm25s's defaults: Lucene's
    variant, English stop words.
    """

    def configure(self, options: str) -> None:
        """Set K, the number of passages, from the options.

        Raises:
            UsageError: K is not a number.
        """
        if options and not re.fullmatch("[1-9][0-9]{0,3}", options):
            raise UsageError(f"{self.name!r} has to name a number of passages, as bm25:{_DEFAULT_K} does")
        self.k = int(options or _DEFAULT_K)

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Return the answer from the passages; `details` give their size and their extents."""
        room = model.room(plain(sample.question, "")) - (self.k - 1) * model.count(_SEPARATOR)
        size = min(PASSAGE_TOKENS, room // self.k)
        if size < _MIN_PASSAGE_TOKENS:
            raise ContextOverflow(
                f"{self.k} passages do not fit: "
                f"the window of {model.window} leaves room for {max(room, 0)} tokens of text"
            )
        passages = Passages(sample.question, sample.document(), Chunker(model.count, size))
        extents = best_extents(sample.question, passages, self.k)
        texts = [text.strip() for text in excerpts(sample.document(), extents)]
        answer = model.ask(plain(sample.question, _SEPARATOR.join(texts)))
        return Answer(text=answer, details={"passage_tokens": size, "passages": [list(extent) for extent in extents]})


@dataclass(frozen=True, kw_only=True)
class _Passage:
    """The extent of a passage, its number of words, and (number of a question word, times it occurs) pairs."""

    extent: Extent
    words: int
    matches: tuple[tuple[int, int], ...]


class Passages(Sequence[list[int]]):
    """The passages as lists of word numbers, built on access: words of the question from 1 on, 0 for any other word."""

    def __init__(self, question: str, document: Iterable[str], chunker: Chunker) -> None:
        self.vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words(question)), start=1)}
        self.records = [self._passage(chunk) for chunk in chunks(pieces(document), chunker) if not chunk.text.isspace()]

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | Sequence[list[int]]:
        if isinstance(index, slice):
            return [self._numbers(passage) for passage in self.records[index]]
        return self._numbers(self.records[index])

    def _numbers(self, passage: _Passage) -> list[int]:
        matches = [number for number, times in passage.matches for number in repeat(number, times)]
        return matches + [0] * (passage.words - len(matches))

    def _passage(self, chunk: Chunk) -> _Passage:
        in_chunk = words(chunk.text)
        matches = Counter(self.vocabulary[word] for word in in_chunk if word in self.vocabulary)
        extent = (chunk.span.start, chunk.span.end)
        return _Passage(extent=extent, words=len(in_chunk), matches=tuple(matches.items()))


def words(text: str) -> list[str]:
    """Return the words of a text as bm25s tokenizes them, without stop words."""
    (tokenized,) = bm25s.tokenize([text], return_ids=False, show_progress=False)
    return list(tokenized)


def best_extents(question: str, passages: Passages, k: int) -> list[Extent]:
    """Return the extents of the k highest-ranked passages, in document order. The earlier passage wins a tie.

    Raises:
        EmptyDocument: there are no passages.
    """
    if not passages:
        raise EmptyDocument
    query = [passages.vocabulary[word] for word in words(question)]
    scores: Sequence[float] = [0.0] * len(passages)
    if query and any(passage.words for passage in passages.records):
        index = bm25s.BM25()
        corpus = bm25s.tokenization.Tokenized(ids=passages, vocab={"": 0, **passages.vocabulary})
        index.index(corpus, show_progress=False)
        scores = index.get_scores(query)
    best = sorted(range(len(passages)), key=lambda number: (-scores[number], number))[:k]
    return [passages.records[number].extent for number in sorted(best)]


def excerpts(document: Iterable[str], extents: Sequence[Extent]) -> list[str]:
    """Return the text of each extent; they have to be in order. The document is read up to the end of the last one."""
    parts: list[list[str]] = [[] for _ in extents]
    position = 0
    for piece in document:
        piece_end = position + len(piece)
        for part, (start, end) in zip(parts, extents, strict=True):
            if start < piece_end and end > position:
                part.append(piece[max(start - position, 0) : end - position])
        position = piece_end
        if position >= extents[-1][1]:
            break
    return ["".join(part) for part in parts]
