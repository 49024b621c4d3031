from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from memagent_integrations import (
    BackendError,
    Budgets,
    ContextOverflow,
    Limits,
    MemAgentError,
    PromptSet,
    Reader,
    Reading,
    ScriptedBackend,
    Step,
    UsageError,
    policies,
)
from memagent_integrations.drivers import adrive
from memagent_integrations.errors import EmptyDocument, QuestionError
from memagent_integrations.loop import Turns
from memagent_integrations.records import Prompt, Reply, Usage

DOCUMENT = "Some words of a long document. " * 100  # 700 of the scripted backend's tokens


def notes(prompt: Prompt) -> str:
    return f"note {prompt.index}" if prompt.phase == "memory" else "the answer"


def reader(script: Any = notes, *, batch_size: int = 1, window: int | None = None, **settings: Any) -> Reader:
    settings = {"chunk_tokens": 200, "memory_tokens": 50} | settings
    return Reader(ScriptedBackend(script, batch_size=batch_size, window=window), **settings)


def prompts_of(subject: Reader) -> list[Prompt]:
    assert isinstance(subject.backend, ScriptedBackend)
    return subject.backend.prompts


def test_reads_every_chunk_and_answers_from_the_memory_alone() -> None:
    subject = reader()
    reading = subject.read("Why?", DOCUMENT)
    assert (reading.answer, reading.memory, reading.question, reading.model) == (
        "the answer",
        "note 3",
        "Why?",
        "scripted",
    )
    assert [step.outcome for step in reading.steps] == ["updated"] * 4 + ["answered"]
    assert [(step.memory_before, step.memory) for step in reading.steps[:2]] == [("", "note 0"), ("note 0", "note 1")]
    assert "".join(DOCUMENT[step.span.start : step.span.end] for step in reading.steps if step.span) == DOCUMENT
    *updates, answer = [prompt.messages[0].content for prompt in prompts_of(subject)]
    assert "note 0" in updates[1]
    assert "note 0" not in updates[2]
    assert "note 3" in answer
    assert "long document. " not in answer
    assert reading.usage == sum(
        (step.reply.usage for step in reading.steps), Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
    )
    assert all(step.reply.usage.prompt_tokens for step in reading.steps)


def test_the_output_is_bounded_in_every_call() -> None:
    subject = reader(memory_tokens=40)
    subject.read("q", DOCUMENT)
    assert [prompt.max_tokens for prompt in prompts_of(subject)] == [40] * 4 + [1024]
    subject = reader(output_tokens=77)
    subject.read("q", DOCUMENT)
    assert {prompt.max_tokens for prompt in prompts_of(subject)} == {77}


@pytest.mark.parametrize(
    ("reply", "outcome", "memory", "cut"),
    [
        ("new", "updated", "new", False),
        ("", "kept", "old", False),
        (" \n ", "kept", "old", False),
        ("<think>only thinking</think>", "kept", "old", False),
        ("<think>cut while thinking", "kept", "old", False),
        (Reply(text="", reasoning="thinking apart", finish_reason="length"), "kept", "old", False),
        (Reply(text="withheld", finish_reason="content_filter"), "kept", "old", False),
        (Reply(text="cut at the li", finish_reason="length"), "updated", "cut at the li", True),
        (Reply(text="w " * 80), "updated", ("w " * 50).strip(), True),
        ("NO CHANGE", "unchanged", "old", False),
        ("<think>hm</think><memory>new</memory>", "updated", "new", False),
    ],
)
def test_what_becomes_of_a_reply(reply: str | Reply, outcome: str, memory: str, cut: bool) -> None:
    once = Limits(empty_retries=0)
    script, prompts = ["old", reply, "old again", "answer"], PromptSet.default(no_change=True)
    subject = reader(script, chunk_tokens=300, prompts=prompts, limits=once, on_lost_section="skip")
    step = subject.read("q", DOCUMENT).steps[1]
    assert (step.outcome, step.memory, step.cut) == (outcome, memory, cut)
    assert step.reply.text == (reply if isinstance(reply, str) else reply.text), "the raw reply stays in the record"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("", "no answer"),
        ("<think>hm</think>", "no answer"),
        (Reply(text="<think>hm", finish_reason="length"), "raise output_tokens"),
        (Reply(text="", finish_reason="content_filter"), "content filter"),
    ],
)
def test_an_empty_answer_is_an_error(reply: str | Reply, message: str) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        reader(["memory", reply, reply, reply, "too late"]).read("q", "short")
    assert caught.value.reading is not None
    assert caught.value.reading.memory == "memory"
    assert len(caught.value.reading.steps) == 2


