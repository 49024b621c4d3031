"""The conventions of LangChain and LangGraph that a reader has to keep: one test for each, in their order."""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

import pytest
from helpers.loopback import Loopback, chat
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
    failing,
    reader,
    say,
    scripted,
    sections,
    total,
    traced,
)
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.chat_models import init_chat_model
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.document_loaders import BaseBlobParser
from langchain_core.documents import Document
from langchain_core.documents.base import Blob
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.output_parsers import PydanticOutputParser, StrOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableConfig,
    RunnableGenerator,
    RunnableLambda,
    RunnablePassthrough,
)
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langchain_openai import ChatOpenAI
from langgraph import errors, types
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import interrupt
from pydantic import BaseModel, Field

from memagent_integrations import BackendError, Limits, MemAgentReader, PromptSet, ScriptedBackend, UsageError
from memagent_integrations.langchain import STEP, MemAgentMiddleware, MemAgentTool, build_graph
from memagent_integrations.records import Prompt, Reply

ways = pytest.mark.parametrize("how", WAYS)
sync_and_async = pytest.mark.parametrize("how", ["invoke", "astream"])
streams = pytest.mark.parametrize(
    "how", ["stream", "astream"]
)  # the memory comes from complete calls, the answer streams


class Handler(BaseCallbackHandler):
    """Collects the ends of runs, and the custom events with their runs."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.events: list[tuple[Any, Any]] = []

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.ends.append(f"llm {type(error).__name__}")

    def on_chain_error(self, error: BaseException, **_: Any) -> None:
        self.ends.append(f"chain {type(error).__name__}")

    def on_chain_end(self, outputs: Any, **_: Any) -> None:
        self.ends.append("chain end")

    def on_custom_event(self, name: str, data: Any, *, run_id: Any, **_: Any) -> None:
        assert name == STEP
        self.events.append((run_id, data))


# ---- A1: the base class and its fields -------------------------------------------------------------------


def test_a1_fields_alternatives_json_and_name_come_with_the_base_class() -> None:
    subject = scripted()
    chunks = subject.configurable_fields(chunk_tokens=ConfigurableField(id="chunk"))
    assert chunks.invoke(INPUT).response_metadata["memagent"]["chunks"] == 4
    assert chunks.invoke(INPUT, {"configurable": {"chunk": 400}}).response_metadata["memagent"]["chunks"] == 2
    other = subject.configurable_alternatives(ConfigurableField(id="model"), default_key="scripted", chat=reader())
    assert other.invoke(INPUT).response_metadata["memagent"]["model"] == "scripted"
    assert (
        other.invoke(INPUT, {"configurable": {"model": "chat"}}).response_metadata["memagent"]["model"]
        == "langchain:Model"
    )
    assert (subject.to_json()["type"], subject.get_name(), scripted(name="mine").get_name()) == (
        "constructor",
        "MemAgentReader",
        "mine",
    )


def broken(_: str) -> str:
    raise ConnectionError("gone")


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "with_retry": lambda model: model.with_retry(stop_after_attempt=2),
    "with_fallbacks": lambda model: Model(script=broken).with_fallbacks([model]),
    "bind": lambda model: model.bind(stop=["!"]),
    "with_config": lambda model: model.with_config(tags=["inner"]),
    "configurable_fields": lambda model: model.configurable_fields(usage=ConfigurableField(id="usage")),
    "parser": lambda model: model | StrOutputParser(),
}


@streams
@pytest.mark.parametrize("wrap", WRAPPED)
async def test_a1_model_takes_everything_wrapped_around_a_chat_model(wrap: str, how: str) -> None:
    model = Model()
    assert (await call(reader(WRAPPED[wrap](model)), how)).text == ANSWER
    assert len(model.prompts) == 5


@ways
@pytest.mark.heavy
@pytest.mark.openai
async def test_a1_model_takes_one_that_is_chosen_at_run_time(how: str) -> None:
    """`init_chat_model(configurable_fields="any")` returns a plain runnable; the config chooses its model."""
    with Loopback(chat(say)) as server:
        options = {"model_provider": "openai", "base_url": f"{server.url}/v1", "api_key": "k", "max_retries": 0}
        subject = reader(init_chat_model("one", configurable_fields="any", **options))
        assert (await call(subject, how, INPUT, {"configurable": {"model": "two"}})).text == ANSWER
        assert {body["model"] for body in server.bodies("/v1/chat/completions")} == {"two"}


@pytest.mark.heavy
@pytest.mark.openai
def test_a1_a_name_is_a_model_of_init_chat_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """But "openai:NAME" is the core's own backend, which counts with the endpoint, as are names without a provider."""
    with Loopback(chat(say)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("AZURE_OPENAI_API_KEY", "none")
        monkeypatch.setenv("OPENAI_API_VERSION", "2024-10-21")
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", f"{server.url}/nowhere")
        message = MemAgentReader("openai:local", **SMALL).invoke(INPUT)
        assert (message.text, message.response_metadata["memagent"]["model"]) == (ANSWER, "openai:local")
        with pytest.raises(BackendError, match="langchain:AzureChatOpenAI:gpt-4o"):
            MemAgentReader("azure_openai:gpt-4o", tokenizer=count).invoke(INPUT)
    for name, complaint in (
        ("nobody:x", "LangChain cannot make the model 'nobody:x'"),
        ("nothing", "unknown model 'nothing'"),
    ):
        with pytest.raises(UsageError, match=complaint):
            MemAgentReader(name).invoke(INPUT)


@ways
async def test_a1_a_retry_of_the_model_repeats_one_call_and_with_a_journal_so_does_one_of_the_reader(
    how: str, tmp_path: Path
) -> None:
    retry: dict[str, Any] = {"stop_after_attempt": 2, "wait_exponential_jitter": False}
    of_model = failing(2)
    root = await traced(reader(of_model.with_retry(**retry)), how)
    first, second = root.child_runs[2].child_runs
    assert (len(of_model.prompts), bool(first.error), second.error) == (6, True, None)
    assert "nostream" in second.tags
    if how not in ("invoke", "ainvoke"):
        return  # LangChain's retry leaves streams alone
    for settings, calls in (({}, 8), ({"journal": tmp_path / "runs.db"}, 6)):
        model = failing(2)
        assert (await call(reader(model, **settings).with_retry(**retry), how)).text == ANSWER
        assert len(model.prompts) == calls, "three before the failure, and then all five or those that are missing"


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_a1_a_retry_of_the_model_repeats_the_answer_too(how: str) -> None:
    """It can only where the answer is one call: LangChain's retry leaves streams alone."""
    model = failing(4)
    retried = model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    assert (await call(reader(retried), how)).text == ANSWER
    assert len(model.prompts) == 6


def test_a1_what_the_model_lets_configure_shows() -> None:
    subject = reader(Model().configurable_fields(usage=ConfigurableField(id="tell_usage")))
    assert [spec.id for spec in subject.config_specs] == ["tell_usage"]
    assert "tell_usage" in json.dumps(subject.get_config_jsonschema(include=["configurable"]))
    assert subject.invoke(INPUT, {"configurable": {"tell_usage": False}}).usage_metadata is None
    assert scripted().config_specs == []


@pytest.mark.filterwarnings("ignore:This API is in beta")
def test_a1_schemas_graph_and_tool_come_from_the_types() -> None:
    subject = reader()
    assert subject.get_input_jsonschema()["$defs"]["ReaderInput"]["required"] == ["question", "context"]
    assert subject.get_input_schema().model_validate(INPUT)
    assert subject.OutputType is subject.get_output_schema() is AIMessage
    assert subject.get_output_jsonschema()["title"] == "AIMessage"
    assert [node.name for node in subject.get_graph().nodes.values()][1] == "MemAgentReader"
    assert "MemAgentReader --> AIMessage" in subject.get_graph().draw_mermaid()
    tool = subject.as_tool(name="read", description="Reads.")
    assert list(tool.args) == ["question", "context"]
    assert tool.invoke(INPUT).text == ANSWER


def test_a1_prompts_are_a_field() -> None:
    """They are a `PromptSet`, not a `ChatPromptTemplate`; `get_prompts`, which looks at the graph only, finds none."""
    model = Model()
    prompts = PromptSet(update="U {question}|{memory}|{section}", answer="A {question}|{memory}", name="mine")
    reader(model, prompts=prompts).configurable_fields(prompts=ConfigurableField(id="prompts")).invoke(INPUT)
    assert [text[:7] for text in model.prompts] == ["U Why?|"] * 4 + ["A Why?|"]
    assert reader(prompts=prompts).get_prompts() == []


# ---- A2: the methods -------------------------------------------------------------------------------------


async def check_tree(how: str) -> None:
    """Check that the reader, called by another runnable, has one run with its calls and events below it."""
    seen, inner = Handler(), reader()

    async def call_inner(value: Any, config: RunnableConfig) -> Any:
        return await call(inner, how, value, config)

    root = await traced(RunnableLambda(call_inner, name="outer").with_config(callbacks=[seen]), "ainvoke")
    (of_reader,) = root.child_runs
    assert (root.name, of_reader.name, of_reader.parent_run_id) == ("outer", "MemAgentReader", root.id)
    assert [child.parent_run_id for child in of_reader.child_runs] == [of_reader.id] * 5
    assert not any(child.child_runs for child in of_reader.child_runs)
    assert [run for run, _ in seen.events] == [of_reader.id] * 4


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_a2_invoke_makes_its_calls_below_its_own_run(how: str) -> None:
    await check_tree(how)


@pytest.mark.parametrize("how", ["stream", "astream"])
async def test_a2_stream_makes_its_calls_below_its_own_run(how: str) -> None:
    await check_tree(how)


@pytest.mark.parametrize("item", [str, Document], ids=["str", "Document"])
async def test_a2_transform_reads_all_of_a_stream_as_it_comes(item: Any) -> None:
    """With the question bound. Without it a stream of texts or documents is refused; any number of dicts is merged."""
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

    model, stream = Model(script=script), RunnableGenerator(pages, apages)
    chain = stream | reader(model).bind(question="Why?")
    assert "".join(chunk.text for chunk in chain.stream("go")) == ANSWER
    prompts = list(model.prompts)
    assert "Page 0" in prompts[0]
    assert "Page 59" in prompts[-2]
    assert (seen[0] < 20, seen[-1]) == (True, 60)
    given.clear()
    assert "".join([chunk.text async for chunk in chain.astream("go")]) == ANSWER
    assert model.prompts == prompts * 2
    assert seen[len(prompts)] < 20
    for how in ("stream", "astream"):
        with pytest.raises(UsageError, match="bind the question"):
            await call(stream | reader(model), how)
        model.prompts.clear()
        await call({"question": lambda _: "Why?", "context": stream} | reader(model), how)
        assert all(f"Page {number} has" in " ".join(model.prompts) for number in range(60))


async def test_a2_an_iterator_that_a_step_returns_is_read_lazily() -> None:
    loaders: list[Loader] = []
    given: list[int] = []

    def pages(_: Any) -> Iterator[Document]:
        loaders.append(Loader(50))
        return loaders[-1].lazy_load()

    def script(text: str) -> str:
        given.append(loaders[-1].yielded)
        return say(text)

    chain: Any = {"question": lambda _: "Why?", "context": pages} | reader(Model(script=script))
    for how in WAYS:
        given.clear()
        assert (await call(chain, how, "go")).text == ANSWER
        assert given == sorted(given)
        assert (given[0] < 10, given[-1]) == (True, 50)


class Counting(Model):
    """Lets its calls go on only when `barrier` says so many are there; keeps the most there were at once."""

    barrier: Any = None
    running: int = 0
    most: int = 0

    def _begin(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)

    def _generate(self, *args: Any, **options: Any) -> ChatResult:
        with LOCK:
            self._begin()
        self.barrier.wait(20)
        with LOCK:
            self.running -= 1
        return super()._generate(*args, **options)

    async def _agenerate(self, *args: Any, **options: Any) -> ChatResult:
        self._begin()
        await self.barrier.wait()
        self.running -= 1
        return await super()._agenerate(*args, **options)


LOCK = threading.Lock()


@pytest.mark.parametrize("most", [1, 3, None], ids=str)
async def test_a2_batches_keep_to_max_concurrency(most: int | None) -> None:
    config: Any = {"max_concurrency": most}
    if most:
        model = Counting(barrier=threading.Barrier(most))
        assert [message.text for message in reader(model).batch([INPUT] * 6, config)] == [ANSWER] * 6
        assert model.most == most
    model = Counting(barrier=asyncio.Barrier(most or 6))
    async with asyncio.timeout(20):
        assert [message.text for message in await reader(model).abatch([INPUT] * 6, config)] == [ANSWER] * 6
    assert model.most == (most or 6)
    wrong = {"question": "", "context": "x"}
    for results in (
        reader().batch([INPUT, wrong], config, return_exceptions=True),
        await reader().abatch([INPUT, wrong], config, return_exceptions=True),
    ):
        assert isinstance(results[0], AIMessage)
        assert isinstance(results[1], UsageError)
    assert sorted(index for index, _ in reader().batch_as_completed([INPUT, INPUT], config)) == [0, 1]


class Answer(BaseModel):
    answer: str


async def test_a2_parsers_follow_invoke_and_stream() -> None:
    text = reader() | StrOutputParser()
    assert text.invoke(INPUT) == await text.ainvoke(INPUT) == ANSWER
    words = ["the", " answer", " is", " seven", ""]
    assert list(text.stream(INPUT)) == [word async for word in text.astream(INPUT)] == words
    model = Model(script=lambda text: "note" if "<section>" in text else '{"answer": "it is seven"}')
    parsed = reader(model) | PydanticOutputParser(pydantic_object=Answer)
    assert parsed.invoke(INPUT) == await parsed.ainvoke(INPUT) == Answer(answer="it is seven")
    streamed = list(parsed.stream(INPUT))
    assert streamed == [value async for value in parsed.astream(INPUT)]
    assert streamed[0].answer == "it"  # half an object is shown too
    assert streamed[-1] == Answer(answer="it is seven")


@pytest.mark.parametrize("make", [reader, scripted])
async def test_a2_the_sum_of_a_stream_is_the_message(make: Callable[[], MemAgentReader]) -> None:
    message = make().invoke(INPUT)
    chunks = list(make().stream(INPUT))
    achunks = [chunk async for chunk in make().astream(INPUT)]
    assert (type(message), message.text) == (AIMessage, ANSWER)
    assert without_id(await make().ainvoke(INPUT)) == without_id(message)
    assert (
        [chunk.text for chunk in chunks] == [chunk.text for chunk in achunks] == ["the", " answer", " is", " seven", ""]
    )
    assert {type(chunk) for chunk in chunks + achunks} == {AIMessageChunk}
    for whole in (total(chunks), total(achunks)):
        assert (whole.content, whole.usage_metadata, whole.response_metadata) == (
            message.content,
            message.usage_metadata,
            message.response_metadata,
        )
        assert whole.chunk_position == "last"
    batch = make().batch([INPUT, INPUT], {"max_concurrency": 2})
    assert list(map(without_id, batch)) == [without_id(message)] * 2


def without_id(message: AIMessage) -> AIMessage:
    return message.model_copy(update={"id": None})


CHAINS: dict[str, Callable[[], Any]] = {
    "with_fallbacks": lambda: reader(Model(script=broken)).with_fallbacks([reader()]),
    "with_config": lambda: reader().with_config(run_name="mine"),
    "pipe": lambda: RunnablePassthrough().pipe(reader()),
    "assign": lambda: RunnablePassthrough.assign(message=reader()).pick("message"),
    "dict": lambda: {"message": reader()} | RunnableLambda(lambda found: found["message"]),
}


@ways
@pytest.mark.parametrize("chain", CHAINS)
async def test_a2_fallbacks_config_pipe_assign_and_dicts_work_as_they_are(chain: str, how: str) -> None:
    assert (await call(CHAINS[chain](), how)).text == ANSWER


# ---- A3: tracing -----------------------------------------------------------------------------------------


def chain_runs(run: Any) -> Iterator[Any]:
    if run.run_type == "chain":
        yield run
        for child in run.child_runs:
            yield from chain_runs(child)


@ways
async def test_a3_no_run_of_the_reader_holds_the_document(how: str, tmp_path: Path) -> None:
    """LangChain keeps the input of a chain around the reader; a document passed by reference stays out of that too."""
    assert (await traced(reader(), how)).inputs == {"question": "Why?", "context": "<3,100 characters>"}
    assert (await traced(reader(trace_inputs="full"), how)).inputs == INPUT
    path = tmp_path / "text.txt"
    path.write_text(DOCUMENT, encoding="utf-8")
    chain = RunnableLambda(lambda value: value) | reader() | RunnableLambda(lambda message: message)
    runs = list(chain_runs(await traced(chain, how, {"question": "Why?", "context": path})))
    assert [run.name for run in runs] == ["RunnableSequence", "RunnableLambda", "MemAgentReader", "RunnableLambda"]
    assert runs[2].inputs["context"] == str(path)
    assert "long document" not in repr([(run.inputs, run.outputs) for run in runs])


@ways
async def test_a3_each_call_is_a_child_run(how: str) -> None:
    root = await traced(reader(), how)
    assert (root.name, root.run_type, root.error) == ("MemAgentReader", "chain", None)
    assert [child.name for child in root.child_runs] == ["memagent_memory"] * 4 + ["memagent_answer"]
    assert {child.run_type for child in root.child_runs} == {"llm"}
    assert {child.parent_run_id for child in root.child_runs} == {root.id}
    memory, answer = root.child_runs[1], root.child_runs[-1]
    assert (set(memory.tags), set(answer.tags)) == (
        {"mine", "memagent:memory", "nostream"},
        {"mine", "memagent:answer"},
    )
    wanted = {"user": "u", "memagent_step": 1, "memagent_phase": "memory"}
    assert wanted.items() <= memory.extra["metadata"].items()
    assert {"memagent_step": 4, "memagent_phase": "answer"}.items() <= answer.extra["metadata"].items()


class State(TypedDict, total=False):
    question: str
    context: str
    answer: str


def one_node(node: Runnable[Any, Any], *, schema: Any = State, checkpointer: Any = None, **options: Any) -> Any:
    builder = StateGraph(schema)
    builder.add_node("read", node, **options)
    builder.add_edge(START, "read")
    builder.add_edge("read", END)
    return builder.compile(checkpointer)


def to_state(message: AIMessage) -> dict[str, str]:
    return {"answer": str(message.text)}


async def graph_stream(graph: Any, mode: str, *, is_async: bool, value: Any = INPUT) -> list[Any]:
    """What a graph streams in this mode."""
    return (
        [event async for event in graph.astream(value, stream_mode=mode)]
        if is_async
        else list(graph.stream(value, stream_mode=mode))
    )


both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@sync_and_async
@pytest.mark.parametrize("make", [reader, scripted])
async def test_a3_steps_are_custom_events_for_handlers_event_streams_and_langgraph(
    make: Callable[[], MemAgentReader], how: str
) -> None:
    seen = Handler()
    await call(make(), how, INPUT, {"callbacks": [seen]})
    steps = [data for _, data in seen.events]
    assert [(data["step"], data["outcome"], data["cut"]) for data in steps] == [
        (number, "updated", False) for number in range(4)
    ]
    assert (steps[0]["chunk"]["start"], steps[3]["chunk"]["end"]) == (0, len(DOCUMENT))
    assert steps[1]["memory"].endswith("note" if make is reader else "note 1")
    assert json.loads(json.dumps(steps)) == steps
    shown = [
        event["data"]
        async for event in make().astream_events(INPUT, version="v2")
        if event["event"] == "on_custom_event"
    ]
    in_graph = await graph_stream(one_node(make() | to_state), "custom", is_async=how.startswith("a"))
    shown_by = [
        [(data["step"], data["memory"], data["chunk"]) for data in events]
        for events in (steps, shown, [event[STEP] for event in in_graph])
    ]
    assert shown_by[0] == shown_by[1] == shown_by[2]


@pytest.mark.skipif("stream_events" not in vars(Pregel), reason="this LangGraph has no version 3 of its events")
@pytest.mark.filterwarnings("ignore:.*v3:Warning", "ignore:astream_events version='v1'")
async def test_a3_versions_of_events() -> None:
    """Version 1 has no custom events, version 2 has them. Version 3 is for graphs; its one message is the answer."""
    names = [
        event["name"]
        async for event in reader().astream_events(INPUT, version="v1")
        if event["event"] == "on_chain_end"
    ]
    assert names[-1] == "MemAgentReader"
    with pytest.raises(NotImplementedError):
        reader().stream_events(INPUT, version="v3")
    task = {"question": "Why?", "source": "text"}
    run = graph().stream_events(task, version="v3")
    assert [str(message.text) for message in run.messages] == [ANSWER]
    assert run.output["answer"] == ANSWER
    arun = await graph().astream_events(task, version="v3")
    assert [str(await message.text) async for message in arun.messages] == [ANSWER]
    assert (await arun.output())["chunk"] == 4


async def test_a3_the_tokens_that_are_seen_are_those_of_the_answer() -> None:
    for options in ({}, {"exclude_tags": ["nostream"]}, {"include_names": ["memagent_answer"]}):
        events = [event async for event in reader().astream_events(INPUT, version="v2", **options)]
        tokens = [
            (event["name"], event["data"]["chunk"].text) for event in events if event["event"] == "on_chat_model_stream"
        ]
        assert "".join(text for _, text in tokens) == ANSWER
        assert {name for name, _ in tokens} == {"memagent_answer"}
    for is_async in (False, True):
        pieces = await graph_stream(one_node(reader() | to_state), "messages", is_async=is_async)
        assert [message.text for message, _ in pieces if message.text] == ["the", " answer", " is", " seven"]


@ways
async def test_a3_usage_is_summed_over_all_calls_and_counted_once(how: str) -> None:
    with get_usage_metadata_callback() as callback:
        usage = (await call(reader(), how)).usage_metadata
    assert usage == {
        "input_tokens": 50,
        "output_tokens": 10,
        "total_tokens": 60,
        "input_token_details": {"cache_read": 20},
    }
    assert callback.usage_metadata == {"scripted-1": usage}
    assert (await call(reader(Model(usage=False)), how)).usage_metadata is None, "unknown is not nothing"


@sync_and_async
async def test_a3_details_are_in_the_response_metadata(how: str) -> None:
    """The finish reason is the answer's; those of the updates show in what became of them: `outcomes` and `cut`."""
    replies = iter(
        [
            "a note",
            AIMessage("", response_metadata={"finish_reason": "stop"}),
            "word " * 80,
            AIMessage("cut", response_metadata={"finish_reason": "length"}),
        ]
    )
    model = Model(script=lambda text: next(replies) if "<section>" in text else ANSWER)
    message = await call(reader(model, on_lost_section="skip", limits=Limits(empty_retries=0)), how)
    (lost,) = message.response_metadata["memagent"]["lost_sections"]
    assert lost["index"] == 1
    characters = f"{lost['start']:,}-{lost['end']:,}"
    assert message.response_metadata == {
        "model_name": "scripted-1",
        "memagent": {
            "model": "langchain:Model",
            "chunks": 4,
            "calls": 5,
            "outcomes": {"updated": 3, "kept": 1, "answered": 1},
            "cut": [2, 3],
            "finish_reason": "stop",
            "memory": "cut",
            "lost_sections": [lost],
            "warnings": [
                f"sections lost: 1 of 4, for which the model wrote no memory (characters {characters})",
                "memories cut off at their limit: 2 of 4; raise memory_tokens, and output_tokens with it",
            ],
            "citations": [],
            "models": {"scripted-1": 3},
        },
    }


# ---- A4: cancelling and closing --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ainvoke", "astream"])
@pytest.mark.parametrize("by", ["cancel", "timeout"])
async def test_a4_cancelling_and_timeouts_stop_the_reading_and_end_its_run(by: str, how: str) -> None:
    seen, calls = Handler(), []
    begun = asyncio.Event()

    class Stuck(Model):
        async def _agenerate(
            self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
        ) -> ChatResult:
            calls.append(1)
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError("never reached")

    async def read() -> None:
        async with asyncio.timeout(None) as limit:
            task = asyncio.create_task(call(reader(Stuck()), how, INPUT, {"callbacks": [seen]}))
            await begun.wait()
            task.cancel() if by == "cancel" else limit.reschedule(0)
            await task

    with pytest.raises(asyncio.CancelledError if by == "cancel" else TimeoutError):
        await read()
    assert len(calls) == 1
    assert seen.ends == ["chain CancelledError"]


class Open(Model):
    """Knows whether a stream of it is open."""

    opened: list[bool] = Field(default_factory=list)

    def _stream(self, *args: Any, **options: Any) -> Iterator[ChatGenerationChunk]:
        self.opened.append(True)
        try:
            yield from super()._stream(*args, **options)
        finally:
            self.opened.append(False)


def test_a4_closing_a_stream_closes_the_models_and_ends_the_runs() -> None:
    """The run of the reader ends as if nothing were amiss: LangChain takes a closed generator for one that ended."""
    seen, model = Handler(), Open()
    stream = reader(model).stream(INPUT, {"callbacks": [seen]})
    assert next(stream).text == "the"
    assert model.opened == [True]
    stream.close()  # type: ignore[attr-defined]
    assert model.opened == [True, False]
    assert sorted(seen.ends) == ["chain end", "llm GeneratorExit"]


async def test_a4_closing_an_async_stream_closes_the_models_and_ends_the_runs() -> None:
    seen, model = Handler(), Open()
    stream = reader(model).astream(INPUT, {"callbacks": [seen]})
    assert (await anext(stream)).text == "the"
    await stream.aclose()
    assert seen.ends == ["chain GeneratorExit", "llm GeneratorExit"]


async def test_a4_what_fails_while_an_async_stream_closes_is_our_error() -> None:
    class Breaking(ScriptedBackend):
        async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
            try:
                async for piece in super().astream(prompt):
                    yield piece
            except GeneratorExit:
                raise BackendError("the connection broke") from None

    stream = MemAgentReader(Breaking(lambda _: "two words"), **SMALL).astream(INPUT)
    assert (await anext(stream)).text == "two"
    with pytest.raises(BackendError, match="the connection broke"):
        await stream.aclose()


@pytest.mark.parametrize("left", ["reader at shutdown", "chain", "chain at shutdown"])
def test_a4_leaving_a_stream_closes_the_model_without_noise(left: str) -> None:
    """LangChain leaves the steps of a chain to the event loop, which closes them concurrently at its shutdown."""
    complaints: list[str] = []
    closed = asyncio.Event()
    seen = Handler()

    class Closed(AsyncCallbackHandler):
        async def on_llm_error(self, error: BaseException, **_: Any) -> None:
            closed.set()

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(str(context.get("exception")))
        )
        subject: Any = reader() if "reader" in left else reader() | StrOutputParser()
        stream = subject.astream(INPUT, {"callbacks": [seen, Closed()]})
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(20):
            while left == "chain" and (not closed.is_set() or len(asyncio.all_tasks()) > 1):
                await closed.wait()
                await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(leave())
    gc.collect()
    assert "llm GeneratorExit" in seen.ends
    if left == "chain at shutdown":
        complaints = [
            complaint for complaint in complaints if "asynchronous generator is already running" not in complaint
        ]
    assert not complaints


