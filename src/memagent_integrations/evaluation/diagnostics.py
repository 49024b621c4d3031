"""Find out why an answer is wrong: when each gold fact was read, when it entered the memory, and when it was lost."""

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
class FactTrace:
    """What happened to one gold fact in a reading. Text holds a fact where `holds` finds all its keys.

    Attributes:
        fact: the fact.
        start: its position in the document, in characters.
        read_at: index of the step whose chunk held the fact's end; None if no chunk did.
        held: whether the memory held the fact d chunks after that step, for d = 0, 1, ...; `held[0]` is about the
            memory that this step wrote.
        answered: whether the answer holds the fact.
    """

    fact: Fact
    start: int
    read_at: int | None
    held: tuple[bool, ...] = field(repr=False)
    answered: bool

    @property
    def noted_at(self) -> int | None:
        """The first step, from `read_at` on, whose memory holds the fact; None if there is none."""
        return self.read_at + self.held.index(True) if self.read_at is not None and True in self.held else None

    @property
    def lost_at(self) -> int | None:
        """The first step from which on no memory holds the fact; None if it was never noted or never lost."""
        return None if self.read_at is None or self.kept is None else self.read_at + self.kept

    @property
    def in_memory(self) -> bool:
        """Whether the last memory holds the fact."""
        return bool(self.held) and self.held[-1]

    @property
    def kept(self) -> int | None:
        """The number of chunks from reading the fact to losing it; None if it was never noted or never lost."""
        if self.in_memory or True not in self.held:
            return None
        return len(self.held) - self.held[::-1].index(True)


@dataclass(frozen=True, kw_only=True)
class Survival:
    """The `share` of facts that the memory holds `distance` chunks after they were read.

    `n` is the number of facts that were followed by at least `distance` chunks.
    """

    distance: int
    n: int
    share: float


def traces(reading: Reading, sample: Sample) -> tuple[FactTrace, ...]:
    """Trace each fact of the sample through a reading. The document is generated once more, to locate the facts.

    The keys of a fact without keys are its own text. A reader without a memory counts as having read nothing.

    Raises:
        UsageError: a fact does not occur in the document.
    """
    steps = [step for step in reading.steps if step.phase == "memory" and step.span is not None]
    located = zip(sample.facts, fact_places(sample), strict=True)
    return tuple(_trace(fact, start, steps, reading.answer or "") for fact, start in located)


def survival(readings: Sequence[Sequence[FactTrace]]) -> tuple[Survival, ...]:
    """Return how the share of facts in the memory changes with the distance from the chunk that held them.

    Args:
        readings: the traces of any number of readings.

    The denominator at a distance counts every fact that was read at least this far from the end of the reading,
    noted or not. So the share at 0 is that of the facts which were noted at once, and the curve may rise where others
    are noted late.
    """
    histories = [trace.held for traced in readings for trace in traced if trace.held]
    curve = []
    for distance in range(max(map(len, histories), default=0)):
        at_distance = [held[distance] for held in histories if len(held) > distance]
        share = sum(at_distance) / len(at_distance)
        curve.append(Survival(distance=distance, n=len(at_distance), share=share))
    return tuple(curve)


def cause(reading: Reading, traced: Sequence[FactTrace]) -> str | None:
    """Return why this reading's answer is wrong, assuming that it is; None without facts.

    It is the first of these that applies to any fact: "failed" (there is no answer), "not read" (no chunk held the
    fact), "never noted", "lost after k chunks" (the smallest k, counted from the chunk that held the fact), "in memory,
    not in the answer", and "in the answer, not as asked" (the answer holds all keys, but the metric rejects it).
    """
    if reading.answer is None:
        return FAILED
    if not traced:
        return None
    if any(trace.read_at is None for trace in traced):
        return NOT_READ
    if any(trace.noted_at is None for trace in traced):
        return NEVER_NOTED
    kept = [trace.kept for trace in traced if trace.kept is not None]
    if kept:
        return f"lost after {min(kept)} chunk{'s' if min(kept) > 1 else ''}"
    return OTHERWISE if all(trace.answered for trace in traced) else LEFT_OUT


def _trace(fact: Fact, start: int, steps: Sequence[Step], answer: str) -> FactTrace:
    keys = fact.keys or (fact.text,)
    end = start + len(fact.text)
    first = next((number for number, step in enumerate(steps) if _reads(step, start, end)), None)
    following = [step.memory for step in steps[first:] if _follows(step, steps[first])] if first is not None else ()
    return FactTrace(
        fact=fact,
        start=start,
        read_at=None if first is None else steps[first].index,
        held=tuple(_holding(following, keys)),
        answered=holds(answer, keys),
    )


def _reads(step: Step, start: int, end: int) -> bool:
    """Return whether the step reads the end of these characters."""
    return step.span is not None and not step.span.merge and step.span.start < end <= step.span.end


def _follows(step: Step, first: Step) -> bool:
    """Return whether the memory of a step is made from that of an earlier one: in its segment, or once it is merged."""
    span, segment = step.span, first.span.segment if first.span else None
    if span is None or segment is None:
        return True
    return (span.segment or 0) >= segment if span.merge else span.segment == segment


def _holding(memories: Sequence[str], keys: Sequence[str]) -> Iterator[bool]:
    """Yield whether each memory holds the keys. A memory that equals the one before is not searched again."""
    before, held = None, False
    for memory in memories:
        if memory != before:
            before, held = memory, holds(memory, keys)
        yield held


def holds(text: str, keys: Sequence[str]) -> bool:
    """Return whether all keys occur in the text as whole words, ignoring case."""
    return all(_pattern(key).search(text) for key in keys)


@lru_cache(maxsize=1024)
def _pattern(key: str) -> re.Pattern[str]:
    """Return a pattern for the key, with any white space between its words and no ASCII letter or digit around it."""
    body = r"\s+".join(map(re.escape, key.split()))
    return re.compile(rf"(?<![A-Za-z0-9]){body}(?![A-Za-z0-9])", re.IGNORECASE)


def fact_places(sample: Sample) -> list[int]:
    """Return where each fact starts in the document, in characters: of several occurrences, the one nearest its depth.

    Raises:
        UsageError: a fact does not occur.
    """
    starts: list[list[int]] = [[] for _ in sample.facts]
    longest = max((len(fact.text) for fact in sample.facts), default=0)
    length, tail = 0, ""
    for piece in sample.document() if sample.facts else ():
        window, offset = tail + piece, length - len(tail)
        for fact, occurrences in zip(sample.facts, starts, strict=True):
            begin = max(len(tail) - len(fact.text) + 1, 0)  # earlier occurrences were found with the last piece
            occurrences.extend(offset + start for start in _occurrences(window, fact.text, begin))
        length += len(piece)
        tail = window[max(len(window) - longest + 1, 0) :] if longest > 1 else ""
    return [
        _nearest_start(sample, fact, occurrences, length)
        for fact, occurrences in zip(sample.facts, starts, strict=True)
    ]


def _nearest_start(sample: Sample, fact: Fact, starts: Sequence[int], length: int) -> int:
    if not starts:
        raise UsageError(f"the document of sample {sample.id} does not hold the fact {fact.text[:80]!r}")
    return min(starts, key=lambda start: abs(start - fact.depth * length))


def _occurrences(text: str, part: str, begin: int) -> Iterator[int]:
    start = text.find(part, begin) if part else -1
    while start >= 0:
        yield start
        start = text.find(part, start + 1)