def test_a_failed_call_keeps_what_was_read() -> None:
    failure = BackendError("no more", retryable=True)
    with pytest.raises(BackendError, match="no more") as caught:
        reader(["one", "two", failure]).read("q", DOCUMENT)
    partial = caught.value.reading
    assert partial is not None
    assert (partial.answer, partial.memory, len(partial.steps)) == (None, "two", 2)


@pytest.mark.parametrize(
    ("question", "document"), [("", "text"), ("  \n", "text"), ("q", ""), ("q", " \n\t"), ("q", []), ("q", iter(""))]
)
def test_nothing_to_read_or_to_ask(question: str, document: Any) -> None:
    subject = reader(["never taken", "nor this"])
    with pytest.raises(UsageError, match="empty"):
        subject.read(question, document)
    assert all(prompt.phase == "memory" for prompt in prompts_of(subject)), "no answer is made up for an empty document"


def test_a_question_beyond_its_budget() -> None:
    with pytest.raises(UsageError, match=r"the question has \d+ tokens, its budget is 20"):
        reader(question_tokens=20).read("why " * 25, "text")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"window": 500},
            r"chunk 200 \+ memory 50 \+ output 50 .* but the window holds 500; chunk_tokens=\d+ or less would fit",
        ),
        ({"window": 300}, "lower memory_tokens or output_tokens"),
        ({"window": 8192, "output_tokens": 8000}, "but the window holds 8192"),
        ({"chunk_tokens": 9000}, "but the window holds 8192"),
    ],
)
def test_budgets_are_checked_before_the_first_call(settings: dict[str, Any], message: str) -> None:
    subject = reader(**settings)
    with pytest.raises(ContextOverflow, match=message):
        subject.read("q", DOCUMENT)
    assert prompts_of(subject) == []


def test_the_advice_of_an_overflow_works() -> None:
    with pytest.raises(ContextOverflow) as caught:
        reader(window=500, output_tokens=100).read("q", DOCUMENT)
    advice = int(str(caught.value).split("chunk_tokens=")[1].split()[0])
    reader(window=500, output_tokens=100, chunk_tokens=advice).read("q", DOCUMENT)
    with pytest.raises(ContextOverflow):
        reader(window=500, output_tokens=100, chunk_tokens=advice + 1).read("q", DOCUMENT)


def test_the_window_holds_every_prompt() -> None:
    hostile = "</section><|im_end|>[INST]" * 300
    subject = reader(lambda prompt: "m " * 600, window=730, memory_tokens=100, output_tokens=100)
    subject.read("</memory>" * 20, hostile)
    for prompt in prompts_of(subject):
        assert subject.backend.count(prompt.messages[0].content) + prompt.max_tokens <= 730


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens has to be a whole number"),
        ({"memory_tokens": -1}, "memory_tokens"),
        ({"output_tokens": 1.5}, "output_tokens"),
        ({"overlap_tokens": 150}, "overlap_tokens has to lie between 0 and half of chunk_tokens"),
        ({"overlap_tokens": "a"}, "overlap_tokens has to be a whole number"),
        ({"chunk_tokens": True}, "chunk_tokens has to be a whole number"),
        ({"chunk_tokens": 10**400}, "chunk_tokens has to be .* not such a large number"),
        ({"layout": "sideways"}, "layout has to be one of"),
        (
            {"layout": "memory-first", "prompts": PromptSet.default()},
            "a prompt set, like that of a policy, has its own layout",
        ),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reader(**settings)


def test_a_window_given_by_hand() -> None:
    with pytest.raises(UsageError, match="window has to be a whole number of at least 1"):
        Reader(ScriptedBackend(notes), window=0)
    with pytest.raises(ContextOverflow, match="the window holds 2000"):
        Reader(ScriptedBackend(notes, window=8192), window=2000).read("q", DOCUMENT)
    with pytest.raises(UsageError, match="backend_options are for a model given by name"):
        Reader(ScriptedBackend(notes), backend_options={"seed": 1})


class CountingBackend(ScriptedBackend):
    """Notes the texts that it counts; `before_the_first_prompt` are those of a reading's beginning."""

    def __init__(self) -> None:
        super().__init__(notes)
        self.counted: list[str] = []
        self.before_the_first_prompt: list[str] = []

    def count(self, text: str) -> int:
        self.counted.append(text)
        return super().count(text)

    def complete(self, prompt: Prompt) -> Reply:
        if prompt.phase == "memory":
            self.before_the_first_prompt = list(self.counted)
        self.counted = []
        return super().complete(prompt)


