"""Facts in prose: the two splits share nothing, the English is right, and each answer follows from the text."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from string import Formatter

import pytest
from helpers.samples import count, local, make, text
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.diagnostics import holds
from memagent_integrations.evaluation.tasks import NAMES, TRAINING, load, prose
from memagent_integrations.evaluation.tasks.phrasebook import Entity, Phrasebook, Relation, phrasebook, render
from memagent_integrations.evaluation.tasks.prose import NOT_TOLD, Passage, Story, tell
from memagent_integrations.tokens import load_counter

KINDS = ("direct", "reworded", "hops", "latest", "absent")
SPLITS = ("training", "evaluation")
SHARED = tuple(name for name in TRAINING if name.startswith(("prose", "needles", "vt")))
"""The tasks for training whose documents are generated."""
PRONOUNS = {"she": {"she", "her"}, "he": {"he", "him", "his"}}
OBJECTS = {"O", "a O"}
GENERIC = frozenset(
    re.findall(
        r"\w+",
        "a about all am among an and anything are as at be been book by company did do does else ever everything firm "
        "for from had has have he her him his how in instrument is it its long more name no not nothing of off on one "
        "or out over person river school she since so that the their there they this through time to town up was what "
        "when where which who whom whose will with year years",
    )
)
"""Words that say nothing about which relation is meant."""


def stories(kind: str, split: str, number: int = 150) -> Iterator[Story]:
    return (tell(kind, split, f"test/{n}") for n in range(number))  # type: ignore[arg-type]


def slots(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def templates(book: Phrasebook) -> list[str]:
    """Every sentence that a document can have."""
    found = [*book.tails, *(lead for leads in book.leads.values() for lead in leads)]
    for relation in book.relations:
        for wording in (*relation.wordings, *filter(None, [relation.latest])):
            found += [*wording.told, *wording.pronoun, *wording.later]
    return found


def questions(book: Phrasebook) -> list[str]:
    """Every question, and every phrase of one."""
    found = [phrase for relation in book.relations for phrase in relation.phrases]
    for relation in book.relations:
        for wording in (*relation.wordings, *filter(None, [relation.latest])):
            found += wording.asked
    return found


def content(sentences: tuple[str, ...]) -> set[str]:
    """The words that carry the meaning, cut to four letters, so that "born" is "born" and "studied" is "study"."""
    joined = " ".join(sentences).replace("{spouse}", "spouse").lower()
    words = re.findall(r"[a-z]+", re.sub(r"\{.*?\}", "", joined))
    return {word[:4] for word in words if word not in GENERIC}


def parts(book: Phrasebook) -> set[str]:
    """All names, or the parts that names are made of."""
    return {name for names in book.names.values() for name in names}


def people(book: Phrasebook) -> dict[str, str]:
    """The pronoun that goes with each first name."""
    return dict.fromkeys(book.names["women"], "she") | dict.fromkeys(book.names["men"], "he")


# the two splits


def test_there_are_many_ways_to_say_few_things() -> None:
    for split, least in (("training", 200), ("evaluation", 150)):
        book = phrasebook(split)
        assert len(book.relations) >= 20
        assert len(templates(book)) >= least
        assert all(len(relation.wordings) >= 2 for relation in book.relations)
        for found in (templates(book), questions(book), *book.names.values()):
            assert len(found) == len(set(found)), [one for one, times in Counter(found).items() if times > 1]


def test_training_and_evaluation_share_no_sentence_no_question_and_no_name() -> None:
    training, evaluation = (phrasebook(split) for split in SPLITS)

    def bare(sentences: list[str]) -> set[str]:
        return {re.sub(r"\{.*?\}", "_", sentence).lower() for sentence in sentences}

    assert not bare(templates(training)) & bare(templates(evaluation))
    assert not bare(questions(training)) & bare(questions(evaluation))
    assert not parts(training) & parts(evaluation)
    for one, other in zip(training.relations, evaluation.relations, strict=True):
        assert (one.name, one.subject, one.object) == (other.name, other.subject, other.object)
        assert bool(one.phrases) == bool(other.phrases) == (one.object in ("person", "town", "firm"))
        assert (one.latest is None) == (other.latest is None)


@pytest.mark.parametrize("kind", KINDS)
def test_no_document_of_one_split_has_a_name_of_the_other(kind: str) -> None:
    for split, other in (SPLITS, SPLITS[::-1]):
        foreign = re.compile(r"\b(?:" + "|".join(map(re.escape, parts(phrasebook(other)))) + r")\b")
        for story in stories(kind, split):
            for passage in story.passages:
                assert not foreign.search(passage.text), passage
            for asked in story.questions:
                assert not foreign.search(asked.question), asked


def test_each_part_of_a_wording_has_the_slots_that_it_needs() -> None:
    known = {"S", "O", "a O", "year", "spouse", "he", "him", "his", "man", "He", "Him", "His", "Man"}
    for split in SPLITS:
        book = phrasebook(split)
        assert all(slots(sentence) <= known for sentence in (*templates(book), *questions(book)))
        for relation in book.relations:
            states = [relation.latest] if relation.latest else []
            for wording in (*relation.wordings, *states):
                for told in (*wording.told, *wording.later):
                    assert "S" in slots(told)
                for pronoun in wording.pronoun:
                    assert "S" not in slots(pronoun)
                    assert slots(pronoun) & {"he", "him", "his", "He", "His"}
                for told in (*wording.told, *wording.later, *wording.pronoun):
                    assert len(slots(told) & OBJECTS) == 1
                    assert told.endswith(".")
                    assert ("year" in slots(told)) == (wording in states)
                for asked in wording.asked:
                    assert "S" in slots(asked)
                    assert not slots(asked) & {*OBJECTS, "year"}
                    assert asked.endswith("?")
                    assert "{S}'" not in asked, "the subject may be a phrase of many words"
            assert all("S" in slots(phrase) and phrase.startswith("the ") for phrase in relation.phrases)
            assert relation.subject in book.leads


def test_a_question_has_no_word_of_another_wording() -> None:
    for split in SPLITS:
        for relation in phrasebook(split).relations:
            for asked in relation.wordings:
                for told in relation.wordings:
                    shared = content(asked.asked) & content((*told.told, *told.pronoun))
                    assert asked is told or not shared, (relation.name, shared, asked.asked, told.told)


def test_names_do_not_occur_in_the_texts_that_hide_them() -> None:
    for split, hay in (("training", local().books.text), ("evaluation", local().essays.text)):
        book = phrasebook(split)
        names = {name for kind in ("women", "men", "surnames", "town", "river", "firm") for name in book.names[kind]}
        assert not names & set(re.findall(r"\w+", hay))


# English


def test_articles_are_those_of_the_sound() -> None:
    for split in SPLITS:
        book = phrasebook(split)
        nouns = [*book.names["profession"], *book.names["genre"]]
        assert not [noun for noun in nouns if re.match(r"uni|use|eu|one|hour|hono|heir", noun)], "not by its letter"
        for noun in nouns:
            sentence = render("{S} is {a O}.", Entity(name="Ann"), Entity(name=noun))
            assert sentence == f"Ann is {'an' if noun[0] in 'aeiou' else 'a'} {noun}."


def test_verbs_and_pronouns_agree() -> None:
    woman, man, firm = (
        Entity(name=name, pronoun=pronoun) for name, pronoun in (("A", "she"), ("B", "he"), ("C", "it"))
    )
    assert (
        render("{He} likes {his} {spouse}, and {O} likes {him}.", woman, man)
        == "She likes her husband, and B likes her."
    )
    assert (
        render("{He} likes {his} {spouse}, and {O} likes {him}.", man, woman) == "He likes his wife, and A likes him."
    )
    assert render("As it is, {he} has {his} seat in {O}.", firm, Entity(name="D")) == "As it is, it has its seat in D."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_pronoun_agrees_with_the_person_it_stands_for(kind: str, split: str) -> None:
    sexes = people(phrasebook(split))  # type: ignore[arg-type]
    seen = set()
    for story in stories(kind, split):
        for passage in story.passages:
            words = re.findall(r"[A-Za-z]+", passage.fact)
            said = {word.lower() for word in words} & (PRONOUNS["she"] | PRONOUNS["he"])
            if said:
                first = next(word for word in words if word in sexes)
                assert said <= PRONOUNS[sexes[first]], passage
                seen.add(sexes[first])
    assert seen == {"she", "he"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_sentences_are_sentences(kind: str, split: str) -> None:
    for story in stories(kind, split):
        for passage in story.passages:
            assert 1 <= len(re.findall(r"[.!?](?= |$)", passage.text)) <= 3
            assert passage.text.startswith(passage.fact)
            assert passage.value in passage.fact
        for written in (*(passage.text for passage in story.passages), *(asked.question for asked in story.questions)):
            assert re.match(r"[A-Z]", written)
            assert not re.search(r"[{}]|  |\bNone\b| ,|\.\.", written), written
            assert not re.search(r"\b(?:a [aeiou]|an [^aeiou]|the (?:The|A) )", written), written


# what is told, and what is asked


def holding(story: Story, name: str) -> list[Passage]:
    return [passage for passage in story.passages if holds(passage.text, (name,))]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["direct", "reworded"])
def test_one_passage_answers_a_question_and_others_tell_the_same_of_others(kind: str, split: str) -> None:
    for story in stories(kind, split):
        assert len({passage.value for passage in story.passages}) == len(story.passages)
        same = Counter(asked.relation for asked in story.questions)
        assert sorted(same.values()) == [3, 3]
        for asked in story.questions:
            (fact,) = asked.facts
            assert holding(story, asked.answers[0]) == [fact]
            assert subject_of(asked.question, fact.fact, split)
            assert not asked.superseded


def test_a_reworded_question_has_no_word_of_the_fact_and_most_direct_ones_have() -> None:
    for split in SPLITS:
        names = {word[:4].lower() for name in parts(phrasebook(split)) for word in re.findall(r"[A-Za-z]+", name)}

        def words(written: str, names: set[str] = names) -> set[str]:
            return content((written,)) - names

        for story in stories("reworded", split):
            for asked in story.questions:
                sentence = re.split(r"(?<=\.) ", asked.facts[0].fact)[-1]
                assert not words(asked.question) & words(sentence), (asked.question, sentence)
        direct = [
            bool(words(asked.question) & words(asked.facts[0].fact))
            for story in stories("direct", split)
            for asked in story.questions
        ]
        assert sum(direct) / len(direct) > 0.8, "the others have irregular verbs, or words like instrument"


def subject_of(question: str, fact: str, split: str) -> str:
    """The part of a name that a question and a fact have in common, and that tells its bearer from others."""
    book = phrasebook(split)  # type: ignore[arg-type]
    kinds = ("surnames", "firm", "book", "town", "school")
    common = [name for kind in kinds for name in book.names[kind] if name in question and name in fact]
    assert len(common) == 1, (question, fact, common)
    return common[0]


@pytest.mark.parametrize("split", SPLITS)
def test_two_hops_are_told_in_their_order_and_neither_alone_answers(split: str) -> None:
    for story in stories("hops", split):
        for asked in story.questions:
            first, second = asked.facts
            assert subject_of(asked.question, first.fact, split)
            assert first.value not in asked.question
            assert first.value in second.fact, "the second is about what the first names"
            assert story.passages.index(first) < story.passages.index(second)
            assert not holds(first.text, (asked.answers[0],))
            assert holding(story, asked.answers[0]) == [second]
            assert not re.search(
                "|".join(re.escape(part) for part in subject_parts(asked.question, split)), second.text
            )


def subject_parts(question: str, split: str) -> list[str]:
    book = phrasebook(split)  # type: ignore[arg-type]
    return [name for kind in ("surnames", "firm", "book", "town") for name in book.names[kind] if name in question]


@pytest.mark.parametrize("split", SPLITS)
def test_the_latest_state_is_the_last_in_time_and_in_the_document(split: str) -> None:
    for story in stories("latest", split):
        for asked in story.questions:
            states = (*asked.superseded, *asked.facts)
            assert len(states) in (2, 3)
            places = [story.passages.index(state) for state in states]
            assert places == sorted(places)
            years = [int(re.findall(r"\b(?:19|20)\d\d\b", state.fact)[-1]) for state in states]
            assert years == sorted(set(years))
            assert asked.answers[0] == states[-1].value
            subject = subject_of(asked.question, states[-1].fact, split)
            assert holding(story, subject) == list(states), "nothing else is told of it"


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_asked_and_absent_is_told_of_others_alone(split: str) -> None:
    book = phrasebook(split)  # type: ignore[arg-type]
    relations = {relation.name: relation for relation in book.relations}
    for story in stories("absent", split):
        whole = " ".join(passage.text for passage in story.passages)
        for asked in story.questions:
            right, *values = asked.answers
            assert right == NOT_TOLD
            assert len(values) == 3
            assert all(len(holding(story, value)) == 1 for value in values)
            assert not asked.facts
            (about,) = asked.about
            subject = subject_of(asked.question, about.fact, split)
            assert holding(story, subject) == [about]
            patterns = tellings(relations[asked.relation], book)
            told = [sentence for pattern in patterns for sentence in re.findall(pattern, whole)]
            assert all(any(value in sentence for sentence in told) for value in values)
            assert not any(sentence in about.text for sentence in told)


def tellings(relation: Relation, book: Phrasebook) -> Iterator[str]:
    """Patterns for all sentences that tell a relation of anybody."""
    value = named(relation.object, book)
    patterns = {"S": named(relation.subject, book), "O": value, "a O": f"an? {value}", "spouse": "(?:wife|husband)"}
    for wording in relation.wordings:
        for template in (*wording.told, *wording.pronoun):
            pieces = Formatter().parse(template)
            yield "".join(
                re.escape(text) + ("" if slot is None else patterns.get(slot, r"\w+")) for text, slot, _, _ in pieces
            )


def named(kind: str, book: Phrasebook) -> str:
    """A pattern for the names of a kind."""
    if kind == "year":
        return r"\d{4}"
    two = {"person": "surnames", "firm": "firm_ending", "school": "school_ending", "book": "book_ending"}
    first = [*book.names["women"], *book.names["men"]] if kind == "person" else book.names[kind]
    head = f"(?:{'|'.join(first)})"
    return f"{head} (?:{'|'.join(book.names[two[kind]])})" if kind in two else head


# in the documents


@pytest.mark.parametrize("name", prose.NAMES)
def test_facts_stand_in_the_document_at_their_depth(name: str) -> None:
    for number in range(6):
        sample = make(name, 8_192, number=number)
        whole = text(sample)
        for fact in (*sample.facts, *sample.superseded):
            assert whole.count(fact.text) == 1
            assert whole.index(fact.text) / len(whole) == pytest.approx(fact.depth, abs=0.05)
            assert fact.text in sample.oracle
            assert len(fact.keys) == 1
            assert fact.keys[0] in fact.text
        places = [whole.index(fact.text) for fact in (*sample.superseded, *sample.facts)]
        assert places == sorted(places)
        assert bool(sample.facts) == (not name.endswith("absent"))
        assert sample.oracle
        task = load(name, local())
        assert task.score(task.gold(sample), sample) == 1
        if sample.facts:
            assert sample.facts[-1].keys[0] == sample.answers[0]
            assert all(task.score(answer, sample) == 1 for answer in sample.answers)
        else:
            assert not any(task.score(f"{NOT_TOLD} {value}", sample) for value in sample.answers[1:])


def test_the_hay_is_essays_for_evaluation_and_books_for_training() -> None:
    essays, books = local().essays.text, local().books.text
    for kind in KINDS:
        for name, hay, other in ((f"prose_{kind}", essays, books), (f"prose_train_{kind}", books, essays)):
            whole = text(make(name, 8_192))
            samples = [whole[start : start + 60] for start in range(0, len(whole) - 60, len(whole) // 20)]
            assert sum(sample in hay for sample in samples) > 10
            assert not any(sample in other for sample in samples[::4])


@pytest.mark.parametrize("length", [4_096, 65_536])
@pytest.mark.parametrize("name", [*prose.NAMES, *SHARED])
def test_the_length_is_that_asked_for(name: str, length: int) -> None:
    for number in range(3):
        assert count(text(make(name, length, number=number))) == pytest.approx(length, rel=0.01)


def test_the_length_is_measured_with_the_tokenizer_that_is_given() -> None:
    real = load_counter("tiktoken:o200k_base")
    for name in ("prose_direct", "prose_train_latest", "vt_train", "needles_train_multikey_2"):
        for length in (4_096, 200_000):
            sample = load(name, local()).make(length, 5, 1, real)
            assert real(text(sample)) == pytest.approx(length, rel=0.01, abs=60), "to half a sentence"


@pytest.mark.parametrize("name", prose.EVALUATION)
def test_all_lengths_ask_the_same_question(name: str) -> None:
    short, long = make(name, 2_048, number=3), make(name, 16_384, number=3)
    assert (short.question, short.answers, short.oracle) == (long.question, long.answers, long.oracle)
    assert make(name, 2_048, number=4).question != short.question != make(name, 2_048, seed=2, number=3).question


@pytest.mark.parametrize("name", [*prose.NAMES, "needles_train_multikey_1", "vt_train"])
def test_a_sample_is_the_same_each_time(name: str) -> None:
    sample, again = make(name, 4_096, number=5), make(name, 4_096, number=5)
    assert text(sample) == text(sample) == text(again)
    assert (sample.question, sample.answers, sample.facts) == (again.question, again.answers, again.facts)


def test_a_length_that_is_too_short_is_refused() -> None:
    for name in ("prose_hops", "prose_train_absent", "vt_train", "needles_train_single_1"):
        with pytest.raises(UsageError, match=rf"{name} needs a length of at least \d+ tokens, not 5$"):
            make(name, 5)


@pytest.mark.parametrize("name", ["prose_latest", "prose_train_direct", "needles_train_multiquery"])
def test_a_million_tokens_take_no_memory(name: str) -> None:
    approximate = load_counter("approximate")
    task = load(name, local())
    task.make(1_000_000, 1, 0, approximate)  # the haystack is read and counted once, before measuring
    tracemalloc.start()
    try:
        sample = task.make(1_000_000, 1, 0, approximate)
        longest = max(map(len, sample.document()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert longest < 1 << 16
    assert sum(map(approximate, sample.document())) == pytest.approx(1_000_000, rel=0.01)


# several questions on one document


@pytest.mark.parametrize("name", SHARED)
def test_successive_samples_ask_about_one_document(name: str) -> None:
    task = load(name, local())
    assert task.questions == {"single": 1, "multivalue": 2, "multiquery": 2, "train": 2}.get(
        name.split("_")[2 if name.startswith("needles") else 1] if not name.startswith("prose") else "", 4
    )
    samples = [task.make(2_048, 1 << 30, number, count) for number in range(3 * task.questions)]
    documents = [text(sample) for sample in samples]
    for first in range(0, len(samples), task.questions):
        group = range(first, first + task.questions)
        assert len({documents[n] for n in group}) == 1
        assert len({samples[n].question for n in group}) == task.questions
        assert len({samples[n].facts for n in group}) == (1 if name.endswith("absent") else task.questions)
    assert len(set(documents)) == 3
    assert len({sample.id for sample in samples}) == len(samples)
    for sample, document in zip(samples, documents, strict=True):
        assert all(document.count(fact.text) == 1 for fact in sample.facts)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TRAINING])
def test_tasks_for_evaluation_make_a_document_for_each_question(name: str) -> None:
    if name.startswith(("niah", "vt", "cwe", "fwe", "prose")):
        assert load(name, local()).questions == 1


# needles and variables for training


@pytest.mark.parametrize("name", [name for name in SHARED if name.startswith("needles")])
def test_needles_for_training_are_those_that_are_asked_for_among_others(name: str) -> None:
    needle = re.compile(r"One of the special magic (numbers|words|uuids) for (\S+) is: (\S+)\.")
    for number in range(4):
        sample = make(name, 4_096, seed=1 << 30, number=number)
        whole = text(sample)
        values = {
            value for _, key, value in needle.findall(whole) if f" {key} " in re.sub("[,?]", " ", sample.question)
        }
        assert values == set(sample.answers) == {key for fact in sample.facts for key in fact.keys}
        assert all(whole.count(answer) == 1 for answer in sample.answers)
        assert "grass is green" not in whole
        assert len(needle.findall(whole)) >= (1 if "single" in name else 4)
        hidden_in_a_book = any(whole[start : start + 80] in local().books.text for start in range(0, 1600, 80))
        assert hidden_in_a_book == (name not in ("needles_train_multikey_2", "needles_train_multikey_3"))


def test_variables_for_training_stand_in_a_book_beside_another_chain() -> None:
    for number in range(6):
        sample = make("vt_train", 4_096, seed=1 << 30, number=number)
        whole = text(sample)
        assert "grass is green" not in whole
        assigned = re.findall(r"VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d{5}))", whole)
        assert len(assigned) == 10
        (value,) = re.findall(r"\d{5}", sample.question)
        held = {name for name, _, number in assigned if number == value}
        for name, source, _ in assigned:  # each is assigned after its source
            held |= {name} if source in held else set()
        assert held == set(sample.answers)
        for (before, after), fact in zip(pairwise(sample.answers), sample.facts[1:], strict=True):
            assert fact.text == f"VAR {after} = VAR {before}"


# questions without an end


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 31), number=st.integers(0, 1 << 40), kind=st.sampled_from(KINDS))
def test_names_never_run_out(seed: int, number: int, kind: str) -> None:
    for split in SPLITS:
        story = tell(kind, split, f"{seed}/{number}")  # type: ignore[arg-type]
        assert len(story.questions) >= 4
        assert tell(kind, split, f"{seed}/{number}") == story  # type: ignore[arg-type]