# ---- A5: serialization -----------------------------------------------------------------------------------


@pytest.mark.openai
def test_a5_a_dump_is_a_constructor_without_secrets() -> None:
    model = ChatOpenAI(model="gpt-4o", api_key="sk-very-secret")
    saved = json.loads(json.dumps(dumpd(MemAgentReader(model, **SMALL))))
    assert MemAgentReader.is_lc_serializable()
    assert (saved["type"], saved["id"]) == ("constructor", ["memagent_integrations", "langchain", "MemAgentReader"])
    assert saved["kwargs"]["model"]["type"] == "constructor"
    assert "very-secret" not in json.dumps(saved)
    assert "loaded" not in saved["kwargs"]
    for unknown in (Model(), model.with_retry() | StrOutputParser() | (lambda text: text), ScriptedBackend([])):
        assert "not_implemented" in json.dumps(dumpd(MemAgentReader(unknown))["kwargs"]["model"])


@pytest.mark.filterwarnings("ignore:The function `load` is in beta", "ignore:The default value of `allowed_objects`")
@pytest.mark.openai
def test_a5_load_wants_our_class_and_namespace_named() -> None:
    prompts = PromptSet.default(layout="memory-first")
    model = ChatOpenAI(model="gpt-4o", api_key="sk-very-secret")
    saved = dumpd(MemAgentReader(model, tokenizer="approximate", prompts=prompts, name="mine", **SMALL))
    allowed: dict[str, Any] = {
        "allowed_objects": [MemAgentReader, ChatOpenAI],
        "valid_namespaces": ["memagent_integrations"],
    }
    again = load(saved, secrets_map={"OPENAI_API_KEY": "sk-very-secret"}, **allowed)
    assert isinstance(again, MemAgentReader)
    assert (again.prompts, again.tokenizer, again.chunk_tokens, again.name) == (prompts, "approximate", 200, "mine")
    assert isinstance(again.model, ChatOpenAI)
    assert again.model.model_name == "gpt-4o"
    assert load(dumpd(MemAgentReader("smollm2")), **allowed).model == "smollm2"
    with pytest.raises(ValueError, match="MemAgentReader"):
        load(dumpd(MemAgentReader("smollm2")))


