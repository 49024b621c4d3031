"""Questions that rules make from sentences: each can be answered from one sentence of the document."""

from __future__ import annotations

import pytest
from helpers.samples import count, local, make, text

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.diagnostics import fact_places
from memagent_integrations.evaluation.tasks import load
from memagent_integrations.evaluation.tasks.articles import NAMES
from memagent_integrations.evaluation.tasks.prose import NOT_TOLD
from memagent_integrations.evaluation.tasks.questioning import asked_of

SENTENCES = {
    "Amy Johnson (1 July 1903 – 5 January 1941) was a pioneering British aviator from Hull in Yorkshire.": {
        "Which pioneering British aviator was from Hull in Yorkshire?": "Amy Johnson",
        "When was Amy Johnson born?": "1 July 1903",
        "When did Amy Johnson die?": "5 January 1941",
    },
    "Diamond Cut is a 1979 album that was written by a friend of Bonnie Tyler.": {
        "Who wrote Diamond Cut?": "Bonnie Tyler",
        "By whom is Diamond Cut written?": "Bonnie Tyler",
    },
    "The Penrith Bridge was opened in May 1907, and is still in use today.": {
        "When was the Penrith Bridge opened?": "May 1907",
    },
    "Matthew Mason moved to the United States in 1998.": {
        "When did Matthew Mason move to the United States?": "1998",
        "Who moved to the United States in 1998?": "Matthew Mason",
    },
    "The Vienna Walzer Orchestra is a chamber orchestra based in Vienna, Austria that plays waltzes.": {
        "Which chamber orchestra is based in Vienna?": "The Vienna Walzer Orchestra",
        "Where is the Vienna Walzer Orchestra based?": "Vienna, Austria",
    },
    "Midwest Bank has forty banking offices in Iowa and had 44 once.": {
        "How many banking offices does Midwest Bank have?": "forty",
    },
    "Memphis had a population of 653,450 at the census of 2013.": {
        "What is the population of Memphis?": "653,450",
        "How many people live in Memphis?": "653,450",
    },
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_rules_ask_for_what_a_sentence_tells(sentence: str) -> None:
    made = {asked.question: asked.answer for asked in asked_of(sentence, sentence)}
    assert made.items() >= SENTENCES[sentence].items()


@pytest.mark.parametrize(
    "sentence",
    [
        "He moved to the United States in 1998.",  # who?
        "The company was founded by three brothers in 1921.",  # which one?
        "Another was opened in May 1907 by the mayor.",
        "Amy Johnson was a pilot.",
        "Amy Johnson moved to the United States in 1998",
        "Amy Johnson " + "often " * 60 + "moved to the United States in 1998.",
    ],
)
def test_what_does_not_stand_alone_is_not_asked_about(sentence: str) -> None:
    assert not list(asked_of(sentence, sentence))


@pytest.mark.parametrize("name", NAMES)
def test_a_sentence_of_the_document_has_the_answer(name: str) -> None:
    for number in range(0, 42, 3):  # not the last of eight
        if number % 8 == 7:
            continue
        sample = make(name, 1_024, number=number)
        (fact,), (answer,) = sample.facts, sample.answers
        (place,) = fact_places(sample)
        assert text(sample)[place:].startswith(fact.text)
        assert fact.keys == (answer,)
        assert answer in fact.text
        assert answer.lower() not in sample.question.lower()
        assert fact.text in sample.oracle


def test_eight_questions_are_about_one_document_and_the_last_has_no_answer() -> None:
    task = load("article_train", local())
    for first in range(0, 40, 8):
        samples = [task.make(1_024, 1 << 30, first + n, count) for n in range(8)]
        assert len({text(sample) for sample in samples}) == 1
        assert len({sample.question for sample in samples}) == 8
        *answered, absent = samples
        assert all(sample.metric is None for sample in answered)
        assert (absent.metric, absent.answers, absent.facts) == ("abstention", (NOT_TOLD,), ())
    assert text(task.make(512, 1 << 30, 0, count)) != text(task.make(512, 1 << 30, 8, count))


def test_articles_for_training_are_not_those_of_the_evaluation() -> None:
    data = local()
    assert not {p.title for p in data.articles_train} & {p.title for p in data.paragraphs}
    assert not {p.text for p in data.articles_train} & {p.text for p in data.paragraphs}
    sample = make("article", 1_024)
    assert any(sample.facts[0].text in " ".join(paragraph.text.split()) for paragraph in data.paragraphs)


def test_a_document_longer_than_all_articles_repeats_them() -> None:
    sample = load("article_train", local()).make(400_000, 1 << 30, 0, count)
    assert count(text(sample)) == pytest.approx(400_000, rel=0.05)
    assert sample.facts[0].text in text(sample)


def test_a_document_too_short_for_a_paragraph_is_refused() -> None:
    with pytest.raises(UsageError, match="article needs a length of at least"):
        make("article", 5)