async def test_a_reading_counts_no_text_twice_before_its_first_prompt() -> None:
    """With many endpoints a count is a call to the server."""
    backend = CountingBackend()
    subject = Reader(backend)
    assert subject.read("Why?", "A short document.").answer
    question, *templates, chunk = backend.before_the_first_prompt
    assert (question, len(templates), len(set(templates)), chunk) == ("Why?", 3, 3, "A short document.")
    backend.counted.clear()
    assert subject.read("Why?", "Another document.").answer
    assert backend.before_the_first_prompt == ["Why?", "Another document."], "the templates are counted once"
    backend.counted.clear()
    assert (await subject.aread("Who?", "Another document.")).answer
    assert backend.before_the_first_prompt == ["Who?", "Another document."]
    backend.counted.clear()
    assert subject.plan("Who?", "Another document.").chunks == 1
    assert backend.counted == ["Who?", "Another document."]


def test_models_that_are_none() -> None:
    with pytest.raises(UsageError, match="not object; for LangChain and LlamaIndex models use"):
        Reader(object())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown model 'gpt'; use one of openai:NAME"):
        Reader("gpt")
    with pytest.raises(UsageError, match="unknown model 'smolm2'; did you mean smollm2"):
        Reader("smolm2")


def test_a_question_and_prompts_of_another_type_are_named() -> None:
    with pytest.raises(UsageError, match="the question has to be a str, not list"):
        reader().read(["a document"], "Who?")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="prompts has to be a PromptSet, not str"):
        Reader(ScriptedBackend([]), prompts="{question}")  # type: ignore[arg-type]


def test_a_plan_is_what_is_done() -> None:
    subject = reader()
    plan = subject.plan("q", DOCUMENT)
    assert prompts_of(subject) == []
    reading = subject.read("q", DOCUMENT)
    assert (plan.chunks, plan.calls) == (len(reading.steps) - 1, len(reading.steps))
    assert plan.document_tokens == sum(step.span.tokens for step in reading.steps if step.span)
    usage = reading.usage
    assert usage.prompt_tokens is not None
    assert usage.prompt_tokens <= plan.prompt_tokens < 2 * usage.prompt_tokens
    assert plan.completion_tokens == 4 * 50 + 1024
    with pytest.raises(UsageError, match="would use up this iterator"):
        subject.plan("q", iter([DOCUMENT]))


def test_plans_of_many_questions_read_the_document_once() -> None:
    opened = 0

    class Loader:
        def lazy_load(self) -> Iterator[str]:
            nonlocal opened
            opened += 1
            yield DOCUMENT

    subject, questions = reader(), ["Who?", "When was it, and where?"]
    plans = subject.plans(questions, Loader())
    assert opened == 1
    assert plans == [subject.plan(question, DOCUMENT) for question in questions]
    assert plans[0].prompt_tokens < plans[1].prompt_tokens
    with pytest.raises(QuestionError, match="empty"):
        subject.plans(["Who?", ""], DOCUMENT)


def test_stream_tells_all_that_happens() -> None:
    events = list(reader(["one", "<think>hm</think>the  answer \n"]).stream("q", "short"))
    assert [type(event) for event in events] == [Step, str, str, Step, Reading]
    assert "".join(event for event in events if isinstance(event, str)) == "the  answer"
    assert isinstance(events[-1], Reading)
    assert events[-1].answer == "the  answer"


def test_a_boxed_answer_streams_at_its_end() -> None:
    subject = reader(["one", r"So it is \boxed{42}."], prompts=PromptSet.default(answer_format="boxed"))
    assert [event for event in subject.stream("q", "short") if isinstance(event, str)] == ["42"]


def test_a_stream_ends_with_the_error() -> None:
    events = reader(["one", BackendError("gone")]).stream("q", "short")
    assert isinstance(next(events), Step)
    with pytest.raises(BackendError, match="gone") as caught:
        next(events)
    assert caught.value.reading is not None


async def test_async_is_the_same() -> None:
    expected = reader().read("q", DOCUMENT)
    assert await reader().aread("q", DOCUMENT) == expected
    events = [event async for event in reader().astream("q", DOCUMENT)]
    assert events[-1] == expected
    assert [event for event in events if isinstance(event, Step)] == list(expected.steps)
    assert "".join(event for event in events if isinstance(event, str)) == "the answer"