# ---- A6: content -----------------------------------------------------------------------------------------


REASONING: dict[str, tuple[str | AIMessage, str | AIMessage]] = {
    "blocks": (
        AIMessage([{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "note"}]),
        AIMessage(
            [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "sev"}, {"type": "text", "text": "en"}]
        ),
    ),
    "kwargs": (
        AIMessage("note", additional_kwargs={"reasoning_content": "Hm."}),
        AIMessage("seven", additional_kwargs={"reasoning_content": "Hm."}),
    ),
    "tags": ("<think>Hm.</think>note", "<think>Hm.</think>seven"),
}


@ways
@pytest.mark.parametrize("kind", REASONING)
async def test_a6_memory_and_answer_are_the_text_alone(kind: str, how: str) -> None:
    model = Model(script=lambda text: REASONING[kind]["<section>" not in text])
    message = await call(reader(model), how)
    assert (message.content, message.response_metadata["memagent"]["memory"]) == ("seven", "note")
    assert not [text for text in model.prompts if "Hm." in text]


@ways
async def test_a6_messages_have_the_blocks_of_langchains_own(how: str) -> None:
    message = await call(reader(Model(output_version="v1")), how)
    assert message.text == ANSWER
    assert [block for block in message.content_blocks if block["type"] == "text"] == [{"type": "text", "text": ANSWER}]
    assert isinstance(message, AIMessageChunk if how in ("stream", "astream") else AIMessage)


