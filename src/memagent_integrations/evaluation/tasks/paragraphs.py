"""Questions whose gold paragraphs stand among many others.

qa_1 (SQuAD) and qa_2 (HotpotQA) of RULER (arXiv:2404.06654); RULER-HQA of MemAgent (arXiv:2507.02259), documents of 50
to 25,600 numbered paragraphs of HotpotQA; and the same with the questions of training sets, for training a reader: the
paper used documents of 200 paragraphs and rewarded the exact answer.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from memagent_integrations.checks import check_int
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.diagnostics import holds
from memagent_integrations.evaluation.forms import Paragraph, Question
from memagent_integrations.evaluation.haystacks import too_short
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.published import PARAGRAPHS
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks.settings import RULER_ANSWER_TOKENS, RULER_LENGTHS, sample_id
from memagent_integrations.statements import sentences
from memagent_integrations.tokens import Counter

_QUESTIONS: dict[str, Callable[[Data], Sequence[Question]]] = {
    "qa_1": lambda data: data.squad,
    "qa_2": lambda data: data.hotpotqa,
    "ruler_hqa": lambda data: data.hotpotqa,
    "hqa_train": lambda data: data.hotpotqa_train,
    "musique_train": lambda data: data.musique_train,
    "squad_train": lambda data: data.squad_train,
}
NAMES = tuple(_QUESTIONS)
TRAINING = ("hqa_train", "musique_train", "squad_train")
_TRAINING_LENGTHS = (200,)
_CANDIDATES = 256  # paragraphs to choose the last one from, by length


def load(name: str, data: Data) -> Task:
    """Return one of the tasks."""
    questions = _QUESTIONS[name](data)
    in_articles = name in ("qa_1", "squad_train")
    if in_articles:
        shelf = _Shelf(tuple(dict.fromkeys(question.gold[0] for question in questions)))
    else:
        shelf = _Shelf(data.paragraphs, data.more_paragraphs)

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        check_int(least=0, most=len(questions) - 1, number=number)
        id = sample_id(name, length, seed, number)
        question = questions[Permutation(len(questions), f"{name}/{seed}")[number]]
        if in_articles:
            question = _shuffled(question, f"{name}/{seed}/{number}/near")
        stack = _Stack(shelf, question, f"{name}/{seed}/{number}")
        size = stack.checked(length) if name in ("ruler_hqa", *TRAINING) else stack.size(name, length, count)
        return stack.sample(id, size)

    number = len(questions)
    if name == "ruler_hqa":
        return Task(name=name, metric="sub_em", make=make, unit="paragraphs", lengths=PARAGRAPHS, size=number)
    if name in TRAINING:
        return Task(name=name, metric="em", make=make, unit="paragraphs", lengths=_TRAINING_LENGTHS, size=number)
    return Task(
        name=name,
        metric="string_match_part",
        make=make,
        lengths=RULER_LENGTHS,
        size=number,
        answer_tokens=RULER_ANSWER_TOKENS["qa"],
    )


def _shuffled(question: Question, key: str) -> Question:
    """Return the question with the rest of its article in another order, of which a short document takes a part."""
    near = random.Random(key).sample(question.near, len(question.near))
    return replace(question, near=tuple(near))


class _Shelf:
    """Paragraphs to choose from, `reserve` after the others. Each is counted once for each counter."""

    def __init__(self, paragraphs: Sequence[Paragraph], reserve: Sequence[Paragraph] = ()) -> None:
        self.paragraphs = (*paragraphs, *reserve)
        self.parts = (range(len(paragraphs)), range(len(paragraphs), len(self.paragraphs)))
        self._costs: dict[tuple[Counter, Paragraph], int] = {}

    def cost(self, paragraph: Paragraph, count: Counter) -> int:
        """Return the tokens of a paragraph with a number of three digits."""
        cost = self._costs.get((count, paragraph))
        if cost is None:
            cost = self._costs[count, paragraph] = count(_numbered(100, paragraph) + "\n\n")
        return cost


class _Stack:
    """The paragraphs for one question in the order in which documents use them; after the last, the others repeat."""

    def __init__(self, shelf: _Shelf, question: Question, key: str) -> None:
        self._shelf, self._question, self._key = shelf, question, key
        used = {_name(paragraph) for paragraph in (*question.gold, *question.near)}
        rng, self._far = random.Random(f"{key}/others"), array("L")
        for part in shelf.parts:
            unused = array("L", (n for n in part if _name(shelf.paragraphs[n]) not in used))
            rng.shuffle(unused)
            self._far.extend(unused)
        self.others = len(question.near) + len(self._far)
        self._last: int | None = None

    def paragraph(self, index: int) -> Paragraph:
        """Return a paragraph: first the gold ones, then the near ones, the shelf's, and the near ones again."""
        gold, near = self._question.gold, self._question.near
        if index < len(gold):
            return gold[index]
        other = (index - len(gold)) % self.others
        return near[other] if other < len(near) else self._shelf.paragraphs[self._far[other - len(near)]]

    def checked(self, paragraphs: int) -> int:
        """Return the number of paragraphs, after checking that a document can have so many.

        Raises:
            UsageError: the gold ones are more, or there are no others to add.
        """
        gold = len(self._question.gold)
        if paragraphs < gold:
            raise UsageError(f"a document of {paragraphs} paragraphs does not hold the {gold} that answer the question")
        if paragraphs > gold and not self.others:
            raise UsageError("there are no paragraphs but those that answer the question")
        return paragraphs

    def size(self, name: str, tokens: int, count: Counter) -> int:
        """Return how many paragraphs make so many tokens. The last one is chosen to fit."""
        headers = [count(f"Document {10**digits}:\n") - count("Document 100:\n") for digits in range(10)]

        def cost(index: int) -> int:
            return self._shelf.cost(self.paragraph(index), count)

        gold = len(self._question.gold)
        size, spent = gold, sum(map(cost, range(gold)))
        if spent > tokens:
            raise too_short(name, tokens, spent)
        self.checked(gold + 1)
        while spent + (next_cost := cost(size) + headers[len(str(size + 1)) - 1]) <= tokens:
            spent, size = spent + next_cost, size + 1
        rest = tokens - spent
        near = gold + len(self._question.near) - size  # as in RULER, others come only after all of these
        unused = near if near > 0 else max(gold + self.others - size, 0) or self.others
        misses = [(abs(rest - cost(size + n)), size + n) for n in range(min(_CANDIDATES, unused))]
        miss, best = min(misses)
        if miss >= rest:
            return size
        self._last = best
        return size + 1

    def sample(self, id: str, size: int) -> Sample:
        """Return the sample whose document has `size` paragraphs."""
        question = self._question
        order = array("L", range(size))
        random.Random(f"{self._key}/{size}").shuffle(order)
        places: dict[int, int] = {}
        total = 0
        for number, text in enumerate(self._texts(order), start=1):
            if order[number - 1] < len(question.gold):
                places[order[number - 1]] = total + len(f"Document {number}:\n")
            total += len(text)
        facts = []
        for n, paragraph in enumerate(question.gold):
            text = _evidence(paragraph, question)
            place = places[n] + _shown(paragraph).index(text)
            facts.append(Fact(text=text, depth=place / total, keys=_keys(paragraph, question)))
        return Sample(
            id=id,
            question=question.question,
            answers=question.answers,
            document=lambda: _batched(self._texts(order)),
            facts=tuple(sorted(facts, key=lambda fact: fact.depth)),
            oracle="\n\n".join(map(_shown, question.gold)),
            details={
                "question": question.id,
                "paragraphs": size,
                "others": self.others,
                "reused": max(size - len(question.gold) - self.others, 0),
            },
        )

    def _texts(self, order: array[int]) -> Iterator[str]:
        for number, index in enumerate(order, start=1):
            paragraph = self.paragraph(index if self._last is None or index < len(order) - 1 else self._last)
            yield _numbered(number, paragraph) + ("\n\n" if number < len(order) else "")