async def test_async_documents() -> None:
    async def lines() -> AsyncIterator[str]:
        for n in range(60):
            await asyncio.sleep(0)
            yield f"line number {n}\n"

    reading = await reader().aread("q", lines())
    assert reading.steps[-2].span
    assert reading.steps[-2].span.end == sum(len(f"line number {n}\n") for n in range(60))

    async def broken() -> AsyncIterator[str]:
        yield DOCUMENT
        raise OSError("the pipe broke")

    with pytest.raises(UsageError, match="OSError: the pipe broke") as caught:
        await reader().aread("q", broken())
    assert caught.value.reading is not None
    assert caught.value.reading.steps


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling_ends_a_reading(streamed: bool) -> None:
    called, release = threading.Event(), threading.Event()

    def script(prompt: Prompt) -> str:
        if prompt.phase == "answer":
            called.set()
            release.wait(10)
        return "text"

    async def consume() -> None:
        if streamed:
            [event async for event in subject.astream("q", "short")]
        else:
            await subject.aread("q", "short")

    subject = reader(script)
    task = asyncio.create_task(consume())
    await asyncio.to_thread(called.wait, 10)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, release.set)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_failure_of_the_caller_cancels_the_rest() -> None:
    def progress(job: int, step: Step) -> None:
        raise RuntimeError("the progress bar broke")

    with pytest.raises(RuntimeError, match="the progress bar broke"):
        await reader().aread_many([("q", DOCUMENT)] * 5, progress=progress)
    assert len(asyncio.all_tasks()) == 1


async def test_a_reading_cancelled_while_it_closes_leaves_nothing_running() -> None:
    closing, release = threading.Event(), threading.Event()

    def turns() -> Turns:
        try:
            yield Prompt(index=0, phase="memory", messages=(), max_tokens=1)
            raise AssertionError("never answered")
        finally:
            closing.set()
            release.wait(10)

    async def consume() -> None:
        async for _ in adrive(turns(), lambda prompt: never(), PromptSet.default()):
            pass

    async def never() -> AsyncIterator[str]:
        called.set()
        await asyncio.Event().wait()
        yield ""

    called = asyncio.Event()
    task = asyncio.create_task(consume())
    await called.wait()
    task.cancel()
    await asyncio.to_thread(closing.wait, 10)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, release.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("setting", [{"concurrency": 0}, {"batch_size": 0}, {"concurrency": "4"}])
def test_backends_that_would_do_nothing(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="has to be a whole number of at least 1"):
        ScriptedBackend([], **setting)


def test_documents_are_read_lazily() -> None:
    taken = 0

    def lines() -> Iterator[str]:
        nonlocal taken
        for _ in range(5000):
            taken += 1
            yield "a line of six words here\n"

    events = reader().stream("q", lines())
    next(events)
    assert taken < 200


@pytest.mark.parametrize("batch_size", [1, 3])
def test_many_jobs_keep_their_order_and_their_failures_apart(batch_size: int) -> None:
    def script(prompt: Prompt) -> str | MemAgentError:
        text = prompt.messages[0].content
        if "poison" in text:
            return BackendError("refused", retryable=True)
        return text.split("<question>\n")[1].split("\n")[0] if prompt.phase == "answer" else "noted"

    jobs = [
        ("q0", DOCUMENT),
        ("q1", "poison"),
        ("q2", ""),
        ("", "text"),
        ("q4", iter(["a", "b"])),
        ("q5", 7),
        ("q6", DOCUMENT),
    ]
    seen: list[tuple[int, int]] = []
    readings = reader(script, batch_size=batch_size).read_many(
        jobs, progress=lambda job, step: seen.append((job, step.index))
    )
    assert [reading.answer for reading in readings] == ["q0", None, None, None, "q4", None, "q6"]
    assert [type(reading.error).__name__ for reading in readings] == [
        "NoneType",
        "BackendError",
        "EmptyDocument",
        "QuestionError",
        "NoneType",
        "UsageError",
        "NoneType",
    ]
    assert sorted(seen) == [(job, step.index) for job, reading in enumerate(readings) for step in reading.steps]


@pytest.mark.parametrize("question", [7, None, b"q", ["q"]])
def test_a_question_that_is_no_text_is_a_reading_that_can_be_saved(question: Any) -> None:
    [reading] = reader(["a"]).read_many([(question, "text")])
    assert isinstance(reading.error, QuestionError)
    saved = Reading.from_json(reading.to_json())
    assert saved.question == repr(question)
    assert str(saved.error) == str(reading.error)


@pytest.mark.parametrize("batch_size", [1, 2])
async def test_async_many(batch_size: int) -> None:
    async def lines() -> AsyncIterator[str]:
        yield DOCUMENT

    jobs: list[tuple[str, Any]] = [("q0", DOCUMENT), ("q1", lines()), ("q2", "")]
    readings = await reader(batch_size=batch_size).aread_many(jobs)
    assert [reading.answer for reading in readings] == ["the answer", "the answer", None]
    assert [reading.answer for reading in await reader(batch_size=batch_size).aread_many(jobs[:1])] == ["the answer"]
    once = lines()
    shared = await reader(batch_size=batch_size).aread_many([("a", once), ("b", once)])
    assert [reading.answer for reading in shared] == ["the answer"] * 2


