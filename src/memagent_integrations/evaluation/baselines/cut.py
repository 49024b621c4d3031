"""The document cut in the middle: what a model's own window holds of it, as LongBench (arXiv:2308.14508) truncates."""

from __future__ import annotations

from collections.abc import Iterable

from memagent_integrations.errors import EmptyDocument
from memagent_integrations.evaluation.baselines.base import Baseline, Found, Model
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.tokens import Counter, cut, fit

MARK = "\n[...]\n"
"""Stands where the middle was."""


class Cut(Baseline):
    """One call, with the first and the last half of what the window holds. The document is read piece by piece, and its middle never held."""

    def find(self, sample: Sample, model: Model) -> Found:
        """The answer from what is left of the document; `details` say whether anything was cut."""
        text, whole = ends(sample.document(), model.room(plain(sample.question, "")), model.count)
        if not text.strip():
            raise EmptyDocument
        return Found(answer=model.ask(plain(sample.question, text)), details={"cut": not whole})


def ends(pieces: Iterable[str], room: int, count: Counter) -> tuple[str, bool]:
    """The beginning and the end of a text, at most `room` tokens together, and whether that is all of it."""
    source = iter(pieces)
    held, size, enough = [], 0, 4 * room
    for piece in source:
        held.append(piece)
        size += len(piece)
        if size > enough:  # is it more than fits already?
            held, enough = ["".join(held)], 2 * size
            if count(held[0]) > room:
                break
    text = "".join(held)
    if count(text) <= room:
        return text, True
    head = cut(text, room // 2, count)
    tail = _Tail(room - room // 2 - count(MARK), count)
    tail.feed(text[len(head) :])
    for piece in source:
        tail.feed(piece)
    return head + MARK + tail.end(), False


class _Tail:
    """The last `limit` tokens of a text that goes by. At most a few times as many characters are held as they have."""

    def __init__(self, limit: int, count: Counter) -> None:
        self._limit, self._count = limit, count
        self._held: list[str] = []
        self._size = 0
        self._keep = max(4 * limit, 64)  # characters that hold so many tokens, as far as we know

    def feed(self, piece: str) -> None:
        """Take the next piece; let go of what is surely not in the tail."""
        self._held.append(piece)
        self._size += len(piece)
        while self._size > 2 * self._keep:
            text = "".join(self._held)
            if self._count(text[-self._keep :]) < self._limit:
                self._keep *= 2
            else:
                text = text[-self._keep :]
            self._held, self._size = [text], len(text)

    def end(self) -> str:
        """The tail, when the text is complete."""
        text = "".join(self._held)
        kept = fit(self._limit, len(text), lambda n: self._count(text[len(text) - n :]))
        return text[len(text) - kept :]
