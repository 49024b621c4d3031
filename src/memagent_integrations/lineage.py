"""Follow the statements of a memory through every rewriting, back to where they came from.

A sentence of a new memory is one of the memory before it (the same, or most of the same numbers, names and words), or
it is new. What is new has its passages in the section of the step. `Step.passages` keeps these, so that the origins of
a memory follow from the steps alone, without the document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from memagent_integrations.passages import Passage, Section, Wanted
from memagent_integrations.statements import Statement, is_number, rarity, statement, statements, terms, total

if TYPE_CHECKING:
    from memagent_integrations.records import Step

_SAME = 0.6
"""The share of the weight of a statement, or of the older one, from which on it is the same statement."""
_ALIKE = 0.35
"""The same, where nothing else explains the statement."""
_MOST_PAIRS = 100_000  # pairs of a term and a statement that are looked at: a memory may repeat itself


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a statement of the memory came from: a step, and characters of its chunk (None: anywhere in it).

    `step` is None for what was in the memory before the reading, and for what a person wrote. `terms` is what the
    statement has from there.
    """

    step: int | None
    start: int | None = None
    end: int | None = None
    terms: frozenset[str] = frozenset()


class Lineage:
    """The statements of a memory and their origins, while the memory changes.

    Args:
        memory: the memory to begin with; its statements have no place.
    """

    def __init__(self, memory: str = "") -> None:
        self._memory = memory
        self.statements: dict[str, tuple[Origin, ...]] = {each.text: _placeless(each) for each in statements(memory)}
        self._family = _Family(self.statements)

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Lineage:
        """Return the lineage of the memory after these steps (`memory_after`)."""
        chains: dict[int | None, Lineage] = {}  # for each segment of a parallel reading; None: what is one chain
        for step in steps:
            if step.phase != "memory":
                continue
            segment, merge = (step.span.segment, step.span.merge) if step.span else (None, False)
            if merge and None not in chains:
                chains[None] = _first_noted(chains)
            number = None if merge else segment
            if number not in chains:
                chains[number] = cls(step.memory_before)
            chain = chains[number]
            if merge and segment in chains:
                chain.absorb(chains[segment])
            chain.follow(step)
        return chains.get(None) or _first_noted(chains)

    def find(self, memory: str, section: str) -> tuple[Passage, ...]:
        """Return the passages of the section from which a new memory has what is new in it."""
        if memory == self._memory:
            return ()
        fresh = {each.text: each for each in statements(memory) if each.text not in self.statements}
        wanted = []
        for each in fresh.values():
            origins = self._family.origins(each)
            explained = frozenset[str]().union(*(origin.terms for origin in origins))
            if new := each.weights.keys() - explained:
                wanted.append(Wanted(each, frozenset(new), bool(origins), self._family.likeness(each)))
        return tuple(Section(section, wanted).passages())

    def absorb(self, other: Lineage) -> None:
        """Take the statements of another memory, which is merged into this one."""
        for text, origins in other.statements.items():
            self.statements[text] = tuple(dict.fromkeys((*self.statements.get(text, ()), *origins)))
        self._family = _Family(self.statements)

    def follow(self, step: Step) -> None:
        """Go on to the memory after a step."""
        if step.memory_before != self._memory:  # somebody changed it between two steps
            self._change(step.index, step.memory_before, (), by_person=True)
        if step.memory != self._memory:
            merge = step.span is not None and step.span.merge  # its passages are in another memory
            passages = () if merge else step.passages
            self._change(step.index, step.memory, passages, by_person=step.reply.edited is not None)

    def _change(self, step: int, memory: str, passages: Sequence[Passage] | None, *, by_person: bool) -> None:
        known, old = dict(self.statements), self._family
        for text, found in _by_statement(passages or ()).items():
            known[text] = _merged(
                statement(text), old.origins(statement(text)), [_origin(step, each) for each in found]
            )
        family = _Family(known) if by_person else old  # a person keeps sentences that the model wrote in this step
        self._memory, self.statements = memory, {}
        for each in statements(memory):
            origins = known.get(each.text)
            if origins is None:
                origins = family.origins(each) or family.origins(each, least=_ALIKE)
                if by_person:
                    origins = (*origins, *_placeless(each, but=origins))
                elif not origins and passages is None:
                    origins = (Origin(step=step, terms=frozenset(each.weights)),)
                origins = _merged(each, origins, ())
            self.statements[each.text] = origins
        self._family = _Family(self.statements)


def _first_noted(chains: Mapping[int | None, Lineage]) -> Lineage:
    """Return the lineage of the first segment that noted anything."""
    noted = (chain for chain in chains.values() if chain._memory)
    return next(noted, None) or next(iter(chains.values()), None) or Lineage()


def memory_after(steps: Iterable[Step]) -> str:
    """Return the memory that steps have left; of segments before any merge, the first that is not empty."""
    memories: dict[int | None, str] = {}
    for step in steps:
        segment = step.span.segment if step.span and not step.span.merge else None
        memories[segment] = step.memory
    return memories[None] if None in memories else next(filter(None, memories.values()), "")


def looked_up(steps: Sequence[Step]) -> dict[str, tuple[Origin, ...]]:
    """Return the statements of an answer that the memory does not explain, with their places in what was looked up."""
    return {
        text: tuple(_origin(step.index, passage) for passage in found)
        for step in steps
        if step.is_answer
        for text, found in _by_statement(step.passages or ()).items()
    }