@pytest.mark.parametrize("batch_size", [1, 8])
def test_questions_about_one_document_share_its_chunks(batch_size: int) -> None:
    taken = 0

    def lines() -> Iterator[str]:
        nonlocal taken
        for n in range(100):
            taken += 1
            yield f"line {n} of the one document\n"

    shared = lines()
    subject = reader(batch_size=batch_size, layout="section-shared")
    readings = subject.read_many([(f"question {n}", shared) for n in range(5)])
    assert taken == 100
    assert len({tuple(step.span for step in reading.steps) for reading in readings}) == 1
    sections = {
        prompt.messages[0].content.split("<question>")[0] for prompt in prompts_of(subject) if prompt.phase == "memory"
    }
    assert len(sections) == len(readings[0].steps) - 1


def test_shared_chunks_share_their_failure() -> None:
    def broken() -> Iterator[str]:
        yield DOCUMENT
        raise OSError("gone")

    shared = broken()
    readings = reader().read_many([("a", shared), ("b", shared), ("c", shared)])
    assert [str(reading.error) for reading in readings] == ["reading the document failed: OSError: gone"] * 3


def test_batches_are_full_and_bounded() -> None:
    sizes: list[int] = []

    class Counting(ScriptedBackend):
        def complete_batch(self, prompts: Any) -> Any:
            sizes.append(len(prompts))
            return super().complete_batch(prompts)

    subject = Reader(Counting(notes, batch_size=3), chunk_tokens=200, memory_tokens=50)
    readings = subject.read_many([("q", DOCUMENT * n) for n in (1, 2, 1, 1)])
    assert max(sizes) == 3
    assert sum(sizes) == sum(len(reading.steps) for reading in readings)


def test_calls_in_flight_are_bounded_and_side_by_side() -> None:
    flying, peak, gate = 0, 0, threading.Barrier(4)
    lock = threading.Lock()

    def script(prompt: Prompt) -> str:
        nonlocal flying, peak
        with lock:
            flying += 1
            peak = max(peak, flying)
        if prompt.phase == "answer":
            gate.wait(10)  # passes only when four readings are in flight at once
        with lock:
            flying -= 1
        return "text"

    reader(script).read_many([("q", "short text")] * 8)
    assert peak == 4


def test_an_interrupt_ends_many_readings() -> None:
    class Stop(KeyboardInterrupt):
        pass

    def script(prompt: Prompt) -> str:
        raise Stop

    with pytest.raises(Stop):
        reader(script).read_many([("q", DOCUMENT)] * 50)


