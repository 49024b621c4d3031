from __future__ import annotations

import asyncio
import gc
import json
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain.chat_models import init_chat_model
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.documents.base import Blob
from langchain_core.language_models import BaseChatModel, FakeListChatModel, FakeListLLM, GenericFakeChatModel
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableGenerator, RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphBubbleUp
from langgraph.graph import END, START, StateGraph
from pydantic import Field

import memagent_integrations
from memagent_integrations import (
    BackendError,
    ContextOverflow,
    Journal,
    MemAgentReader,
    MissingExtra,
    PromptSet,
    Reader,
    ScriptedBackend,
    UsageError,
    policies,
)
from memagent_integrations.langchain import ChatModelBackend, ReaderInput
from memagent_integrations.records import Message, Prompt, Usage

count = ScriptedBackend([]).count
DOCUMENT = "Some words of a long document. " * 100  # 700 of the scripted tokens: four chunks of 200
INPUT: ReaderInput = {"question": "Why?", "context": DOCUMENT}
SMALL: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50}
ANSWER = "the answer is seven"


def say(text: str) -> str:
    return text.partition("<memory>")[2].partition("</memory>")[0].strip() + " note" if "<section>" in text else ANSWER


class Model(BaseChatModel):
    """Answers what `script` says, word by word when streamed; keeps what it was asked and with which options."""

    script: Callable[[str], str | AIMessage] = say
    asked: list[str] = Field(default_factory=list)
    options: list[dict[str, Any]] = Field(default_factory=list)
    usage: bool = True
    failures: list[BaseException] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _answer(self, messages: list[BaseMessage], options: dict[str, Any]) -> AIMessage:
        self.asked.append(str(messages[-1].text))
        self.options.append(options)
        if self.failures:
            raise self.failures.pop(0)
        told = self.script(self.asked[-1])
        if isinstance(told, AIMessage):
            return told
        usage = {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12, "input_token_details": {"cache_read": 4}} if self.usage else None
        return AIMessage(told, usage_metadata=usage, response_metadata={"finish_reason": "stop", "model_name": "scripted-1"})

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._answer(messages, options))])

    async def _agenerate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._answer(messages, options))])

    def _stream(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> Iterator[ChatGenerationChunk]:
        whole = self._answer(messages, options)
        for word in str(whole.text).replace(" ", "| ").split("|"):
            yield ChatGenerationChunk(message=AIMessageChunk(word))
        yield ChatGenerationChunk(
            message=AIMessageChunk("", usage_metadata=whole.usage_metadata, response_metadata=whole.response_metadata, chunk_position="last")
        )

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in self._stream(messages, **options):
            yield chunk


def reader(model: Any = None, **settings: Any) -> MemAgentReader:
    return MemAgentReader(model or Model(), **({"tokenizer": count} | SMALL | settings))


def scripted(**settings: Any) -> MemAgentReader:
    def script(prompt: Prompt) -> str:
        return f"note {prompt.index}" if prompt.phase == "memory" else ANSWER

    return MemAgentReader(ScriptedBackend(script), **(SMALL | settings))


def total(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


# ---- what comes out --------------------------------------------------------------------------------------------------------


def test_the_reading_is_the_readers() -> None:
    model = Model()
    message = reader(model).invoke(INPUT)
    reading = Reader(ChatModelBackend(Model(), tokenizer=count), **SMALL).read("Why?", DOCUMENT)
    assert (message.text, message.response_metadata["memagent"]["memory"]) == (reading.answer, reading.memory)
    assert reading.memory.endswith("note note note note")
    assert "".join(text.partition("<section>\n")[2].partition("\n</section>")[0] for text in model.asked) == DOCUMENT
    assert message.response_metadata["memagent"] == {
        "model": "langchain:Model",
        "chunks": 4,
        "calls": 5,
        "outcomes": {"updated": 4, "answered": 1},
        "cut": [],
        "finish_reason": "stop",
        "memory": reading.memory,
    }
    assert message.usage_metadata == {"input_tokens": 50, "output_tokens": 10, "total_tokens": 60, "input_token_details": {"cache_read": 20}}


@pytest.mark.parametrize("make", [reader, scripted])
async def test_all_ways_to_call_give_the_same(make: Callable[[], MemAgentReader]) -> None:
    message = make().invoke(INPUT)
    chunks = list(make().stream(INPUT))
    achunks = [chunk async for chunk in make().astream(INPUT)]
    assert message.text == ANSWER
    assert await make().ainvoke(INPUT) == message
    assert [chunk.text for chunk in chunks] == [chunk.text for chunk in achunks] == ["the", " answer", " is", " seven", ""]
    for whole in (total(chunks), total(achunks)):
        assert (whole.content, whole.usage_metadata, whole.response_metadata) == (message.content, message.usage_metadata, message.response_metadata)
    assert make().batch([INPUT, INPUT], {"max_concurrency": 2}) == [message] * 2
    assert await make().abatch([INPUT, INPUT]) == [message] * 2


async def test_parsers_follow_it() -> None:
    chain = reader() | StrOutputParser()
    assert chain.invoke(INPUT) == await chain.ainvoke(INPUT) == ANSWER
    assert "".join(chain.stream(INPUT)) == "".join([text async for text in chain.astream(INPUT)]) == ANSWER
    assert len(list(chain.stream(INPUT))) > 3


async def test_unknown_usage_is_absent() -> None:
    subject = reader(Model(usage=False))
    assert subject.invoke(INPUT).usage_metadata is None
    assert total(list(subject.stream(INPUT))).usage_metadata is None


def test_usage_without_a_cache_tells_none() -> None:
    told = AIMessage("x", usage_metadata={"input_tokens": 1, "output_tokens": 1, "total_tokens": 2})
    usage = reader(Model(script=lambda _: told)).invoke(INPUT).usage_metadata
    assert usage == {"input_tokens": 5, "output_tokens": 5, "total_tokens": 10}


def test_usage_is_counted_once_by_langchains_own_counter() -> None:
    with get_usage_metadata_callback() as callback:
        usage = reader().invoke(INPUT).usage_metadata
    assert usage is not None
    assert callback.usage_metadata["scripted-1"]["total_tokens"] == usage["total_tokens"] == 60


def test_thinking_is_neither_memory_nor_answer() -> None:
    blocks = AIMessage(content=[{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "seven"}])
    message = reader(Model(script=lambda text: "<think>so</think>note" if "<section>" in text else blocks)).invoke(INPUT)
    assert message.response_metadata["memagent"]["memory"] == "note"
    assert message.content == "seven"
    reply = ChatModelBackend(Model(script=lambda _: blocks), tokenizer=count).complete(PROMPT)
    assert (reply.text, reply.reasoning) == ("seven", "Hm.")


async def test_async_calls_run_side_by_side() -> None:
    together = asyncio.Barrier(4)

    class Waiting(Model):
        async def _agenerate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
            await together.wait()
            return await super()._agenerate(messages, stop, run_manager, **options)

    model = Waiting()
    async with asyncio.timeout(20):
        messages = await reader(model).abatch([INPUT] * 4)
    assert [message.text for message in messages] == [ANSWER] * 4


async def test_batches_keep_to_max_concurrency_and_hand_back_errors() -> None:
    subject = reader()
    results = subject.batch([INPUT, {"question": "", "context": "x"}], {"max_concurrency": 1}, return_exceptions=True)
    assert isinstance(results[0], AIMessage)
    assert isinstance(results[1], UsageError)
    indexes = [index for index, _ in subject.batch_as_completed([INPUT, INPUT])]
    assert sorted(indexes) == [0, 1]


def test_schemas_and_graph() -> None:
    subject = reader()
    assert subject.get_input_jsonschema()["$defs"]["ReaderInput"]["required"] == ["question", "context"]
    assert subject.OutputType is AIMessage
    assert [node.name for node in subject.get_graph().nodes.values()][1] == "MemAgentReader"


# ---- what goes in -----------------------------------------------------------------------------------------------------------


class Loader(BaseLoader):
    def __init__(self, pages: int = 4) -> None:
        self.pages, self.given = pages, 0

    def lazy_load(self) -> Iterator[Document]:
        for number in range(self.pages):
            self.given += 1
            yield Document(f"Page {number} has some words. " * 30, metadata={"source": "book", "page": number})


class Retriever(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(f"what is said of {query}")]


@pytest.mark.parametrize(
    ("context", "seen"),
    [
        (Document("page one"), "page one"),
        ([Document("one"), Document("two")], "one\n\ntwo"),
        (Blob.from_data("from a blob"), "from a blob"),
        (Retriever(), "what is said of Why?"),
        (iter(["some ", "text"]), "some text"),
        (Loader(2), "Page 1 has some words."),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_contexts(context: Any, seen: str) -> None:
    model = Model()
    one_shot = isinstance(context, Iterator)
    reader(model, chunk_tokens=1000).invoke({"question": "Why?", "context": context})
    assert seen in model.asked[0]
    if not one_shot:
        await reader(model, chunk_tokens=1000).ainvoke({"question": "Why?", "context": context})
        assert [text for text in model.asked if seen in text] == [model.asked[0], model.asked[2]]


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text in a file", encoding="utf-8")
    for context in (tmp_path / "a.txt", Blob.from_path(tmp_path / "a.txt")):
        model = Model()
        collector = RunCollectorCallbackHandler()
        reader(model).invoke({"question": "q", "context": context}, {"callbacks": [collector]})
        assert "text in a file" in model.asked[0]
        assert collector.traced_runs[0].inputs["context"] == str(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="reading the document failed"):
        reader().invoke({"question": "q", "context": Blob.from_path(tmp_path / "none.txt")})


async def test_an_async_iterator() -> None:
    async def lines() -> AsyncIterator[str]:
        for number in range(100):
            yield f"line {number} with some words\n"

    model = Model()
    assert (await reader(model).ainvoke({"question": "q", "context": lines()})).text == ANSWER
    assert "line 99" in model.asked[-2]
    with pytest.raises(UsageError, match="async"):
        reader(model).invoke({"question": "q", "context": lines()})


def test_a_loader_is_read_as_it_goes() -> None:
    loader, given = Loader(50), []

    def script(text: str) -> str:
        given.append(loader.given)
        return say(text)

    reader(Model(script=script)).invoke({"question": "q", "context": loader.lazy_load()})
    assert given[0] < 10
    assert given == sorted(given)
    assert given[-1] == 50


@pytest.mark.parametrize(
    ("value", "options", "complaint"),
    [
        ("just text", {}, "dict with 'question' and 'context'"),
        ({"question": "q"}, {}, "dict with 'question' and 'context'"),
        ({"question": 7, "context": "x"}, {}, "has to be text, not int"),
        ({"question": "q", "context": "x"}, {"stop": ["."]}, "takes no stop"),
        ({"question": "q", "context": 7}, {}, "int is not a document"),
        ({"question": "q", "context": ""}, {}, "document is empty"),
    ],
)
async def test_bad_input(value: Any, options: dict[str, Any], complaint: str) -> None:
    subject = reader()
    with pytest.raises(UsageError, match=complaint):
        subject.invoke(value, **options)
    with pytest.raises(UsageError, match=complaint):
        list(subject.stream(value, **options))
    with pytest.raises(UsageError, match=complaint):
        await subject.ainvoke(value, **options)
    with pytest.raises(UsageError, match=complaint):
        [chunk async for chunk in subject.astream(value, **options)]


# ---- input that comes in pieces ---------------------------------------------------------------------------------------------


async def achunks_of(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


PIECES: list[tuple[list[Any], str]] = [
    ([{"question": "Why?", "context": "whole"}], "whole"),
    ([{"context": Document("d0")}, {"question": "Wh"}, {"context": Document("d1")}, {"question": "y?"}], "d0\n\nd1"),
    ([{"question": "Why?", "context": Document(f"d{n}")} for n in range(3)], "d0\n\nd1\n\nd2"),
    ([{"question": "Why?"}, {"context": "some "}, {"context": "text"}], "some text"),
    ([{"question": "Why?"}, {"context": Retriever()}], "what is said of Why?"),
]


@pytest.mark.parametrize(("pieces", "seen"), PIECES, ids=str)
async def test_pieces_are_put_together(pieces: list[Any], seen: str) -> None:
    model = Model()
    chunks = list(reader(model).transform(iter(pieces)))
    chunks += [chunk async for chunk in reader(model).atransform(achunks_of(pieces))]
    assert "".join(chunk.text for chunk in chunks) == ANSWER * 2
    for text in (model.asked[0], model.asked[2]):
        assert f"<section>\n{seen}\n</section>" in text
        assert "<question>\nWhy?\n</question>" in text


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([Document("d0"), Document("d1")], "bind the question"),
        (["some ", "text"], "bind the question"),
        ([{"question": AIMessageChunk("Why?")}, {"context": "x"}], "bind the question"),
        ([{"question": "a", "context": "x"}, {"question": "b", "context": "y"}], "more than one question"),
        ([{"question": "a"}], "no context"),
        ([], "no context"),
    ],
    ids=str,
)
async def test_pieces_that_make_no_input(pieces: list[Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        list(reader().transform(iter(pieces)))
    with pytest.raises(UsageError, match=complaint):
        [chunk async for chunk in reader().atransform(achunks_of(pieces))]


@pytest.mark.parametrize("item", [str, Document], ids=["str", "Document"])
async def test_a_stream_with_a_bound_question_is_read_as_it_comes(item: Any) -> None:
    given: list[int] = []
    seen: list[int] = []

    def pages(_: Any) -> Iterator[Any]:
        for number in range(60):
            given.append(number)
            yield item(f"Page {number} has some words. " * 10)

    async def apages(_: Any) -> AsyncIterator[Any]:
        for page in pages(_):
            yield page

    def script(text: str) -> str:
        seen.append(len(given))
        return say(text)

    model = Model(script=script)
    chain = RunnableGenerator(pages, apages) | reader(model).bind(question="Why?")
    assert "".join(chunk.text for chunk in chain.stream("go")) == ANSWER
    asked = list(model.asked)
    assert "Page 59" in asked[-2]
    assert seen[0] < 20
    assert seen[-1] == 60
    given.clear()
    assert "".join([chunk.text async for chunk in chain.astream("go")]) == ANSWER
    assert model.asked == asked * 2
    assert seen[len(asked)] < 20


async def test_a_bound_question_with_one_input() -> None:
    model = Model()
    chain = RunnableLambda(lambda text: text) | reader(model).bind(question="Why?")
    loader = RunnableLambda(lambda _: Loader(1)) | reader(model).bind(question="Why?")
    for answer in (chain.invoke("text"), total(list(chain.stream("text"))), total([chunk async for chunk in loader.astream("go")])):
        assert answer.text == ANSWER
    assert "Page 0" in model.asked[-2]


async def test_a_dict_with_a_lazy_value_goes_through_a_chain() -> None:
    loader = Loader(5)
    chain: Any = {"question": lambda _: "Why?", "context": lambda _: loader.lazy_load()} | reader()
    assert chain.invoke("go").text == "".join(chunk.text for chunk in chain.stream("go")) == ANSWER
    assert loader.given == 10
    assert "".join([chunk.text async for chunk in chain.astream("go")]) == ANSWER


# ---- runs, events ------------------------------------------------------------------------------------------------------------


class Events(BaseCallbackHandler):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.events.append((name, data))


class AsyncEvents(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.loops.add(asyncio.get_running_loop())
        self.events.append((name, data))


async def traced(subject: Any, how: str, value: Any = INPUT) -> Any:
    collector = RunCollectorCallbackHandler()
    config: Any = {"callbacks": [collector], "tags": ["mine"], "metadata": {"user": "u"}}
    if how == "invoke":
        subject.invoke(value, config)
    elif how == "ainvoke":
        await subject.ainvoke(value, config)
    elif how == "stream":
        list(subject.stream(value, config))
    else:
        [chunk async for chunk in subject.astream(value, config)]
    (root,) = collector.traced_runs
    return root


WAYS = ["invoke", "ainvoke", "stream", "astream"]


@pytest.mark.parametrize("how", WAYS)
async def test_each_call_is_a_child_run(how: str) -> None:
    root = await traced(reader(), how)
    assert (root.name, root.run_type, root.error) == ("MemAgentReader", "chain", None)
    assert root.inputs == {"question": "Why?", "context": "<3,100 characters>"}
    assert [child.name for child in root.child_runs] == ["memagent_memory"] * 4 + ["memagent_answer"]
    assert {child.parent_run_id for child in root.child_runs} == {root.id}
    assert [child.run_type for child in root.child_runs] == ["llm"] * 5
    memory, answer = root.child_runs[1], root.child_runs[-1]
    assert set(memory.tags) == {"mine", "memagent:memory", "nostream"}
    assert set(answer.tags) == {"mine", "memagent:answer"}
    wanted = {"user": "u", "memagent_step": 1, "memagent_phase": "memory"}
    assert wanted.items() <= memory.extra["metadata"].items()
    assert "Some words" not in json.dumps(root.inputs)


@pytest.mark.parametrize("how", WAYS)
async def test_a_trace_may_hold_the_document(how: str) -> None:
    assert (await traced(reader(trace_inputs="full"), how)).inputs == INPUT


async def test_what_stands_for_a_context_in_a_trace() -> None:
    async def elided(context: Any) -> Any:
        return (await traced(reader(), "invoke", {"question": "q", "context": context, "more": DOCUMENT})).inputs

    assert await elided([Document("a"), Document("b")]) == {"question": "q", "context": "<list of 2>"}
    assert await elided(iter(["a"])) == {"question": "q", "context": "<list_iterator>"}
    assert await elided(Blob.from_data("b")) == {"question": "q", "context": "<Blob>"}
    assert (await traced(reader().bind(question="q"), "invoke", "text")).inputs == {"input": "<4 characters>"}


@pytest.mark.parametrize("how", WAYS)
async def test_a_failed_reading_is_a_failed_run(how: str) -> None:
    collector = RunCollectorCallbackHandler()
    subject = MemAgentReader(ScriptedBackend([BackendError("the server is gone")]), **SMALL).with_config(callbacks=[collector])
    with pytest.raises(BackendError):
        await traced(subject, how)
    assert "the server is gone" in str(collector.traced_runs[0].error)


@pytest.mark.parametrize("make", [reader, scripted])
@pytest.mark.parametrize("how", WAYS)
async def test_each_memory_is_an_event(make: Callable[[], MemAgentReader], how: str) -> None:
    seen, aseen = Events(), AsyncEvents()
    handlers = [seen, aseen] if how.startswith("a") else [seen]
    await traced(make().with_config(callbacks=handlers), how)
    assert [name for name, _ in seen.events] == ["memagent_step"] * 4
    data = seen.events[1][1]
    assert (data["step"], data["outcome"], data["cut"]) == (1, "updated", False)
    assert data["memory"].endswith("note" if make is reader else "note 1")
    assert data["chunk"]["end"] - data["chunk"]["start"] > 500
    json.dumps(seen.events)
    if how.startswith("a"):
        assert aseen.events == seen.events
        assert aseen.loops == {asyncio.get_running_loop()}


async def test_astream_events_show_steps_and_only_the_answers_tokens() -> None:
    events = [event async for event in reader().astream_events(INPUT, version="v2", exclude_tags=["nostream"])]
    assert [event["data"]["step"] for event in events if event["event"] == "on_custom_event"] == [0, 1, 2, 3]
    tokens = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == ANSWER
    assert {event["name"] for event in events if event["event"] == "on_chat_model_stream"} == {"memagent_answer"}


def test_a_retriever_is_part_of_the_trace() -> None:
    collector = RunCollectorCallbackHandler()
    reader().invoke({"question": "q", "context": Retriever()}, {"callbacks": [collector]})
    assert collector.traced_runs[0].child_runs[0].run_type == "retriever"


# ---- in LangGraph ----------------------------------------------------------------------------------------------------------


class State(TypedDict, total=False):
    question: str
    context: str
    answer: str


def graph() -> Any:
    builder = StateGraph(State)
    builder.add_node("read", reader() | (lambda message: {"answer": message.text}))
    builder.add_edge(START, "read")
    builder.add_edge("read", END)
    return builder.compile()


async def test_a_node_of_a_graph() -> None:
    assert graph().invoke(INPUT)["answer"] == ANSWER
    assert (await graph().ainvoke(INPUT))["answer"] == ANSWER


async def test_a_graph_streams_steps_and_the_answer() -> None:
    def check(events: list[tuple[str, Any]]) -> None:
        steps = [data["memagent_step"]["step"] for mode, data in events if mode == "custom"]
        assert steps == [0, 1, 2, 3]
        assert "".join(data[0].content for mode, data in events if mode == "messages") == ANSWER

    check(list(graph().stream(INPUT, stream_mode=["custom", "messages"])))
    check([event async for event in graph().astream(INPUT, stream_mode=["custom", "messages"])])


# ---- leaving early ---------------------------------------------------------------------------------------------------------


class Ends(BaseCallbackHandler):
    def __init__(self) -> None:
        self.ends: list[str] = []

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.ends.append(f"llm {type(error).__name__}")

    def on_chain_error(self, error: BaseException, **_: Any) -> None:
        self.ends.append(f"chain {type(error).__name__}")


async def test_closing_a_stream_closes_the_models() -> None:
    ends = Ends()
    stream = reader().astream(INPUT, {"callbacks": [ends]})
    assert (await anext(stream)).text == "the"
    await stream.aclose()
    assert sorted(ends.ends) == ["chain GeneratorExit", "llm GeneratorExit"]
    ends = Ends()
    pieces = reader().stream(INPUT, {"callbacks": [ends]})
    assert next(pieces).text == "the"
    pieces.close()  # type: ignore[attr-defined]
    assert "llm GeneratorExit" in ends.ends


async def test_leaving_a_chains_stream_closes_the_model() -> None:
    """LangChain leaves the steps of a chain to the garbage collector, which has the event loop close them."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    closed = asyncio.Event()

    class Closed(AsyncCallbackHandler):
        async def on_llm_error(self, error: BaseException, **_: Any) -> None:
            assert isinstance(error, GeneratorExit)
            closed.set()

    stream = (reader() | StrOutputParser()).astream(INPUT, {"callbacks": [Closed()]})
    assert await anext(stream) == "the"
    await stream.aclose()
    async with asyncio.timeout(20):
        await closed.wait()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.gather(*others)
    assert not complaints


def test_a_stream_left_at_the_very_end_leaves_no_noise() -> None:
    complaints: list[Any] = []

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        stream = reader().astream(INPUT)
        assert (await anext(stream)).text == "the"
        await stream.aclose()

    asyncio.run(leave())
    gc.collect()
    assert not complaints


async def test_cancelling_stops_the_reading() -> None:
    begun, asked = asyncio.Event(), []

    class Stuck(Model):
        async def _agenerate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
            asked.append(1)
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError("never reached")

    ends = Ends()
    task = asyncio.create_task(reader(Stuck()).ainvoke(INPUT, {"callbacks": [ends]}))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asked) == 1
    assert "chain CancelledError" in ends.ends


# ---- models ------------------------------------------------------------------------------------------------------------------


PROMPT = Prompt(index=0, phase="answer", messages=(Message(role="user", content="Name it."),), max_tokens=9)


def wrapped(how: str, model: Any) -> Any:
    return {
        "plain": lambda: model,
        "retry": lambda: model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False, retry_if_exception_type=(ConnectionError,)),
        "bind": lambda: model.bind(stop=["!"]),
        "config": lambda: model.with_config(tags=["inner"]),
        "fallbacks": lambda: FakeListChatModel(responses=["x"], error_on_chunk_number=0).with_fallbacks([model]),
        "parser": lambda: model | StrOutputParser(),
        "configurable": lambda: model.configurable_fields(usage=ConfigurableField(id="usage")),
    }[how]()


@pytest.mark.parametrize("how", ["plain", "retry", "bind", "config", "parser", "configurable"])
async def test_whatever_wraps_a_model(how: str) -> None:
    subject = reader(wrapped(how, Model()))
    assert subject.invoke(INPUT).text == (await subject.ainvoke(INPUT)).text == ANSWER
    assert total(list(subject.stream(INPUT))).text == total([chunk async for chunk in subject.astream(INPUT)]).text == ANSWER


async def test_a_retry_repeats_one_call_not_the_document() -> None:
    model = Model(failures=[ConnectionError("gone")])
    root = await traced(reader(wrapped("retry", model)), "invoke")
    assert len(model.asked) == 6
    assert root.child_runs[0].name == "memagent_memory"
    first, second = root.child_runs[0].child_runs
    assert first.error
    assert not second.error
    assert "nostream" in second.tags


async def test_a_fallback_takes_over() -> None:
    spare = Model()
    subject = reader(wrapped("fallbacks", spare))
    assert "".join(chunk.text for chunk in subject.stream(INPUT)) == ANSWER
    assert len(spare.asked) == 1  # the answer alone is streamed, and only streams of the first fail
    assert total([chunk async for chunk in subject.astream(INPUT)]).text == ANSWER


def test_a_chain_of_messages_ends() -> None:
    messages = iter([AIMessage("note"), AIMessage("seven")])
    assert reader(GenericFakeChatModel(messages=messages), chunk_tokens=1000).invoke(INPUT).text == "seven"


async def test_a_plain_llm_is_asked_in_plain_text() -> None:
    asked: list[str] = []

    class LLM(FakeListLLM):
        def _call(self, prompt: str, *args: Any, **options: Any) -> str:
            asked.append(prompt)
            return super()._call(prompt, *args, **options)

    message = reader(LLM(responses=["note", "seven"]), chunk_tokens=1000).invoke(INPUT)
    assert (message.text, message.usage_metadata) == ("seven", None)
    assert asked[0].startswith("A long document")
    assert "Human:" not in asked[0]


def test_no_option_is_sent_to_a_model_that_may_not_take_it() -> None:
    model = Model()
    reader(model).invoke(INPUT)
    assert model.options == [{}] * 5
    ChatModelBackend(model, tokenizer=count, limit_parameter="num_predict").complete(PROMPT)
    assert model.options[-1] == {"num_predict": 9}


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"finish_reason": "length"}, "length"),
        ({"stop_reason": "max_tokens"}, "length"),
        ({"stop_reason": "end_turn"}, "stop"),
        ({"finish_reason": "SAFETY"}, "content_filter"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"done_reason": "stop"}, "stop"),
        ({}, None),
    ],
    ids=str,
)
def test_why_a_reply_ended(told: dict[str, Any], reason: str | None) -> None:
    backend = ChatModelBackend(Model(script=lambda _: AIMessage("x", response_metadata=told)), tokenizer=count)
    assert backend.complete(PROMPT).finish_reason == reason
    *_, reply = backend.stream(PROMPT)
    assert reply.finish_reason == reason  # type: ignore[union-attr]


def test_a_refusal_is_a_content_filter() -> None:
    backend = ChatModelBackend(Model(script=lambda _: AIMessage("no", additional_kwargs={"refusal": "I cannot"})), tokenizer=count)
    assert backend.complete(PROMPT).finish_reason == "content_filter"


def test_roles_and_usage() -> None:
    messages = (Message(role="system", content="s"), Message(role="user", content="u"), Message(role="assistant", content="a"))
    seen: list[list[str]] = []

    class Roles(Model):
        def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
            seen.append([message.type for message in messages])
            return super()._generate(messages, stop, run_manager, **options)

    reply = ChatModelBackend(Roles(), tokenizer=count).complete(Prompt(index=0, phase="answer", messages=messages, max_tokens=5))
    assert seen == [["system", "human", "ai"]]
    assert reply.usage == Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=4)
    assert reply.seconds > 0


def test_what_answers_neither_message_nor_text_is_no_model() -> None:
    with pytest.raises(UsageError, match="this one gave dict"):
        reader(Model() | (lambda message: {"text": message})).invoke(INPUT)
    for wrong in (7, None):
        with pytest.raises(UsageError, match="has to be a LangChain model"):
            MemAgentReader(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="has to be a LangChain model"):
            ChatModelBackend(wrong)  # type: ignore[arg-type]


# ---- errors ----------------------------------------------------------------------------------------------------------------


class Status(Exception):  # as the errors of most SDKs
    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


async def raised(error: BaseException, how: str) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        await traced(reader(Model(failures=[error])), how)
    return caught.value


@pytest.mark.parametrize("how", WAYS)
async def test_failures_of_the_model(how: str) -> None:
    for cause, retryable in (
        (Status(429, "slow down"), True),
        (Status(503, "later"), True),
        (Status(401, "no"), False),
        (ConnectionError("gone"), True),
        (TimeoutError("slow"), True),
    ):
        error = await raised(cause, how)
        assert isinstance(error, BackendError), error
        assert (error.retryable, error.__cause__) == (retryable, cause)
    assert isinstance(await raised(Status(400, "maximum context length is 8192"), how), ContextOverflow)


@pytest.mark.parametrize("how", WAYS)
async def test_what_is_not_the_models_failure_passes(how: str) -> None:
    for error in (TypeError("a bug"), KeyError("a bug"), GraphBubbleUp("pause")):
        assert await raised(error, how) is error


def test_an_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        reader(Model(failures=[KeyboardInterrupt()])).invoke(INPUT)


def test_a_stream_without_a_reply() -> None:
    def nothing(_: Any) -> Iterator[str]:
        yield from ()

    empty = RunnableGenerator(nothing)
    with pytest.raises(BackendError, match="without a reply"):
        list(ChatModelBackend(empty, tokenizer=count).stream(PROMPT))  # type: ignore[arg-type]


def test_an_error_holds_what_was_read() -> None:
    calls: list[str] = []

    def script(text: str) -> str:
        calls.append(text)
        if len(calls) == 3:
            raise Status(500, "down")
        return say(text)

    with pytest.raises(BackendError) as caught:
        reader(Model(script=script)).invoke(INPUT)
    assert caught.value.reading is not None
    assert len(caught.value.reading.steps) == 2


# ---- settings ----------------------------------------------------------------------------------------------------------------


def test_settings_reach_the_reader() -> None:
    model = Model()
    prompts = PromptSet(update="U {question}|{memory}|{section}", answer="A {question}|{memory}", name="mine")
    reader(model, prompts=prompts, chunk_tokens=1000).invoke(INPUT)
    assert model.asked[0].startswith("U Why?|")
    reader(model, layout="section-shared").invoke(INPUT)
    assert model.asked[2].index("<section>") < model.asked[2].index("<question>")
    with pytest.raises(ContextOverflow, match="500"):
        reader(window=500, chunk_tokens=400).invoke(INPUT)
    with pytest.raises(UsageError, match="its budget is 5"):
        reader(question_tokens=5).invoke({"question": "one two three four five six?", "context": "x"})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": "many"}, "chunk_tokens"),
        ({"overlap_tokens": 190}, "overlap_tokens"),
        ({"layout": "upside-down"}, "layout"),
        ({"layout": "memory-first", "prompts": PromptSet.default()}, "not both"),
        ({"chunk_token": 5}, "chunk_token"),
        ({"trace_inputs": "some"}, "trace_inputs"),
        ({"tokenizer": 7}, "tokenizer"),
    ],
    ids=str,
)
def test_wrong_settings_are_told_at_once(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        reader(**settings)


def test_settings_can_be_configured_at_run_time() -> None:
    subject = scripted().configurable_fields(chunk_tokens=ConfigurableField(id="chunk"))
    assert subject.with_config(configurable={"chunk": 400}).invoke(INPUT).response_metadata["memagent"]["chunks"] == 2
    assert subject.invoke(INPUT).response_metadata["memagent"]["chunks"] == 4


def test_what_the_model_lets_configure_shows() -> None:
    configurable = Model().configurable_fields(usage=ConfigurableField(id="tell_usage"))
    subject = reader(configurable)
    assert [spec.id for spec in subject.config_specs] == ["tell_usage"]
    assert subject.invoke(INPUT, {"configurable": {"tell_usage": False}}).usage_metadata is None
    assert scripted().config_specs == []


# ---- counting tokens -----------------------------------------------------------------------------------------------------------


class Endpoint(BaseHTTPRequestHandler):
    """Speaks the protocol of OpenAI, counts words, and says what is in the server's `failure`."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        if self.path.endswith("/tokenize"):
            return self._send(200, {"tokens": [1] * count(body["prompt"]), "max_model_len": 4096})
        if self.server.failure:
            return self._send(*self.server.failure)
        text = say(body["messages"][-1]["content"])
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return self._send(200, head | {"choices": [choice], "usage": usage})
        events = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]}]
        events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
        events += [{"choices": [], "usage": usage}] if body.get("stream_options", {}).get("include_usage") else []
        lines = [json.dumps(head | {"object": "chat.completion.chunk"} | event) for event in events]
        return self._send(200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream")

    def _send(self, status: int, answer: Any, kind: str = "application/json") -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Endpoint)
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.failure: tuple[int, Any] | None = None

    @property
    def model(self) -> ChatOpenAI:
        return ChatOpenAI(model="local", base_url=f"http://127.0.0.1:{self.server_port}/v1", api_key="key-of-mine", max_retries=0)

    def bodies(self) -> list[dict[str, Any]]:
        return [body for path, body, _ in self.asked if path.endswith("/completions")]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_endpoint_counts_bounds_and_tells(server: Server) -> None:
    subject = MemAgentReader(server.model, output_tokens=60, **SMALL)
    message = subject.invoke(INPUT)
    assert message.text == ANSWER
    assert message.response_metadata["memagent"]["chunks"] == 4
    assert message.response_metadata["memagent"]["model"] == "langchain:ChatOpenAI:local"
    assert {body["max_completion_tokens"] for body in server.bodies()} == {60}
    assert {key for _, _, key in server.asked} == {"Bearer key-of-mine"}
    whole = total(list(subject.stream(INPUT)))
    assert whole.usage_metadata == message.usage_metadata
    assert message.usage_metadata == {"input_tokens": 50, "output_tokens": 10, "total_tokens": 60, "input_token_details": {"cache_read": 20}}
    assert sum(body.get("prompt") == "a" for _, body, _ in server.asked) == 1  # it is asked once whether it can count
    assert ChatModelBackend(server.model).window == 4096


async def test_an_endpoint_async(server: Server) -> None:
    subject = MemAgentReader(server.model.with_retry(), **SMALL)
    assert (await subject.ainvoke(INPUT)).text == ANSWER
    assert total([chunk async for chunk in subject.astream(INPUT)]).usage_metadata is not None
    assert "stream_options" in server.bodies()[-1]


def test_options_are_sent_when_all_models_take_them(server: Server) -> None:
    ChatModelBackend(server.model.with_fallbacks([server.model])).complete(PROMPT)
    ChatModelBackend(server.model.with_fallbacks([Model()])).complete(PROMPT)
    assert [body.get("max_completion_tokens") for body in server.bodies()] == [9, None]


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (429, {"error": {"message": "slow down"}}, BackendError, True),
        (500, {"error": {"message": "down"}}, BackendError, True),
        (401, {"error": {"message": "bad key"}}, BackendError, False),
        (404, {"error": {"message": "no such model"}}, BackendError, False),
        (400, {"error": {"message": "This model's maximum context length is 4096 tokens"}}, ContextOverflow, None),
        (400, {"error": {"message": "bad", "code": "context_length_exceeded"}}, ContextOverflow, None),
        (200, {"error": {"message": "out of credit"}}, BackendError, True),
        (200, {"error": {"message": "out of credit", "code": 402}}, BackendError, False),
    ],
    ids=str,
)
def test_an_endpoint_fails(server: Server, status: int, body: Any, kind: type[Exception], retryable: bool | None) -> None:
    server.failure = status, body
    with pytest.raises(kind) as caught:
        ChatModelBackend(server.model).complete(PROMPT)
    assert getattr(caught.value, "retryable", None) is retryable
    assert caught.value.__cause__ is not None


def test_an_endpoint_is_gone(server: Server) -> None:
    model = server.model
    server.server_close()
    with pytest.raises(BackendError) as caught:
        ChatModelBackend(model, tokenizer=count).complete(PROMPT)
    assert caught.value.retryable


def test_tiktoken_counts_for_openais_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_BASE", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    backend = ChatModelBackend(ChatOpenAI(model="gpt-4o", api_key="none").bind(stop=["x"]))
    assert backend.count("hello world") == 2
    assert backend.count("") == 0
    assert backend.window is not None
    assert backend.window > 100_000  # from the model's profile
    assert ChatModelBackend(Model(), tokenizer=count, window=99).window == 99


def test_a_tokenizer_by_name_or_none_at_all() -> None:
    assert ChatModelBackend(Model(), tokenizer="approximate").count("hello") == 2
    with pytest.raises(UsageError, match="pass tokenizer="):
        MemAgentReader(Model()).invoke(INPUT)
    with pytest.raises(UsageError, match="unknown tokenizer"):
        MemAgentReader(Model(), tokenizer="nonsense").invoke(INPUT)
    with pytest.raises(UsageError, match="backend"):
        MemAgentReader(ScriptedBackend([]), tokenizer="approximate").invoke(INPUT)


# ---- models by name -----------------------------------------------------------------------------------------------------------


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="unknown model 'nothing'"):
        MemAgentReader("nothing").invoke(INPUT)


