"""Retrieval: one call with the K passages of a document that rank highest for the question."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from memagent_integrations.errors import ContextOverflow, EmptyDocument, UsageError
from memagent_integrations.evaluation.baselines.base import Answer, Baseline, Model
from memagent_integrations.evaluation.baselines.prompts import SEPARATOR, plain
from memagent_integrations.evaluation.samples import Sample

_DEFAULT_K = 5
_MIN_PASSAGE_TOKENS = 16

Extent = tuple[int, int]
"""The characters of a passage in the document: the first, and the one after the last."""


class Retrieval(Baseline):
    """One call with the K passages (option, default 5) that match the question best, in document order.

    The document is read twice, piece by piece: the first pass ranks its passages, the second takes the best.
    """

    passage_tokens: int
    """Size of a passage, which ends at a sentence or paragraph where possible. Smaller where K of them do not fit."""

    def configure(self, options: str) -> None:
        """Set K, the number of passages, from the options.

        Raises:
            UsageError: K is not a number.
        """
        if options and not re.fullmatch("[1-9][0-9]{0,3}", options):
            kind = self.name.partition(":")[0]
            raise UsageError(f"{self.name!r} has to name a number of passages, as {kind}:{_DEFAULT_K} does")
        self.k = int(options or _DEFAULT_K)

    @abstractmethod
    def best(self, sample: Sample, size: int, model: Model) -> list[Extent]:
        """Return the extents of the K best passages of at most `size` tokens, in any order; none without text."""

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Return the answer from the passages; `details` give their size and their extents."""
        room = model.room(plain(sample.question, "")) - (self.k - 1) * model.count(SEPARATOR)
        size = min(self.passage_tokens, room // self.k)
        if size < _MIN_PASSAGE_TOKENS:
            raise ContextOverflow(
                f"{self.k} passages do not fit: "
                f"the window of {model.window} leaves room for {max(room, 0)} tokens of text"
            )
        extents = sorted(self.best(sample, size, model))
        if not extents:
            raise EmptyDocument
        texts = [text.strip() for text in excerpts(sample.document(), extents)]
        answer = model.ask(plain(sample.question, SEPARATOR.join(texts)))
        return Answer(text=answer, details={"passage_tokens": size, "passages": [list(extent) for extent in extents]})


def top(scores: Sequence[float], k: int) -> list[int]:
    """Return the numbers of the k highest scores, best first. The earlier one wins a tie."""
    return sorted(range(len(scores)), key=lambda number: (-scores[number], number))[:k]


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
