"""RULER's variable tracking (arXiv:2404.06654, NVIDIA/RULER): one chain of four hops from a number to five variables, in the repeated sentence."""

from __future__ import annotations

import random
import string
from itertools import pairwise

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import GRASS, Generated, filled, stream
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.settings import RULER_LENGTHS, named
from memagent_integrations.tokens import Counter

NAMES = ("vt",)
_HOPS = 4
_LETTERS = 5


def load(name: str, data: Data) -> Task:
    """Variable tracking."""
    return Task(name=name, metric="string_match_all", make=_sample, lengths=RULER_LENGTHS)


def _sample(length: int, seed: int, number: int, count: Counter) -> Sample:
    name = named("vt", length, seed, number)
    seeded = random.Random(f"vt/{seed}/{number}")
    variables = coded(f"vt/{seed}/{number}", string.ascii_uppercase, _LETTERS, _HOPS + 1)
    value = str(seeded.randrange(10_000, 100_000))
    chain = [f"VAR {variables[0]} = {value}", *(f"VAR {after} = VAR {before}" for before, after in pairwise(variables))]
    filler = Generated(lambda index: GRASS)
    units = filled("vt", filler, length, chain, count, least=len(chain))
    places = sorted(seeded.sample(range(units), len(chain)))
    facts = [
        Fact(text=text, depth=filler.depth(units, at), keys=(variable,))
        for text, at, variable in zip(chain, places, variables, strict=True)
    ]
    return Sample(
        id=name,
        question=f"Which {len(variables)} variables are assigned the value {value} in the text, directly or through others? Name them all.",
        answers=tuple(variables),
        document=lambda: stream(filler, units, zip(places, chain, strict=True)),
        facts=tuple(facts),
        oracle="\n".join(chain),
        details={"haystack": "repeat", "units": units, "chains": 1, "hops": _HOPS},
    )


def coded(key: str, alphabet: str, letters: int, words: int) -> list[str]:
    """Different words of random letters."""
    order = Permutation(len(alphabet) ** letters, key)
    return [
        "".join(alphabet[order[n] // len(alphabet) ** place % len(alphabet)] for place in range(letters))
        for n in range(words)
    ]
