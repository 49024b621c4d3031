"""Text to hide things in: any number of tokens of it, made as it is read, with needles at the places where they are wanted."""

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

_BATCH = 64  # units that are joined into one piece of a document
_SAMPLE = 65_536  # characters of a document that are counted to know the tokens of the rest
_SAMPLES = 32  # places from which they are taken
_LONGEST = 400  # characters of a sentence


class Filler(ABC):
    """A text without an end, in units (sentences, lines) that `separator` sets apart. Needles stand between units."""

    separator: str

    @abstractmethod
    def unit(self, index: int) -> str:
        """Unit `index`, from 0."""

    @abstractmethod
    def size(self, tokens: int, count: Counter) -> int:
        """How many units come to `tokens` tokens, separators included; 0: not even one does."""

    def place(self, units: int, depth: float) -> int:
        """Before which of `units` units a text has to stand to be at `depth`."""
        return round(depth * units)

    def depth(self, units: int, place: int) -> float:
        """How deep a text is that stands before unit `place` of `units`."""
        return place / units


class Generated(Filler):
    """Units that a function makes."""

    def __init__(self, unit: Callable[[int], str], separator: str = "\n") -> None:
        self._unit = unit
        self.separator = separator

    def unit(self, index: int) -> str:
        """What the function makes of `index`."""
        return self._unit(index)

    def size(self, tokens: int, count: Counter) -> int:
        """By counts of all units where they are few, else of samples."""
        return units_for(tokens, count, lambda units: (self, units))


class Corpus:
    """A text as sentences, its white space made single spaces, with what it costs in tokens: each part is counted once for each counter."""

    def __init__(self, text: str) -> None:
        self.text = re.sub(r"\s*[^\S ]\s*| {2,}", " ", text).strip()
        self.starts = array("Q", _starts(self.text))
        self._costs: dict[tuple[Counter, int], int] = {}

    def sentence(self, index: int) -> str:
        """Sentence `index`."""
        end = self.starts[index + 1] - 1 if index + 1 < len(self.starts) else len(self.text)
        return self.text[self.starts[index] : end]

    def join(self, first: int, end: int) -> str:
        """Sentences `first` to `end` (exclusive) as one text."""
        return " ".join(map(self.sentence, range(first, end)))

    def cost(self, first: int, count: Counter) -> int:
        """Tokens of the `_BATCH` sentences from `first` on."""
        known = self._costs.get((count, first))
        if known is None:
            known = self._costs[count, first] = count(" " + self.join(first, self.end(first)))
        return known

    def end(self, first: int) -> int:
        """Where the batch that begins with sentence `first` ends."""
        return min(first + _BATCH, len(self.starts))


