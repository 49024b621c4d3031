"""One model writes the memory, another the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.loopback import Loopback, chat

from memagent_integrations import (
    BackendError,
    ContextOverflow,
    Journal,
    JournalMismatch,
    Limits,
    Reader,
    Reading,
    ScriptedBackend,
    UsageError,
)
from memagent_integrations.backends import load_backend
from memagent_integrations.errors import CallTimeout, JournalError
from memagent_integrations.records import Prompt

DOCUMENT = "Some words of a long document. " * 100  # 700 of the scripted backend's tokens
KEYED = "openai:gpt-5"
SIZES: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50}


class Named(ScriptedBackend):
    """A scripted backend with a name of its own; each of its tokens counts `factor` times."""

    def __init__(self, name: str, script: Any, *, factor: int = 1, max_retries: int = 0, **options: Any) -> None:
        super().__init__(script, **options)
        self.name, self.max_retries, self._factor = name, max_retries, factor

    def count(self, text: str) -> int:
        return self._factor * super().count(text)


def noting(**options: Any) -> Named:
    return Named("noter", lambda prompt: f"note {prompt.index}", **options)


def answering(script: Any = lambda prompt: "the answer", **options: Any) -> Named:
    return Named("answerer", script, **options)


def phases(backend: ScriptedBackend) -> list[str]:
    return [prompt.phase for prompt in backend.prompts]


async def by_read(reader: Reader) -> Reading:
    return reader.read("Why?", DOCUMENT)


async def by_stream(reader: Reader) -> Reading:
    *_, reading = reader.stream("Why?", DOCUMENT)
    assert isinstance(reading, Reading)
    return reading


async def by_aread(reader: Reader) -> Reading:
    return await reader.aread("Why?", DOCUMENT)


async def by_astream(reader: Reader) -> Reading:
    *_, reading = [event async for event in reader.astream("Why?", DOCUMENT)]
    assert isinstance(reading, Reading)
    return reading


async def by_parts(reader: Reader) -> Reading:
    memory = reader.memorize("Why?", DOCUMENT).memory
    return reader.answer("Why?", memory, first=4)


async def by_aparts(reader: Reader) -> Reading:
    memory = (await reader.amemorize("Why?", DOCUMENT)).memory
    return await reader.aanswer("Why?", memory, first=4)


@pytest.mark.parametrize("way", [by_read, by_stream, by_aread, by_astream, by_parts, by_aparts])
async def test_one_model_notes_and_the_other_answers(way: Callable[[Reader], Any]) -> None:
    notes, answers = noting(), answering()
    reading = await way(Reader(notes, answer_model=answers, **SIZES))
    assert (reading.answer, reading.memory) == ("the answer", "note 3")
    assert (phases(notes), phases(answers)) == (["memory"] * 4, ["answer"])
    assert (reading.model, reading.answer_model) == ("noter", "answerer")


@pytest.mark.parametrize(("notes_at_once", "answers_at_once"), [(1, 1), (4, 1), (1, 4), (4, 4)])
@pytest.mark.parametrize("is_async", [False, True])
async def test_many_readings_go_to_the_model_of_each_phase(
    notes_at_once: int, answers_at_once: int, is_async: bool
) -> None:
    batches: list[tuple[str, int]] = []

    class Batched(Named):
        def complete_batch(self, prompts: Any) -> Any:
            assert len({prompt.phase for prompt in prompts}) == 1
            batches.append((self.name, len(prompts)))
            return super().complete_batch(prompts)

    def failing(prompt: Prompt) -> Any:
        return BackendError("no") if "short" in prompt.messages[0].content else "the answer"

    notes = Batched("noter", lambda prompt: f"note {prompt.index}", batch_size=notes_at_once)
    answers = Batched("answerer", failing, batch_size=answers_at_once)
    reader = Reader(notes, answer_model=answers, **SIZES)
    jobs = [("Why?", DOCUMENT), ("Is it short?", DOCUMENT[:2000]), ("Who?", DOCUMENT)]
    readings = await reader.aread_many(jobs) if is_async else reader.read_many(jobs)
    assert [reading.answer for reading in readings] == ["the answer", None, "the answer"]
    assert str(readings[1].error) == "no"
    assert set(phases(notes)) == {"memory"}
    assert phases(answers) == ["answer"] * 3
    if notes_at_once > 1:
        assert ("noter", 3) in batches
        assert (("answerer", 2) in batches) == (answers_at_once > 1)


def test_a_reading_by_one_model_names_no_other() -> None:
    backend = ScriptedBackend(["note", "answer"] * 2)
    assert Reader(backend).read("Why?", "text").answer_model is None
    assert Reader(backend, answer_model=backend).read("Why?", "text").answer_model is None


def test_a_reading_without_an_answer_names_no_model_that_answered() -> None:
    reader = Reader(noting(), answer_model=answering(), **SIZES)
    assert reader.memorize("Why?", DOCUMENT).answer_model is None
    assert reader.answer("Why?", "a memory").answer_model == "answerer"


def test_which_model_answered_survives_json() -> None:
    reading = Reader(noting(), answer_model=answering()).read("Why?", "text")
    assert Reading.from_json(reading.to_json()) == reading
    one = Reader(ScriptedBackend(["note", "answer"])).read("Why?", "text")
    assert Reading.from_json(one.to_json().replace('"answer_model":null,', "")) == one, "as older versions wrote it"


def test_the_prompt_for_the_answer_has_to_fit_the_window_of_the_model_that_answers() -> None:
    reader = Reader(noting(window=8192), answer_model=answering(window=600), **SIZES)
    with pytest.raises(ContextOverflow, match="the window of answerer holds 600"):
        reader.read("Why?", DOCUMENT)
    assert Reader(noting(window=8192), answer_model=answering(window=3000), **SIZES).read("Why?", DOCUMENT).answer
    with pytest.raises(ContextOverflow, match="the window holds 600"):
        Reader(noting(window=600), answer_model=answering(window=8192), chunk_tokens=400).read("Why?", DOCUMENT)


def test_the_question_is_counted_in_the_tokens_of_the_model_that_answers() -> None:
    question = "Why? " * 200

    def reader(factor: int) -> Reader:
        return Reader(noting(window=8192), answer_model=answering(window=2500, factor=factor), output_tokens=200)

    assert reader(1).plan(question, "text").calls == 2
    with pytest.raises(ContextOverflow, match="the window of answerer holds 2500"):
        reader(4).plan(question, "text")


def test_a_memory_that_is_too_long_in_the_tokens_of_the_model_that_answers_is_not_sent() -> None:
    notes = Named("noter", lambda prompt: "word " * 150)
    answers = answering(window=1200, factor=4)
    reader = Reader(notes, answer_model=answers, chunk_tokens=300, memory_tokens=200, output_tokens=300)
    with pytest.raises(ContextOverflow, match="whose tokens are others than those of noter") as caught:
        reader.read("Why?", "text")
    assert answers.prompts == []
    assert caught.value.reading is not None
    assert caught.value.reading.memory.startswith("word word")


def test_the_cost_of_the_answer_is_planned_in_the_tokens_of_the_model_that_answers() -> None:
    def prompt_tokens(factor: int) -> int:
        return Reader(noting(), answer_model=answering(factor=factor), **SIZES).plan("Why?", DOCUMENT).prompt_tokens

    assert prompt_tokens(3) > prompt_tokens(1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failed_answer_is_retried_as_the_model_that_answers_asks(is_stream: bool) -> None:
    script: Iterator[Any] = iter([BackendError("busy", retryable=True), "the answer"])
    answers = answering(lambda prompt: next(script), max_retries=1)
    reader = Reader(noting(), answer_model=answers, **SIZES)
    events: Iterable[Any] = reader.stream("Why?", DOCUMENT) if is_stream else [reader.read("Why?", DOCUMENT)]
    *_, reading = events
    assert reading.answer == "the answer"
    assert len(answers.prompts) == 2


def test_the_limits_hold_for_the_model_that_answers() -> None:
    def slow(prompt: Prompt) -> str:
        while time.monotonic() < (prompt.deadline or 0) + 0.05:
            time.sleep(0.01)
        return "too late"

    reader = Reader(noting(), answer_model=answering(slow), limits=Limits(call_timeout=0.1, max_retries=0), **SIZES)
    with pytest.raises(CallTimeout):
        reader.read("Why?", DOCUMENT)


def test_failures_of_one_server_are_not_made_up_for_by_successes_of_the_other() -> None:
    answers = answering(lambda prompt: BackendError("down", retryable=True))
    limits = Limits(breaker_threshold=2, breaker_cooldown=1000)
    reader = Reader(noting(), answer_model=answers, limits=limits, **SIZES)
    for message in ("down", "down", "answerer was not asked: its last 2 calls failed"):
        with pytest.raises(BackendError, match=message):
            reader.read("Why?", DOCUMENT)
    assert len(answers.prompts) == 2


def test_a_run_is_that_of_both_models(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.db")
    notes, answers = noting(), answering()
    Reader(notes, answer_model=answers, journal=journal, **SIZES).read("Why?", DOCUMENT, run="one")
    again = Reader(notes, answer_model=answers, journal=journal, **SIZES).read("Why?", DOCUMENT, run="one")
    assert (again.answer, again.answer_model) == ("the answer", "answerer")
    assert journal.reading("one") == again
    assert (len(notes.prompts), len(answers.prompts)) == (4, 1), "nothing is read twice"
    with pytest.raises(JournalMismatch, match=r"answer_model: 'answerer', now None"):
        Reader(notes, journal=journal, **SIZES).read("Why?", DOCUMENT, run="one")
    other = Named("another", lambda prompt: "another answer")
    with pytest.raises(JournalMismatch, match=r"answer_model: 'answerer', now 'another'"):
        Reader(notes, answer_model=other, journal=journal, **SIZES).read("Why?", DOCUMENT, run="one")
    assert Reader(notes, answer_model=other, journal=journal, **SIZES).read("Why?", DOCUMENT).answer == "another answer"


@pytest.mark.heavy
def test_a_run_of_two_named_models_is_resumed_with_both(tmp_path: Path) -> None:
    with Loopback(chat(["a note"])) as noter, Loopback(chat(["an answer"])) as answerer:
        reader = Reader(
            "openai:small",
            backend_options={"base_url": f"{noter.url}/v1", "max_retries": 0},
            answer_model="openai:large",
            answer_options={"base_url": f"{answerer.url}/v1", "temperature": 0.5, "max_retries": 0},
            journal=tmp_path / "runs.db",
            chunk_tokens=400,
        )
        with reader:
            assert reader.read("Why?", DOCUMENT, run="one").answer == "an answer"
        journal = Journal(tmp_path / "runs.db")
        journal.edit("one", 0, memory="another memory", name="two")
        with Reader.from_run(journal, "two") as resumed:
            reading = resumed.read("Why?", DOCUMENT, run="two")
        assert (reading.model, reading.answer_model) == ("openai:small", "openai:large")
        sent = [request.body for request in answerer.requests if request.path == "/v1/chat/completions"]
        assert [(body["model"], body["temperature"]) for body in sent] == [("large", 0.5)] * 2
        moved = Reader.from_run(journal, "two", answer_options={"base_url": "http://127.0.0.1:9/v1/"})
        assert moved.answer_backend.identity["base_url"] == "http://127.0.0.1:9/v1/"
        assert moved.answer_backend.identity["temperature"] == 0.5


@pytest.mark.heavy
def test_a_run_whose_second_model_was_made_in_python_asks_for_it(tmp_path: Path) -> None:
    with Loopback(chat(["a note"])) as server:
        options = {"base_url": f"{server.url}/v1"}
        journal = Journal(tmp_path / "runs.db")
        with Reader("openai:m", backend_options=options, answer_model=answering(), journal=journal) as reader:
            reader.read("Why?", "text", run="one")
    with pytest.raises(UsageError, match="begun with answerer, a model that was made in Python"):
        Reader.from_run(journal, "one")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answer_model": 3}, "answer_model has to be a name or a Backend, not int"),
        ({"answer_model": "nonsense"}, "unknown model 'nonsense'"),
        ({"answer_model": "policy:folder"}, "cannot be a policy"),
        ({"answer_options": {"temperature": 0}}, "there is none"),
        ({"answer_model": ScriptedBackend([]), "answer_options": {"temperature": 0}}, "answer_options are for a model"),
    ],
)
def test_settings_of_the_second_model_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Reader(ScriptedBackend([]), **settings)


async def test_closing_closes_both_models() -> None:
    class Closable(Named):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    pair = [Closable(name, []) for name in ("noter", "answerer")]
    with Reader(pair[0], answer_model=pair[1]):
        pass
    async with Reader(pair[0], answer_model=pair[1]):
        pass
    assert [backend.closed for backend in pair] == [2, 2]


def test_a_changed_reader_keeps_or_takes_another_model_for_the_answer() -> None:
    notes, answers, other = noting(), answering(), Named("other", lambda prompt: "other")
    reader = Reader(notes, answer_model=answers, **SIZES)
    assert reader.changed(chunk_tokens=100).read("Why?", DOCUMENT).answer_model == "answerer"
    assert reader.changed(answer_backend=other).read("Why?", DOCUMENT).answer == "other"
    assert Reader(notes).changed(answer_backend=other).read("Why?", "text").answer_model == "other"
    assert reader.answer_backend is answers
    assert Reader(notes).answer_backend is notes


async def test_a_model_that_cannot_be_closed_leaves_nothing_else_open(tmp_path: Path) -> None:
    class Closable(Named):
        closed = 0

        def close(self) -> None:
            self.closed += 1
            if self.name == "noter":
                raise RuntimeError("the server hangs")

    pair = [Closable(name, []) for name in ("noter", "answerer")]
    one, other = (Reader(pair[0], answer_model=pair[1], journal=tmp_path / "runs.db") for _ in range(2))
    with pytest.raises(RuntimeError, match="hangs"):
        one.close()
    with pytest.raises(RuntimeError, match="hangs"):
        await other.aclose()
    assert [backend.closed for backend in pair] == [2, 2]
    for reader in (one, other):
        assert reader.journal is not None
        with pytest.raises(JournalError, match="closed"):
            reader.journal.runs()


@pytest.mark.parametrize("other", [KEYED, "".join([*KEYED])], ids=["the same text", "an equal text"])
def test_a_name_given_twice_is_one_model_unless_it_has_other_options(other: str) -> None:
    options = {"api_key": "none", "temperature": 0.7}
    reader = Reader(KEYED, answer_model=other, backend_options=options)
    assert reader.answer_backend is reader.backend
    assert Reader(KEYED, answer_model=other, backend_options=options, answer_options=dict(options)).answer_backend.name
    cold = Reader(KEYED, answer_model=other, backend_options=options, answer_options=options | {"temperature": 0.0})
    assert [cold.backend.identity["temperature"], cold.answer_backend.identity["temperature"]] == [0.7, 0.0]


@pytest.mark.heavy
def test_two_models_that_nothing_distinguishes_are_resumed_as_two(tmp_path: Path) -> None:
    with Loopback(chat(["the answer"])) as server:
        options = {"base_url": f"{server.url}/v1", "api_key": "none"}
        backends = [load_backend(KEYED, **options) for _ in range(2)]
        with Reader(backends[0], answer_model=backends[1], journal=tmp_path / "runs.db") as reader:
            reader.read("Why?", "text", run="one")
        with Reader.from_run(tmp_path / "runs.db", "one", backend_options=options, answer_options=options) as reader:
            assert reader.read("Why?", "text", run="one").answer == "the answer"


def test_a_reader_changed_to_one_model_has_one() -> None:
    notes, answers = noting(), answering()
    for reader in (
        Reader(notes).changed(answer_backend=notes),
        Reader(notes, answer_model=answers).changed(answer_backend=notes),
        Reader(answers, answer_model=notes).changed(backend=notes),
    ):
        assert reader.read("Why?", "text").answer_model is None
