"""RULER's variable tracking (arXiv:2404.06654, NVIDIA/RULER).

One chain of four hops, from a number to five variables, is hidden in a repeated sentence.
"""

from __future__ import annotations

import random
import string
from itertools import pairwise

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import GRASS, Generated, filled, stream
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.settings import RULER_LENGTHS, sample_id
from memagent_integrations.tokens import Counter

NAMES = ("vt",)
_HOPS = 4
_LETTERS = 5


def load(name: str, data: Data) -> Task:
    """Return the task."""
    return Task(name=name, metric="string_match_all", make=_sample, lengths=RULER_LENGTHS)


def _sample(length: int, seed: int, number: int, count: Counter) -> Sample:
    id = sample_id("vt", length, seed, number)
    key = f"vt/{seed}/{number}"
    rng = random.Random(key)
    variables = random_words(key, string.ascii_uppercase, _LETTERS, _HOPS + 1)
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {variables[0]} = {value}", *(f"VAR {after} = VAR {before}" for before, after in pairwise(variables))]
    filler = Generated(lambda index: GRASS)
    units = filled("vt", filler, length, chain, count, least=len(chain))
    places = sorted(rng.sample(range(units), len(chain)))
    facts = [
        Fact(text=text, depth=filler.depth(units, place), keys=(variable,))
        for text, place, variable in zip(chain, places, variables, strict=True)
    ]
    return Sample(
        id=id,
        question=f"Which {len(variables)} variables are assigned the value {value} in the text, "
        "directly or through others? Name them all.",
        answers=tuple(variables),
        document=lambda: stream(filler, units, zip(places, chain, strict=True)),
        facts=tuple(facts),
        oracle="\n".join(chain),
        details={"haystack": "repeat", "units": units, "chains": 1, "hops": _HOPS},
    )


def random_words(key: str, alphabet: str, letters: int, words: int) -> list[str]:
    """Return `words` different words of random letters."""
    base = len(alphabet)
    order = Permutation(base**letters, key)
    return ["".join(alphabet[order[n] // base**digit % base] for digit in range(letters)) for n in range(words)]