def test_a_named_backend_is_loaded_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    subject = MemAgentReader("openai:local", **SMALL)
    configurable = subject.configurable_fields(memory_tokens=ConfigurableField(id="memory"))
    for message in (*subject.batch([INPUT] * 3), configurable.invoke(INPUT, {"configurable": {"memory": 40}})):
        assert message.text == ANSWER
        assert message.response_metadata["memagent"]["model"] == "openai:local"
    assert sum(body.get("prompt") == "a" for _, body, _ in server.asked) == 1
    asked = len(server.asked)
    subject.tokenizer = "approximate"  # another counter is another backend
    assert subject.invoke(INPUT).text == ANSWER
    assert not [path for path, _, _ in server.asked[asked:] if path.endswith("/tokenize")]


def test_a_policy_brings_its_prompts_and_budgets(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    prompts = PromptSet(update="UPDATE {question} {memory} <section>{section}", answer="ANSWER {question} {memory}", name="trained")
    budgets = Reader(ScriptedBackend([]), chunk_tokens=300, memory_tokens=30).budgets
    policies.save(policies.Policy(model="openai:local", prompts=prompts, budgets=budgets), tmp_path)
    message = MemAgentReader(f"policy:{tmp_path}").invoke(INPUT)
    assert message.response_metadata["memagent"]["chunks"] == 3
    assert server.bodies()[0]["messages"][0]["content"].startswith("UPDATE Why?")
    assert MemAgentReader(f"policy:{tmp_path}", chunk_tokens=1000).invoke(INPUT).response_metadata["memagent"]["chunks"] == 1
    with pytest.raises(UsageError, match="like that of a policy"):
        MemAgentReader(f"policy:{tmp_path}", layout="memory-first").invoke(INPUT)


def test_an_answer_that_is_not_streamed_comes_from_a_call_like_the_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    MemAgentReader("openai:local", **SMALL).invoke(INPUT)
    assert not any(body.get("stream") for body in server.bodies())
    list(MemAgentReader("openai:local", **SMALL).stream(INPUT))
    assert [bool(body.get("stream")) for body in server.bodies()[-2:]] == [False, True]


def test_any_other_provider_is_langchains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_API_VERSION", "2024-10-21")
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BackendError, match="langchain:AzureChatOpenAI"):
        MemAgentReader("azure_openai:gpt-4o", tokenizer=count).with_config(max_concurrency=1).invoke({"question": "q", "context": "x"})
    with pytest.raises(UsageError, match="LangChain cannot make the model 'nobody:x'"):
        MemAgentReader("nobody:x").invoke(INPUT)
    with pytest.raises(MissingExtra) as caught:
        MemAgentReader("deepseek:x").invoke(INPUT)
    assert re.fullmatch(r"pip install (-U )?langchain-deepseek", caught.value.command)


