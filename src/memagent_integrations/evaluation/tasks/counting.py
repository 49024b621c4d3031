"""RULER's two aggregation tasks (arXiv:2404.06654, NVIDIA/RULER): the common words of a numbered list, the frequent words of a coded text."""

from __future__ import annotations

import math
import string
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import Generated, stream, too_short, units_for
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.chains import coded
from memagent_integrations.evaluation.tasks.settings import RULER_LENGTHS, named
from memagent_integrations.evaluation.tasks.words import singles
from memagent_integrations.tokens import Counter

NAMES = ("cwe", "fwe")
_COMMON = 10  # common words of cwe
_SHORT = 4096  # below it, cwe has fewer of each
_FREQUENT = 3  # words that fwe asks for
_LETTERS = 6
_ZETA = math.pi**2 / 6  # the zeta function at alpha = 2
_FEWEST = 100  # words of a coded text: with fewer, rounding could make the third word as frequent as the fourth
_SHOWN = 200  # words of an oracle of fwe


def load(name: str, data: Data) -> Task:
    """Common words extraction or frequent words extraction."""
    return Task(name=name, metric="string_match_all", make=_cwe if name == "cwe" else _fwe, lengths=RULER_LENGTHS)


def _cwe(length: int, seed: int, number: int, count: Counter) -> Sample:
    """Ten words 30 times each, all others 3 times (6 times and once in a short list), shuffled and numbered."""
    name, key = named("cwe", length, seed, number), f"cwe/{seed}/{number}"
    often, seldom = (30, 3) if length >= _SHORT else (6, 1)
    head = _COMMON * often
    word = singles(key)

    def listed(entries: int) -> Generated:
        order = Permutation(entries, key)

        def entry(index: int) -> str:
            slot = order[index]
            return f"{index + 1}. {word(slot // often if slot < head else _COMMON + (slot - head) // seldom)}"

        return Generated(entry, " ")

    entries = units_for(length, count, lambda entries: (listed(entries), entries))
    entries -= (entries - head) % seldom
    if entries <= head:
        raise too_short("cwe", length, count("".join(stream(listed(head + seldom), head + seldom))))
    filler, order = listed(entries), Permutation(entries, key)
    common = [word(n) for n in range(_COMMON)]
    places = [sorted(order.place(slot) for slot in range(n * often, (n + 1) * often)) for n in range(_COMMON)]
    return Sample(
        id=name,
        question=f"Which are the {_COMMON} most common words in the numbered list?",
        answers=tuple(common),
        document=lambda: stream(filler, entries),
        facts=tuple(
            Fact(text=filler.unit(at), depth=at / entries, keys=(text,))
            for text, at in zip(common, map(_first, places), strict=True)
        ),
        oracle=" ".join(filler.unit(place) for place in sorted(place for own in places for place in own)),
        details={"entries": entries, "common": _COMMON, "often": often, "seldom": seldom},
    )


def _first(places: Sequence[int]) -> int:
    """The first of the places of a word whose entry ("7. word") is not the end of another one ("17. word")."""
    numbers = [str(place + 1) for place in places]
    return next(
        place
        for place, number in zip(places, numbers, strict=True)
        if sum(other.endswith(number) for other in numbers) == 1
    )


def _fwe(length: int, seed: int, number: int, count: Counter) -> Sample:
    """Coded words, the k-th in frequency n / (k ** 2 * zeta(2)) times among n; the first of them are dots, which do not count."""
    name, key = named("fwe", length, seed, number), f"fwe/{seed}/{number}"
    ranks = max(
        min(length // 50, math.isqrt(length * 8)), _FREQUENT + 2
    )  # RULER's vocabulary, without ranks that come to no word
    words = ["...", *coded(key, string.ascii_lowercase, _LETTERS, ranks - 1)]

    def text(wanted: int) -> tuple[Generated, int]:
        ends = _ends(wanted, len(words))
        order = Permutation(ends[-1], key) if ends[-1] else ()
        return Generated(lambda index: words[bisect_right(ends, order[index])], " "), ends[-1]

    wanted = units_for(length, count, text)
    if wanted < _FEWEST:
        raise too_short("fwe", length, count("".join(stream(*text(_FEWEST)))))
    ends, answers = _ends(wanted, len(words)), words[1 : _FREQUENT + 1]
    filler, total = text(wanted)
    firsts = [next(place for place in range(total) if filler.unit(place) == answer) for answer in answers]
    shown = (unit for unit in map(filler.unit, range(total)) if unit in answers)
    return Sample(
        id=name,
        question=f"Which are the {_FREQUENT} coded words that appear most often in the text? The dots do not count.",
        answers=tuple(answers),
        document=lambda: stream(filler, total),
        facts=tuple(
            Fact(text=word, depth=place / total, keys=(word,)) for word, place in zip(answers, firsts, strict=True)
        ),
        oracle=" ".join(islice(shown, _SHOWN)),
        details={"words": total, "counts": [ends[n] - ends[n - 1] for n in range(1, _FREQUENT + 1)], "alpha": 2.0},
    )


def _ends(words: int, ranks: int) -> Sequence[int]:
    """Where the words of each rank end among all of them, sorted by rank."""
    return list(accumulate(int(words / (rank * rank * _ZETA)) for rank in range(1, ranks + 1)))