def _batched(texts: Iterator[str], size: int = 32) -> Iterator[str]:
    while batch := list(islice(texts, size)):
        yield "".join(batch)


def _numbered(number: int, paragraph: Paragraph) -> str:
    return f"Document {number}:\n{_shown(paragraph)}"


def _shown(paragraph: Paragraph) -> str:
    return f"{paragraph.title}\n{paragraph.text}" if paragraph.title else paragraph.text


def _name(paragraph: Paragraph) -> str:
    return paragraph.title or paragraph.text


def _evidence(paragraph: Paragraph, question: Question) -> str:
    """Return the part of a paragraph that answers the question.

    That is the sentence with an answer that shares most words with the question; where no sentence can stand alone (of
    an article it names the subject only by "he" or "it", or no sentence has an answer) it is all of it.
    """
    if paragraph.title:
        return _shown(paragraph)
    parts = (paragraph.text[start:end].strip() for start, end in sentences(paragraph.text))
    answering = [text for text in parts if any(holds(text, (answer,)) for answer in question.answers)]
    asked = set(question.question.lower().split())
    return max(answering, key=lambda text: len(asked & set(text.lower().split())), default=paragraph.text)


def _keys(paragraph: Paragraph, question: Question) -> tuple[str, ...]:
    """Return the answer if the paragraph contains it, else the paragraph's subject.

    Answers of yes and no do not count: any text may contain them.
    """
    answers = [answer for answer in question.answers if answer.lower() not in ("yes", "no")]
    contained = [answer for answer in answers if holds(paragraph.text, (answer,))]
    subject = [paragraph.title.partition(" (")[0]] if paragraph.title else question.answers  # SQuAD has no titles
    return (min(contained or subject, key=len),)