def test_a_model_to_be_configured(server: Server) -> None:
    model = init_chat_model(model_provider="openai", base_url=server.model.openai_api_base, api_key="k", configurable_fields=("model",))
    subject = reader(model)
    assert subject.invoke(INPUT, {"configurable": {"model": "local"}}).text == ANSWER
    assert server.bodies()[0]["model"] == "local"


@pytest.mark.parametrize(
    ("blocked", "statement", "command"),
    [
        ("langchain_core", "import memagent_integrations.langchain", "pip install 'memagent-integrations[langchain]'"),
        ("langchain_core", "from memagent_integrations import MemAgentReader", "pip install 'memagent-integrations[langchain]'"),
        (
            "langchain",
            "from memagent_integrations import MemAgentReader; MemAgentReader('ollama:x').invoke({'question': 'q', 'context': 'x'})",
            "pip install 'memagent-integrations[langchain]'",
        ),
    ],
)
def test_what_is_missing_is_told(blocked: str, statement: str, command: str) -> None:
    script = f"""
import sys
sys.modules[{blocked!r}] = None
import memagent_integrations
try:
    {statement}
except memagent_integrations.MissingExtra as error:
    print(error.command)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == command, done.stderr


def test_the_door_leads_here() -> None:
    assert memagent_integrations.MemAgentReader is MemAgentReader


# ---- copies ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_it_can_be_saved_and_loaded() -> None:
    model = ChatOpenAI(model="gpt-4o", api_key="sk-very-secret")
    prompts = PromptSet.default(layout="memory-first")
    subject = MemAgentReader(model, tokenizer="approximate", prompts=prompts, name="mine", **SMALL)
    saved = json.loads(json.dumps(dumpd(subject)))
    assert saved["id"] == ["memagent_integrations", "langchain", "MemAgentReader"]
    assert "very-secret" not in json.dumps(saved)
    assert "loaded" not in saved["kwargs"]
    again = load(
        saved,
        allowed_objects=[MemAgentReader, ChatOpenAI],
        valid_namespaces=["memagent_integrations"],
        secrets_map={"OPENAI_API_KEY": "sk-very-secret"},
    )
    assert isinstance(again, MemAgentReader)
    assert (again.prompts, again.tokenizer, again.chunk_tokens, again.name) == (prompts, "approximate", 200, "mine")
    assert isinstance(again.model, ChatOpenAI)
    assert again.model.model_name == "gpt-4o"
    by_name = load(dumpd(MemAgentReader("smollm2")), allowed_objects=[MemAgentReader], valid_namespaces=["memagent_integrations"])
    assert by_name.model == "smollm2"


def test_it_can_be_pickled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    subject = MemAgentReader("openai:local", **SMALL)
    assert subject.invoke(INPUT).text == ANSWER  # it holds a client now, and a lock
    for copy in (pickle.loads(pickle.dumps(subject)), subject.model_copy(deep=True)):
        assert (copy.model, copy.chunk_tokens) == ("openai:local", 200)
        assert copy.invoke(INPUT).text == ANSWER
    assert sum(body.get("prompt") == "a" for _, body, _ in server.asked) == 3


@pytest.mark.parametrize("kind", [str, Path, Journal])
async def test_a_journal(kind: Any, tmp_path: Path) -> None:
    journal = kind(tmp_path / "runs.db")
    script = ["one", BackendError("the server went away")]
    with pytest.raises(BackendError):
        MemAgentReader(ScriptedBackend(script), **SMALL, journal=journal).invoke(INPUT)
    backend = ScriptedBackend(lambda prompt: f"note {prompt.index}")
    subject = MemAgentReader(backend, **SMALL, journal=journal)
    first = subject.invoke(INPUT)
    assert backend.prompts[0].index == 1, "the first step is there already"
    asked = len(backend.prompts)
    assert (await subject.ainvoke(INPUT)).text == first.text
    assert "".join(chunk.text for chunk in subject.stream(INPUT)) == first.text
    assert len(backend.prompts) == asked, "a complete reading costs nothing"
    assert pickle.loads(pickle.dumps(MemAgentReader("smollm2", journal=journal))).journal is not None
    with pytest.raises(UsageError, match="journal has to be a file or a Journal, not int"):
        MemAgentReader("smollm2", journal=5)


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
async def test_a_reading_has_a_name_in_the_journal(how: str, tmp_path: Path) -> None:
    subject = MemAgentReader(ScriptedBackend(lambda prompt: "a note"), journal=tmp_path / "runs.db", **SMALL)
    config: Any = {"configurable": {"memagent_run": "lease"}}
    if how == "stream":
        list(subject.stream(INPUT, config))
    elif how == "astream":
        assert [chunk async for chunk in subject.astream(INPUT, config)]
    else:
        assert (await subject.ainvoke(INPUT, config) if how == "ainvoke" else subject.invoke(INPUT, config)).text == "a note"
    with Journal(tmp_path / "runs.db") as journal:
        assert [run.name for run in journal.runs()] == ["lease"]
    assert [spec.id for spec in subject.config_specs] == ["memagent_run"]
    assert MemAgentReader(ScriptedBackend([]), **SMALL).config_specs == []
