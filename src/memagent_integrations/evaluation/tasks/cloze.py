"""Cloze: a word of the document is asked for by the words around it (Taylor 1953; for books arXiv:1511.02301).

Anything that people have written gives any number of such questions. `cloze` takes them from essays, `cloze_train`, for
training, from books, and asks several about each document.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import islice

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import Cycled, filled, stream, too_short
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.settings import RULER_LENGTHS, TRAINING_LENGTHS, sample_id
from memagent_integrations.tokens import Counter

TRAINING = ("cloze_train",)
NAMES = ("cloze", *TRAINING)

_QUESTIONS = 8  # about each document for training
_LEAST, _MOST = 8, 70  # words of a sentence
_AROUND = 8  # most words of the question on each side of the gap
_DROPPED = 0.25  # share of them that every second question leaves out
_SENTENCE = re.compile(r"[\"'“‘(]*[A-Z].*[.!?][\"'”’)]*", re.DOTALL)
_ABBREVIATED = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|No|[A-Z])\.$")
_NAME = re.compile(r"[A-Z][a-z]{2,}|\d[\d,.]*")
_WORD = re.compile(r"[a-z]{5,}")
_EDGES = re.compile(r"^\W+|\W+$|['’]s\W*$")


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A question for a word, and the word."""

    question: str
    word: str


def load(name: str, data: Data) -> Task:
    """Return one of the tasks."""
    training = name in TRAINING
    hay, questions = (data.books, _QUESTIONS) if training else (data.essays, 1)

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        id = sample_id(name, length, seed, number)
        document, question = divmod(number, questions)
        key = f"{name}/{seed}/{document}"
        filler = Cycled(hay, random.Random(f"{key}/start").getrandbits(32))
        units = filled(name, filler, length, (), count)
        order = Permutation(units, f"{key}/sentences")
        gaps = (
            (place, gap)
            for turn in range(questions)  # a short document may have fewer sentences to ask about than questions
            for place in order
            if (gap := cut_out(filler.unit(place), f"{key}/{turn}/{place}"))
        )
        found = next(islice(gaps, question, None), None)
        if found is None:
            raise too_short(name, length, 2 * length)
        place, gap = found
        sentence = filler.unit(place)
        return Sample(
            id=id,
            question=gap.question,
            answers=(gap.word,),
            document=lambda: stream(filler, units),
            facts=(Fact(text=sentence, depth=filler.depth(units, place), keys=(gap.word,)),),
            oracle=sentence,
            details={"document": document, "units": units},
        )

    lengths = TRAINING_LENGTHS if training else RULER_LENGTHS
    return Task(name=name, metric="em" if training else "sub_em", make=make, lengths=lengths, questions=questions)


def cut_out(sentence: str, key: str) -> Gap | None:
    """Return a question for a word of a sentence, rather a name or a number than another; None: nothing can be asked.

    The same arguments return the same.
    """
    words = [_EDGES.sub("", word) for word in sentence.split()]
    whole = _SENTENCE.fullmatch(sentence) and not _ABBREVIATED.search(sentence)
    if not whole or not _LEAST <= len(words) <= _MOST:
        return None
    rng = random.Random(key)
    names = [n for n, word in enumerate(words) if n and _NAME.fullmatch(word)]
    places = names or [n for n, word in enumerate(words) if _WORD.fullmatch(word)]
    if not places:
        return None
    gap = rng.choice(places)
    left, right = words[max(gap - _AROUND, 0) : gap], words[gap + 1 : gap + 1 + _AROUND]
    shortened = rng.random() < 0.5
    left, right = (
        [word for word in side if (not shortened or rng.random() > _DROPPED) and word] for side in (left, right)
    )
    around = " ".join([*left, "____", *right])
    forms = (
        f'Which word is missing: "{around}"?',
        f'What stands in the gap of "{around}"?',
        f"{' '.join([*left, 'what', *right])}?",
    )
    return Gap(question=rng.choice(forms), word=words[gap])