# ---- A7: LangGraph ---------------------------------------------------------------------------------------


TASK: Any = {"question": "Why?", "source": "text"}
THREAD: Any = {"configurable": {"thread_id": "1"}}


def graph(model: Any = None, *, document: str = DOCUMENT, chunk_tokens: int = 200, **options: Any) -> Any:
    return build_graph(reader(model, chunk_tokens=chunk_tokens), load=lambda _: document, **options)


class Mine(TypedDict, total=False):
    ask: str
    text: str
    told: str


class Typed(BaseModel):
    ask: str
    text: str
    told: str = ""


@both
@pytest.mark.parametrize("schema", [Mine, Typed])
async def test_a7_as_node_writes_the_answer_to_its_key(schema: Any, is_async: bool) -> None:
    """A bare reader in a graph loses its answer, since a message is no update of the state."""
    compiled = one_node(reader().as_node(question_key="ask", context_key="text", answer_key="told"), schema=schema)
    task = {"ask": "Why?", "text": DOCUMENT}
    assert (await compiled.ainvoke(task) if is_async else compiled.invoke(task)) == {**task, "told": ANSWER}
    steps = await graph_stream(compiled, "custom", is_async=is_async, value=task)
    assert [event[STEP]["step"] for event in steps] == [0, 1, 2, 3]
    words = await graph_stream(compiled, "messages", is_async=is_async, value=task)
    assert "".join(message.text for message, _ in words) == ANSWER


