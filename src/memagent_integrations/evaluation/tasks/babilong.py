"""bAbI's stories told in a book: BABILong (arXiv:2406.10149) with tasks 1 to 5 of bAbI (arXiv:1502.05698).

All sentences of a story are hidden, in their order, between the sentences of books; those that give the answer are the facts. A part of the
stories is for training: those of `babilong_train_qa1` to `babilong_train_qa5` are never asked about by the others.
"""

from __future__ import annotations

import random
import re

from memagent_integrations.checks import check_int
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.data import Data, for_training
from memagent_integrations.evaluation.haystacks import Cycled, filled, stream
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.settings import RULER_LENGTHS, named
from memagent_integrations.tokens import Counter

TRAINING = tuple(f"babilong_train_qa{task}" for task in range(1, 6))
NAMES = (*(f"babilong_qa{task}" for task in range(1, 6)), *TRAINING)


def load(name: str, data: Data) -> Task:
    """One of the tasks."""
    stories = [
        story for story in data.babi(int(name[-1])) if for_training("".join(story.facts[:1])) is (name in TRAINING)
    ]
    books = data.books
    if not stories:
        raise UsageError(f"there are no questions for {name}")

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        check_int(least=0, most=len(stories) - 1, number=number)
        id = named(name, length, seed, number)
        index = Permutation(len(stories), f"{name}/{seed}")[number]
        story, seeded = stories[index], random.Random(f"{name}/{seed}/{number}")
        filler = Cycled(books, seeded.getrandbits(32))
        units = filled(name, filler, length, story.facts, count)
        places = [filler.place(units, depth) for depth in sorted(seeded.random() for _ in story.facts)]
        hidden = list(zip(places, story.facts, strict=True))
        return Sample(
            id=id,
            question=f"{story.question} Answer with one word; what the text says last about it holds.",
            answers=(story.answer,),
            document=lambda: stream(filler, units, hidden),
            facts=tuple(
                Fact(text=text, depth=filler.depth(units, at), keys=_named(text))
                for at, text in map(hidden.__getitem__, story.support)
            ),
            oracle="\n".join(story.facts),
            details={"question": index, "units": units, "sentences": len(hidden)},
        )

    return Task(name=name, metric="string_match_part", make=make, lengths=RULER_LENGTHS, size=len(stories))


def _named(sentence: str) -> tuple[str, ...]:
    """Whom and what a sentence of bAbI is about: names, and nouns with their article."""
    return tuple(re.findall(r"(?<=[Tt]he )\w+|(?!The )\b[A-Z]\w+", sentence))
