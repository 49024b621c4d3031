"""Models of this package in LangChain's traces, counts and caches; and what else a call of the runnable gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict

import pytest
from helpers.scripted_chat import (
    ANSWER,
    DOCUMENT,
    INPUT,
    SMALL,
    WAYS,
    Loader,
    Model,
    Retriever,
    call,
    count,
    reader,
    scripted,
)
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.tracers import Run
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from memagent_integrations import BackendError, MemAgentError, MemAgentReader, Reader, ScriptedBackend, UsageError
from memagent_integrations.records import Plan, Prompt, Reading, Reply, Usage

every_way = pytest.mark.parametrize("how", WAYS)


def backend(**settings: Any) -> ScriptedBackend:
    def script(prompt: Prompt) -> str:
        return f"note {prompt.index}" if prompt.phase == "memory" else ANSWER

    return ScriptedBackend(script, **settings)


async def run_of(subject: Any, how: str) -> Run:
    collector = RunCollectorCallbackHandler()
    await call(subject, how, INPUT, {"callbacks": [collector], "tags": ["mine"]})
    (root,) = collector.traced_runs
    return root


@every_way
async def test_a_backend_is_traced_as_a_model_of_langchain(how: str) -> None:
    """The runs are those of a chat model with the same calls, but for the class."""
    own, chat = await run_of(scripted(), how), await run_of(reader(), how)
    ours = [(run.name, run.run_type, sorted(run.tags or [])) for run in own.child_runs]
    assert ours == [(run.name, run.run_type, sorted(run.tags or [])) for run in chat.child_runs]
    first, last = own.child_runs[0], own.child_runs[-1]
    assert (first.name, sorted(first.tags or [])) == ("memagent_memory", ["memagent:memory", "mine", "nostream"])
    assert first.metadata["memagent_step"] == 0
    assert first.metadata["ls_model_name"] == "scripted"
    assert first.extra["invocation_params"]["max_tokens"] == 50
    assert "Some words of a long document." in str(first.inputs)
    assert (last.name, (last.outputs or {})["generations"][0][0]["text"]) == ("memagent_answer", ANSWER)
    assert all(run.parent_run_id == own.id for run in own.child_runs)


@every_way
async def test_usage_handlers_count_the_calls_of_a_backend(how: str) -> None:
    with get_usage_metadata_callback() as usage:
        message = await call(scripted(), how)
    assert usage.usage_metadata["scripted"]["total_tokens"] == message.usage_metadata["total_tokens"]


@every_way
async def test_usage_that_is_not_known_stays_unknown(how: str) -> None:
    replies = [Reply(text="note", usage=Usage()), Reply(text="seven", usage=Usage())]
    with get_usage_metadata_callback() as usage:
        message = await call(MemAgentReader(ScriptedBackend(replies)), how, {"question": "Why?", "context": "x"})
    assert (message.usage_metadata, usage.usage_metadata) == (None, {})


@pytest.fixture
def cache() -> Iterator[InMemoryCache]:
    one = InMemoryCache()
    set_llm_cache(one)
    yield one
    set_llm_cache(None)


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_langchains_cache_saves_the_calls_of_a_backend(how: str, cache: InMemoryCache) -> None:
    model = backend()
    first = await call(MemAgentReader(model, **SMALL), how)
    calls = len(model.prompts)
    second = await call(MemAgentReader(model, **SMALL), how)
    assert (len(model.prompts), second.text) == (calls, ANSWER)
    assert second.response_metadata["memagent"]["memory"] == first.response_metadata["memagent"]["memory"]
    assert second.response_metadata["memagent"]["finish_reason"] == "stop"
    assert second.usage_metadata["total_tokens"] == first.usage_metadata["total_tokens"]
    await call(MemAgentReader(model, **(SMALL | {"output_tokens": 99})), how)
    assert len(model.prompts) > calls


@every_way
@pytest.mark.parametrize("kind", ["a backend", "a model"])
async def test_the_cache_of_a_model_that_tells_no_usage(kind: str, how: str, cache: InMemoryCache) -> None:
    def asked() -> MemAgentReader:
        silent = ScriptedBackend(lambda prompt: Reply(text=ANSWER, usage=Usage()))
        return MemAgentReader(silent) if kind == "a backend" else reader(FakeListChatModel(responses=[ANSWER]))

    for _ in range(2):
        message = await call(asked(), how)
        assert (message.text, message.usage_metadata) == (ANSWER, None)


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("lost", ["note", "seven"])
@pytest.mark.parametrize("kind", ["a backend", "a model", "a model in a chain"])
async def test_an_empty_reply_is_not_asked_of_the_cache_again(
    kind: str, lost: str, how: str, cache: InMemoryCache
) -> None:
    asked: list[str] = []

    def reply(prompt: str) -> str:
        said = "note" if "<section>" in prompt else "seven"
        asked.append(said)
        return "" if said == lost and asked.count(said) == 1 else said

    subject: Any = Model(script=reply)
    options: dict[str, Any] = {"window": 8192, "tokenizer": count}
    if kind == "a backend":
        subject, options = ScriptedBackend(lambda prompt: reply(prompt.messages[-1].content)), {}
    elif kind == "a model in a chain":
        subject = subject.with_config(tags=["x"]) | StrOutputParser()
    reader = MemAgentReader(subject, **options)
    for _ in range(2):
        message = await call(reader, how, {"question": "Why?", "context": "x"})
        assert (message.text, message.response_metadata["memagent"]["memory"]) == ("seven", "note")


async def test_a_cache_tells_models_and_schemas_apart(cache: InMemoryCache) -> None:
    first, second = backend(), backend()
    second.name = "another"
    MemAgentReader(first, **SMALL).invoke(INPUT)
    MemAgentReader(second, **SMALL).invoke(INPUT)
    assert len(second.prompts) == len(first.prompts)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    with pytest.raises(BackendError, match="does not fit"):
        MemAgentReader(first, output=schema, **SMALL).invoke(INPUT)


@every_way
async def test_reasoning_and_the_reason_of_the_end_survive(how: str) -> None:
    replies = [Reply(text="note", reasoning="Hm."), Reply(text="seven", reasoning="So.", finish_reason="length")]
    subject = MemAgentReader(ScriptedBackend(replies))
    if how.startswith("a"):
        reading = await subject.areading({"question": "Why?", "context": "x"})
    else:
        reading = subject.reading({"question": "Why?", "context": "x"})
    assert [step.reply.reasoning for step in reading.steps] == ["Hm.", "So."]
    assert reading.steps[-1].reply.finish_reason == "length"


class Messages(TypedDict, total=False):
    question: str
    context: str
    messages: Annotated[list[Any], add_messages]


@pytest.mark.parametrize("make", [scripted, reader])
async def test_langgraph_streams_an_answer_once_that_a_node_writes_into_the_messages(
    make: Callable[[], MemAgentReader],
) -> None:
    for node in (make().as_node(answer_key="messages"), lambda _: {"messages": [make().invoke(INPUT)]}):
        builder = StateGraph(Messages)
        builder.add_node("read", node)
        builder.add_edge(START, "read")
        graph: Any = builder.compile()
        streamed = [message for message, _ in graph.stream(INPUT, stream_mode="messages")]
        assert "".join(message.text for message in streamed) == ANSWER
        streamed = [message async for message, _ in graph.astream(INPUT, stream_mode="messages")]
        assert "".join(message.text for message in streamed) == ANSWER
        (id,) = {message.id for message in streamed}
        assert id


@pytest.mark.parametrize("make", [scripted, reader])
def test_two_answers_of_one_reader_are_two_messages(make: Callable[[], MemAgentReader]) -> None:
    subject = make()
    first, second = subject.invoke(INPUT), subject.invoke(INPUT)
    assert len(add_messages([first], [second])) == 2
    assert len(add_messages([], subject.batch([INPUT, INPUT]))) == 2


async def test_answers_of_a_backend_are_tokens_of_langgraphs_stream_of_messages() -> None:
    class State(TypedDict, total=False):
        question: str
        context: str
        answer: str

    builder = StateGraph(State)
    builder.add_node("read", scripted().as_node())
    builder.add_edge(START, "read")
    graph: Any = builder.compile()
    sync = [message.text for message, _ in graph.stream(INPUT, stream_mode="messages") if message.text]
    asynchronous = [message.text async for message, _ in graph.astream(INPUT, stream_mode="messages") if message.text]
    assert sync == asynchronous == ["the", " answer", " is", " seven"]


@every_way
async def test_closing_a_stream_closes_the_stream_of_the_backend(how: str) -> None:
    closed: list[str] = []

    class Open(ScriptedBackend):
        def stream(self, prompt: Prompt) -> Any:
            try:
                yield "the"
                yield from super().stream(prompt)
            finally:
                closed.append("sync")

    subject = MemAgentReader(Open(["note", ANSWER]))
    task: Any = {"question": "Why?", "context": "x"}
    if how.startswith("a"):
        stream: Any = subject.astream(task)
        assert (await anext(stream)).text == "the"
        await stream.aclose()
    else:
        pieces: Any = subject.stream(task)
        assert next(pieces).text == "the"
        pieces.close()
    assert closed == ["sync"]


@every_way
async def test_a_failing_backend_is_a_failed_run(how: str) -> None:
    seen: list[BaseException] = []

    class Errors(BaseCallbackHandler):
        def on_llm_error(self, error: BaseException, **_: Any) -> None:
            seen.append(error)

    with pytest.raises(BackendError, match="the script ended"):
        await call(MemAgentReader(ScriptedBackend(["note"])), how, INPUT, {"callbacks": [Errors()]})
    assert [type(error) for error in seen] == [BackendError]


@every_way
async def test_a_call_fails_the_same_with_and_without_handlers(how: str) -> None:
    """Without any it is made without a run; what is no error of this package becomes one either way."""

    def script(prompt: Prompt) -> str:
        raise ConnectionError("the cable is cut")

    failing, told = MemAgentReader(ScriptedBackend(script)), []
    for callbacks in ([], [RunCollectorCallbackHandler()]):
        with pytest.raises(BackendError, match="the cable is cut") as failure:
            await call(failing, how, INPUT, {"callbacks": callbacks})
        told.append((str(failure.value), failure.value.retryable))
    assert told[0] == told[1]


@every_way
async def test_what_a_filter_withholds_is_asked_for_once_with_and_without_handlers(how: str) -> None:
    asked: list[int] = []

    def script(prompt: Prompt) -> str:
        asked.append(prompt.index)
        raise RuntimeError("content_filter: the response was filtered")

    calls, told = [], []
    for callbacks in ([], [RunCollectorCallbackHandler()]):
        asked.clear()
        with pytest.raises(MemAgentError) as failure:
            await call(MemAgentReader(ScriptedBackend(script)), how, INPUT, {"callbacks": callbacks})
        calls.append(list(asked))
        told.append(str(failure.value))
    assert calls == [[0], [0]]
    assert told[0] == told[1]


# ---- plans and readings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_reading_is_what_the_reader_gives(is_async: bool) -> None:
    subject, collector = scripted(), RunCollectorCallbackHandler()
    config: Any = {"callbacks": [collector]}
    reading = await subject.areading(INPUT, config) if is_async else subject.reading(INPUT, config)
    assert isinstance(reading, Reading)
    expected = Reader(backend(), **SMALL).read("Why?", DOCUMENT)
    assert (reading.answer, reading.memory, len(reading.steps)) == (ANSWER, expected.memory, len(expected.steps))
    (run,) = collector.traced_runs
    assert isinstance((run.outputs or {})["output"], AIMessage)
    bound: Any = {"question": "Why?"}
    again = await subject.areading(DOCUMENT, **bound) if is_async else subject.reading(DOCUMENT, **bound)  # type: ignore[arg-type]
    assert again.memory == reading.memory


@pytest.mark.parametrize("context", [DOCUMENT, Loader(3), Retriever(), Retriever().with_retry()], ids=type)
def test_a_plan_is_the_readers(context: Any) -> None:
    model = Model()
    subject = reader(model)
    plan = subject.plan({"question": "Why?", "context": context})
    assert isinstance(plan, Plan)
    assert model.prompts == []
    details = subject.invoke({"question": "Why?", "context": context}).response_metadata["memagent"]
    assert (plan.chunks, plan.calls) == (details["chunks"], details["calls"])
    assert subject.plan("Why?", context=context) == plan  # type: ignore[arg-type]


def test_a_plan_does_not_use_up_an_iterator() -> None:
    with pytest.raises(UsageError, match="a plan would use up this iterator"):
        reader().plan({"question": "Why?", "context": iter(["x"])})
    with pytest.raises(UsageError, match="no context"):
        reader().plan({"question": "Why?"})  # type: ignore[typeddict-item]


# ---- nodes -----------------------------------------------------------------------------------------------


class State(TypedDict, total=False):
    question: str
    context: Any
    memory: str
    answer: str
    messages: Annotated[list[BaseMessage], add_messages]
    notes: str
    usage: Any
    cited: Any
    reading: Any
    parsed: Any


async def run_node(is_async: bool, state: Any, subject: MemAgentReader | None = None, **keys: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("read", (subject or scripted()).as_node(**keys))
    builder.add_edge(START, "read")
    graph: Any = builder.compile()
    return await graph.ainvoke(state) if is_async else await asyncio.to_thread(graph.invoke, state)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_node_gives_the_message_where_the_key_is_messages(is_async: bool) -> None:
    state = await run_node(is_async, {**INPUT, "messages": [("user", "Hello")]}, answer_key="messages")
    greeting, message = state["messages"]
    assert (greeting.text, type(message), message.text) == ("Hello", AIMessage, ANSWER)
    assert message.usage_metadata["total_tokens"] > 0
    assert message.response_metadata["memagent"]["chunks"] == 4


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_node_gives_the_parts_that_are_named(is_async: bool) -> None:
    parts = {"answer": "answer", "notes": "memory", "usage": "usage", "cited": "citations", "reading": "reading"}
    state = await run_node(is_async, INPUT, parts={**parts, "messages": "messages"})
    assert (state["answer"], state["notes"]) == (ANSWER, "note 3")
    assert state["usage"] == state["messages"][0].usage_metadata
    assert isinstance(state["reading"], Reading)
    assert state["cited"] == state["messages"][0].response_metadata["memagent"]["citations"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_node_starts_from_the_memory_in_the_state(is_async: bool) -> None:
    model = backend()
    subject = MemAgentReader(model, **SMALL)
    keys: Any = {"memory_key": "memory", "parts": {"memory": "memory"}}
    await run_node(is_async, {**INPUT, "memory": "an old note"}, subject, **keys)
    assert "<memory>\nan old note\n</memory>" in model.prompts[0].messages[0].content
    state = await run_node(is_async, INPUT, subject, **keys)
    assert state["memory"] == "note 3"


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_node_takes_its_question_from_messages(is_async: bool) -> None:
    model = backend()
    state = {"messages": [("user", "Why?")], "context": DOCUMENT}
    state = await run_node(
        is_async, state, MemAgentReader(model, **SMALL), question_key="messages", answer_key="messages"
    )
    assert "<question>\nWhy?\n</question>" in model.prompts[0].messages[0].content
    assert [message.type for message in state["messages"]] == ["human", "ai"]


def test_a_part_that_there_is_not_is_told_at_once() -> None:
    with pytest.raises(UsageError, match="no part 'text' of a reading; there are: answer, message"):
        scripted().as_node(parts={"answer": "text"})
