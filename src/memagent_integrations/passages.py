"""Find the sentences of a section that say what is new in a memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memagent_integrations.statements import LONGEST, Statement, is_number, rarity, sentences, terms, total

_HELD = 0.3
"""The share of what is new in a statement that a sentence has to hold to be its passage."""
_MORE = 0.2
"""The share of a statement that a sentence has to add, if the statement has a place already."""
_MUCH = 3.5
"""The weight that is enough, whatever its share: a long statement draws on several sentences."""
_MOST_PASSAGES = 16  # of a statement
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


@dataclass(frozen=True)
class Wanted:
    """A statement whose `new` terms are looked for.

    `continues`: its other terms have origins. `likeness` is the share of it that an older statement holds.
    """

    statement: Statement
    new: frozenset[str]
    continues: bool
    likeness: float


class Section:
    """The sentences of a section, as far as they hold terms that are looked for."""

    def __init__(self, text: str, wanted: Sequence[Wanted]) -> None:
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

    def _chosen(self, wanted: Wanted, weights: Mapping[str, float]) -> Iterator[tuple[int, frozenset[str]]]:
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
            weight = total(weights, added)
            share = weight / total(weights, weights)
            telling = any(weights[term] >= 1.5 for term in added)  # a number, or a name, that is rare in the section
            several = sum(of.weights[term] >= 1 for term in added) > 1
            enough = weight >= _MUCH or share >= (_MORE if more else _HELD)
            if not (telling or (several and enough) if more else enough):
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