def test_a7_a_graph_that_is_interrupted_after_each_chunk_makes_no_call_twice() -> None:
    model = Model()
    compiled = graph(model, checkpointer=InMemorySaver(), interrupt_after=["read_chunk"])
    state = compiled.invoke(TASK, THREAD)
    assert (state["chunk"], state["memory"], len(model.prompts)) == (1, "note", 1)
    compiled.update_state(THREAD, {"memory": "It was the butler."})
    state = compiled.invoke(None, THREAD)
    assert (state["chunk"], state["memory"]) == (2, "It was the butler. note")
    assert "<memory>\nIt was the butler.\n</memory>" in model.prompts[1]
    compiled.invoke(None, THREAD)
    compiled.invoke(None, THREAD)
    compiled.update_state(THREAD, {"memory": "Edited last."})
    assert compiled.get_state(THREAD).next == ("answer",)
    state = compiled.invoke(None, THREAD)
    assert (state["answer"], state["memory"], len(model.prompts)) == (ANSWER, "Edited last.", 5)
    assert "Edited last." in model.prompts[-1]
    assert "".join(sections(model)) == DOCUMENT


def test_a7_an_interrupt_passes_retries_and_fallbacks_that_are_for_our_errors() -> None:
    """LangChain's defaults catch any `Exception`, also an interrupt: name `BackendError`, the failures of a model."""

    def script(text: str) -> str:
        return interrupt("May I go on?") if "<section>" not in text else say(text)

    for wrap in (
        lambda inner: inner.with_retry(retry_if_exception_type=(BackendError,), stop_after_attempt=3),
        lambda inner: inner.with_fallbacks([scripted()], exceptions_to_handle=(BackendError,)),
    ):
        model = Model(script=script)
        compiled = one_node(wrap(reader(model)) | to_state, checkpointer=InMemorySaver())
        state = compiled.invoke(INPUT, THREAD)
        assert [stop.value for stop in state["__interrupt__"]] == ["May I go on?"]
        assert ("answer" in state, len(model.prompts)) == (False, 5)


