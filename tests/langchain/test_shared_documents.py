"""Batches of inputs with one document: it is read and cut once, and each input stays a run of its own."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_chat import Model, count
from helpers.ways import batch
from langchain_core.documents import Document
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from memagent_integrations import BackendError, Journal, MemAgentReader, ScriptedBackend
from memagent_integrations.errors import EmptyDocument, UsageError
from memagent_integrations.records import Prompt

SMALL: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 20}
PAGES = [f"Page {number} has words. " * 18 for number in range(6)]
QUESTIONS = [f"Which of {number}?" for number in range(5)]
ANSWERS = [f"it is {number}" for number in range(5)]


def say(text: str) -> str:
    number = text.partition("Which of ")[2].partition("?")[0]
    return f"note of {number}" if "<section>" in text else f"it is {number}"


def script(prompt: Prompt) -> str:
    return say(prompt.messages[0].content)


class Loader:
    """A document that counts how often it is opened, and how many of its pages were read."""

    def __init__(self, pages: list[str] = PAGES) -> None:
        self.pages, self.opened, self.read = pages, 0, 0

    def lazy_load(self) -> Iterator[Document]:
        self.opened += 1
        for page in self.pages:
            self.read += 1
            yield Document(page)


class Watching(RunCollectorCallbackHandler):
    """Note how many readings run at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.most, self.lock = set[Any](), 0, threading.Lock()

    def on_chain_start(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.running.add(kwargs["run_id"])
            self.most = max(self.most, len(self.running))
        return super().on_chain_start(*args, **kwargs)

    def on_chain_end(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.running.discard(kwargs["run_id"])
        return super().on_chain_end(*args, **kwargs)


class Counting(ScriptedBackend):
    """Note the texts of the document that are counted."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(script, **settings)
        self.counted: list[str] = []

    def count(self, text: str) -> int:
        if "Page" in text and "Which of" not in text:
            self.counted.append(text)
        return super().count(text)


def readers() -> list[MemAgentReader]:
    """Readers whose calls are made each by itself, one at a time, together, and by a chat model."""
    backends = [ScriptedBackend(script), ScriptedBackend(script, concurrency=1), ScriptedBackend(script, batch_size=2)]
    return [
        *(MemAgentReader(backend, **SMALL) for backend in backends),
        MemAgentReader(Model(script=say), tokenizer=count, **SMALL),
    ]


def inputs(document: Any, number: int = 5) -> list[Any]:
    return [{"question": question, "context": document} for question in QUESTIONS[:number]]


def texts(answers: list[Any]) -> list[str]:
    return [answer.text for answer in answers]


every_batch = pytest.mark.parametrize("how", ["batch", "abatch", "batch_as_completed", "abatch_as_completed"])


@every_batch
async def test_a_document_of_several_inputs_is_opened_once(how: str) -> None:
    for reader in readers():
        document = Loader()
        assert texts(await batch(reader, how, inputs(document))) == ANSWERS
        assert (document.opened, document.read) == (1, 6)


@every_batch
@pytest.mark.parametrize("most", [1, 2])
async def test_max_concurrency_is_kept_to_and_the_later_ones_find_the_chunks(how: str, most: int) -> None:
    for reader in readers():
        watching = Watching()
        document = Loader()
        config = {"max_concurrency": most, "callbacks": [watching]}
        assert texts(await batch(reader, how, inputs(document), config)) == ANSWERS
        assert watching.most <= most
        assert document.opened == 1


@every_batch
async def test_equal_texts_and_paths_are_one_document(how: str, tmp_path: Path) -> None:
    file = tmp_path / "pages.txt"
    file.write_text("".join(PAGES))
    for same in (lambda: "".join(PAGES), lambda: Path(str(file))):
        alone, backend = Counting(), Counting()
        MemAgentReader(alone, **SMALL).invoke(inputs(same())[0])
        values = [{"question": question, "context": same()} for question in QUESTIONS]
        assert texts(await batch(MemAgentReader(backend, **SMALL), how, values)) == ANSWERS
        assert backend.counted == alone.counted
        assert len(backend.prompts) == 5 * len(alone.prompts)


@every_batch
async def test_it_may_be_an_iterator(how: str) -> None:
    for reader in readers():
        assert texts(await batch(reader, how, inputs(iter(PAGES)))) == ANSWERS


@pytest.mark.parametrize("how", ["abatch", "abatch_as_completed"])
async def test_it_may_be_an_async_iterator(how: str) -> None:
    closed = 0

    async def pages() -> AsyncIterator[str]:
        nonlocal closed
        try:
            for page in PAGES:
                yield page
        finally:
            closed += 1

    for number, reader in enumerate(readers()):
        assert texts(await batch(reader, how, inputs(pages()), {"max_concurrency": 2})) == ANSWERS
        assert closed == number + 1


@every_batch
async def test_the_answers_and_prompts_are_those_of_readings_alone(how: str) -> None:
    alone, together = ScriptedBackend(script), ScriptedBackend(script)
    messages = [MemAgentReader(alone, **SMALL).invoke(value) for value in inputs("".join(PAGES))]
    answers = await batch(MemAgentReader(together, **SMALL), how, inputs("".join(PAGES)))
    assert sorted(str(prompt.messages) for prompt in together.prompts) == sorted(
        str(prompt.messages) for prompt in alone.prompts
    )
    assert [answer.usage_metadata for answer in answers] == [message.usage_metadata for message in messages]


@every_batch
async def test_each_document_is_shared_by_its_own_inputs(how: str) -> None:
    for reader in readers():
        first, second, alone = (Loader([f"{name} page. " * 50]) for name in ("First", "Second", "Third"))
        values = [
            {"question": f"Which of {n}?", "context": context}
            for n, context in enumerate([first, second, first, alone, second])
        ]
        answers = await batch(reader, how, values)
        assert texts(answers) == ANSWERS
        assert [one.opened for one in (first, second, alone)] == [1, 1, 1]


@every_batch
async def test_a_retriever_is_asked_for_each_question(how: str) -> None:
    asked: list[str] = []

    def find(question: str) -> list[Document]:
        asked.append(question)
        return [Document(page) for page in PAGES]

    retriever = RunnableLambda(find)
    for reader in readers():
        assert texts(await batch(reader, how, inputs(retriever))) == ANSWERS
        assert sorted(asked) == QUESTIONS
        asked.clear()


@every_batch
async def test_each_input_keeps_its_run_and_its_config(how: str) -> None:
    for reader in readers():
        collectors = [RunCollectorCallbackHandler() for _ in QUESTIONS]
        configs = [{"callbacks": [one], "tags": [f"n{n}"], "run_name": f"r{n}"} for n, one in enumerate(collectors)]
        await batch(reader, how, inputs("".join(PAGES)), configs)
        for number, collector in enumerate(collectors):
            (run,) = collector.traced_runs
            assert (run.name, run.tags, run.error) == (f"r{number}", [f"n{number}"], None)
            assert run.inputs == {"question": QUESTIONS[number], "context": f"<{len(''.join(PAGES)):,} characters>"}
            names = [child.name for child in run.child_runs]
            assert names == ["memagent_memory"] * (len(names) - 1) + ["memagent_answer"]
            assert all(QUESTIONS[number] in str(child.inputs) for child in run.child_runs)


@every_batch
async def test_a_reading_that_fails_costs_the_others_nothing(how: str) -> None:
    def fail(prompt: Prompt) -> str:
        if QUESTIONS[2] in prompt.messages[0].content and prompt.index == 1:
            raise BackendError("the model is gone")
        return script(prompt)

    for sizes in ({}, {"concurrency": 1}, {"batch_size": 2}):
        document = Loader()
        values: list[Any] = [*inputs(document), {"context": document}]
        reader = MemAgentReader(ScriptedBackend(fail, **sizes), **SMALL)
        answers = await batch(reader, how, values, return_exceptions=True)
        assert [type(answer) for answer in answers[2::3]] == [BackendError, UsageError]
        assert answers[2].reading.memory == "note of 2"
        assert texts([answers[number] for number in (0, 1, 3, 4)]) == [ANSWERS[number] for number in (0, 1, 3, 4)]
        assert document.opened == 1


@every_batch
async def test_a_document_that_cannot_be_read_on_is_an_error_of_each(how: str) -> None:
    def pages() -> Iterator[str]:
        yield from PAGES[:3]
        raise ConnectionError("the disk is gone")

    for reader in readers():
        answers = await batch(reader, how, inputs(pages()), return_exceptions=True)
        assert [type(answer) for answer in answers] == [UsageError] * 5
        assert all("the disk is gone" in str(answer) for answer in answers)
        assert [answer.reading.question for answer in answers] == QUESTIONS, "each has its own steps"
        answers = await batch(reader, how, inputs(iter([])), return_exceptions=True)
        assert [type(answer) for answer in answers] == [EmptyDocument] * 5


@every_batch
async def test_an_error_ends_the_batch(how: str) -> None:
    def fail(prompt: Prompt) -> str:
        if QUESTIONS[1] in prompt.messages[0].content:
            raise BackendError("the model is gone")
        return script(prompt)

    for sizes in ({}, {"concurrency": 1}, {"batch_size": 2}):
        with pytest.raises(BackendError, match="the model is gone"):
            await batch(MemAgentReader(ScriptedBackend(fail, **sizes), **SMALL), how, inputs(iter(PAGES)))


@every_batch
async def test_models_that_configs_choose_count_for_themselves(how: str) -> None:
    model: Any = Model(script=say).configurable_fields(usage=ConfigurableField(id="usage"))
    reader = MemAgentReader(model, tokenizer=count, **SMALL)
    document = Loader()
    configs = [{"configurable": {"usage": number < 3}} for number in range(5)]
    assert texts(await batch(reader, how, inputs(document), configs)) == ANSWERS
    assert document.opened == 2
    assert texts(await batch(reader, how, inputs(document), {"configurable": {"usage": False}})) == ANSWERS
    assert document.opened == 3


@every_batch
async def test_with_a_journal_each_is_recorded(how: str, tmp_path: Path) -> None:
    with Journal(tmp_path / "runs.db") as journal:
        for expected in (5 * 6, 0):
            backend = ScriptedBackend(script)
            reader = MemAgentReader(backend, journal=journal, **SMALL)
            assert texts(await batch(reader, how, inputs(iter(["".join(PAGES[:4])])))) == ANSWERS
            assert bool(backend.prompts) == bool(expected)
        assert sorted(run.question for run in journal.runs()) == QUESTIONS


@every_batch
async def test_a_document_that_is_bound_is_shared_too(how: str) -> None:
    document = Loader()
    reader = MemAgentReader(ScriptedBackend(script), **SMALL).bind(context=document)
    assert texts(await batch(reader, how, QUESTIONS)) == ANSWERS  # type: ignore[arg-type]
    assert document.opened == 1


async def test_a_list_of_questions_in_a_chain() -> None:
    chain = RunnableLambda(inputs) | MemAgentReader(ScriptedBackend(script), **SMALL).map()
    document = Loader()
    assert texts(chain.invoke(document)) == ANSWERS
    assert texts(await chain.ainvoke(document)) == ANSWERS
    assert document.opened == 2


async def test_a_batch_that_is_left_ends() -> None:
    for sizes in ({"concurrency": 2}, {"batch_size": 2}):
        document = Loader()
        values: list[Any] = [{"question": f"Which of {number}?", "context": document} for number in range(40)]
        reader = MemAgentReader(ScriptedBackend(script, **sizes), **SMALL)
        pairs: Any = reader.batch_as_completed(values)
        next(pairs)
        pairs.close()
        apairs: Any = reader.abatch_as_completed(values)
        await anext(apairs)
        await apairs.aclose()
        assert document.opened == 2
        assert texts(reader.batch(values[:5])) == ANSWERS


async def test_parallel_readings_and_lookups_share_as_well() -> None:
    settings: list[dict[str, Any]] = [{"strategy": "parallel", "segments": 2}, {"lookup": 2}]
    for more in settings:
        document = Loader()
        reader = MemAgentReader(ScriptedBackend(script), **SMALL, **more)
        assert texts(reader.batch(inputs(document))) == ANSWERS
        assert texts(await reader.abatch(inputs(document))) == ANSWERS
        assert document.opened == 2
