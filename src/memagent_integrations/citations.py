"""Where the statements of a memory came from: found when they are written, and followed through every rewriting.

A sentence of a new memory is one of the memory before it (the same, or most of the same numbers, names and words), or
it is new. For what is new in it, the sentences of the section that hold it are its passages. `Step.passages` keeps
these, so that the origins of a memory follow from the steps alone, without the document.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memagent_integrations.documents import is_one_shot, pieces
from memagent_integrations.errors import UsageError
from memagent_integrations.statements import (
    LONGEST,
    Statement,
    is_number,
    rarity,
    sentences,
    statement,
    statements,
    terms,
    total,
)

if TYPE_CHECKING:
    from memagent_integrations.records import Span, Step

_SAME = 0.6
"""The share of the weight of a statement, or of the older one, from which on it is the same statement."""
_ALIKE = 0.35
"""The same, where nothing else explains the statement."""
_HELD = 0.3
"""The share of what is new in a statement that a sentence of the section has to hold to be its passage."""
_MORE = 0.2
"""The share that another sentence has to add."""
_MOST_PASSAGES = 16
_MOST_PAIRS = 100_000  # pairs of a term and a sentence that are looked at: texts may repeat themselves


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Where a statement came from in the section of its step: characters `start` to `end` of the chunk's text.

    `words` are those words of the statement that the passage holds.
    """

    statement: str
    words: str
    start: int
    end: int


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


@dataclass(frozen=True, kw_only=True)
class Citation:
    """A statement of the final memory, and a place that it rests on: characters of the document `document_id`.

    `page` is the page, if the document's metadata names one. `step` is the number of the step that read the place.
    """

    statement: str
    document_id: str
    start: int
    end: int
    page: str | None
    step: int

    def quote(self, document: Any) -> str:
        """Return the text of the place, from the document that was read (what `documents.pieces` takes).

        Raises:
            UsageError: the document has no such place, or can be read only once.
        """
        if is_one_shot(document):
            raise UsageError("a quote would use up this iterator; quote from what can be read again (str, Path, list)")
        found, most, known = None, -1.0, False
        parts, position = [], self.start
        for piece in pieces(document):
            if piece.document_id != self.document_id:
                continue
            known = True
            if piece.start <= self.start:
                parts, position = [], self.start
            if piece.start <= position < piece.start + len(piece.text):
                parts.append(piece.text[position - piece.start : self.end - piece.start])
                position += len(parts[-1])
            if parts and position == self.end:
                text = "".join(parts)
                held = _share_in(self.statement, text)
                if held >= _HELD:
                    return text
                # documents that were cut from one, without `start_index`, have the same name and begin at 0 all
                found, most = (text, held) if held > most else (found, most)
        if found is None:
            problem = f"ends before character {self.end}" if known else "is not in it"
            raise UsageError(f"this is not the document that was read: {self.document_id} {problem}")
        return found


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
        """Return the lineage of the memory after these steps."""
        lineage: Lineage | None = None
        for step in steps:
            if step.phase == "memory":
                lineage = lineage or cls(step.memory_before)
                lineage.follow(step)
        return lineage or cls()

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
                wanted.append(_Wanted(each, frozenset(new), bool(origins), self._family.likeness(each)))
        return tuple(_Section(section, wanted).passages())

    def follow(self, step: Step) -> None:
        """Go on to the memory after a step."""
        if step.memory_before != self._memory:  # somebody changed it between two steps
            self._change(step.index, step.memory_before, (), by_person=True)
        if step.memory != self._memory:
            self._change(step.index, step.memory, step.passages, by_person=step.reply.edited is not None)

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


@dataclass(frozen=True)
class _Wanted:
    """A statement whose `new` terms are looked for; `continues`: it has origins for others, or is like an older one."""

    statement: Statement
    new: frozenset[str]
    continues: bool
    likeness: float