@pytest.mark.parametrize("batch_size", [1, 2])
async def test_readings_that_nobody_waits_for_make_no_more_calls(batch_size: int) -> None:
    called, release = threading.Event(), threading.Event()

    def script(prompt: Prompt) -> str:
        if "wait" in prompt.messages[0].content:
            called.set()
            release.wait(10)
        return "text"

    def progress(job: int, step: Step) -> None:
        if job == 0:
            called.wait(10)
            raise RuntimeError("the progress bar broke")

    def ended() -> int:
        release.set()
        for thread in threading.enumerate():
            if thread.name.startswith(("ThreadPoolExecutor", "asyncio")) and thread is not threading.current_thread():
                thread.join(0.2)
        return len(prompts_of(subject))

    jobs: list[tuple[str, Any]] = [("q", DOCUMENT * 6), *(("wait", DOCUMENT * 5) for _ in range(20))]  # longest first
    subject = reader(script)
    with pytest.raises(RuntimeError, match="the progress bar broke"):
        await asyncio.to_thread(subject.read_many, jobs, progress=progress)
    assert ended() <= 12, "of more than 400"
    called.clear()
    release.clear()
    subject = reader(script, batch_size=batch_size)
    task = asyncio.create_task(subject.aread_many(jobs))
    await asyncio.to_thread(called.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended() <= 12


@pytest.mark.parametrize("jobs", [None, [("q",)], [("a", "b", "c", "d")], 5, ["q"], ["ab"], [{"q": 1, "doc": 2}]])
async def test_jobs_that_are_no_pairs(jobs: Any) -> None:
    with pytest.raises(UsageError, match="the jobs have to be"):
        reader().read_many(jobs)
    with pytest.raises(UsageError, match="the jobs have to be"):
        await reader().aread_many(jobs)


class Source:
    """An async document that notes how much of it was read, and whether it was closed."""

    def __init__(self) -> None:
        self.taken, self.closed = 0, False

    async def lines(self) -> AsyncGenerator[str]:
        try:
            for _ in range(100):
                self.taken += 1
                yield DOCUMENT
        finally:
            self.closed = True


@pytest.mark.parametrize(("question", "settings"), [("", {}), ("why " * 2000, {}), ("q", {"window": 300})])
async def test_nothing_of_an_async_document_is_read_for_what_cannot_be(question: str, settings: dict[str, Any]) -> None:
    source = Source()
    with pytest.raises((UsageError, ContextOverflow)):
        await reader(**settings).aread(question, source.lines())
    assert source.taken == 0


async def test_an_async_document_is_closed_however_the_reading_ends() -> None:
    failed, left = Source(), Source()
    with pytest.raises(BackendError):
        await reader(["one note"]).aread("q", failed.lines())
    async with aclosing(reader().astream("q", left.lines())) as events:
        async for _ in events:
            break
    assert (failed.closed, left.closed) == (True, True)
    assert max(failed.taken, left.taken) <= 2


async def test_a_failed_call_does_not_wait_for_more_of_an_async_document() -> None:
    async def endless() -> AsyncGenerator[str]:
        yield DOCUMENT
        await asyncio.get_running_loop().create_future()

    with pytest.raises(BackendError, match="refused"):
        await asyncio.wait_for(reader([BackendError("refused")], chunk_tokens=100).aread("q", endless()), 10)


async def test_files_in_an_async_document_are_read_in_threads(tmp_path: Path) -> None:
    threads = set()

    class Loader:
        def lazy_load(self) -> Iterator[str]:
            threads.add(threading.current_thread())
            yield DOCUMENT

    async def loaders() -> AsyncGenerator[Any]:
        yield Loader()

    assert (await reader().aread("q", loaders())).answer
    assert threading.current_thread() not in threads


async def test_a_reader_is_an_async_context_too() -> None:
    closed: list[str] = []

    class Closing(ScriptedBackend):
        async def aclose(self) -> None:
            closed.append("async")

    async with Reader(Closing(notes)) as subject:
        assert (await subject.aread("q", "text")).answer
    async with Closing(notes):
        pass
    assert closed == ["async", "async"]


def test_a_stream_may_bring_the_answer_whole() -> None:
    class NoStream(ScriptedBackend):
        def stream(self, prompt: Prompt) -> Any:
            raise AssertionError("streamed")

    events = list(Reader(NoStream(notes)).stream("q", "text", whole=True))
    assert [event for event in events if isinstance(event, str)] == ["the answer"]


def test_progress_is_called_once_at_a_time() -> None:
    inside = threading.Lock()

    def progress(job: int, step: Step) -> None:
        assert inside.acquire(blocking=False)
        inside.release()

    assert all(reading.answer for reading in reader().read_many([("q", DOCUMENT)] * 20, progress=progress))


async def test_a_big_piece_of_an_async_document_is_not_tokenized_to_its_end_first() -> None:
    counted = 0

    class Counting(ScriptedBackend):
        def count(self, text: str) -> int:
            nonlocal counted
            counted += len(text)
            return super().count(text)

    async def whole() -> AsyncGenerator[str]:
        yield DOCUMENT * 300

    async with aclosing(Reader(Counting(notes), chunk_tokens=200, memory_tokens=50).astream("q", whole())) as events:
        async for _ in events:
            break
    assert counted < len(DOCUMENT) * 10


@pytest.mark.parametrize("document", ["", " \n\t " * 5000, [" ", "\u3000\n"]])
async def test_a_document_of_nothing_but_space_costs_no_call(document: Any) -> None:
    async def stream() -> AsyncGenerator[Any]:
        yield document

    subject = reader()
    for attempt in (subject.read, subject.plan):
        with pytest.raises(UsageError, match="the document is empty"):
            attempt("q", document)
    with pytest.raises(UsageError, match="the document is empty"):
        await subject.aread("q", stream())
    assert prompts_of(subject) == []


async def test_chunks_of_nothing_but_space_are_passed_over() -> None:
    document = " " * 2000 + DOCUMENT + "\n" * 3000 + "the end"

    async def stream() -> AsyncGenerator[str]:
        yield document

    subject = reader()
    reading = subject.read("q", document)
    assert subject.plan("q", document).calls == len(reading.steps) == len(prompts_of(subject))
    assert all(document[step.span.start : step.span.end].strip() for step in reading.steps if step.span)
    assert "the end" in prompts_of(subject)[-2].messages[0].content
    assert (await subject.aread("q", stream())).steps == reading.steps


@pytest.mark.parametrize(
    "prompts",
    [
        PromptSet(
            update="{question} {memory} {section} {section} {question}",
            answer="{question} {memory} {question} {memory}",
        ),
        PromptSet(
            update="{question} {memory} {section}", answer="{question} {memory}", empty_memory="nothing yet " * 100
        ),
    ],
)
def test_templates_that_repeat_their_parts_are_within_the_window_too(prompts: PromptSet) -> None:
    question = "why " * 100
    with pytest.raises(ContextOverflow, match=r"chunk_tokens=(\d+) or less would fit") as caught:
        reader(prompts=prompts, window=1000, chunk_tokens=900).read(question, DOCUMENT)
    room = int(re.findall(r"chunk_tokens=(\d+)", str(caught.value))[0])
    subject = reader(prompts=prompts, window=1000, chunk_tokens=room, output_tokens=40)
    plan, reading = subject.plan(question, DOCUMENT), subject.read(question, DOCUMENT)
    for prompt in prompts_of(subject):
        assert subject.backend.count(prompt.messages[0].content) + prompt.max_tokens <= 1000
    assert reading.usage.prompt_tokens is not None
    assert plan.prompt_tokens >= reading.usage.prompt_tokens


async def test_the_thinking_that_the_chat_template_opened_is_not_streamed() -> None:
    def script(prompt: Prompt) -> str:
        return (
            "so I think</think>\nnoted"
            if prompt.phase == "memory"
            else "hm, it may be that</think>\n<memory>it is so</memory>"
        )

    events = list(reader(script).stream("q", DOCUMENT))
    assert "".join(event for event in events if isinstance(event, str)) == "it is so"
    assert [event async for event in reader(script).astream("q", DOCUMENT)] == events


def test_a_memory_whose_first_character_is_too_long_keeps_the_old_one() -> None:
    class Wide(ScriptedBackend):
        def count(self, text: str) -> int:
            return super().count(text) + 99 * text.count("\U0001f642")

    wide = "\U0001f642\U0001f642"
    notes = iter(["first", wide, wide, wide, "answer"])
    subject = Reader(Wide(lambda _: next(notes)), chunk_tokens=400, memory_tokens=50, on_lost_section="skip")
    reading = subject.read("q", DOCUMENT)
    assert [(step.memory, step.outcome) for step in reading.steps] == [
        ("first", "updated"),
        ("first", "kept"),
        ("first", "answered"),
    ]


def test_a_policy_brings_its_prompts_and_budgets(tmp_path: Path) -> None:
    boxed = PromptSet.default(layout="memory-first", answer_format="boxed")
    policies.save(
        policies.Policy(model="openai:m", adapter="lora", prompts=boxed, budgets=Budgets(chunk_tokens=300)), tmp_path
    )
    loaded = policies.load(tmp_path)
    assert loaded.prompts == boxed
    assert loaded.adapter == str(tmp_path / "lora")
    with pytest.raises(UsageError, match="does not take these options"):
        Reader(f"policy:{tmp_path}")  # an endpoint takes no adapter
    policies.save(policies.Policy(model="openai:m", prompts=boxed, budgets=Budgets(chunk_tokens=300)), tmp_path)
    subject = Reader(f"policy:{tmp_path}", memory_tokens=99, backend_options={"base_url": "http://127.0.0.1:1/v1"})
    assert (subject.prompts, subject.budgets.chunk_tokens, subject.budgets.memory_tokens) == (boxed, 300, 99)
    with pytest.raises(UsageError, match="like that of a policy"):
        Reader(f"policy:{tmp_path}", layout="section-first", backend_options={"base_url": "http://127.0.0.1:1/v1"})


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model": "m", "prompts": {"update": "x", "answer": "y"}}'])
def test_broken_policies(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "memagent.json").write_text(content)
    with pytest.raises(UsageError, match=r"memagent\.json|prompt template lacks"):
        Reader(f"policy:{tmp_path}")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "missing"])
