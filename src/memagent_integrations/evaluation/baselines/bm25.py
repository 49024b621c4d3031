"""Retrieval: the K passages of a document that BM25 finds nearest to the question."""

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
from memagent_integrations.evaluation.baselines.base import Baseline, Found, Model
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.records import Chunk

PASSAGE_TOKENS = 512
"""Size of a passage; a passage ends at a sentence or paragraph where one ends near. Where K of them do not fit the window, they are smaller."""
_K = 5
_LEAST = 16  # tokens below which a passage is none
_BETWEEN = "\n\n"

Place = tuple[int, int]
"""The first character of a passage, and the one after its last."""


class BM25(Baseline):
    """One call, with the K passages (option; 5) nearest to the question, in the order of the document.

    The document is read twice, piece by piece. Of the first time there remain, for each passage, its place and how often it has each word of the
    question: the scores are those of an index over all words (bm25s's defaults: Lucene's variant, English stop words).
    """

    def configure(self, options: str) -> None:
        """Take K.

        Raises:
            UsageError: it is no number.
        """
        if options and not re.fullmatch("[1-9][0-9]{0,3}", options):
            raise UsageError(f"{self.name!r} has to name a number of passages, as bm25:{_K} does")
        self.k = int(options or _K)

    def find(self, sample: Sample, model: Model) -> Found:
        """The answer from the passages; `details` say which they are, by their characters."""
        room = model.room(plain(sample.question, "")) - (self.k - 1) * model.count(_BETWEEN)
        size = min(PASSAGE_TOKENS, room // self.k)
        if size < _LEAST:
            raise ContextOverflow(
                f"{self.k} passages do not fit: the window of {self.terms.window} leaves room for {max(room, 0)} tokens of text"
            )
        places = nearest(
            sample.question, Passages(sample.question, sample.document(), Chunker(model.count, size)), self.k
        )
        texts = excerpts(sample.document(), places)
        answer = model.ask(plain(sample.question, _BETWEEN.join(text.strip() for text in texts)))
        return Found(answer=answer, details={"passage_tokens": size, "passages": [list(place) for place in places]})


@dataclass(frozen=True, kw_only=True)
class _Passage:
    """Where a passage stands, how many words it has, and how often each word of the question, by its number."""

    place: Place
    words: int
    asked: tuple[tuple[int, int], ...]


class Passages(Sequence[list[int]]):
    """The words of each passage as numbers, made when they are looked at: those of the question from 1 on, 0 for any other."""

    def __init__(self, question: str, document: Iterable[str], chunker: Chunker) -> None:
        self.vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words(question)), start=1)}
        self.held = [self._passage(chunk) for chunk in chunks(pieces(document), chunker) if not chunk.text.isspace()]

    def __len__(self) -> int:
        return len(self.held)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | Sequence[list[int]]:
        if isinstance(index, slice):
            return [self._numbers(passage) for passage in self.held[index]]
        return self._numbers(self.held[index])

    def _numbers(self, passage: _Passage) -> list[int]:
        asked = [number for number, times in passage.asked for number in repeat(number, times)]
        return asked + [0] * (passage.words - len(asked))

    def _passage(self, chunk: Chunk) -> _Passage:
        found = words(chunk.text)
        asked = Counter(self.vocabulary[word] for word in found if word in self.vocabulary)
        return _Passage(place=(chunk.span.start, chunk.span.end), words=len(found), asked=tuple(asked.items()))


def words(text: str) -> list[str]:
    """The words that count, as bm25s cuts them."""
    (found,) = bm25s.tokenize([text], return_ids=False, show_progress=False)
    return list(found)


def nearest(question: str, passages: Passages, k: int) -> list[Place]:
    """The k passages of highest score, in the order of the document; of equal ones the first.

    Raises:
        EmptyDocument: there are none.
    """
    if not passages:
        raise EmptyDocument
    asked = [passages.vocabulary[word] for word in words(question)]
    scores: Sequence[float] = [0.0] * len(passages)
    if asked and any(passage.words for passage in passages.held):
        index = bm25s.BM25()
        corpus = bm25s.tokenization.Tokenized(ids=passages, vocab={"": 0, **passages.vocabulary})
        index.index(corpus, show_progress=False)
        scores = index.get_scores(asked)
    best = sorted(range(len(passages)), key=lambda number: (-scores[number], number))[:k]
    return [passages.held[number].place for number in sorted(best)]


def excerpts(document: Iterable[str], places: Sequence[Place]) -> list[str]:
    """The text of each place; they come in order. The document is read no further than to the last of them."""
    parts: list[list[str]] = [[] for _ in places]
    position = 0
    for piece in document:
        after = position + len(piece)
        for part, (start, end) in zip(parts, places, strict=True):
            if start < after and end > position:
                part.append(piece[max(start - position, 0) : end - position])
        position = after
        if position >= places[-1][1]:
            break
    return ["".join(part) for part in parts]