class _Section:
    """The sentences of a section, as far as they hold terms that are looked for."""

    def __init__(self, text: str, wanted: Sequence[_Wanted]) -> None:
        self._text, self._wanted = text, wanted
        self._sentences = list(sentences(text, wrapped=True)) if wanted else []
        self._places: dict[str, list[int]] = {term: [] for each in wanted for term in each.statement.weights}
        self._most = max(_MOST_PAIRS // max(sum(len(each.statement.weights) for each in wanted), 1), 8)
        self._with_numbers: set[int] = set()
        number = 0
        for term, _, start in terms(text) if wanted else ():
            places = self._places.get(term)
            has_number = is_number(term)
            if places is None and not has_number:
                continue
            while start >= self._sentences[number][1]:
                number += 1
            if has_number:
                self._with_numbers.add(number)
            if places is None:
                continue
            if not places or places[-1] != number:
                places.append(number)

    def passages(self) -> Iterator[Passage]:
        """Yield the passages of what is looked for."""
        for each in self._wanted:
            weights = {
                term: weight * rarity(len(self._places[term]), len(self._sentences))
                for term, weight in each.statement.weights.items()
            }
            chosen = dict(self._chosen(each, weights))
            held = frozenset[str]().union(*chosen.values())
            if total(weights, held) < each.likeness * total(weights, weights) and not each.continues:
                continue  # an older statement explains more of it
            for first, last, held in _joined(sorted(chosen.items()), self._sentences):
                yield self._passage(each.statement, first, last, held)

    def _chosen(self, wanted: _Wanted, weights: Mapping[str, float]) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield the sentences that hold most of what is new, each with the terms that it adds, the best one first."""
        of, left = wanted.statement, set(wanted.new)
        others = self._with_numbers.difference(*(self._places[term] for term in of.numbers)) if of.numbers else set()
        whole: dict[int, float] = defaultdict(float)  # of sentences that add as much, the one about the same thing
        for term, weight in weights.items():
            for number in self._places[term][: self._most]:
                whole[number] += weight
        for turn in range(_MOST_PASSAGES):
            more = wanted.continues or turn > 0  # the statement has a place already: this one has to say something
            adds: dict[int, float] = defaultdict(float)
            for term in sorted(left):  # in an order, so that the sums are the same each time
                for number in self._places[term][: self._most]:
                    if not (more and number in others):  # a sentence with other numbers is about something else
                        adds[number] += weights[term]
            if not adds:
                return
            best = max(adds, key=lambda number: (0.7 * adds[number] + 0.3 * whole[number], -number))
            added = frozenset(term for term in left if best in self._places[term][: self._most])
            share = total(weights, added) / total(weights, weights)
            telling = any(weights[term] >= 1.5 for term in added)  # a number, or a name, that is rare in the section
            several = sum(of.weights[term] >= 1 for term in added) > 1
            if not (telling or (several and share >= _MORE) if more else share >= _HELD):
                return
            yield best, added
            left -= added

    def _passage(self, of: Statement, first: int, last: int, held: frozenset[str]) -> Passage:
        start, end = self._sentences[first][0], self._sentences[last][1]
        text = self._text[start:end]
        words = dict.fromkeys(word for term, word, _ in terms(of.text) if term in held)
        return Passage(
            statement=of.text,
            words=" ".join(words),
            start=start + len(text) - len(text.lstrip()),
            end=end - len(text) + len(text.rstrip()),
        )


def cite(
    origins: Mapping[str, tuple[Origin, ...]], spans: Mapping[int, Span], question: str, answer: str | None
) -> Iterator[Citation]:
    """Yield a citation for each place of each statement, those first that the answer rests on, then the question."""
    every = [statement(text) for text in origins]
    times = Counter(term for each in every for term in each.weights)
    weights: dict[str, float] = defaultdict(float)
    for text, share in ((answer or "", 2.0), (question, 1.0)):
        for start, end in sentences(text):
            for term, weight in statement(text[start:end]).weights.items():
                if term in times:
                    weights[term] += share * weight * rarity(times[term], len(every))

    def order(each: tuple[int, Statement, Origin]) -> tuple[float, int, int, int]:
        number, of, origin = each
        relevance = total(weights, origin.terms & of.weights.keys()) + 0.5 * total(weights, of.weights)
        return -round(relevance, 9), number, origin.step or 0, origin.start or 0

    placed = [
        (number, of, origin)
        for number, of in enumerate(every)
        for origin in origins[of.text]
        if origin.step is not None
    ]
    known: set[tuple[str, str, int, int]] = set()
    for _, of, origin in sorted(placed, key=order):
        for citation in _citations(of.text, origin, spans):
            key = (of.text, citation.document_id, citation.start, citation.end)
            if key not in known:
                known.add(key)
                yield citation


def _citations(text: str, origin: Origin, spans: Mapping[int, Span]) -> Iterator[Citation]:
    """Yield the places of an origin in the documents that its chunk consists of."""
    span = spans.get(origin.step) if origin.step is not None else None
    for source in span.sources if span else ():
        size = source.end - source.start
        start = max((origin.start or 0) - source.offset, 0)
        end = size if origin.end is None else min(origin.end - source.offset, size)
        if start < end:
            yield Citation(
                statement=text,
                document_id=source.document_id,
                start=source.start + start,
                end=source.start + end,
                page=source.page,
                step=origin.step or 0,
            )


def _share_in(sentence: str, text: str) -> float:
    """Return the share of the weight of a statement that a text holds."""
    weights = statement(sentence).weights
    return total(weights, {term for term, *_ in terms(text)}) / max(total(weights, weights), 1e-9)


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


def _merged(each: Statement, older: Iterable[Origin], newer: Iterable[Origin]) -> tuple[Origin, ...]:
    """Return the origins of a statement. What none of them explains is a wording of what the older ones do."""
    held, newer = frozenset(each.weights), tuple(newer)
    older = tuple(replace(origin, terms=origin.terms & held) for origin in older)
    wording = held.difference(*(origin.terms for origin in (*older, *newer)))
    return (*(replace(origin, terms=origin.terms | wording) for origin in older), *newer)


def _numbers_differ(some: frozenset[str], others: frozenset[str]) -> bool:
    return bool(some and others and some.isdisjoint(others))


def _joined(
    chosen: Sequence[tuple[int, frozenset[str]]], places: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, frozenset[str]]]:
    """Yield the chosen sentences as first, last and their terms; neighbours are one passage while it stays short."""
    runs: list[tuple[int, int, frozenset[str]]] = []
    for number, held in chosen:
        if runs and number - runs[-1][1] == 1 and places[number][1] - places[runs[-1][0]][0] <= LONGEST:
            runs[-1] = (runs[-1][0], number, runs[-1][2] | held)
        else:
            runs.append((number, number, held))
    return iter(runs)
