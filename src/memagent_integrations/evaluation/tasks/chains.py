"""RULER's variable tracking (arXiv:2404.06654, NVIDIA/RULER).

One chain of four hops, from a number to five variables, is hidden in a repeated sentence; for training, two chains in
books.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from itertools import pairwise

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import GRASS, Corpus, Cycled, Filler, Generated, filled, stream
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.settings import (
    RULER_ANSWER_TOKENS,
    RULER_LENGTHS,
    TRAINING_LENGTHS,
    sample_id,
)
from memagent_integrations.tokens import Counter

TRAINING = ("vt_train",)
NAMES = ("vt", *TRAINING)
_HOPS = 4
_LETTERS, _EXAMPLE_LETTERS = 5, 3
_TRAINING_CHAINS = 2


def load(name: str, data: Data) -> Task:
    """Return one of the tasks."""
    training = name in TRAINING
    chains, books = (_TRAINING_CHAINS, data.books) if training else (1, None)

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        return _sample(name, chains, books, length, seed, number, count)

    return Task(
        name=name,
        metric="string_match_all",
        make=make,
        lengths=TRAINING_LENGTHS if training else RULER_LENGTHS,
        questions=chains,
        answer_tokens=None if training else RULER_ANSWER_TOKENS["vt"],
        example=None if training else _example,
    )


def _sample(
    name: str, chains: int, books: Corpus | None, length: int, seed: int, number: int, count: Counter
) -> Sample:
    id = sample_id(name, length, seed, number)
    document, asked = divmod(number, chains)
    key = f"{name}/{seed}/{document}"
    rng = random.Random(key)
    words = random_words(key, string.ascii_uppercase, _LETTERS, chains * (_HOPS + 1))
    values = rng.sample(range(10_000, 100_000), chains)
    variables = [words[n * (_HOPS + 1) : (n + 1) * (_HOPS + 1)] for n in range(chains)]
    assignments = [_assignments(value, names) for value, names in zip(values, variables, strict=True)]
    turns = [n for n in range(chains) for _ in range(_HOPS + 1)]  # the chain of each assignment in the document
    random.Random(f"{key}/turns").shuffle(turns)
    rest = [iter(chain) for chain in assignments]
    texts = [next(rest[n]) for n in turns]
    filler: Filler = Generated(lambda index: GRASS)
    if books:
        filler = Cycled(books, random.Random(f"{key}/start").getrandbits(32))
    units = filled(name, filler, length, texts, count, least=len(texts))
    places = sorted(rng.sample(range(units), len(texts)))
    names = variables[asked]
    gold = [(text, place) for text, place, n in zip(texts, places, turns, strict=True) if n == asked]
    facts = tuple(
        Fact(text=text, depth=filler.depth(units, place), keys=(variable,))
        for (text, place), variable in zip(gold, names, strict=True)
    )
    return Sample(
        id=id,
        question=f"Which {len(names)} variables are assigned the value {values[asked]} in the text, "
        "directly or through others? Name them all.",
        answers=tuple(names),
        document=lambda: stream(filler, units, zip(places, texts, strict=True)),
        facts=facts,
        oracle="\n".join(fact.text for fact in facts),
        details={"haystack": "book" if books else "repeat", "units": units, "chains": chains, "hops": _HOPS},
    )


def _example(seed: int, number: int) -> str:
    """Return a short text with another value and shorter names, and the right answer for it."""
    key = f"vt/{seed}/{number}"
    names = random_words(f"{key}/example", string.ascii_uppercase, _EXAMPLE_LETTERS, _HOPS + 1)
    value = random.Random(f"{key}/example").randrange(10_000, 100_000)
    text = "\n".join(f"{GRASS}\n{assignment}" for assignment in _assignments(value, names))
    return f"An example. In this text\n\n{text}\n\nthe variables with the value {value} are: {' '.join(names)}"


def _assignments(value: int, variables: Sequence[str]) -> list[str]:
    """Return the assignments of a chain in their order."""
    return [f"VAR {variables[0]} = {value}", *(f"VAR {after} = VAR {before}" for before, after in pairwise(variables))]


def random_words(key: str, alphabet: str, letters: int, words: int) -> list[str]:
    """Return `words` different words of random letters."""
    base = len(alphabet)
    order = Permutation(base**letters, key)
    return ["".join(alphabet[order[n] // base**digit % base] for digit in range(letters)) for n in range(words)]
