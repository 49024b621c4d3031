"""Cloze: each question can be answered from one sentence of the document, and by its words alone."""

from __future__ import annotations

import re
from itertools import islice

import pytest
from helpers.samples import count, local, make, text

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.diagnostics import fact_places
from memagent_integrations.evaluation.tasks import load
from memagent_integrations.evaluation.tasks.cloze import NAMES, cut_out

SENTENCE = "The captain of the Pequod, a man named Ahab, had lost one of his legs to the whale's teeth."


@pytest.mark.parametrize("name", NAMES)
def test_a_sentence_of_the_document_has_the_word_and_those_around_it(name: str) -> None:
    for number in range(40):
        sample = make(name, 1_024, number=number)
        (fact,), (answer,) = sample.facts, sample.answers
        (place,) = fact_places(sample)
        assert text(sample)[place:].startswith(fact.text)
        assert fact.keys == (answer,)
        assert re.search(rf"\b{re.escape(answer)}\b", fact.text)
        asked = re.findall(r'"(.*)"', sample.question) or [sample.question.rstrip("?").replace("what", "____")]
        around = [word for word in asked[0].split() if word != "____"]
        assert len(around) > 2
        rest = iter(re.sub(r"[’']s\b", "", fact.text).split())
        assert all(any(word in other for other in rest) for word in around), "in the order of the sentence"


def test_a_name_or_a_number_is_asked_for_before_other_words() -> None:
    words = {gap.word for n in range(40) if (gap := cut_out(SENTENCE, str(n)))}
    assert words == {"Pequod", "Ahab"}
    words = {gap.word for n in range(40) if (gap := cut_out(SENTENCE.replace("Pequod", "ship").lower(), str(n)))}
    assert not words, "it does not begin as sentences do"
    numbered = "They had been at sea for 1,234 days when the first of the whales was seen."
    words = {gap.word for n in range(9) if (gap := cut_out(numbered, str(n)))}
    assert words == {"1,234"}


@pytest.mark.parametrize(
    "sentence",
    ["It was he.", "He had been told all about it by Mr.", "word " * 9, "The " + "very " * 80 + "end."],
)
def test_what_is_no_whole_sentence_is_not_asked_about(sentence: str) -> None:
    assert cut_out(sentence, "0") is None


def test_half_of_the_questions_leave_words_out() -> None:
    questions = [gap.question for n in range(200) if (gap := cut_out(SENTENCE, str(n)))]
    shortened = [question for question in questions if not re.search(r"had lost one of|The captain of the", question)]
    assert 40 < len(shortened) < 160


def test_eight_questions_are_about_one_document_for_training() -> None:
    task = load("cloze_train", local())
    for first in range(0, 40, 8):
        samples = [task.make(512, 1 << 30, first + n, count) for n in range(8)]
        assert len({text(sample) for sample in samples}) == 1
        assert len({sample.question for sample in samples}) == 8
    assert text(task.make(512, 1 << 30, 0, count)) != text(task.make(512, 1 << 30, 8, count))


def test_essays_are_for_evaluation_and_books_for_training() -> None:
    for name, corpus in (("cloze", local().essays), ("cloze_train", local().books)):
        for number in range(0, 24, 8):
            sample = make(name, 512, number=number)
            assert sample.facts[0].text in corpus.text
            assert next(islice(sample.document(), 1))[:60] in corpus.text


def test_a_document_without_a_sentence_to_ask_about_is_refused() -> None:
    with pytest.raises(UsageError, match="cloze needs a length of at least"):
        make("cloze", 5)
