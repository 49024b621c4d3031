"""Text that several nodes share: what of a node was read before."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from memagent_integrations.places import Place

_KEPT = 1000  # nodes whose text is compared with that of the next ones
_GAP = 4  # characters of space that a splitter may leave out between two nodes
_HEAD = 32

Part = tuple[int, str]
"""A part of a text, with its start in the document."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The text of a node that was read. `neighbours` are the ids of the nodes before and behind it."""

    node_id: str
    document_id: str
    start: int
    text: str
    neighbours: frozenset[str]

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def agrees(self, other: _Known) -> bool:
        """Return whether two texts are the same where their places overlap."""
        first, last = max(self.start, other.start), min(self.end, other.end)
        mine, others = self.text[first - self.start : last - self.start], other.text[first - other.start :]
        return others.startswith(mine)

    def is_place_sure(self, other: _Known) -> bool:
        """Return whether an overlap with another node can only be where the offsets say.

        Offsets are found by a search for the node's text, which in a text that repeats itself finds an earlier place.
        """
        is_inside = self.end <= other.end if self.start >= other.start else other.end <= self.end
        if is_inside:
            return other.node_id not in self.neighbours and self.node_id not in other.neighbours
        later, overlap = (
            max(self, other, key=attrgetter("start")),
            min(self.end, other.end) - max(self.start, other.start),
        )
        return not _repeats_itself(later.text, overlap + _GAP)


class ReadBefore:
    """Knows the text that was read lately, to leave it out where it comes again."""

    def __init__(self) -> None:
        self._nodes: set[tuple[str, Place, int]] = set()
        self._documents: dict[str, list[_Known]] = {}  # in the order of their starts
        self._contradictory: set[str] = set()  # documents whose offsets contradict one another
        self._latest: deque[_Known] = deque()
        self._longest = 0

    def rest(self, node: Any, place: Place, text: str) -> list[Part]:
        """Return the parts of a node's text that are new, each with its start in that text.

        It is all of the text if its place is not known for sure. A part may be nothing but space.
        """
        key = (node.node_id, place, hash(text))  # nodes may share an id
        if key in self._nodes:
            return []
        self._nodes.add(key)
        if not place.fits or not text:
            return [(0, text)]
        new = _Known(node.node_id, place.document_id, place.start, text, _neighbours(node))
        overlapping = self._overlapping(new)
        if not all(map(new.agrees, overlapping)):
            self._contradictory.add(new.document_id)
        if new.document_id in self._contradictory or not all(map(new.is_place_sure, overlapping)):
            return [(0, text)]
        parts = [(new.start, text)]
        for known in overlapping:
            parts = [rest for part in parts for rest in _without(*part, known)]
        if parts:
            self._keep(new)
        return [(start - new.start, part) for start, part in parts]

    def _overlapping(self, new: _Known) -> list[_Known]:
        known = self._documents.get(new.document_id, [])
        first = bisect_left(known, new.start - self._longest, key=attrgetter("start"))
        last = bisect_left(known, new.end, key=attrgetter("start"))
        return [each for each in known[first:last] if each.end > new.start]

    def _keep(self, new: _Known) -> None:
        """Keep a text for a while: of an iterator, nothing is kept for ever."""
        insort(self._documents.setdefault(new.document_id, []), new, key=attrgetter("start"))
        self._latest.append(new)
        self._longest = max(self._longest, len(new.text))
        if len(self._latest) > _KEPT:
            oldest = self._latest.popleft()
            self._documents[oldest.document_id].remove(oldest)


def _without(start: int, text: str, known: _Known) -> Iterator[Part]:
    """Yield what lies before and behind a known text."""
    end = start + len(text)
    if start < (first := min(end, known.start)):
        yield start, text[: first - start]
    if (last := max(start, known.end)) < end:
        yield last, text[last - start :]


def _neighbours(node: Any) -> frozenset[str]:
    relations = (getattr(node, name, None) for name in ("prev_node", "next_node"))
    return frozenset(relation.node_id for relation in relations if relation)


def _repeats_itself(text: str, most: int) -> bool:
    """Return whether the text is the same when it is moved by `most` characters or less."""
    most = min(most, len(text) - 1)
    head = text[: min(_HEAD, len(text) - most)]
    shift = text.find(head, 1)
    while 0 < shift <= most:
        if text.startswith(text[shift:]):
            return True
        shift = text.find(head, shift + 1)
    return False