def test_a7_build_graph_resumes_in_another_process_with_history_and_edits(tmp_path: Path) -> None:
    model, words = failing(3), "Other words of another document. " * 155  # five chunks
    with SqliteSaver.from_conn_string(str(tmp_path / "graph.db")) as saver, pytest.raises(BackendError, match="gone"):
        graph(model, document=words, checkpointer=saver).invoke(TASK, THREAD)
    with SqliteSaver.from_conn_string(str(tmp_path / "graph.db")) as saver:
        compiled = graph(model, document=words, checkpointer=saver)
        assert (compiled.get_state(THREAD).values["chunk"], compiled.get_state(THREAD).next, len(model.prompts)) == (
            3,
            ("read_chunk",),
            4,
        )
        compiled.update_state(THREAD, {"memory": "Edited."})
        state = compiled.invoke(None, THREAD)
        history = {
            snapshot.values["chunk"]: snapshot.values["memory"]
            for snapshot in compiled.get_state_history(THREAD)
            if snapshot.next == ("read_chunk",)
        }
    assert (state["answer"], state["chunk"], state["memory"]) == (ANSWER, 5, "Edited. note note")
    assert list(history) == [4, 3, 2, 1, 0]
    assert (history[4], history[0]) == ("Edited. note", "")
    assert len(model.prompts) == 7, "five chunks, the answer, and the call that failed"
    assert state["usage"]["prompt_tokens"] == 60
    read = sections(model)
    assert read[3] == read[4]
    assert "".join([*read[:3], *read[4:]]) == words


