"""RULER's two aggregation tasks (arXiv:2404.06654, NVIDIA/RULER).

cwe asks for the common words of a numbered list, fwe for the frequent words of a coded text.
"""

from __future__ import annotations

import math
import random
import string
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, islice

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import Generated, stream, too_short, units_for
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.chains import random_words
from memagent_integrations.evaluation.tasks.settings import RULER_ANSWER_TOKENS, RULER_LENGTHS, sample_id
from memagent_integrations.evaluation.tasks.words import singles
from memagent_integrations.tokens import Counter

NAMES = ("cwe", "fwe")
_COMMON = 10  # number of common words of cwe
_SHORT = 3_072  # below this length, cwe repeats each word less often; RULER's 4,096 include prompt and example
_EXAMPLE = (10, 3, 1)  # other words, and how often the example has a common one and another one
_FREQUENT = 3  # number of words that fwe asks for
_LETTERS = 6
_ZETA = math.pi**2 / 6  # the zeta function at alpha = 2
_MIN_WORDS = 100  # of a coded text: with fewer, rounding could make the third word as frequent as the fourth
_ORACLE_WORDS = 200  # of fwe


def load(name: str, data: Data) -> Task:
    """Return common words extraction or frequent words extraction."""
    return Task(
        name=name,
        metric="string_match_all",
        make=_cwe if name == "cwe" else _fwe,
        lengths=RULER_LENGTHS,
        answer_tokens=RULER_ANSWER_TOKENS[name],
        example=_example if name == "cwe" else None,
    )


def _cwe(length: int, seed: int, number: int, count: Counter) -> Sample:
    """Make a shuffled, numbered list: ten words 30 times, all others 3 times (6 times and once in a short list)."""
    id, key = sample_id("cwe", length, seed, number), f"cwe/{seed}/{number}"
    often, seldom = (30, 3) if length >= _SHORT else (6, 1)
    head = _COMMON * often
    word = singles(key)

    def numbered_list(entries: int) -> Generated:
        order = Permutation(entries, key)

        def entry(index: int) -> str:
            slot = order[index]
            return f"{index + 1}. {word(slot // often if slot < head else _COMMON + (slot - head) // seldom)}"

        return Generated(entry, " ")

    entries = units_for(length, count, lambda entries: (numbered_list(entries), entries))
    entries -= (entries - head) % seldom
    if entries <= head:
        raise too_short("cwe", length, count("".join(stream(numbered_list(head + seldom), head + seldom))))
    filler, order = numbered_list(entries), Permutation(entries, key)
    common = [word(n) for n in range(_COMMON)]
    places = [sorted(order.index(slot) for slot in range(n * often, (n + 1) * often)) for n in range(_COMMON)]
    return Sample(
        id=id,
        question=f"Which are the {_COMMON} most common words in the numbered list?",
        answers=tuple(common),
        document=lambda: stream(filler, entries),
        facts=tuple(
            Fact(text=filler.unit(place), depth=place / entries, keys=(text,))
            for text, place in zip(common, map(_first_unique, places), strict=True)
        ),
        oracle=" ".join(filler.unit(place) for place in sorted(chain.from_iterable(places))),
        details={"entries": entries, "common": _COMMON, "often": often, "seldom": seldom},
    )


def _example(seed: int, number: int) -> str:
    """Return a short list with its common words, as RULER shows one; its longer one for long lists is not used."""
    key = f"cwe/{seed}/{number}"
    word, (others, often, seldom) = singles(f"{key}/example"), _EXAMPLE
    slots = [*range(_COMMON)] * often + [*range(_COMMON, _COMMON + others)] * seldom
    random.Random(f"{key}/example").shuffle(slots)
    entries, common = (
        " ".join(f"{number}. {word(slot)}" for number, slot in enumerate(chosen, start=1))
        for chosen in (slots, range(_COMMON))
    )
    return f"An example. In this list\n\n{entries}\n\nthe {_COMMON} most common words are: {common}"


def _first_unique(places: Sequence[int]) -> int:
    """Return a word's first place where its entry ("7. word") does not end another of its entries ("17. word")."""
    numbers = [str(place + 1) for place in places]
    return next(
        place
        for place, number in zip(places, numbers, strict=True)
        if sum(other.endswith(number) for other in numbers) == 1
    )


def _fwe(length: int, seed: int, number: int, count: Counter) -> Sample:
    """Make a text of n coded words, the k-th most frequent n / (k ** 2 * zeta(2)) times. The first one is dots."""
    id, key = sample_id("fwe", length, seed, number), f"fwe/{seed}/{number}"
    # The size of RULER's vocabulary, without the ranks too rare to occur.
    ranks = max(min(length // 50, math.isqrt(length * 8)), _FREQUENT + 2)
    words = ["...", *random_words(key, string.ascii_lowercase, _LETTERS, ranks - 1)]

    def text(wanted: int) -> tuple[Generated, int]:
        ends = _rank_ends(wanted, len(words))
        order = Permutation(ends[-1], key) if ends[-1] else ()
        return Generated(lambda index: words[bisect_right(ends, order[index])], " "), ends[-1]

    wanted = units_for(length, count, text)
    if wanted < _MIN_WORDS:
        raise too_short("fwe", length, count("".join(stream(*text(_MIN_WORDS)))))
    ends, answers = _rank_ends(wanted, len(words)), words[1 : _FREQUENT + 1]
    filler, total = text(wanted)
    first_places = [next(place for place in range(total) if filler.unit(place) == answer) for answer in answers]
    answer_words = (unit for unit in map(filler.unit, range(total)) if unit in answers)
    return Sample(
        id=id,
        question=f"Which are the {_FREQUENT} coded words that appear most often in the text? The dots do not count.",
        answers=tuple(answers),
        document=lambda: stream(filler, total),
        facts=tuple(
            Fact(text=word, depth=place / total, keys=(word,))
            for word, place in zip(answers, first_places, strict=True)
        ),
        oracle=" ".join(islice(answer_words, _ORACLE_WORDS)),
        details={"words": total, "counts": [ends[n] - ends[n - 1] for n in range(1, _FREQUENT + 1)], "alpha": 2.0},
    )


def _rank_ends(words: int, ranks: int) -> Sequence[int]:
    """Return where the words of each rank end, if all words are sorted by rank."""
    return list(accumulate(int(words / (rank * rank * _ZETA)) for rank in range(1, ranks + 1)))