class _Family:
    """The statements before a change, and which of them a new one continues."""

    def __init__(self, known: Mapping[str, tuple[Origin, ...]]) -> None:
        self._members = [(statement(text), origins) for text, origins in known.items()]
        self._most = max(_MOST_PAIRS // max(len(known), 1), 8)  # statements that are looked at for a term
        self._alike_to: dict[str, list[tuple[float, int]]] = {}

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """For each term, the numbers of the statements that hold it."""
        places: dict[str, list[int]] = defaultdict(list)
        for number, (member, _) in enumerate(self._members):
            for term in member.weights:
                places[term].append(number)
        return places

    @cached_property
    def _weights_of_members(self) -> list[dict[str, float]]:
        return [self._weights(member) for member, _ in self._members]

    def origins(self, new: Statement, least: float = _SAME) -> tuple[Origin, ...]:
        """Return the origins that a statement has from those that it continues."""
        origins: dict[Origin, None] = {}
        for share, number in self._alike(new):
            if share >= least:
                origins.update(dict.fromkeys(_inherited(new, self._members[number][1])))
        return tuple(origins)

    def likeness(self, new: Statement) -> float:
        """Return how much of a statement the one that is most like it holds, of those that have origins."""
        weights = self._weights(new)
        alike = [number for share, number in self._alike(new) if share >= _ALIKE and self._members[number][1]]
        shares = (total(weights, self._members[number][0].weights) for number in alike)
        return max(shares, default=0.0) / total(weights, weights)

    def _weights(self, member: Statement) -> dict[str, float]:
        count = max(len(self._members), 1)
        return {
            term: weight * rarity(len(self._places.get(term, ())), count) for term, weight in member.weights.items()
        }

    def _alike(self, new: Statement) -> list[tuple[float, int]]:
        """Return the statements that share terms with this one, each with the share of its or of their weight."""
        if new.text not in self._alike_to:
            self._alike_to[new.text] = list(self._compared(new))
        return self._alike_to[new.text]

    def _compared(self, new: Statement) -> Iterator[tuple[float, int]]:
        shared: dict[int, list[str]] = defaultdict(list)
        for term in new.weights:
            for number in self._places.get(term, ())[: self._most]:
                shared[number].append(term)
        weights = self._weights(new)
        whole = total(weights, weights)
        for number, common in shared.items():
            member = self._members[number][0]
            is_one_word = len(common) == 1 and not is_number(common[0])
            if is_one_word and not len(member.weights) == len(new.weights) == 1:
                continue
            if not _numbers_differ(new.numbers, member.numbers):
                theirs = self._weights_of_members[number]
                share_of_theirs = total(theirs, common) / total(theirs, theirs)
                yield max(total(weights, common) / whole, share_of_theirs), number


def _placeless(each: Statement, but: Iterable[Origin] = ()) -> tuple[Origin, ...]:
    """Return an origin without a place for the terms of a statement that no other origin explains."""
    left = frozenset(each.weights).difference(*(origin.terms for origin in but))
    return (Origin(step=None, terms=left),) if left else ()


def _origin(step: int, passage: Passage) -> Origin:
    held = frozenset(term for term, *_ in terms(passage.words))
    return Origin(step=step, start=passage.start, end=passage.end, terms=held)


def _by_statement(passages: Iterable[Passage]) -> dict[str, list[Passage]]:
    grouped: dict[str, list[Passage]] = defaultdict(list)
    for passage in passages:
        grouped[passage.statement].append(passage)
    return grouped


def _inherited(new: Statement, origins: Sequence[Origin]) -> Iterator[Origin]:
    """Yield those origins of an older statement that the new one still rests on, one at least."""
    if len(origins) < 2:
        yield from origins
        return
    whole = total(new.weights, new.weights)

    def rests_on(origin: Origin) -> bool:
        size = sum(new.weights.get(term, 1.0) for term in origin.terms)
        return bool(new.numbers & origin.terms) or 2 * total(new.weights, origin.terms) >= min(size, whole)

    agreeing = [each for each in origins if not _numbers_differ(new.numbers, frozenset(filter(is_number, each.terms)))]
    kept = list(filter(rests_on, agreeing))
    yield from kept or [max(agreeing or origins, key=lambda origin: total(new.weights, origin.terms))]


def _merged(each: Statement, older: Sequence[Origin], newer: Iterable[Origin]) -> tuple[Origin, ...]:
    """Return the origins of a statement. What none of them explains is a wording of what the older ones do."""
    held, newer = frozenset(each.weights), tuple(newer)
    wording = held.difference(*(origin.terms for origin in (*older, *newer)))
    known: dict[tuple[int | None, int | None, int | None], Origin] = {}
    kept = [replace(origin, terms=(origin.terms & held) | wording) for origin in older]
    for origin in (*kept, *newer):
        place = (origin.step, origin.start, origin.end)
        same = known.get(place, origin)
        known[place] = replace(origin, terms=origin.terms | same.terms)
    return tuple(known.values())


def _numbers_differ(some: frozenset[str], others: frozenset[str]) -> bool:
    return bool(some and others and some.isdisjoint(others))
