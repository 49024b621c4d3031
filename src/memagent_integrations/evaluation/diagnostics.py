"""Why an answer was wrong: when each gold fact was read, entered the memory, and was lost from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.samples import Fact, Sample
from memagent_integrations.records import Reading, Step

FAILED = "failed"
NOT_READ = "not read"
NEVER_NOTED = "never noted"
LEFT_OUT = "in memory, not in the answer"
OTHERWISE = "in the answer, not as asked"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The way of one gold fact through a reading.

    `start` is its place in the document, in characters; `read_at` the step whose chunk held its end, None if no chunk did. `held[d]` tells whether
    its keys stood in the memory `d` chunks after that step, `held[0]` being the memory that the step wrote. `answered`: they stand in the answer.
    """

    fact: Fact
    start: int
    read_at: int | None
    held: tuple[bool, ...] = field(repr=False)
    answered: bool

    @property
    def noted_at(self) -> int | None:
        """The step at which the fact entered the memory: the first, from the one that read it, whose memory holds it."""
        return self.read_at + self.held.index(True) if self.read_at is not None and True in self.held else None

    @property
    def lost_at(self) -> int | None:
        """The step at which the fact was lost for good: the first of those at the end that have it no more. None: it was not noted, or stayed."""
        return (
            None if self.noted_at is None or self.in_memory or self.read_at is None else self.read_at + self._last() + 1
        )

    @property
    def in_memory(self) -> bool:
        """Whether the last memory holds the fact."""
        return bool(self.held) and self.held[-1]

    @property
    def kept(self) -> int | None:
        """How many chunks the fact was read before the memory that lost it for good was written. None: it was not lost."""
        return None if self.lost_at is None else self._last() + 1

    def _last(self) -> int:
        """The distance of the last memory that holds it."""
        return len(self.held) - 1 - self.held[::-1].index(True)


@dataclass(frozen=True, kw_only=True)
class Survival:
    """The `share` of facts in the memory `distance` chunks after they were read, of the `n` facts after which so many chunks were read."""

    distance: int
    n: int
    share: float


def traces(reading: Reading, sample: Sample) -> tuple[Trace, ...]:
    """The way of each fact of the sample; the document is made anew once to find where they stand.

    A memory holds a fact if all its keys stand in it (the fact's own text, if it has none), in any case and as whole words. A reader without a memory
    has read nothing by this account.

    Raises:
        UsageError: a fact does not stand in the document.
    """
    steps = [step for step in reading.steps if step.phase == "memory" and step.span is not None]
    return tuple(
        _trace(fact, start, steps, reading.answer or "")
        for fact, start in zip(sample.facts, fact_places(sample), strict=True)
    )


def survival(readings: Sequence[Sequence[Trace]]) -> tuple[Survival, ...]:
    """The share of facts that are in the memory, by the distance in chunks from where they were read, over the traces of any readings.

    The denominator at a distance is every fact that was read at least so many chunks before the reading's last one, noted or not. So the share at 0
    is that of the facts which were noted at once, and the curve may rise where others are noted late.
    """
    held = [trace.held for traced in readings for trace in traced if trace.held]
    curve = []
    for distance in range(max(map(len, held), default=0)):
        at = [one[distance] for one in held if len(one) > distance]
        curve.append(Survival(distance=distance, n=len(at), share=sum(at) / len(at)))
    return tuple(curve)


def cause(reading: Reading, traced: Sequence[Trace]) -> str | None:
    """Why the answer of this reading, if it is wrong, is wrong: the first link that broke, of any fact. None without facts.

    "failed" (there is no answer), "not read" (no chunk held the fact), "never noted", "lost after k chunks" (the fewest, counted from its reading),
    "in memory, not in the answer", and "in the answer, not as asked", where all keys are in an answer that the metric does not take.
    """
    if reading.answer is None:
        return FAILED
    if not traced:
        return None
    if any(trace.read_at is None for trace in traced):
        return NOT_READ
    if any(trace.noted_at is None for trace in traced):
        return NEVER_NOTED
    lost = [trace.kept for trace in traced if trace.kept is not None]
    if lost:
        return f"lost after {min(lost)} chunk{'s' if min(lost) > 1 else ''}"
    return OTHERWISE if all(trace.answered for trace in traced) else LEFT_OUT


def _trace(fact: Fact, start: int, steps: Sequence[Step], answer: str) -> Trace:
    keys = fact.keys or (fact.text,)
    end = start + len(fact.text)
    first = next(
        (number for number, step in enumerate(steps) if step.span and step.span.start < end <= step.span.end), None
    )
    return Trace(
        fact=fact,
        start=start,
        read_at=None if first is None else steps[first].index,
        held=() if first is None else tuple(_holding([step.memory for step in steps[first:]], keys)),
        answered=holds(answer, keys),
    )


def _holding(memories: Sequence[str], keys: Sequence[str]) -> Iterator[bool]:
    """Whether each memory holds the keys; one that is the same as before is not searched again."""
    before, held = None, False
    for memory in memories:
        if memory != before:
            before, held = memory, holds(memory, keys)
        yield held


def holds(text: str, keys: Sequence[str]) -> bool:
    """Whether all keys stand in the text, in any case and as whole words."""
    return all(_pattern(key).search(text) for key in keys)


@lru_cache(maxsize=1024)
def _pattern(key: str) -> re.Pattern[str]:
    """The key with any space between its words, and no ASCII letter or digit that would go on with it."""
    body = r"\s+".join(map(re.escape, key.split()))
    return re.compile(rf"(?<![A-Za-z0-9]){body}(?![A-Za-z0-9])", re.IGNORECASE)


def fact_places(sample: Sample) -> list[int]:
    """Where the facts stand in the document, in characters: of several places that which is nearest to the fact's depth.

    Raises:
        UsageError: one of them does not stand there.
    """
    found: list[list[int]] = [[] for _ in sample.facts]
    longest = max((len(fact.text) for fact in sample.facts), default=0)
    length, tail = 0, ""
    for piece in sample.document() if sample.facts else ():
        window, offset = tail + piece, length - len(tail)
        for fact, places in zip(sample.facts, found, strict=True):
            begin = max(len(tail) - len(fact.text) + 1, 0)  # what lies before was found with the last piece
            places.extend(offset + match for match in _all(window, fact.text, begin))
        length += len(piece)
        tail = window[max(len(window) - longest + 1, 0) :] if longest > 1 else ""
    for fact, places in zip(sample.facts, found, strict=True):
        if not places:
            raise UsageError(f"the document of sample {sample.id} does not hold the fact {fact.text[:80]!r}")
    return [
        min(places, key=lambda place: abs(place - fact.depth * length))
        for fact, places in zip(sample.facts, found, strict=True)
    ]


def _all(text: str, part: str, begin: int) -> Iterator[int]:
    place = text.find(part, begin) if part else -1
    while place >= 0:
        yield place
        place = text.find(part, place + 1)
