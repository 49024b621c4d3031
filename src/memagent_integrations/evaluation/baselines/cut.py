"""The document truncated in the middle to fit the model's window, as LongBench (arXiv:2308.14508) does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memagent_integrations.errors import EmptyDocument
from memagent_integrations.evaluation.baselines.base import Answer, Baseline, Model
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.tokens import Counter, cut, fit

MARK = "\n[...]\n"
"""Replaces the middle of a truncated document."""


class Cut(Baseline):
    """One call, half of whose text is the beginning of the document and half its end.

    The document is read piece by piece; its middle is never held in memory.
    """

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Return the answer from what is left of the document; `details` say whether anything was cut."""
        text, whole = ends(sample.document(), model.room(plain(sample.question, "")), model.count)
        if not text.strip():
            raise EmptyDocument
        return Answer(text=model.ask(plain(sample.question, text)), details={"cut": not whole})


def ends(pieces: Iterable[str], room: int, count: Counter) -> tuple[str, bool]:
    """Return the beginning and the end of a text, at most `room` tokens together, and whether that is all of it."""
    remaining = iter(pieces)
    text = beginning(remaining, room, count)
    if count(text) <= room:
        return text, True
    head = cut(text, room // 2, count)
    tail = _Tail(room - room // 2 - count(MARK), count)
    tail.feed(text[len(head) :])
    for piece in remaining:
        tail.feed(piece)
    return head + MARK + tail.end(), False


def beginning(pieces: Iterator[str], room: int, count: Counter) -> str:
    """Return a text up to where it has more than `room` tokens, or all of it. What was not taken stays in `pieces`."""
    parts, size, next_check = list[str](), 0, 4 * room
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > next_check:  # counting at every piece would be slow
            parts, next_check = ["".join(parts)], 2 * size
            if count(parts[0]) > room:
                break
    return "".join(parts)


class _Tail:
    """Keeps the last `limit` tokens of a text that comes in pieces. Holds at most a few times as many characters."""

    def __init__(self, limit: int, count: Counter) -> None:
        self._limit, self._count = limit, count
        self._parts: list[str] = []
        self._size = 0
        self._keep = max(4 * limit, 64)  # characters assumed to hold `limit` tokens; doubled where they do not

    def feed(self, piece: str) -> None:
        """Add the next piece; drop what is certainly not in the tail."""
        self._parts.append(piece)
        self._size += len(piece)
        while self._size > 2 * self._keep:
            text = "".join(self._parts)
            if self._count(text[-self._keep :]) < self._limit:
                self._keep *= 2
            else:
                text = text[-self._keep :]
            self._parts, self._size = [text], len(text)

    def end(self) -> str:
        """Return the tail, after the last piece."""
        text = "".join(self._parts)
        kept = fit(self._limit, len(text), lambda n: self._count(text[len(text) - n :]))
        return text[len(text) - kept :]