def test_policies_that_are_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="is no policy"):
        Reader(f"policy:{name}")


def test_a_policy_names_no_policy(tmp_path: Path) -> None:
    policies.save(policies.Policy(model=f"policy:{tmp_path}", prompts=PromptSet.default()), tmp_path)
    with pytest.raises(UsageError, match="not another policy"):
        Reader(f"policy:{tmp_path}")


def test_a_script_serves_threads() -> None:
    readings = Reader(ScriptedBackend((f"line {n}" for n in range(1000)), concurrency=8)).read_many(
        [("q", "text")] * 100
    )
    assert all(reading.answer for reading in readings)


def test_a_reader_closes_what_it_opened() -> None:
    closed: list[bool] = []

    class Closing(ScriptedBackend):
        def close(self) -> None:
            closed.append(True)

    with Reader(Closing(notes)) as subject:
        assert "scripted" in repr(subject)
    assert closed == [True]


def in_parts(reader: Reader, document: str) -> tuple[str, str, list[Step]]:
    """Read chunk by chunk, keeping the memory, then answer; return the memory, the answer and the steps."""
    memory, steps = "", []
    for chunk in reader.chunks(document):
        memory = reader.memorize("What is noted?", chunk, memory=memory, progress=steps.append).memory
    return memory, str(reader.answer("What is noted?", memory).answer), steps


