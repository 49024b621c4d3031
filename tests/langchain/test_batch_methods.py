"""Batches of the runnable: prompts asked together, at most as many readings at a time as the backend takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.scripted_chat import ANSWER, Model, count
from helpers.ways import batch
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.messages import AIMessage
from langchain_core.runnables import ConfigurableField, RunnablePassthrough
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from memagent_integrations import BackendError, MemAgentReader, Reader, ScriptedBackend, UsageError
from memagent_integrations.errors import EmptyDocument, MemAgentError
from memagent_integrations.langchain import ChatModelBackend
from memagent_integrations.records import Prompt, Reply

SMALL: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 20}


def document(number: int, chunks: int = 6) -> str:
    return f"Page {number} has words. " * (18 * chunks)


def tasks(number: int, chunks: int = 6) -> list[Any]:
    return [{"question": f"Which of {n}?", "context": document(n, chunks)} for n in range(number)]


def script(prompt: Prompt) -> str:
    text = prompt.messages[0].content
    number = text.partition("Which of ")[2].partition("?")[0]
    return f"note of {number}" if prompt.phase == "memory" else f"it is {number}"


class Together(ScriptedBackend):
    """Note the size of each batch, and how many calls run at a time."""

    def __init__(self, script: Any = script, **settings: Any) -> None:
        super().__init__(script, **settings)
        self.batches: list[int] = []
        self.running = self.most = 0
        self.counting = threading.Lock()

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        self.batches.append(len(prompts))
        return super().complete_batch(prompts)


every_batch = pytest.mark.parametrize("how", ["batch", "abatch", "batch_as_completed", "abatch_as_completed"])


@every_batch
async def test_a_backend_that_computes_prompts_together_gets_batches_as_read_many_makes_them(how: str) -> None:
    backend = Together(batch_size=4)
    answers = await batch(MemAgentReader(backend, **SMALL), how, tasks(8))
    assert [answer.text for answer in answers] == [f"it is {number}" for number in range(8)]
    many = Together(batch_size=4)
    Reader(many, **SMALL).read_many([(task["question"], task["context"]) for task in tasks(8)])
    assert backend.batches == many.batches == [4] * 14


@every_batch
async def test_batches_are_filled_to_the_end_with_documents_of_all_lengths(how: str) -> None:
    inputs = [
        {"question": f"Which of {n}?", "context": document(n, chunks)} for n, chunks in enumerate([1, 5, 2, 4, 3, 1])
    ]
    backend = Together(batch_size=3)
    answers = await batch(MemAgentReader(backend, **SMALL), how, inputs)
    assert [answer.text for answer in answers] == [f"it is {number}" for number in range(6)]
    calls = sum(answer.response_metadata["memagent"]["calls"] for answer in answers)
    assert (sum(backend.batches), calls) == (22, 22)
    assert max(backend.batches) == 3
    assert len(backend.batches) <= 9


@every_batch
async def test_max_concurrency_lowers_the_size_of_a_batch(how: str) -> None:
    backend = Together(batch_size=4)
    await batch(MemAgentReader(backend, **SMALL), how, tasks(4, 1), {"max_concurrency": 2})
    assert set(backend.batches) == {2}
    backend = Together(batch_size=4)
    await batch(MemAgentReader(backend, **SMALL), how, tasks(4, 1), {"max_concurrency": 1})
    assert backend.batches == []
    assert len(backend.prompts) == 8


@every_batch
async def test_each_input_has_its_config_and_its_run(how: str) -> None:
    for backend in (Together(batch_size=4), Together()):
        collectors = [RunCollectorCallbackHandler() for _ in range(5)]
        configs = [{"callbacks": [one], "tags": [f"n{n}"], "run_name": f"r{n}"} for n, one in enumerate(collectors)]
        await batch(MemAgentReader(backend, **SMALL), how, tasks(5, 2), configs)
        for number, collector in enumerate(collectors):
            (run,) = collector.traced_runs
            assert (run.name, run.tags, run.error) == (f"r{number}", [f"n{number}"], None)
            names = [child.name for child in run.child_runs]
            assert names == ["memagent_memory", "memagent_memory", "memagent_answer"]
            assert all(f"Which of {number}?" in str(child.inputs) for child in run.child_runs)


@every_batch
async def test_a_reading_that_fails_leaves_the_others_untouched(how: str) -> None:
    def fail(prompt: Prompt) -> str:
        if "Which of 2?" in prompt.messages[0].content and prompt.index == 1:
            raise BackendError("the model is gone")
        return script(prompt)

    inputs = tasks(6, 3)
    inputs[4] = {"question": "Which of 4?", "context": ""}
    backend = Together(fail, batch_size=3)
    answers = await batch(MemAgentReader(backend, **SMALL), how, inputs, return_exceptions=True)
    assert [type(answer) for answer in answers] == [
        *(AIMessage, AIMessage, BackendError),
        *(AIMessage, EmptyDocument, AIMessage),
    ]
    assert answers[2].reading.memory == "note of 2"


@every_batch
async def test_an_error_ends_the_batch_and_no_more_calls_are_made(how: str) -> None:
    def fail(prompt: Prompt) -> str:
        if "Which of 1?" in prompt.messages[0].content:
            raise BackendError("the model is gone")
        return script(prompt)

    backend = Together(fail, batch_size=2)
    async with asyncio.timeout(30):
        with pytest.raises(BackendError, match="the model is gone"):
            await batch(MemAgentReader(backend, **SMALL), how, tasks(40, 3))
    assert len(backend.prompts) < 40


async def test_a_batch_that_is_left_ends() -> None:
    backend = Together(batch_size=2)
    stream = MemAgentReader(backend, **SMALL).batch_as_completed(tasks(40, 3))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(backend.prompts) < 40
    astream: Any = MemAgentReader(backend, **SMALL).abatch_as_completed(tasks(40, 3))
    await anext(astream)
    await astream.aclose()
    assert len(backend.prompts) < 80


async def test_an_async_batch_that_is_cancelled_ends() -> None:
    backend = Together(batch_size=4)
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(prompt: Prompt) -> str:
        loop.call_soon_threadsafe(begun.set)
        return script(prompt)

    backend = Together(slow, batch_size=2)
    task = asyncio.create_task(MemAgentReader(backend, **SMALL).abatch(tasks(200, 3)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(backend.prompts) < 800


class Counting(ScriptedBackend):
    """Note how many calls run at a time: each waits until `concurrency` of them do, or no more come."""

    def __init__(self, concurrency: int, wait: int) -> None:
        super().__init__(script, concurrency=concurrency)
        self.barrier = threading.Barrier(wait)
        self.running = self.most = 0
        self.counting = threading.Lock()

    def complete(self, prompt: Prompt) -> Reply:
        with self.counting:
            self.running += 1
            self.most = max(self.most, self.running)
        self.barrier.wait(20)
        try:
            return super().complete(prompt)
        finally:
            with self.counting:
                self.running -= 1

    async def acomplete(self, prompt: Prompt) -> Reply:
        with ThreadPoolExecutor(1) as pool:
            return await asyncio.get_running_loop().run_in_executor(pool, self.complete, prompt)


@every_batch
async def test_concurrency_of_a_backend_bounds_the_calls_at_a_time(how: str) -> None:
    for concurrency, most, expected in ((3, None, 3), (3, 2, 2), (2, 6, 2)):
        backend = Counting(concurrency, expected)
        await batch(MemAgentReader(backend, **SMALL), how, tasks(6, 1), {"max_concurrency": most})
        assert backend.most == expected


@every_batch
async def test_a_backend_over_a_chat_model_bounds_them_too(how: str) -> None:
    backend = ChatModelBackend(Model(), tokenizer=count, concurrency=2)
    answers = await batch(MemAgentReader(backend, **SMALL), how, tasks(5, 1))
    assert [answer.text for answer in answers] == [ANSWER] * 5


@every_batch
async def test_two_models_one_of_which_computes_together(how: str) -> None:
    notes, answers = Together(batch_size=3), Together()
    outputs = await batch(MemAgentReader(notes, answer_model=answers, **SMALL), how, tasks(6, 2))
    assert [output.text for output in outputs] == [f"it is {number}" for number in range(6)]
    assert sum(notes.batches) == 12
    assert {prompt.phase for prompt in answers.prompts} == {"answer"}
    assert len(answers.prompts) == 6


@every_batch
async def test_usage_is_counted_once_per_call_of_a_batch(how: str) -> None:
    backend = Together(batch_size=4)
    with get_usage_metadata_callback() as usage:
        answers = await batch(MemAgentReader(backend, **SMALL), how, tasks(5, 2))
    total = sum(answer.usage_metadata["total_tokens"] for answer in answers)
    assert usage.usage_metadata["scripted"]["total_tokens"] == total


@every_batch
async def test_batches_go_through_chains_bindings_and_configurable_fields(how: str) -> None:
    def subject(backend: ScriptedBackend) -> MemAgentReader:
        return MemAgentReader(backend, **SMALL)

    for make in (
        lambda backend: RunnablePassthrough() | subject(backend),
        lambda backend: subject(backend).with_config(tags=["t"]),
        lambda backend: subject(backend).configurable_fields(chunk_tokens=ConfigurableField(id="chunk_tokens")),
    ):
        backend = Together(batch_size=4)
        if how.endswith("completed"):
            answers = await batch(subject(backend), how, tasks(4, 1))
        else:
            answers = await batch(make(backend), how, tasks(4, 1))
        assert [answer.text for answer in answers] == [f"it is {number}" for number in range(4)]
        assert backend.batches == [4, 4]


@every_batch
async def test_nothing_and_one_input(how: str) -> None:
    backend = Together(batch_size=4)
    subject = MemAgentReader(backend, **SMALL)
    assert await batch(subject, how, []) == []
    (answer,) = await batch(subject, how, tasks(1, 1))
    assert answer.text == "it is 0"


@every_batch
async def test_a_model_that_cannot_be_loaded_is_an_error_of_each_input(how: str) -> None:
    subject = MemAgentReader("openai:x", backend_options={"temprature": 1})
    answers = await batch(subject, how, tasks(2), return_exceptions=True)
    assert [type(answer) for answer in answers] == [UsageError] * 2


@pytest.mark.parametrize("max_concurrency", [None, 2])
async def test_an_async_batch_that_is_left_or_fails_leaves_no_reading_behind(max_concurrency: int | None) -> None:
    waiting, started, ended = asyncio.Event(), 0, 0

    class Waiting(Model):
        async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
            nonlocal started, ended
            text, started = str(messages[-1].text), started + 1
            try:
                if "Which of 0?" not in text:
                    await waiting.wait()
                elif "fail" in text:
                    raise ConnectionError("the server is gone")
                return await super()._agenerate(messages, **options)
            finally:
                ended += 1

    reader, before = MemAgentReader(Waiting(), tokenizer=count, **SMALL), asyncio.all_tasks()
    config: Any = {"max_concurrency": max_concurrency} if max_concurrency else None
    pairs = reader.abatch_as_completed(tasks(5, 1), config)
    assert (await anext(pairs))[0] == 0
    await pairs.aclose()
    assert (asyncio.all_tasks() - before, started) == (set(), ended)
    failing = [{"question": "Which of 0?", "context": "to fail"}, *tasks(5, 1)[1:]]
    with pytest.raises(BackendError, match="the server is gone"):
        await reader.abatch(failing, config)
    assert (asyncio.all_tasks() - before, started) == (set(), ended)
