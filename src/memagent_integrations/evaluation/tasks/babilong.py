"""bAbI's stories hidden in books: BABILong (arXiv:2406.10149) with tasks 1 to 5 of bAbI (arXiv:1502.05698).

All sentences of a story are hidden, in their order, between the sentences of books; those that give the answer are the
facts. The first gold of a sample is its answer, the others are the labels that an answer may not name. Some stories are
for training: those of `babilong_train_qa1` to `babilong_train_qa5` occur in no other task.
"""

from __future__ import annotations

import random
import re

from memagent_integrations.checks import check_int
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.data import Data, for_training
from memagent_integrations.evaluation.haystacks import Cycled, filled, stream
from memagent_integrations.evaluation.official import babilong_golds
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.settings import RULER_LENGTHS, sample_id
from memagent_integrations.tokens import Counter

_ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
LABELS = {
    **dict.fromkeys(range(1, 5), _ROOMS),
    5: ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
}
"""What the answers of each task of bAbI are taken from."""
TRAINING = tuple(f"babilong_train_qa{task}" for task in range(1, 6))
NAMES = (*(f"babilong_qa{task}" for task in range(1, 6)), *TRAINING)


def load(name: str, data: Data) -> Task:
    """Return one of the tasks."""
    training, task = name in TRAINING, int(name[-1])
    stories = [story for story in data.babi(task) if for_training("".join(story.facts[:1])) is training]
    books = data.books
    if not stories:
        raise UsageError(f"there are no questions for {name}")

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        check_int(least=0, most=len(stories) - 1, number=number)
        id = sample_id(name, length, seed, number)
        index = Permutation(len(stories), f"{name}/{seed}")[number]
        story, rng = stories[index], random.Random(f"{name}/{seed}/{number}")
        filler = Cycled(books, rng.getrandbits(32))
        units = filled(name, filler, length, story.facts, count)
        depths = sorted(rng.random() for _ in story.facts)
        needles = [(filler.place(units, depth), fact) for depth, fact in zip(depths, story.facts, strict=True)]
        support = [needles[index] for index in story.support]
        return Sample(
            id=id,
            question=f"{story.question} Answer with one word.",
            answers=babilong_golds(story.answer, story.question, LABELS[task]),
            document=lambda: stream(filler, units, needles),
            facts=tuple(
                Fact(text=text, depth=filler.depth(units, place), keys=_names(text)) for place, text in support
            ),
            oracle="\n".join(story.facts),
            details={"question": index, "units": units, "sentences": len(needles)},
        )

    return Task(name=name, metric="babilong", make=make, lengths=RULER_LENGTHS, size=len(stories))


def _names(sentence: str) -> tuple[str, ...]:
    """Return what a sentence of bAbI is about: names, and nouns that have an article."""
    return tuple(re.findall(r"(?<=[Tt]he )\w+|(?!The )\b[A-Z]\w+", sentence))
