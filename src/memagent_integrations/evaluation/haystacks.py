"""Generate documents of any number of tokens piece by piece, with needles at chosen depths."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from memagent_integrations.errors import UsageError
from memagent_integrations.tokens import Counter, fit

GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The sentence of RULER's "repeat" haystack (arXiv:2404.06654, NVIDIA/RULER)."""

_BATCH = 64  # units in one piece of a document
_SAMPLED_CHARACTERS = 65_536  # of a long document, to estimate its tokens
_SAMPLED_PLACES = 32  # where they are taken
_MAX_SENTENCE = 400  # characters


class Filler(ABC):
    """An endless text of units (sentences, lines) joined by `separator`. Needles stand between units."""

    separator: str

    @abstractmethod
    def unit(self, index: int) -> str:
        """Return the unit at an index, from 0."""

    @abstractmethod
    def size(self, tokens: int, count: Counter) -> int:
        """Return how many units make `tokens` tokens, separators included; 0 if one unit is already too long."""

    def place(self, units: int, depth: float) -> int:
        """Return the unit, of `units`, before which a needle stands at `depth`."""
        return round(depth * units)

    def depth(self, units: int, index: int) -> float:
        """Return the depth of a needle that stands before unit `index` of `units`."""
        return index / units


class Generated(Filler):
    """Units made by a function of their index."""

    def __init__(self, unit: Callable[[int], str], separator: str = "\n") -> None:
        self._unit = unit
        self.separator = separator

    def unit(self, index: int) -> str:
        """Return what the function makes."""
        return self._unit(index)

    def size(self, tokens: int, count: Counter) -> int:
        """Return how many units make `tokens` tokens, by counting samples of a long text."""
        return units_for(tokens, count, lambda units: (self, units))


class Corpus:
    """A text as sentences, with white space normalised. Each batch of sentences is counted once for each counter."""

    def __init__(self, text: str) -> None:
        self.text = re.sub(r"\s*[^\S ]\s*| {2,}", " ", text).strip()
        self.starts = array("Q", _sentence_starts(self.text))
        self._costs: dict[tuple[Counter, int], int] = {}

    def sentence(self, index: int) -> str:
        """Return the sentence at an index."""
        end = self.starts[index + 1] - 1 if index + 1 < len(self.starts) else len(self.text)
        return self.text[self.starts[index] : end]

    def join(self, first: int, end: int) -> str:
        """Return sentences `first` to `end` (exclusive) as one text."""
        return " ".join(map(self.sentence, range(first, end)))

    def cost(self, first: int, count: Counter) -> int:
        """Return the tokens of the batch that begins with sentence `first`."""
        cost = self._costs.get((count, first))
        if cost is None:
            cost = self._costs[count, first] = count(" " + self.join(first, self.end(first)))
        return cost

    def end(self, first: int) -> int:
        """Return where the batch that begins with sentence `first` ends."""
        return min(first + _BATCH, len(self.starts))


