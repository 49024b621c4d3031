"""The K passages of a document that BM25 ranks highest for the question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import overload

import bm25s

from memagent_integrations.chunking import Chunker, chunks
from memagent_integrations.documents import pieces
from memagent_integrations.evaluation.baselines.base import Model
from memagent_integrations.evaluation.baselines.retrieval import Extent, Retrieval, top
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.records import Chunk


class BM25(Retrieval):
    """Passages by the words that they share with the question.

    The first pass keeps, for each passage, its extent and how often it holds each word of the question. That gives the
    scores of an index over all words, with bm25s's defaults: Lucene's variant, English stop words.
    """

    passage_tokens = 512

    def best(self, sample: Sample, size: int, model: Model) -> list[Extent]:
        """Return the extents of the K passages with the highest scores."""
        passages = Passages(sample.question, sample.document(), Chunker(model.count, size))
        return best_extents(sample.question, passages, self.k)


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
    """Return the extents of the k highest-ranked passages, best first. The earlier passage wins a tie."""
    query = [passages.vocabulary[word] for word in words(question)]
    scores: Sequence[float] = [0.0] * len(passages)
    if query and any(passage.words for passage in passages.records):
        index = bm25s.BM25()
        corpus = bm25s.tokenization.Tokenized(ids=passages, vocab={"": 0, **passages.vocabulary})
        index.index(corpus, show_progress=False)
        scores = index.get_scores(query)
    return [passages.records[number].extent for number in top(scores, k)]