def test_a7_the_state_holds_a_reference_and_no_document(tmp_path: Path) -> None:
    path, text = tmp_path / "graph.db", tmp_path / "text.txt"
    text.write_text("Some words of a long document. " * 65_000, encoding="utf-8")  # 2 MB
    with SqliteSaver.from_conn_string(str(path)) as saver:
        compiled = build_graph(reader(chunk_tokens=5000), checkpointer=saver)
        state = compiled.invoke({"question": "Why?", "source": str(text)}, THREAD)
        sizes = [len(json.dumps(snapshot.values)) for snapshot in compiled.get_state_history(THREAD)]
    assert state["chunk"] > 80
    assert max(sizes) < 1000
    assert sum(file.stat().st_size for file in tmp_path.glob("graph.db*")) < 1_000_000
    with pytest.raises(UsageError, match="small reference"):
        graph().invoke({"question": "Why?", "source": DOCUMENT * 10})


async def test_a7_any_checkpointer_keeps_a_graph_by_its_thread(tmp_path: Path) -> None:
    """A graph takes it, the async one for async calls. The reader itself takes none: it has a journal."""
    model = failing(2)
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "graph.db")) as saver:
        with pytest.raises(BackendError, match="gone"):
            await graph(model, checkpointer=saver).ainvoke(TASK, THREAD)
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "graph.db")) as saver:
        state = await graph(model, checkpointer=saver).ainvoke(None, THREAD)
        other = await graph(checkpointer=saver).ainvoke(TASK, {"configurable": {"thread_id": "2"}})
    assert (state["answer"], state["chunk"], len(model.prompts)) == (ANSWER, 4, 6)
    assert "".join([*sections(model)[:2], *sections(model)[3:]]) == DOCUMENT
    assert other["chunk"] == 4
    with closing(sqlite3.connect(tmp_path / "graph.db")) as db:
        assert db.execute("SELECT DISTINCT thread_id FROM checkpoints ORDER BY 1").fetchall() == [("1",), ("2",)]
    with pytest.raises(UsageError, match="checkpointer"):
        reader(checkpointer=InMemorySaver())


