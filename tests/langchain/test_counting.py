"""Whose tokens are seen: those of the answer, and none of a memory update, however the model is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.scripted_chat import ANSWER, DOCUMENT, INPUT, Model, count, reader
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from memagent_integrations import Reader
from memagent_integrations.langchain import ChatModelBackend, build_graph


class Streaming(Model):
    """A model that its owner has told to stream."""

    streaming: bool = True


def broken() -> Model:
    return Model(script=lambda _: (_ for _ in ()).throw(ConnectionError("gone")))


WRAPPED: dict[str, Callable[[], Any]] = {
    "bare": Model,
    "streaming=True": lambda: Streaming(streaming=True),
    "with_retry": lambda: Model().with_retry(),
    "bind": lambda: Model().bind(stop=["."]),
    "with_config": lambda: Model().with_config(tags=["mine"]),
    "with_fallbacks": lambda: Model().with_fallbacks([Model()]),
    "the fallback": lambda: broken().with_fallbacks([Model()]),
    "fallbacks with retries": lambda: broken().with_retry(stop_after_attempt=1).with_fallbacks([Model().with_retry()]),
    "lambda | model": lambda: RunnableLambda(lambda messages: messages) | Model(),
    "model in a lambda": lambda: _in_a_lambda(Model()),
    "alternatives": lambda: Model().configurable_alternatives(ConfigurableField(id="which"), other=Model()),
}


def _in_a_lambda(model: Model) -> Any:
    async def acall(messages: Any) -> Any:
        return await model.ainvoke(messages)

    return RunnableLambda(lambda messages: model.invoke(messages), acall)


wrapped = pytest.mark.parametrize("wrapping", WRAPPED)


@wrapped
async def test_an_event_stream_has_the_tokens_of_the_answer_only(wrapping: str) -> None:
    events = [event async for event in reader(WRAPPED[wrapping]()).astream_events(INPUT, version="v2")]
    tokens = [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == ANSWER
    assert len(list(filter(None, tokens))) == 4
    phases = [event["metadata"].get("memagent_phase") for event in events if event["event"] == "on_chat_model_end"]
    assert phases.count("memory") >= 4, "the calls themselves are seen"


@pytest.mark.filterwarnings("ignore:astream_log is deprecated")
@wrapped
async def test_a_log_stream_has_the_tokens_of_the_answer_only(wrapping: str) -> None:
    patches = [patch async for patch in reader(WRAPPED[wrapping]()).astream_log(INPUT)]
    paths = [op["path"] for patch in patches for op in patch.ops if "/streamed_output_str/" in op["path"]]
    writing = {path.split("/")[2] for path in paths if "memory" in path.split("/")[2]}
    assert not writing
    text = [op["value"] for patch in patches for op in patch.ops if op["path"].startswith("/streamed_output/")]
    assert "".join(chunk.text for chunk in text) == ANSWER


class State(TypedDict, total=False):
    question: str
    context: str
    answer: str


def node(model: Any) -> Any:
    graph: Any = StateGraph(State)
    graph.add_node("read", reader(model).as_node())
    graph.add_edge(START, "read")
    graph.add_edge("read", END)
    return graph.compile()


@wrapped
@pytest.mark.parametrize("kind", ["a node", "a graph"])
async def test_langgraphs_messages_are_the_answers(kind: str, wrapping: str) -> None:
    def made() -> tuple[Any, Any]:
        if kind == "a node":
            return node(WRAPPED[wrapping]()), {"question": "Why?", "context": DOCUMENT}
        return build_graph(reader(WRAPPED[wrapping]()), load=lambda _: DOCUMENT), {"question": "Why?", "source": "x"}

    compiled, value = made()
    seen = [message.text async for message, _ in compiled.astream(value, stream_mode="messages")]
    assert "".join(seen) == ANSWER
    compiled, value = made()
    assert "".join(message.text for message, _ in compiled.stream(value, stream_mode="messages")) == ANSWER


@pytest.mark.filterwarnings("ignore:.*v3:Warning")
@wrapped
async def test_the_third_version_of_event_streams_has_one_message(wrapping: str) -> None:
    run = await node(WRAPPED[wrapping]()).astream_events({"question": "Why?", "context": DOCUMENT}, version="v3")
    texts = []
    async for stream in run.messages:
        texts.append(await stream.text)
    assert texts == [ANSWER]


async def test_a_reader_without_a_config_writes_no_tokens_of_memories_either() -> None:
    """Inside a run, LangChain hands callbacks on by the context."""
    inner = Reader(ChatModelBackend(Model(), tokenizer=count), chunk_tokens=200, memory_tokens=50)

    async def read(question: str) -> str:
        return (await inner.aread(question, DOCUMENT)).answer or ""

    events = [event async for event in RunnableLambda(read).astream_events("Why?", version="v2")]
    memory = [event for event in events if event.get("name") == "memagent_memory"]
    assert [event["event"] for event in memory] == ["on_chat_model_start", "on_chat_model_end"] * 4


async def test_the_callers_own_handlers_and_model_stay_as_they_are() -> None:
    class Mine(BaseCallbackHandler):
        ended = 0

        def on_llm_end(self, *_: Any, **__: Any) -> None:
            self.ended += 1

    mine, model = Mine(), Model()
    before = model.model_dump(exclude={"prompts", "options"})
    async for _ in reader(model).astream_events(INPUT, {"callbacks": [mine]}, version="v2"):
        pass
    assert mine.ended == 5
    assert model.model_dump(exclude={"prompts", "options"}) == before
    assert model.disable_streaming is False