async def test_a_reading_in_parts_is_the_reading() -> None:
    def script(prompt: Prompt) -> str:
        text = prompt.messages[0].content
        return f"{len(text)} signs and {text.count('word')} words" if prompt.phase == "memory" else text[-200:]

    document = "some words of a document and a last word. " * 60
    whole = Reader(ScriptedBackend(script), chunk_tokens=100).read("What is noted?", document)
    reader = Reader(ScriptedBackend(script), chunk_tokens=100)
    memory, answer, steps = in_parts(reader, document)
    assert (memory, answer) == (whole.memory, whole.answer)
    assert [(step.span, step.memory) for step in steps] == [(step.span, step.memory) for step in whole.steps[:-1]]
    reported: list[Step] = []
    for reading in (
        reader.memorize("What is noted?", document, progress=reported.append),
        await reader.amemorize("What is noted?", document),
    ):
        assert (reading.memory, reading.answer, reading.steps) == (whole.memory, "", whole.steps[:-1])
    assert tuple(reported) == whole.steps[:-1]
    assert (await reader.aanswer("What is noted?", memory)).answer == whole.answer

    async def pages() -> AsyncIterator[str]:
        yield document

    assert (await reader.amemorize("What is noted?", pages())).memory == whole.memory
    assert (
        reader.memorize("What is noted?", document, memory="what was known before").steps[0].memory_before
        == "what was known before"
    )
    assert reader.answer("What is noted?", "").answer, "nothing may have been worth noting"
    for wrong in (lambda: reader.memorize(" ", document), lambda: reader.answer("", memory)):
        with pytest.raises(UsageError, match="question is empty"):
            wrong()


@pytest.mark.parametrize("document", ["", " ", []])
async def test_a_part_of_nothing_is_an_error_like_a_reading_of_nothing(document: Any) -> None:
    with pytest.raises(EmptyDocument):
        reader().memorize("q", document)
    with pytest.raises(EmptyDocument):
        await reader().amemorize("q", document)


def test_a_chunk_of_another_reader_may_be_too_large() -> None:
    (chunk,) = reader(chunk_tokens=2000).chunks(DOCUMENT)
    with pytest.raises(UsageError, match="the chunk has 701 tokens, chunk_tokens is 200"):
        reader().memorize("q", chunk)


async def test_steps_of_a_part_are_numbered_on() -> None:
    subject = reader()
    chunk = next(subject.chunks(DOCUMENT))
    assert [step.index for step in subject.memorize("q", chunk, first=7).steps] == [7]
    assert [step.index for step in (await subject.aanswer("q", "a note", first=8)).steps] == [8]
    assert [prompt.index for prompt in prompts_of(subject)] == [7, 8]


async def test_progress_may_be_async() -> None:
    reported: list[int] = []

    async def progress(step: Step) -> None:
        await asyncio.sleep(0)
        reported.append(step.index)

    await reader().aread("q", DOCUMENT, progress=progress)
    assert reported == [0, 1, 2, 3, 4]


def test_a_changed_reader_shares_what_its_calls_need() -> None:
    first = reader()
    other = first.changed(layout="memory-first", memory_tokens=20, window=4000)
    assert (other.prompts.name, other.budgets.memory_tokens, other.budgets.chunk_tokens) == ("memory-first", 20, 200)
    assert (first.prompts.name, first.budgets.memory_tokens) == ("section-first", 50)
    assert other.calls is first.calls
    assert other.backend is first.backend
    with pytest.raises(ContextOverflow):
        other.changed(window=100).read("q", DOCUMENT)
    with pytest.raises(UsageError, match="pass prompts or layout, not both"):
        first.changed(layout="memory-first", prompts=PromptSet.default())
    with pytest.raises(UsageError, match="window"):
        first.changed(window=0)


def test_an_embedded_model_brings_budgets_that_suit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "memagent_integrations.reader.loading.load_backend", lambda name, **options: ScriptedBackend(notes)
    )
    assert Reader("smollm2-raw").budgets == Budgets(memory_tokens=256, output_tokens=256)
    assert Reader("smollm2-raw", memory_tokens=500).budgets.memory_tokens == 500
    assert Reader("openai:x").budgets == Budgets()


def test_progress_that_would_have_to_be_awaited() -> None:
    async def progress(step: Step) -> None: ...

    with pytest.raises(UsageError, match="no coroutine"):
        reader().read("Who?", "Ann left.", progress=progress)  # type: ignore[arg-type]


def test_a_notebook_shows_half_a_character() -> None:
    shown = reader(["half \ud83d"] * 2).read("Who? \ud83d", "Ann left.")._repr_html_()
    assert shown.encode().decode() == shown