class Cycled(Filler):
    """The sentences of a corpus from its batch number `batch` on, and again from its beginning when they end."""

    separator = " "

    def __init__(self, corpus: Corpus, batch: int = 0) -> None:
        self._corpus = corpus
        self._first = batch * _BATCH % len(corpus.starts) // _BATCH * _BATCH

    def unit(self, index: int) -> str:
        """A sentence."""
        return self._corpus.sentence((self._first + index) % len(self._corpus.starts))

    def size(self, tokens: int, count: Counter) -> int:
        """By the counts of the corpus, and of the last few sentences."""
        corpus, total = self._corpus, len(self._corpus.starts)
        units = spent = 0
        first = self._first
        while spent + (cost := corpus.cost(first, count)) <= tokens:
            spent, units, first = spent + cost, units + corpus.end(first) - first, corpus.end(first) % total
            if units == total:  # the whole corpus, and all of it as often as it fits
                _counted(spent)
                units, spent = units * (tokens // spent), spent * (tokens // spent)
        return units + _nearest(
            tokens - spent, corpus.end(first) - first, lambda n: count(" " + corpus.join(first, first + n))
        )

    def place(self, units: int, depth: float) -> int:
        """By characters: sentences differ."""
        origin = self._offset(0)
        rounds, rest = divmod(round(origin + depth * (self._offset(units) - origin)), len(self._corpus.text) + 1)
        return min(rounds * len(self._corpus.starts) + bisect_left(self._corpus.starts, rest) - self._first, units)

    def depth(self, units: int, place: int) -> float:
        """By characters."""
        origin = self._offset(0)
        return (self._offset(place) - origin) / (self._offset(units) - origin)

    def _offset(self, index: int) -> int:
        rounds, sentence = divmod(self._first + index, len(self._corpus.starts))
        return rounds * (len(self._corpus.text) + 1) + self._corpus.starts[sentence]


def stream(filler: Filler, units: int, needles: Iterable[tuple[int, str]] = ()) -> Iterator[str]:
    """`units` units of the filler in pieces, with `needles` (the unit that each stands before, and its text) in the order of their places."""
    parts = _woven(filler, units, needles)
    lead = ""
    while batch := list(islice(parts, _BATCH)):
        yield lead + filler.separator.join(batch)
        lead = filler.separator


def filled(name: str, filler: Filler, tokens: int, needles: Sequence[str], count: Counter, *, least: int = 1) -> int:
    """How many units of filler make a document of `tokens` tokens together with the needles.

    Raises:
        UsageError: the needles leave no room for `least` of them.
    """
    taken = sum(count(filler.separator + needle) for needle in needles)
    units = filler.size(tokens - taken, count) if tokens > taken else 0
    if units < least:
        raise too_short(
            name, tokens, taken + sum(count(filler.separator + filler.unit(index)) for index in range(least))
        )
    return units


def too_short(name: str, tokens: int, least: int) -> UsageError:
    """The error for a length that does not hold what a task has to put into it."""
    return UsageError(f"{name} needs a length of at least {least} tokens, not {tokens}")


def units_for(tokens: int, count: Counter, text: Callable[[int], tuple[Filler, int]]) -> int:
    """A number n so that `text(n)`, a filler and how many units of it, has `tokens` tokens, to half a percent or half a unit."""
    most = tokens * 8  # a unit has a token, or nearly

    def cost(units: int) -> int:
        return estimate(*text(units), count)

    units = _nearest(tokens, most, cost, guess=max(tokens // 32, 1), enough=0.995)
    if units >= most:
        _counted(0)
    return units


def estimate(filler: Filler, units: int, count: Counter) -> int:
    """Tokens of `units` units: counted where they are few, else what samples from all over the text say."""
    if not units:
        return 0
    length = max(
        sum(len(filler.unit(units * n // _SAMPLES)) for n in range(_SAMPLES)) / _SAMPLES + len(filler.separator), 1
    )
    each = int(_SAMPLE / _SAMPLES / length) + 1
    if units <= each * _SAMPLES:
        return count("".join(stream(filler, units)))
    starts = (n * (units - each) // (_SAMPLES - 1) for n in range(_SAMPLES))
    counted = sum(count(filler.separator.join(["", *map(filler.unit, range(start, start + each))])) for start in starts)
    return round(counted * units / (each * _SAMPLES))


def _nearest(limit: int, most: int, cost: Callable[[int], int], *, guess: int = 0, enough: float = 1.0) -> int:
    """The number of units, at most `most`, whose cost is next to the limit."""
    under = fit(limit, most - 1, cost, guess=guess, enough=enough)
    return under + 1 if cost(under + 1) - limit < limit - (cost(under) if under else 0) else under


def _counted(tokens: int) -> None:
    if not tokens:
        raise UsageError(
            "the tokenizer finds next to no tokens in a long text; give one that counts the tokens of the model"
        )


def _woven(filler: Filler, units: int, needles: Iterable[tuple[int, str]]) -> Iterator[str]:
    place = 0
    for before, needle in needles:
        yield from map(filler.unit, range(place, before))
        yield needle
        place = before
    yield from map(filler.unit, range(place, units))


def _starts(text: str) -> Iterator[int]:
    start = 0
    for match in re.finditer(r"[.!?][\"')\]”’]* |$", text):
        while match.end() - start > _LONGEST:  # a text without ends of sentences
            space = text.rfind(" ", start + 1, start + _LONGEST)
            if space < 0:
                break
            yield start
            start = space + 1
        if match.end() > start:
            yield start
        start = match.end()