@both
async def test_a7_many_chunks_meet_no_recursion_limit(is_async: bool) -> None:
    compiled = graph(document=DOCUMENT * 6, chunk_tokens=50)

    async def acall(value: Any, config: RunnableConfig) -> Any:
        return await compiled.ainvoke(value, config)

    parent: Any = RunnableLambda(acall if is_async else lambda value, config: compiled.invoke(value, config))
    state = await parent.ainvoke(TASK) if is_async else parent.invoke(TASK)
    assert (state["answer"], state["chunk"] > 80) == (ANSWER, True)
    for again in (compiled, compiled | RunnableLambda(lambda value: value), compiled.with_config(tags=["mine"])):
        limited = {"recursion_limit": 5}
        assert (await again.ainvoke(TASK, limited) if is_async else again.invoke(TASK, limited))["chunk"] == state[
            "chunk"
        ]


@pytest.mark.skipif("TimeoutPolicy" not in vars(types), reason="this LangGraph has no timeouts of nodes")
async def test_a7_each_step_counts_as_progress_for_an_idle_timeout() -> None:
    """Also with a backend that is no LangChain model, whose calls LangGraph does not see."""
    idle = 1.0

    class Slow(ScriptedBackend):
        stuck = 99

        async def acomplete(self, prompt: Prompt) -> Reply:
            if prompt.index == self.stuck:
                await asyncio.Event().wait()
            await asyncio.sleep(0.2 * idle)  # how long a call takes is what this is about
            return await super().acomplete(prompt)

    def node(backend: ScriptedBackend) -> Any:
        subject = MemAgentReader(backend, chunk_tokens=100, memory_tokens=50).as_node()
        return one_node(subject, timeout=types.TimeoutPolicy(idle_timeout=idle))

    backend = Slow(lambda prompt: "note" if prompt.phase == "memory" else ANSWER)
    begun = asyncio.get_running_loop().time()
    assert (await node(backend).ainvoke(INPUT))["answer"] == ANSWER
    assert asyncio.get_running_loop().time() - begun > idle
    backend = Slow(lambda prompt: "note")
    backend.stuck = 2
    with pytest.raises(errors.NodeTimeoutError):
        await node(backend).ainvoke(INPUT)
    assert len(backend.prompts) == 2


# ---- A8: inputs ------------------------------------------------------------------------------------------


class Lines(BaseBlobParser):
    def lazy_parse(self, blob: Blob) -> Iterator[Document]:
        for line in blob.as_string().splitlines():
            yield Document(line.upper())


async def achain(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


INPUTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "str": (lambda path: path.read_text(), "one\ntwo"),
    "Path": (lambda path: path, "one\ntwo"),
    "Blob": (Blob.from_path, "one\ntwo"),
    "Blob of data": (lambda _: Blob.from_data("one\ntwo"), "one\ntwo"),
    "Document": (lambda _: Document("one"), "one"),
    "Documents": (lambda _: [Document("one"), Document("two")], "one\n\ntwo"),
    "texts": (lambda _: iter(["one ", "two"]), "one two"),
    "lazy_parse": (lambda path: Lines().lazy_parse(Blob.from_path(path)), "ONE\n\nTWO"),
    "loader": (lambda _: Loader(2), "some words. \n\nPage 1 has some words."),
    "lazy_load": (lambda _: Loader(2).lazy_load(), "some words. \n\nPage 1 has some words."),
    "retriever": (lambda _: Retriever(), "what is said of Why?"),
    "alazy_load": (lambda _: Loader(2).alazy_load(), "some words. \n\nPage 1 has some words."),
    "async Documents": (lambda _: achain(Document("one"), Document("two")), "one\n\ntwo"),
    "async texts": (lambda _: achain("one ", "two"), "one two"),
}


@sync_and_async
@pytest.mark.parametrize("kind", INPUTS)
async def test_a8_whatever_langchain_has_for_documents_is_read(kind: str, how: str, tmp_path: Path) -> None:
    """An async input needs an async call; the error says so."""
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo", encoding="utf-8")
    make, text = INPUTS[kind]
    model = Model()
    reading = call(reader(model, chunk_tokens=1000), how, {"question": "Why?", "context": make(path)})
    if how == "invoke" and kind.startswith("a"):
        with pytest.raises(UsageError, match="async"):
            await reading
        return
    assert (await reading).text == ANSWER
    (section,) = sections(model)
    assert text in section


# ---- A9: peers -------------------------------------------------------------------------------------------


@both
async def test_a9_it_does_what_refine_and_the_summarization_middleware_leave_undone(is_async: bool) -> None:
    """Refine wants a list, streams one chunk, mixes the tokens of all steps; summaries are unbounded."""
    config: Any = {"callbacks": [runs := RunCollectorCallbackHandler()]}
    value: Any = {"question": "Why?", "context": (Document(word) for word in DOCUMENT.split(". "))}
    subject = reader()
    chunks = (
        [chunk async for chunk in subject.astream(value, config)] if is_async else list(subject.stream(value, config))
    )
    assert [chunk.text for chunk in chunks] == ["the", " answer", " is", " seven", ""]
    assert chunks[-1].usage_metadata
    chunks_read = chunks[-1].response_metadata["memagent"]["chunks"]
    assert [run.name for run in runs.traced_runs[0].child_runs] == ["memagent_memory"] * chunks_read + [
        "memagent_answer"
    ]
    model = Model()
    middleware: AgentMiddleware[Any, Any] = MemAgentMiddleware(
        reader(), budget_tokens=20, keep_tokens=10, token_counter=len
    )
    agent = create_agent(model, middleware=[middleware])
    messages = {"messages": [HumanMessage(f"message {number}") for number in range(30)]}
    state = await agent.ainvoke(messages) if is_async else agent.invoke(messages)
    assert len(state["messages"]) == 11, "ten that are kept, and the answer"
    assert count(state["memory"]) <= 50
    assert MemAgentTool(subject, context=DOCUMENT).invoke({"question": "Why?"}) == ANSWER
