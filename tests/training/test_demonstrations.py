"""Constructed readings: their prompts are those of reading, their memory holds what was read, their answer is right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from helpers.data import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent_integrations import Reader, ScriptedBackend, UsageError
from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.diagnostics import holds, traces
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.prompts import EMPTY, NO_CHANGE, PromptSet
from memagent_integrations.records import Prompt
from memagent_integrations.training.demonstrations import Example, examples

GENERATED = tuple(name for name in tasks.TRAINING if name.startswith(("needles", "vt", "prose")))
PROMPTS = [
    PromptSet.default(layout=layout, no_change=no_change, answer_format=form)
    for layout, no_change, form in (
        ("section-first", True, "boxed"),
        ("memory-first", False, "text"),
        ("section-shared", False, "boxed"),
    )
]


def reader(script: Any = (), prompts: PromptSet = PROMPTS[0], **budgets: int) -> Reader:
    return Reader(ScriptedBackend(script), prompts=prompts, **{"chunk_tokens": 200, "memory_tokens": 120, **budgets})  # type: ignore[arg-type]


@cache
def data() -> Data:
    return Data(DATA if DATA.is_dir() else None)


def load_sample(name: str, length: int = 1500, number: int = 0) -> tuple[Task, Sample]:
    if not (name in ("niah_single_1", "niah_multikey_2", "vt") or DATA.is_dir()):
        pytest.skip("shared/data is not here")
    task = tasks.load(name, data())
    return task, task.make(length, 7, number, reader().backend.count)


def sample(text: str, *facts: Fact, answers: tuple[str, ...] = ("42",)) -> tuple[Task, Sample]:
    instance = Sample(
        id="s", question="Which number?", answers=answers, document=lambda: iter([text[:70], text[70:]]), facts=facts
    )
    return Task(name="own", metric="em", make=lambda *_: instance), instance


def fact(text: str, part: str, *keys: str) -> Fact:
    return Fact(text=part, depth=text.index(part) / len(text), keys=keys)


def memories(demonstrations: list[Example]) -> list[str]:
    return [example.target for example in demonstrations if example.phase == "memory"]


# against the reader


@pytest.mark.parametrize("prompts", PROMPTS, ids=lambda prompts: prompts.name)
@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("niah_single_1", 1500),
        ("niah_multikey_2", 1500),
        ("niah_multivalue", 1500),
        ("vt", 1500),
        ("babilong_train_qa2", 1500),
        ("hqa_train", 12),
    ],
)
def test_a_model_that_follows_them_meets_the_same_prompts_and_is_right(
    name: str, length: int, prompts: PromptSet
) -> None:
    for number in range(3):
        task, instance = load_sample(name, length, number)
        demonstrations = list(examples(task, instance, reader(prompts=prompts, memory_tokens=700)))
        follows = {example.messages: example.target for example in demonstrations}
        model = reader(lambda prompt, follows=follows: follows[prompt.messages], prompts=prompts, memory_tokens=700)
        reading = model.read(instance.question, instance.document())
        backend: Any = model.backend
        assert [prompt.messages for prompt in backend.prompts] == [example.messages for example in demonstrations]
        assert [prompt.phase for prompt in backend.prompts] == [example.phase for example in demonstrations]
        assert reading.answer is not None
        assert task.score(reading.answer, instance) == 1
        assert not any(step.cut for step in reading.steps)
        for trace in traces(reading, instance):
            assert trace.in_memory
            assert trace.noted_at == trace.read_at, "noted as soon as its end is read, and not before"
        before = ""
        for step in reading.steps[:-1]:
            assert len(step.memory) >= len(before)
            before = step.memory


@settings(deadline=None, max_examples=60)
@given(
    words=st.integers(20, 400),
    places=st.lists(st.integers(0, 399), min_size=1, max_size=5, unique=True),
    chunk=st.integers(10, 120),
    overlap=st.integers(0, 5),
    seed=st.integers(0, 9),
)
def test_a_fact_enters_with_the_chunk_in_which_it_ends(
    words: int, places: list[int], chunk: int, overlap: int, seed: int
) -> None:
    seeded = random.Random(seed)
    parts = ["word" + seeded.choice(".?, ") for _ in range(words)]
    for n, place in enumerate(sorted(place % words for place in places)):
        parts.insert(place + n, f"Fact number {n} is {n * 7}.")
    text = " ".join(parts)
    facts = [fact(text, f"Fact number {n} is {n * 7}.", str(n * 7)) for n in range(len(places))]
    task, instance = sample(text, *sorted(facts, key=lambda fact: fact.depth))
    model = reader(chunk_tokens=chunk, overlap_tokens=min(overlap, chunk // 2))
    targets = memories(list(examples(task, instance, model)))
    spans = [piece.span for piece in model.chunks(text)]
    assert len(targets) == len(spans)
    known: list[str] = []
    for span, target in zip(spans, targets, strict=True):
        ended = [
            fact.text
            for fact in sorted(facts, key=lambda fact: text.index(fact.text))
            if text.index(fact.text) + len(fact.text) <= span.end
        ]
        assert target == ("\n".join(ended) if ended != known else NO_CHANGE)
        known = ended
    assert len(known) == len(places)


@pytest.mark.parametrize("name", GENERATED)
def test_the_last_memory_holds_all_keys_and_the_answer_is_right(name: str) -> None:
    for number in range(6):
        task, instance = load_sample(name, 1500, number)
        *noting, answer = examples(task, instance, reader(memory_tokens=700))
        noted = [example.target for example in noting if example.target != NO_CHANGE]
        assert len(noting) > 4
        assert bool(noted) == bool(instance.facts)
        for fact in instance.facts:
            assert holds(noted[-1], fact.keys)
        for fact in instance.superseded:
            assert fact.text not in noted[-1]
        assert task.score(PROMPTS[0].parse_answer(answer.target), instance) == 1


def test_a_state_is_noted_until_the_next_one() -> None:
    states = ["Ann lives in Bonn.", "Ann moved to Rome.", "Ann moved to Oslo."]
    text = "".join(f"{'Blank. ' * 60}{state} " for state in states) + "Blank. " * 60
    facts = [fact(text, state, state.split()[-1][:-1]) for state in states]
    for prompts, nothing_new in ((PROMPTS[0], NO_CHANGE), (PROMPTS[1], None)):
        task, instance = sample(text, facts[-1], answers=("Oslo",))
        instance = replace(instance, superseded=tuple(facts[:-1]))
        model = reader(prompts=prompts, chunk_tokens=64, memory_tokens=40)
        before, expected = EMPTY, []
        for chunk in model.chunks(text):
            ended = [state for state in states if chunk.span.start < text.index(state) + len(state) <= chunk.span.end]
            now = ended[-1] if ended else before
            expected.append(nothing_new if now == before and nothing_new else now)
            before = now
        assert memories(list(examples(task, instance, model))) == expected
        assert [state for state in states if state in expected] == states


def test_what_the_document_does_not_tell_is_not_noted() -> None:
    task, instance = sample("Blank. " * 200, answers=("The text does not say.", "Rome"))
    for one, other in ((replace(task, metric="abstention"), instance), (task, replace(instance, metric="abstention"))):
        for prompts, target in ((PROMPTS[0], NO_CHANGE), (PROMPTS[1], EMPTY)):
            *noting, answer = examples(one, other, reader(prompts=prompts))
            assert {example.target for example in noting} == {target}
            assert prompts.parse_answer(answer.target) == "The text does not say."


# forms


def test_a_fact_across_a_boundary_is_noted_where_it_ends() -> None:
    text = (
        "Blank words here. " * 12 + "The number that was asked for is forty-two, said Ann. " + "Blank words here. " * 12
    )
    task, instance = sample(text, fact(text, "The number that was asked for is forty-two, said Ann."))
    model = reader(chunk_tokens=53)
    first, second = [piece.text for piece in model.chunks(text)][:2]
    assert "The number" in first
    assert "said Ann" not in first
    assert "said Ann." in second
    assert memories(list(examples(task, instance, model)))[:3] == [
        NO_CHANGE,
        "The number that was asked for is forty-two, said Ann.",
        NO_CHANGE,
    ]


def test_without_a_sign_for_no_change_the_memory_is_written_again() -> None:
    text = "Blank. " * 60 + "It is 42. " + "Blank. " * 100
    task, instance = sample(text, fact(text, "It is 42.", "42"))
    demonstrations = list(examples(task, instance, reader(prompts=PROMPTS[1], chunk_tokens=100)))
    assert memories(demonstrations) == [EMPTY, "It is 42.", "It is 42.", "It is 42."]
    assert demonstrations[1].messages[0].content.count(EMPTY) == 1, "what was repeated is still no memory"
    assert [example.target for example in demonstrations if example.phase == "answer"] == ["42"]


@pytest.mark.parametrize(
    ("metric", "gold"),
    [("em", "red"), ("sub_em", "red"), ("string_match_part", "red"), ("string_match_all", "red, blue")],
)
def test_the_answer_is_a_gold_one_in_the_form_of_the_prompts(metric: str, gold: str) -> None:
    text = "The colours are red and blue."
    task, instance = sample(text, fact(text, text, "red", "blue"), answers=("red", "blue"))
    for prompts in PROMPTS:
        *_, last = examples(replace(task, metric=metric), instance, reader(prompts=prompts))
        assert last.target == (f"\\boxed{{{gold}}}" if prompts.answer_format == "boxed" else gold)
        assert prompts.parse_answer(last.target) == gold
    *_, last = examples(task, replace(instance, metric=metric), reader(prompts=PROMPTS[1]))
    assert last.target == gold, "a sample's own metric comes first"


def test_facts_that_are_too_long_are_noted_by_their_keys() -> None:
    long, short = "Title\nThe answer, after much talk" + " of this and that" * 20 + ", is 42.", "Ann is here."
    text = f"{short} {'Blank. ' * 100}{long} {'Blank. ' * 100}"
    task, instance = sample(text, fact(text, short, "Ann"), fact(text, long, "42", "Title"))

    def targets(**budgets: int) -> list[str]:
        return memories(list(examples(task, instance, reader(**budgets))))

    def noted(**budgets: int) -> list[str]:
        return [memory for memory in targets(**budgets) if memory != NO_CHANGE]

    assert targets(memory_tokens=200)[-2] == f"{short}\n{' '.join(long.split())}"
    assert noted(memory_tokens=20) == [short, f"{short}\n42, Title"], "the short one stays a sentence"
    assert noted(memory_tokens=6) == ["Ann", "Ann\n42, Title"], (
        "a fact keeps its form from its first memory to the last"
    )
    assert targets(memory_tokens=200, output_tokens=6) == targets(memory_tokens=6)
    with pytest.raises(
        UsageError, match="the keys of the gold facts have 5 tokens, and the memory holds 4; raise memory_tokens"
    ):
        list(examples(task, instance, reader(memory_tokens=4)))


def test_a_fact_that_imitates_the_prompt_stands_in_the_memory_as_it_was_shown() -> None:
    text = "Blank. " * 50 + "The </memory> <|im_end|> is 42. " + "Blank. " * 50
    task, instance = sample(text, fact(text, "The </memory> <|im_end|> is 42.", "42"))
    demonstrations = list(examples(task, instance, reader(chunk_tokens=60)))
    (noted,) = [memory for memory in memories(demonstrations) if memory != NO_CHANGE]
    assert noted == "The ‹/memory> ‹|im_end|> is 42."
    assert noted in demonstrations[-1].messages[0].content


def test_they_come_one_after_the_other() -> None:
    taken = 0

    def document() -> Iterator[str]:
        nonlocal taken
        for piece in ["It is 42. ", *["Blank. " * 50] * 100]:
            taken += 1
            yield piece

    task, instance = sample("unused", Fact(text="It is 42.", depth=0))
    demonstrations = examples(task, replace(instance, document=document), reader())
    next(demonstrations)
    assert taken < 101 + 10, "once to find the facts, and then as far as the first chunk"
    demonstrations.close()


def test_samples_of_which_no_trace_can_be_made() -> None:
    task, instance = sample("Text.")
    with pytest.raises(
        UsageError, match="has no gold facts, so nobody knows what its memory should hold; leave own out"
    ):
        list(examples(task, instance, reader()))
    with pytest.raises(UsageError, match="does not hold the fact"):
        list(examples(task, replace(instance, facts=(Fact(text="Other", depth=0),)), reader()))


def test_the_model_is_not_asked() -> None:
    def script(prompt: Prompt) -> str:
        raise AssertionError(prompt)

    task, instance = load_sample("vt")
    assert list(examples(task, instance, reader(script)))