class Cycled(Filler):
    """The sentences of a corpus, from batch number `batch` on, and from the beginning again when they end."""

    separator = " "

    def __init__(self, corpus: Corpus, batch: int = 0) -> None:
        self._corpus = corpus
        self._first = batch * _BATCH % len(corpus.starts) // _BATCH * _BATCH

    def unit(self, index: int) -> str:
        """Return a sentence."""
        return self._corpus.sentence((self._first + index) % len(self._corpus.starts))

    def size(self, tokens: int, count: Counter) -> int:
        """Return how many sentences make `tokens` tokens, by counting whole batches and the last few sentences."""
        corpus, total = self._corpus, len(self._corpus.starts)
        units = spent = 0
        first = self._first
        while spent + (cost := corpus.cost(first, count)) <= tokens:
            spent, units, first = spent + cost, units + corpus.end(first) - first, corpus.end(first) % total
            if units == total:  # the whole corpus: as many times as it fits
                _require_tokens(spent)
                units, spent = units * (tokens // spent), spent * (tokens // spent)

        def batch_cost(sentences: int) -> int:
            return count(" " + corpus.join(first, first + sentences))

        return units + _nearest(tokens - spent, corpus.end(first) - first, batch_cost)

    def place(self, units: int, depth: float) -> int:
        """Return the sentence at a depth, measured in characters because sentences differ."""
        corpus, origin = self._corpus, self._offset(0)
        target = round(origin + depth * (self._offset(units) - origin))
        rounds, rest = divmod(target, len(corpus.text) + 1)
        return min(rounds * len(corpus.starts) + bisect_left(corpus.starts, rest) - self._first, units)

    def depth(self, units: int, index: int) -> float:
        """Return the depth of a sentence, measured in characters."""
        origin = self._offset(0)
        return (self._offset(index) - origin) / (self._offset(units) - origin)

    def _offset(self, index: int) -> int:
        rounds, sentence = divmod(self._first + index, len(self._corpus.starts))
        return rounds * (len(self._corpus.text) + 1) + self._corpus.starts[sentence]


def stream(filler: Filler, units: int, needles: Iterable[tuple[int, str]] = ()) -> Iterator[str]:
    """Yield `units` units of the filler in pieces, with the needles.

    Args:
        filler: the text.
        units: how many units of it.
        needles: (index of the unit before which it stands, text) pairs in the order of the indices.
    """
    parts = _with_needles(filler, units, needles)
    lead = ""
    while batch := list(islice(parts, _BATCH)):
        yield lead + filler.separator.join(batch)
        lead = filler.separator


def filled(name: str, filler: Filler, tokens: int, needles: Sequence[str], count: Counter, *, least: int = 1) -> int:
    """Return how many units of filler make a document of `tokens` tokens together with the needles.

    Raises:
        UsageError: the needles leave room for fewer than `least` units.
    """
    used = sum(count(filler.separator + needle) for needle in needles)
    units = filler.size(tokens - used, count) if tokens > used else 0
    if units < least:
        raise too_short(name, tokens, used + sum(count(filler.separator + filler.unit(n)) for n in range(least)))
    return units


def too_short(name: str, tokens: int, least: int) -> UsageError:
    """Return the error for a length into which a task's content does not fit."""
    return UsageError(f"{name} needs a length of at least {least} tokens, not {tokens}")


def units_for(tokens: int, count: Counter, text: Callable[[int], tuple[Filler, int]]) -> int:
    """Return the n for which `text(n)`, a filler and its number of units, has `tokens` tokens.

    It is exact to half a percent or half a unit.
    """
    most = tokens * 8  # nearly every unit has at least one token

    def cost(units: int) -> int:
        return estimate(*text(units), count)

    units = _nearest(tokens, most, cost, guess=max(tokens // 32, 1), enough=0.995)
    if units >= most:
        _require_tokens(0)
    return units


def estimate(filler: Filler, units: int, count: Counter) -> int:
    """Return the tokens of `units` units: counted where they are few, else extrapolated from samples of the text."""
    if not units:
        return 0
    sampled_length = sum(len(filler.unit(units * n // _SAMPLED_PLACES)) for n in range(_SAMPLED_PLACES))
    unit_length = max(sampled_length / _SAMPLED_PLACES + len(filler.separator), 1)
    per_place = int(_SAMPLED_CHARACTERS / _SAMPLED_PLACES / unit_length) + 1
    if units <= per_place * _SAMPLED_PLACES:
        return count("".join(stream(filler, units)))
    starts = (n * (units - per_place) // (_SAMPLED_PLACES - 1) for n in range(_SAMPLED_PLACES))
    samples = (["", *map(filler.unit, range(start, start + per_place))] for start in starts)
    counted = sum(count(filler.separator.join(sample)) for sample in samples)
    return round(counted * units / (per_place * _SAMPLED_PLACES))


def _nearest(limit: int, most: int, cost: Callable[[int], int], *, guess: int = 0, enough: float = 1.0) -> int:
    """Return the number of units, at most `most`, whose cost is nearest to the limit."""
    under = fit(limit, most - 1, cost, guess=guess, enough=enough)
    return under + 1 if cost(under + 1) - limit < limit - (cost(under) if under else 0) else under


def _require_tokens(tokens: int) -> None:
    if not tokens:
        raise UsageError(
            "the tokenizer finds next to no tokens in a long text; give one that counts the tokens of the model"
        )


def _with_needles(filler: Filler, units: int, needles: Iterable[tuple[int, str]]) -> Iterator[str]:
    position = 0
    for before, needle in needles:
        yield from map(filler.unit, range(position, before))
        yield needle
        position = before
    yield from map(filler.unit, range(position, units))


def _sentence_starts(text: str) -> Iterator[int]:
    start = 0
    for match in re.finditer(r"[.!?][\"')\]”’]* |$", text):
        while match.end() - start > _MAX_SENTENCE:  # cut text without sentence ends between words
            space = text.rfind(" ", start + 1, start + _MAX_SENTENCE)
            if space < 0:
                break
            yield start
            start = space + 1
        if match.end() > start:
            yield start
        start = match.end()
