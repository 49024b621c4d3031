"""Questions about sentences of an encyclopedia, which rules make: several about each document of some paragraphs.

SQuAD (arXiv:1606.05250) has such questions by people; the rules give any number of them to train on.
"""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import islice

from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.forms import Paragraph
from memagent_integrations.evaluation.haystacks import Generated, filled, stream
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.prose import NOT_TOLD
from memagent_integrations.evaluation.tasks.questioning import Asked, asked_of
from memagent_integrations.evaluation.tasks.settings import RULER_LENGTHS, TRAINING_LENGTHS, sample_id
from memagent_integrations.statements import sentences
from memagent_integrations.tokens import Counter

TRAINING = ("article_train",)
NAMES = ("article", *TRAINING)

_QUESTIONS = 8  # about each document for training; the last one is about a paragraph that it does not have
_PARAGRAPHS = 8_192  # most that documents are made of


def load(name: str, data: Data) -> Task:
    """Return one of the tasks."""
    training = name in TRAINING
    articles = data.articles_train if training else data.paragraphs
    paragraphs = list(islice(filter(_questions, articles), _PARAGRAPHS))
    questions = _QUESTIONS if training else 1

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        id = sample_id(name, length, seed, number)
        document, question = divmod(number, questions)
        key = f"{name}/{seed}/{document}"
        order = Permutation(len(paragraphs), key)
        titles = random.Random(f"{key}/titles").random() < 0.5
        filler = Generated(lambda index: _shown(paragraphs[order[index % len(order)]], titles), "\n\n")
        units = filled(name, filler, length, (), count)
        absent = training and question == _QUESTIONS - 1 and units < len(order)
        places = range(units, len(order)) if absent else range(min(units, len(order)))
        about = [(place, asked) for place in places for asked in _questions(paragraphs[order[place]])]
        random.Random(f"{key}/questions").shuffle(about)
        place, (sentence, asked) = about[question % len(about)]
        return Sample(
            id=id,
            question=asked.question,
            answers=(NOT_TOLD if absent else asked.answer,),
            document=lambda: stream(filler, units),
            facts=() if absent else (Fact(text=sentence, depth=filler.depth(units, place), keys=(asked.answer,)),),
            oracle="" if absent else filler.unit(place),
            details={"document": document, "units": units},
            metric="abstention" if absent else None,
        )

    lengths = TRAINING_LENGTHS if training else RULER_LENGTHS
    return Task(name=name, metric="em" if training else "sub_em", make=make, lengths=lengths, questions=questions)


@lru_cache(maxsize=2 * _PARAGRAPHS)
def _questions(paragraph: Paragraph) -> tuple[tuple[str, Asked], ...]:
    """Return the questions about a paragraph, each with its sentence."""
    text = _text(paragraph)
    parts = (text[start:end].strip() for start, end in sentences(text))
    return tuple((sentence, asked) for sentence in parts for asked in asked_of(sentence, text))


def _shown(paragraph: Paragraph, titles: bool) -> str:
    return f"{paragraph.title}\n{_text(paragraph)}" if titles else _text(paragraph)


def _text(paragraph: Paragraph) -> str:
    return " ".join(paragraph.text.split())
