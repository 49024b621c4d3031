"""RULER's eight needle tasks: sentences with a key and a value, hidden in unrelated text.

Needle sentence, kinds, haystacks and numbers are RULER's (arXiv:2404.06654, NVIDIA/RULER). `length` is that of the
document. A needle stands anywhere in a repeated sentence or among needles, and at one of 40 depths in other texts, as
in RULER. The tasks for training hide the needles in books, and ask several questions about a document if it has needles
enough.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import GRASS, Corpus, Cycled, Filler, Generated, filled, stream
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.settings import (
    RULER_ANSWER_TOKENS,
    RULER_LENGTHS,
    TRAINING_LENGTHS,
    sample_id,
)
from memagent_integrations.evaluation.tasks.words import Kind, distinct
from memagent_integrations.tokens import Counter

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_DEPTHS = 40


@dataclass(frozen=True, kw_only=True)
class _Variant:
    haystack: str
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    questions: int = 1


_VARIANTS = {
    "niah_single_1": _Variant(haystack="repeat"),
    "niah_single_2": _Variant(haystack="essay"),
    "niah_single_3": _Variant(haystack="essay", value="uuids"),
    "niah_multikey_1": _Variant(haystack="essay", keys=4),
    "niah_multikey_2": _Variant(haystack="needle"),
    "niah_multikey_3": _Variant(haystack="needle", key="uuids", value="uuids"),
    "niah_multivalue": _Variant(haystack="essay", values=4),
    "niah_multiquery": _Variant(haystack="essay", keys=4, queries=4),
    "needles_train_single_1": _Variant(haystack="book"),
    "needles_train_single_2": _Variant(haystack="book", value="words"),
    "needles_train_single_3": _Variant(haystack="book", value="uuids"),
    "needles_train_multikey_1": _Variant(haystack="book", keys=4, questions=4),
    "needles_train_multikey_2": _Variant(haystack="needle", keys=4, questions=4),
    "needles_train_multikey_3": _Variant(haystack="needle", key="uuids", value="uuids", keys=4, questions=4),
    "needles_train_multivalue": _Variant(haystack="book", keys=2, values=4, questions=2),
    "needles_train_multiquery": _Variant(haystack="book", keys=8, queries=4, questions=2),
}
NAMES = tuple(_VARIANTS)
TRAINING = tuple(name for name in NAMES if name.startswith("needles_train_"))


def load(name: str, data: Data) -> Task:
    """Return one of the needle tasks."""
    variant = _VARIANTS[name]
    text = {"essay": lambda: data.essays, "book": lambda: data.books}.get(variant.haystack, lambda: None)()

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        return _sample(name, variant, text, length, seed, number, count)

    training = name in TRAINING
    return Task(
        name=name,
        metric="string_match_all",
        make=make,
        lengths=TRAINING_LENGTHS if training else RULER_LENGTHS,
        questions=variant.questions,
        answer_tokens=None if training else RULER_ANSWER_TOKENS["niah"],
    )


def _sample(
    name: str, variant: _Variant, text: Corpus | None, length: int, seed: int, number: int, count: Counter
) -> Sample:
    id = sample_id(name, length, seed, number)
    document, question = divmod(number, variant.questions)
    source = f"{name}/{seed}/{document}"  # the same needles at each length
    key, value = distinct(variant.key, f"{source}/keys"), distinct(variant.value, f"{source}/values")
    needles = [(k, k * variant.values + v) for k in range(variant.keys) for v in range(variant.values)]
    random.Random(source).shuffle(needles)

    def sentence(k: int, v: int) -> str:
        return NEEDLE.format(kind=variant.value, key=key(k), value=value(v))

    queried = range(question * variant.queries, (question + 1) * variant.queries)
    filler: Filler = Generated(lambda index: GRASS)
    if variant.haystack == "needle":
        filler = Generated(lambda index: sentence(variant.keys + index, len(needles) + index))
    elif text:
        start = random.Random(f"{source}/start").getrandbits(32) if variant.haystack == "book" else 0
        filler = Cycled(text, start)
    texts = [sentence(k, v) for k, v in needles]
    units = filled(name, filler, length, texts, count)
    if isinstance(filler, Generated):
        rng = random.Random(f"{source}/places")
        places = sorted(int(rng.random() * units) for _ in texts)
    else:
        places = [filler.place(units, depth) for depth in _depths(name, seed, document, len(texts))]
    facts = [
        Fact(text=text, depth=filler.depth(units, place), keys=(value(v),))
        for text, place, (k, v) in zip(texts, places, needles, strict=True)
        if k in queried
    ]
    return Sample(
        id=id,
        question=_question(variant, [key(k) for k in queried]),
        answers=tuple(value(k * variant.values + v) for k in queried for v in range(variant.values)),
        document=lambda: stream(filler, units, zip(places, texts, strict=True)),
        facts=tuple(facts),
        oracle="\n".join(fact.text for fact in facts),
        details={"haystack": variant.haystack, "units": units, "needles": len(texts)},
    )


def _depths(name: str, seed: int, document: int, needles: int) -> list[float]:
    """Return some of RULER's 40 depths in order. Successive documents go through all of them."""
    depths = [n / (_DEPTHS - 1) for n in range(_DEPTHS)]
    random.Random(f"{name}/{seed}/depths").shuffle(depths)
    return sorted(depths[(document * needles + n) % _DEPTHS] for n in range(needles))


def _question(variant: _Variant, keys: list[str]) -> str:
    joined = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
    if variant.queries * variant.values == 1:
        return f"What is the special magic {variant.value[:-1]} for {joined} that the text mentions?"
    return f"What are all the special magic {variant.value} for {joined} that the text mentions?"
