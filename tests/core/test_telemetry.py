"""Spans of readings, made by the real SDK. Each test has a provider of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from memagent_integrations import BackendError, Budgets, Journal, Limits, PromptSet, Reading, ScriptedBackend
from memagent_integrations.calls import Calls
from memagent_integrations.drivers import adrive, drive, drive_batch
from memagent_integrations.errors import MemAgentError
from memagent_integrations.journal import settings_of
from memagent_integrations.loop import Turns, advance, reading_loop
from memagent_integrations.records import Chunk, Prompt, Reply, Span, Step, Usage
from memagent_integrations.telemetry import traced, under

QUESTION, ANSWER = "Whose secretquestion is it?", "A secretanswer."
NOTES = ["a secretnote", "a secretnote of two", ANSWER]
PROMPTS, BUDGETS = PromptSet.default(), Budgets(chunk_tokens=100, memory_tokens=50)
CHUNKS = tuple(Chunk(span=Span(index=n, start=n, end=n + 1, tokens=3), text=f"secretsection {n}") for n in range(2))
INPUT, OUTPUT, CACHED = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.cache_read.input_tokens",
)


class Spans:
    """A provider of tracers, and the spans that they made."""

    def __init__(self) -> None:
        self.provider, self._exporter = TracerProvider(), InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def __iter__(self) -> Iterator[ReadableSpan]:
        return iter(sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self if span.name.startswith(name)]

    def reading(self) -> ReadableSpan:
        (span,) = self.named("invoke_agent")
        return span

    def ids(self, name: str) -> set[int]:
        return {span.context.span_id for span in self.named(name)}

    def parents(self, name: str) -> set[int]:
        return {span.parent.span_id for span in self.named(name) if span.parent}

    def attributes(self, *names: str) -> list[tuple[Any, ...]]:
        """Return some attributes of each call."""
        return [tuple((span.attributes or {}).get(name) for name in names) for span in self.named("chat")]


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    yield spans
    for span in spans:
        assert span.end_time is not None
        assert "secret" not in json.dumps([span.to_json(), dict(span.attributes or {})]), "no text in a span"
        assert not span.events
        assert span.status.description is None
    calls = spans.named("chat")
    parents = {span.context.span_id: span.context.trace_id for span in spans.named("invoke_agent")}
    assert all(span.parent and parents[span.parent.span_id] == span.context.trace_id for span in calls)


def loop(backend: ScriptedBackend, chunks: Iterable[Chunk] = CHUNKS, model: str = "openai:gpt-x") -> Turns:
    return reading_loop(QUESTION, chunks, prompts=PROMPTS, budgets=BUDGETS, count=backend.count, model=model)


def start(
    spans: Spans, backend: ScriptedBackend, chunks: Iterable[Chunk] = CHUNKS, model: str = "openai:gpt-x"
) -> Turns:
    return traced(loop(backend, chunks, model), model=model, budgets=BUDGETS, tracer_provider=spans.provider)


def run(turns: Turns, backend: ScriptedBackend) -> Reading:
    *_, last = drive(turns, backend.stream, PROMPTS)
    assert isinstance(last, Reading)
    return last


def test_a_reading_is_a_span_and_so_is_every_call(spans: Spans) -> None:
    backend = ScriptedBackend(NOTES)
    reading = run(start(spans, backend), backend)
    assert reading == run(loop(again := ScriptedBackend(NOTES)), again), "tracing changes nothing"
    span, (first, second, answer) = spans.reading(), spans.named("chat")
    assert (span.name, span.kind, span.parent) == ("invoke_agent memagent", trace.SpanKind.INTERNAL, None)
    assert span.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "memagent",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-x",
        INPUT: reading.usage.prompt_tokens,
        OUTPUT: reading.usage.completion_tokens,
        "memagent.chunk_tokens": 100,
        "memagent.memory_tokens": 50,
        "memagent.question_tokens": 1024,
        "memagent.overlap_tokens": 0,
        "memagent.steps": 3,
        "memagent.recorded_steps": 0,
        "memagent.lost_sections": 0,
    }
    assert (answer.name, answer.kind) == ("chat gpt-x", trace.SpanKind.CLIENT)
    assert answer.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-x",
        "gen_ai.request.max_tokens": 1024,
        "gen_ai.response.finish_reasons": ("stop",),
        INPUT: reading.steps[-1].reply.usage.prompt_tokens,
        OUTPUT: reading.steps[-1].reply.usage.completion_tokens,
        CACHED: 0,
        "memagent.step.index": 2,
        "memagent.step.phase": "answer",
        "memagent.step.outcome": "answered",
        "memagent.step.cut": False,
    }
    names = ("memagent.step.index", "memagent.step.phase", "memagent.step.outcome", "gen_ai.request.max_tokens")
    assert spans.attributes(*names) == [
        (0, "memory", "updated", 50),
        (1, "memory", "updated", 50),
        (2, "answer", "answered", 1024),
    ]
    assert {each.status.status_code for each in spans} == {trace.StatusCode.UNSET}
    times = [first.start_time, first.end_time, second.start_time, second.end_time, answer.start_time, answer.end_time]
    assert [span.start_time, *times, span.end_time] == sorted(
        [span.start_time or 0, *(time or 0 for time in times), span.end_time or 0]
    )


def test_the_call_for_the_answer_names_the_model_that_answers(spans: Spans) -> None:
    backend = ScriptedBackend(NOTES)
    turns = traced(loop(backend), model="openai:small", answer_model="vllm:large", tracer_provider=spans.provider)
    run(turns, backend)
    assert (spans.reading().attributes or {})["gen_ai.request.model"] == "small"
    assert [span.name for span in spans.named("chat")] == ["chat small", "chat small", "chat large"]
    names = ("gen_ai.provider.name", "gen_ai.request.model")
    assert spans.attributes(*names) == [("openai", "small")] * 2 + [("vllm", "large")]


def test_what_a_server_leaves_open_stays_open(spans: Spans) -> None:
    usage = Usage(prompt_tokens=7)
    note = Reply(text="secretnote", usage=usage)
    empty = Reply(text="", usage=usage, finish_reason="length", seconds=1.5)
    backend = ScriptedBackend([note, empty, ANSWER])
    run(start(spans, backend), backend)
    names = (INPUT, OUTPUT, "gen_ai.response.finish_reasons", "memagent.step.outcome", "memagent.step.seconds")
    assert spans.attributes(*names)[:2] == [(7, None, None, "updated", None), (7, None, ("length",), "kept", 1.5)]
    assert OUTPUT not in (spans.reading().attributes or {})


@pytest.mark.parametrize(
    ("name", "provider", "model"),
    [
        ("openai:ft:gpt-x:mine", "openai", "ft:gpt-x:mine"),
        ("vllm:org/model", "vllm", "org/model"),
        ("transformers:org/model", "transformers", "org/model"),
        ("llamacpp:model.gguf", "llamacpp", "model.gguf"),
        ("langchain:ChatOllama:llama3:8b", None, "llama3:8b"),
        ("llama-index:MockLLM", None, "MockLLM"),
        ("smollm2", None, "smollm2"),
        ("scripted", None, "scripted"),
    ],
)
def test_provider_and_model_are_those_of_the_backends_name(
    spans: Spans, name: str, provider: str | None, model: str
) -> None:
    backend = ScriptedBackend(NOTES)
    run(start(spans, backend, model=name), backend)
    assert spans.attributes("gen_ai.provider.name", "gen_ai.request.model") == [(provider, model)] * 3
    assert {span.name for span in spans.named("chat")} == {f"chat {model}"}


def test_the_parent_is_what_was_current_where_the_loop_was_made(spans: Spans) -> None:
    """The loops of `read_many` run in threads, in which another span is current."""
    backend, readings = ScriptedBackend(NOTES), []
    with spans.provider.get_tracer("test").start_as_current_span("request"):
        turns = start(spans, backend)
    thread = threading.Thread(target=lambda: readings.append(run(turns, backend)))
    thread.start()
    thread.join()
    (request,) = spans.named("request")
    parent = spans.reading().parent
    assert readings
    assert parent
    assert request.context == parent


class Client(ScriptedBackend):
    """Its calls have spans of their own."""

    def __init__(self, tracer: trace.Tracer) -> None:
        super().__init__(NOTES)
        self.tracer = tracer

    def complete(self, prompt: Prompt) -> Reply:
        with self.tracer.start_as_current_span("POST"):
            return super().complete(prompt)

    async def acomplete(self, prompt: Prompt) -> Reply:
        with self.tracer.start_as_current_span("POST"):
            await asyncio.sleep(0)
            return ScriptedBackend.complete(self, prompt)


@pytest.mark.parametrize("limits", [Limits(), Limits(call_timeout=30)], ids=["", "timed"])
@pytest.mark.parametrize("how", ["complete", "stream", "acomplete", "astream"])
async def test_spans_of_a_client_are_children_of_the_call(spans: Spans, how: str, limits: Limits) -> None:
    calls, backend = Calls(limits), Client(spans.provider.get_tracer("client"))
    turns = start(spans, backend)

    async def acomplete(prompt: Prompt) -> AsyncGenerator[str | Reply]:
        yield await calls.acomplete(backend, prompt)

    if how.startswith("a"):
        call = acomplete if how == "acomplete" else partial(calls.astream, backend)
        async for _ in adrive(turns, call, PROMPTS):
            assert not trace.get_current_span().get_span_context().is_valid
    else:

        def complete(prompt: Prompt) -> Iterator[str | Reply]:
            yield calls.complete(backend, prompt)

        for _ in drive(turns, complete if how == "complete" else partial(calls.stream, backend), PROMPTS):
            assert not trace.get_current_span().get_span_context().is_valid, "nothing leaks to whoever reads the stream"
    posts = {post.parent.span_id for post in spans.named("POST") if post.parent}
    assert posts == {chat.context.span_id for chat in spans.named("chat")}


@pytest.mark.parametrize("how", ["read", "aread"])
def test_a_mistake_in_a_backend_is_an_error_of_its_call(spans: Spans, how: str) -> None:
    backend, calls = ScriptedBackend(lambda prompt: 1 / 0), Calls(Limits())  # type: ignore[arg-type, return-value]
    turns = start(spans, backend)

    def read() -> None:
        for _ in drive(turns, lambda prompt: iter([calls.complete(backend, prompt)]), PROMPTS):
            pass

    def aread() -> None:
        async def call(prompt: Prompt) -> AsyncGenerator[str | Reply]:
            yield await calls.acomplete(backend, prompt)

        async def read_async() -> None:
            async for _ in adrive(turns, call, PROMPTS):
                pass

        asyncio.run(read_async())

    with pytest.raises(ZeroDivisionError):
        {"read": read, "aread": aread}[how]()
    assert {(span.attributes or {}).get("error.type") for span in spans} == {"ZeroDivisionError"}


def test_a_context_holds_for_its_block_alone() -> None:
    before = contexts.get_current()
    with under(None):
        assert contexts.get_current() == before
    with suppress(KeyError), under(contexts.set_value("key", 1)):
        assert contexts.get_value("key") == 1
        raise KeyError
    assert contexts.get_current() == before


async def test_async_readings_side_by_side(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("client")

    async def one() -> Reading:
        backend = Client(tracer)
        calls = Calls(Limits())

        async def call(prompt: Prompt) -> AsyncGenerator[str | Reply]:
            yield await calls.acomplete(backend, prompt)

        *_, last = [event async for event in adrive(start(spans, backend), call, PROMPTS)]
        assert isinstance(last, Reading)
        return last

    with tracer.start_as_current_span("request") as request:
        readings = await asyncio.gather(one(), one(), one())
    assert {reading.answer for reading in readings} == {ANSWER}
    assert [span.parent for span in spans.named("invoke_agent")] == [request.get_span_context()] * 3
    assert len(spans.named("chat")) == len(spans.named("POST")) == 9
    assert spans.parents("POST") == spans.ids("chat")


async def test_a_cancelled_async_reading_ends_its_spans(spans: Spans) -> None:
    backend, started = ScriptedBackend(NOTES), asyncio.Event()

    async def call(prompt: Prompt) -> AsyncGenerator[str | Reply]:
        started.set()
        await asyncio.sleep(60)
        yield backend.complete(prompt)

    async def read() -> None:
        async with aclosing(adrive(start(spans, backend), call, PROMPTS)) as events:
            async for _ in events:
                pass

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert spans.attributes("memagent.cancelled", "error.type") == [(True, None)]
    assert (spans.reading().attributes or {})["memagent.cancelled"] is True


def test_a_batch(spans: Spans) -> None:
    """One of three readings fails; each call is a child of its own reading."""

    def complete(prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        return [BackendError("secret") if next(broken) else backend.complete(prompt) for prompt in prompts]

    broken = chain([False, True], repeat(False))
    backend = ScriptedBackend(lambda prompt: ANSWER if prompt.phase == "answer" else "a secretnote")
    events = list(drive_batch([start(spans, backend) for _ in range(3)], complete, 2))
    assert sorted((number, bool(event.error)) for number, event in events if isinstance(event, Reading)) == [
        (0, False),
        (1, True),
        (2, False),
    ]
    failed = [span for span in spans if span.status.status_code == trace.StatusCode.ERROR]
    assert sorted(span.name for span in failed) == ["chat gpt-x", "invoke_agent memagent"]
    counts = [
        sum(span.parent == reading.context for span in spans.named("chat")) for reading in spans.named("invoke_agent")
    ]
    assert sorted(counts) == [1, 3, 3]


def test_a_failed_call(spans: Spans) -> None:
    backend = ScriptedBackend(["a secretnote", BackendError("the server said: secret", retryable=True)])
    reading = run(start(spans, backend), backend)
    assert isinstance(reading.error, BackendError)
    assert spans.attributes("error.type", "memagent.step.outcome") == [(None, "updated"), ("BackendError", None)]
    assert [span.status.status_code for span in spans.named("chat")] == [trace.StatusCode.UNSET, trace.StatusCode.ERROR]
    span = spans.reading()
    assert span.status.status_code == trace.StatusCode.ERROR
    assert span.attributes
    assert (span.attributes["error.type"], span.attributes["memagent.steps"], span.attributes[INPUT]) == (
        "BackendError",
        1,
        reading.usage.prompt_tokens,
    )


def test_an_answer_that_is_none_fails_the_reading_but_not_the_call(spans: Spans) -> None:
    backend = ScriptedBackend([*NOTES[:2], ""])
    assert run(start(spans, backend), backend).error
    assert spans.attributes("error.type", "memagent.step.outcome")[-1] == (None, "kept")
    assert spans.reading().status.status_code == trace.StatusCode.ERROR


def test_a_reading_that_makes_no_call(spans: Spans) -> None:
    backend = ScriptedBackend([])
    assert run(start(spans, backend, ()), backend).error
    assert not spans.named("chat")
    assert (spans.reading().attributes or {})["error.type"] == "EmptyDocument"


def test_a_mistake_in_a_document_ends_the_reading_and_not_the_call(spans: Spans) -> None:
    def chunks() -> Iterator[Chunk]:
        yield CHUNKS[0]
        raise RuntimeError("secret")

    backend = ScriptedBackend(NOTES)
    with pytest.raises(RuntimeError):
        run(start(spans, backend, chunks()), backend)
    assert spans.attributes("error.type", INPUT)[0][0] is None
    assert (spans.reading().attributes or {})["error.type"] == "RuntimeError"


@pytest.mark.parametrize("leave_at", [Step, str])
def test_a_stream_that_is_left(spans: Spans, leave_at: type) -> None:
    backend, closed = ScriptedBackend(NOTES), []

    def chunks() -> Iterator[Chunk]:
        try:
            yield from CHUNKS
        finally:
            closed.append(True)

    with closing(drive(start(spans, backend, chunks()), backend.stream, PROMPTS)) as events:
        assert any(isinstance(event, leave_at) for event in events)
    assert spans.attributes("memagent.cancelled", "error.type")[-1] == (True, None)
    assert (spans.reading().attributes or {})["memagent.cancelled"] is True
    assert {span.status.status_code for span in spans} == {trace.StatusCode.UNSET}
    assert closed, "the loop within is closed at once"


def test_a_loop_that_never_begins_has_no_span(spans: Spans) -> None:
    start(spans, ScriptedBackend([])).close()
    assert not list(spans)


def test_recorded_steps_have_no_spans(spans: Spans, tmp_path: Path) -> None:
    def read(script: list[Any], into: Spans) -> Reading:
        backend = ScriptedBackend(script)
        settings = settings_of(QUESTION, backend.name, backend.identity, BUDGETS, PROMPTS)
        recorded = journal.recorded(loop(backend), settings)
        return run(traced(recorded, model=backend.name, budgets=BUDGETS, tracer_provider=into.provider), backend)

    with Journal(tmp_path / "runs.db") as journal:
        assert read([NOTES[0], BackendError("gone")], Spans()).error
        whole = read(NOTES[1:], spans)
        assert whole.answer == ANSWER
        again = Spans()
        assert read([], again) == whole
    assert spans.attributes("memagent.step.index") == [(1,), (2,)]
    known = spans.reading().attributes or {}
    assert (known["memagent.recorded_steps"], known["memagent.steps"]) == (1, 3)
    assert known[INPUT] == sum(step.reply.usage.prompt_tokens or 0 for step in whole.steps[1:]), (
        "what this reading cost, not the one before"
    )
    (only,) = again
    assert only.attributes
    assert (only.attributes["memagent.recorded_steps"], only.attributes[INPUT]) == (3, 0)


def test_an_error_at_a_recorded_step_is_the_readings(spans: Spans) -> None:
    """Nobody makes a call for it, but the loop may be ended there."""
    backend = ScriptedBackend([])
    inner = loop(backend)

    def journal() -> Turns:
        prompt = next(inner)
        try:
            yield replace(prompt, recorded=Reply(text="secretnote"))
        except BackendError as error:
            reading = advance(inner, error)
        assert isinstance(reading, Reading)
        return reading

    turns = traced(journal(), model=backend.name, budgets=BUDGETS, tracer_provider=spans.provider)
    assert isinstance(advance(turns, None), Prompt)
    reading = advance(turns, BackendError("secret"))
    assert isinstance(reading, Reading)
    assert reading.error
    assert [span.name for span in spans] == ["invoke_agent memagent"]
    assert spans.reading().status.status_code == trace.StatusCode.ERROR


def test_without_an_sdk_it_is_the_same_reading() -> None:
    backend = ScriptedBackend(NOTES)
    turns = traced(loop(backend), model=backend.name, tracer_provider=trace.NoOpTracerProvider())
    assert run(turns, backend).answer == ANSWER


@pytest.mark.heavy
def test_without_opentelemetry_the_loop_is_the_loop() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None
from memagent_integrations import Reader, ScriptedBackend
from memagent_integrations.telemetry import traced, under
turns = (prompt for prompt in ())
assert traced(turns, model="scripted") is turns
with under(None):
    assert Reader(ScriptedBackend(["memory", "answer"])).read("q", "text").answer == "answer"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
