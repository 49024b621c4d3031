"""What the runs and the events of a reading hold, by `trace_inputs`."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.scripted_chat import WAYS, Model, call
from langchain_core.callbacks import (
    AsyncCallbackHandler,
    BaseCallbackHandler,
    CallbackManager,
    UsageMetadataCallbackHandler,
    get_usage_metadata_callback,
)
from langchain_core.documents import Document
from langchain_core.globals import set_debug
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda
from langchain_core.tracers import BaseTracer, Run
from langchain_core.tracers.context import collect_runs
from langgraph.graph import START, StateGraph
from pydantic import BaseModel

from memagent_integrations import BackendError, MemAgentReader, ScriptedBackend
from memagent_integrations.langchain import MemAgentDocumentCompressor, MemAgentTool, build_graph
from memagent_integrations.records import Prompt

QUESTION = "Where does ZEBRAQUESTION live?"
DOCUMENT = "The ZEBRADOCUMENT lives in a house. " * 30
MEMORY, ANSWER = "note of ZEBRAMEMORY", "in ZEBRAANSWER"
TASK: Any = {"question": QUESTION, "context": DOCUMENT}
SECRET = "ZEBRA"
every_way = pytest.mark.parametrize("how", WAYS)


def runs_below(roots: list[Run]) -> Iterator[Run]:
    waiting = list(roots)
    while waiting:
        run = waiting.pop()
        waiting.extend(run.child_runs)
        yield run


class Recorder(BaseTracer):
    """Keep all that reaches a tracer: runs as they are, their events, and custom events."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[Run] = []
        self.custom: list[Any] = []

    def _persist_run(self, run: Run) -> None:
        self.roots.append(run)

    def on_custom_event(self, name: str, data: Any, **details: Any) -> None:
        self.custom.append((name, data, details))

    def runs(self) -> Iterator[Run]:
        return runs_below(self.roots)

    def text(self) -> str:
        """Return everything that was recorded, as text."""
        runs = [
            (run.name, run.inputs, run.outputs, run.error, run.extra, run.tags, run.serialized, run.events)
            for run in self.runs()
        ]
        return f"{runs!r}{self.custom!r}"


class Everything(BaseCallbackHandler):
    """Keep the arguments of every event."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *args, **kwargs: self.seen.append((name, repr(args), repr(kwargs)))

    def text(self) -> str:
        return repr(self.seen)


class AsyncEverything(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append((repr(args), repr(kwargs)))

    async def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append((repr(args), repr(kwargs)))

    on_llm_end = on_llm_error = on_chain_start = on_chain_end = on_chain_error = on_llm_new_token  # type: ignore[assignment]

    async def on_custom_event(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append((repr(args), repr(kwargs)))


class Shelf(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(DOCUMENT, metadata={"summary": DOCUMENT})]


def say(text: str) -> AIMessage:
    usage: Any = {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}
    content = MEMORY if "<section>" in text else ANSWER
    metadata = {"model_name": "scripted-1", "finish_reason": "stop", "logprobs": {"content": [{"token": content}]}}
    return AIMessage(content, usage_metadata=usage, response_metadata=metadata)


def reader(model: Any = None, **settings: Any) -> MemAgentReader:
    counted = {"tokenizer": ScriptedBackend([]).count} if not isinstance(model, ScriptedBackend) else {}
    sizes = {"chunk_tokens": 100, "memory_tokens": 50, "trace_inputs": "none"}
    return MemAgentReader(Model(script=say) if model is None else model, **(counted | sizes | settings))


def backend(**settings: Any) -> ScriptedBackend:
    return ScriptedBackend(lambda prompt: MEMORY if prompt.phase == "memory" else ANSWER, **settings)


MODELS: dict[str, Any] = {
    "chat model": lambda: Model(script=say),
    "with_retry": lambda: Model(script=say).with_retry(),
    "with_fallbacks": lambda: Model(script=say).with_fallbacks([Model(script=say)]),
    "bind": lambda: Model(script=say).bind(prediction=DOCUMENT, stop=[DOCUMENT]),
    "backend": backend,
}


@every_way
@pytest.mark.parametrize("kind", MODELS)
async def test_no_run_holds_text_with_none(kind: str, how: str) -> None:
    tracer, everything, awaited = Recorder(), Everything(), AsyncEverything()
    answer = await call(reader(MODELS[kind]()), how, TASK, {"callbacks": [tracer, everything, awaited]})
    assert (answer.text, answer.response_metadata["memagent"]["memory"]) == (ANSWER, MEMORY)
    calls = [run for run in tracer.runs() if run.run_type in ("llm", "chat_model")]
    assert len(calls) == 4
    assert len(tracer.custom) == 3
    assert awaited.seen
    for text in (tracer.text(), everything.text(), repr(awaited.seen)):
        assert SECRET not in text
        assert "1,080 characters" in text


@every_way
async def test_a_trace_without_text_has_the_numbers(how: str) -> None:
    tracer, usage = Recorder(), UsageMetadataCallbackHandler()
    await call(reader(), how, TASK, {"callbacks": [tracer, usage], "tags": ["mine"], "metadata": {"user": "u"}})
    (root,) = tracer.roots
    assert root.tags == ["mine"]
    assert root.metadata["user"] == "u"
    assert root.inputs == {"question": "<30 characters>", "context": "<1,080 characters>"}
    (output,) = (root.outputs or {}).values()
    assert output.usage_metadata["total_tokens"] == 48
    assert output.response_metadata["memagent"]["outcomes"] == {"updated": 3, "answered": 1}
    assert output.response_metadata["memagent"]["memory"] == "<19 characters>"
    names = [(run.name, run.metadata["memagent_step"]) for run in root.child_runs]
    assert names == [("memagent_memory", 0), ("memagent_memory", 1), ("memagent_memory", 2), ("memagent_answer", 3)]
    assert {name: counted["total_tokens"] for name, counted in usage.usage_metadata.items()} == {"scripted-1": 48}
    assert [data["step"] for _, data, _ in tracer.custom] == [0, 1, 2]
    assert {data["memory"] for _, data, _ in tracer.custom} == {"<19 characters>"}
    assert {data["outcome"] for _, data, _ in tracer.custom} == {"updated"}


@every_way
async def test_usage_of_the_context_is_counted_once_with_none(how: str) -> None:
    for model in (Model(script=say), Model(script=say).with_retry()):
        with get_usage_metadata_callback() as usage, collect_runs() as collected:
            await call(reader(model), how, TASK)
        assert usage.usage_metadata["scripted-1"]["total_tokens"] == 48
        assert [run.name for run in collected.traced_runs] == ["MemAgentReader"]
        assert SECRET not in repr([(run.inputs, run.outputs, run.child_runs) for run in collected.traced_runs])


@every_way
async def test_callbacks_of_the_model_itself_see_no_text_either(how: str) -> None:
    seen = [Everything() for _ in range(5)]
    listened: list[Any] = []

    def listen(run: Run) -> None:
        listened.append((run.inputs, run.outputs))

    model = Model(script=say, callbacks=[seen[0]])
    wrapped: list[Any] = [
        model,
        Model(script=say).with_config(callbacks=[seen[1]]),
        Model(script=say).with_config(callbacks=CallbackManager([seen[2]], [seen[2]])).with_retry(),
        Model(script=say).with_fallbacks([Model(script=say, callbacks=[seen[3]])]),
        Model(script=say).with_listeners(on_end=listen),
        Model(script=say, callbacks=[seen[4]]).configurable_fields(usage=ConfigurableField(id="usage")),
        RunnableLambda(lambda prompt: prompt) | Model(script=say, callbacks=[seen[4]]),
    ]
    for one in wrapped:
        assert (await call(reader(one), how, TASK)).text == ANSWER
    assert all(handler.seen for handler in (*seen[:3], seen[4]))
    assert listened
    assert SECRET not in f"{[handler.text() for handler in seen]}{listened!r}"


def quoting(text: str) -> str:
    """Fail with the prompt in the message, in the second call."""
    raise RuntimeError(f"cannot answer {text}") from ValueError(text)


@every_way
@pytest.mark.parametrize("kind", ["chat model", "with_retry", "backend"])
async def test_an_error_that_quotes_the_prompt_is_traced_by_its_class_alone(kind: str, how: str) -> None:
    def fail(prompt: Prompt) -> str:
        raise BackendError(f"cannot answer {prompt.messages[0].content}")

    model = {
        "chat model": Model(script=quoting),
        "with_retry": Model(script=quoting).with_retry(stop_after_attempt=2, wait_exponential_jitter=False),
        "backend": ScriptedBackend(fail),
    }[kind]
    tracer, everything = Recorder(), Everything()
    with pytest.raises(BackendError, match=SECRET):
        await call(reader(model), how, TASK, {"callbacks": [tracer, everything]})
    (root,) = tracer.roots
    assert "BackendError" in str(root.error)
    assert SECRET not in tracer.text() + everything.text()


@every_way
async def test_documents_that_a_runnable_finds_are_no_text_of_a_trace(how: str) -> None:
    async def names(question: str) -> list[Document]:
        return [Document(DOCUMENT)]

    contexts: list[Runnable[Any, Any]] = [Shelf(), Shelf() | (lambda pages: pages)]
    contexts += [RunnableLambda(names)] if how.startswith("a") else []
    for context in contexts:
        tracer, everything = Recorder(), Everything()
        task = {"question": QUESTION, "context": context}
        assert (await call(reader(), how, task, {"callbacks": [tracer, everything]})).text == ANSWER
        assert len([run for run in tracer.runs() if run.run_type in ("llm", "chat_model")]) == 4
        assert SECRET not in tracer.text() + everything.text()


@pytest.mark.parametrize("kind", MODELS)
async def test_event_streams_hold_no_text_with_none(kind: str) -> None:
    subject = reader(MODELS[kind]())
    events = [event async for event in subject.astream_events(TASK)]
    assert SECRET not in repr(events)
    assert events[0]["data"]["input"] == {"question": "<30 characters>", "context": "<1,080 characters>"}
    assert [event["event"] for event in events].count("on_custom_event") == 3
    assert [event["event"] for event in events].count("on_chat_model_end") == 4
    assert events[-1]["event"] == "on_chain_end"
    assert events[-1]["data"]["output"].response_metadata["memagent"]["chunks"] == 3
    chain = RunnableLambda(lambda _: None) | {"answer": subject.bind(**TASK)}
    assert SECRET not in repr(
        [event async for event in chain.astream_events("go") if event["name"] in ("MemAgentReader", "memagent_answer")]
    )


async def test_events_of_other_handlers_of_a_stream_have_the_chunks() -> None:
    """The stream itself is what the caller asked for, and whole."""
    pieces = [chunk.text async for chunk in reader().astream(TASK)]
    assert "".join(pieces) == ANSWER
    assert len([piece for piece in pieces if piece]) > 1


@pytest.mark.parametrize("is_async", [False, True])
async def test_batches_hold_no_text_with_none(is_async: bool) -> None:
    for model in (Model(script=say), backend(batch_size=2)):
        tracers = [Recorder() for _ in range(3)]
        configs: Any = [{"callbacks": [tracer]} for tracer in tracers]
        subject = reader(model)
        answers = await subject.abatch([TASK] * 3, configs) if is_async else subject.batch([TASK] * 3, configs)
        assert [answer.text for answer in answers] == [ANSWER] * 3
        for tracer in tracers:
            assert len(tracer.roots) == 1
            assert len(list(tracer.runs())) == 5
            assert SECRET not in tracer.text()


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_run_of_a_tool_holds_no_text_with_none(is_async: bool) -> None:
    tracer = Recorder()
    tool, config = MemAgentTool(reader(), context=DOCUMENT), {"callbacks": [tracer]}
    asked = {"type": "tool_call", "name": tool.name, "id": "1", "args": {"question": QUESTION}}
    message = await tool.ainvoke(asked, config) if is_async else tool.invoke(asked, config)  # type: ignore[arg-type]
    assert (message.text, message.artifact["memory"]) == (ANSWER, MEMORY)
    assert len(list(tracer.runs())) == 6
    assert SECRET not in tracer.text()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_tool_that_is_run_directly_holds_no_text_either(is_async: bool) -> None:
    tracer, own = Recorder(), Recorder()
    tool = MemAgentTool(reader(), context=DOCUMENT, callbacks=[own])
    asked = {"question": QUESTION}
    answer = await tool.arun(asked, callbacks=[tracer]) if is_async else tool.run(asked, callbacks=[tracer])
    assert answer == ANSWER
    assert tool.callbacks == [own]
    assert (len(list(tracer.runs())), len(list(own.runs()))) == (6, 1)
    assert SECRET not in tracer.text() + own.text()


class Place(BaseModel):
    """Where something is."""

    place: str


@every_way
@pytest.mark.parametrize("include_raw", [False, True])
async def test_the_runs_of_a_structured_answer_are_the_readers(how: str, include_raw: bool) -> None:
    script = ScriptedBackend(lambda prompt: MEMORY if prompt.phase == "memory" else f'{{"place": "{ANSWER}"}}')
    for trace_inputs, hidden in (("none", SECRET), ("elided", DOCUMENT)):
        tracer = Recorder()
        subject = reader(script, trace_inputs=trace_inputs).with_structured_output(Place, include_raw=include_raw)
        result = await call(subject, how, TASK, {"callbacks": [tracer]})
        assert (result["parsed"] if include_raw else result) == Place(place=ANSWER)
        assert [run.name for run in tracer.roots] == ["MemAgentReader"]
        assert hidden not in tracer.text()


def test_debug_prints_no_text_with_none(capsys: pytest.CaptureFixture[str]) -> None:
    set_debug(True)
    try:
        reader().invoke(TASK)
    finally:
        set_debug(False)
    printed = capsys.readouterr().out
    assert "memagent_memory" in printed
    assert SECRET not in printed


@every_way
async def test_after_a_reading_without_text_other_runs_are_traced_as_ever(how: str) -> None:
    with collect_runs() as collected:
        await call(reader(), how, TASK)
        await call(RunnableLambda(lambda text: text), how, DOCUMENT)
    assert collected.traced_runs[-1].inputs["input"] == DOCUMENT
    gc.collect()


@every_way
async def test_what_the_elided_default_holds_is_what_the_docs_say(how: str) -> None:
    tracer = Recorder()
    task = {"question": QUESTION, "context": Shelf()}
    await call(reader(trace_inputs="elided"), how, TASK, {"callbacks": [tracer]})
    await call(reader(trace_inputs="elided"), how, task, {"callbacks": [tracer]})
    first, second = tracer.roots
    assert first.inputs == {"question": QUESTION, "context": "<1,080 characters>"}
    prompts = [json.dumps(run.inputs) for run in first.child_runs]
    assert all("ZEBRADOCUMENT" in prompt for prompt in prompts[:-1])
    assert "ZEBRADOCUMENT" in repr(second.child_runs[0].outputs)
    assert tracer.custom[0][1]["memory"] == MEMORY


async def test_the_first_event_of_a_stream_shows_the_input_as_traces_do() -> None:
    async def first(**settings: Any) -> Any:
        events = [event async for event in reader(**settings).astream_events(TASK)]
        return events[0]["data"]["input"]

    assert await first(trace_inputs="elided") == {"question": QUESTION, "context": "<1,080 characters>"}
    assert await first(trace_inputs="full") == TASK


def test_the_setting_is_saved_and_checked() -> None:
    assert dumpd(reader(model=backend()))["kwargs"]["trace_inputs"] == "none"


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_calls_of_a_graph_hold_no_text_with_none(is_async: bool) -> None:
    """The runs of the graph and its nodes are LangGraph's, and hold its state."""
    tracer = Recorder()
    graph, task = build_graph(reader(), load=lambda _: DOCUMENT), {"question": QUESTION, "source": "a name"}
    with collect_runs() as collected:
        config: Any = {"callbacks": [tracer]}
        state = await graph.ainvoke(task, config) if is_async else graph.invoke(task, config)
    assert state["answer"] == ANSWER
    for runs in (tracer.runs(), runs_below(collected.traced_runs)):
        calls = [run for run in runs if run.run_type in ("llm", "chat_model")]
        assert len(calls) in (0, 4)  # a run collector is not inherited
        assert SECRET not in repr([(run.inputs, run.outputs, run.events, run.extra) for run in calls])
    assert SECRET not in repr(tracer.custom)


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_notes_of_a_compressor_are_no_text_of_a_trace_with_none(is_async: bool) -> None:
    tracer = Recorder()
    compressor, pages = MemAgentDocumentCompressor(reader()), [Document(DOCUMENT)]
    if is_async:
        (notes,) = await compressor.acompress_documents(pages, QUESTION, [tracer])
    else:
        (notes,) = compressor.compress_documents(pages, QUESTION, [tracer])
    assert notes.page_content == MEMORY
    assert len(list(tracer.runs())) == 4
    assert SECRET not in tracer.text()


def placing(text: str = f'{{"place": "{ANSWER}"}}') -> MemAgentReader:
    return reader(ScriptedBackend(lambda prompt: MEMORY if prompt.phase == "memory" else text))


def wrappers(trace_inputs: Any) -> dict[str, Runnable[Any, Any]]:
    """Return what a reader makes around itself, by name."""
    plain, of_places = (made.model_copy(update={"trace_inputs": trace_inputs}) for made in (reader(), placing()))
    return {
        "with_structured_output": of_places.with_structured_output(Place),
        "include_raw": of_places.with_structured_output(Place, include_raw=True),
        "as_node": plain.as_node(parts={"answer": "answer", "memory": "memory"}),
        "as_tool": plain.as_tool(description="Reads."),
    }


WRAPPERS = ["with_structured_output", "include_raw", "as_node", "as_tool"]


@pytest.mark.filterwarnings("ignore:This API is in beta")
@pytest.mark.parametrize("mode", ["elided", "full", "none"])
@pytest.mark.parametrize("how", [*WAYS, "batch", "abatch"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
async def test_what_a_reader_makes_around_itself_is_traced_as_the_reader_is(wrapper: str, how: str, mode: str) -> None:
    tracer, everything = Recorder(), Everything()
    subject, config = wrappers(mode)[wrapper], {"callbacks": [tracer, everything]}
    if how == "batch":
        (given,) = subject.batch([TASK], config)  # type: ignore[arg-type]
    elif how == "abatch":
        (given,) = await subject.abatch([TASK], config)  # type: ignore[arg-type]
    else:
        given = await call(subject, how, TASK, config)
    assert ANSWER in str(given)
    (root,) = tracer.roots
    reading = root if wrapper != "as_tool" else root.child_runs[0]
    assert (reading.name, reading.run_type) == ("MemAgentReader", "chain")
    assert {run.run_type for run in reading.child_runs} == {"llm"}, "no other run is started"
    for run in (root, reading):
        inputs = repr(run.inputs)
        assert ("ZEBRADOCUMENT" in inputs) == (mode == "full")
        assert ("ZEBRAQUESTION" in inputs) == (mode != "none")
        assert ("1,080 characters" in inputs) == (mode != "full")
        assert ("ZEBRAANSWER" in repr(run.outputs)) == (mode != "none")
    if mode == "none":
        assert SECRET not in tracer.text() + everything.text()


@pytest.mark.filterwarnings("ignore:This API is in beta")
@every_way
@pytest.mark.parametrize("wrapper", WRAPPERS)
async def test_an_error_below_what_a_reader_makes_around_itself_is_no_text_with_none(wrapper: str, how: str) -> None:
    def fail(prompt: Prompt) -> str:
        raise BackendError(f"cannot answer {prompt.messages[0].content}")

    failing, tracer, everything = reader(ScriptedBackend(fail)), Recorder(), Everything()
    subject: Any = {
        "with_structured_output": lambda: failing.with_structured_output(Place),
        "include_raw": lambda: failing.with_structured_output(Place, include_raw=True),
        "as_node": failing.as_node,
        "as_tool": lambda: failing.as_tool(description="Reads."),
    }[wrapper]()
    with pytest.raises(BackendError, match=SECRET):
        await call(subject, how, TASK, {"callbacks": [tracer, everything]})
    assert "BackendError" in str(tracer.roots[0].error)
    assert SECRET not in tracer.text() + everything.text()


@every_way
async def test_an_answer_that_does_not_fit_is_no_text_with_none(how: str) -> None:
    tracer = Recorder()
    subject = placing("ZEBRA of no schema").with_structured_output(Place, include_raw=True)
    given = await call(subject, how, TASK, {"callbacks": [tracer]})
    assert (given["parsed"], given["raw"].text) == (None, "ZEBRA of no schema")
    assert SECRET not in tracer.text()


@pytest.mark.filterwarnings("ignore:This API is in beta")
@pytest.mark.parametrize("mode", ["elided", "full", "none"])
async def test_event_streams_of_a_structured_answer_show_what_traces_do(mode: Any) -> None:
    subject = wrappers(mode)["with_structured_output"]
    events = [event async for event in subject.astream_events(TASK)]
    assert ("ZEBRADOCUMENT" in repr(events[0]["data"])) == (mode == "full")
    assert [event["event"] for event in events].count("on_custom_event") == 3
    assert events[-1]["event"] == "on_chain_end"
    if mode == "none":
        assert SECRET not in repr(events)
    else:
        assert events[-1]["data"]["output"] == Place(place=ANSWER)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_node_of_a_reader_adds_no_run_to_the_graphs_own(is_async: bool) -> None:
    tracer = Recorder()
    builder: Any = StateGraph(dict)
    builder.add_node("read", reader().as_node())
    builder.add_edge(START, "read")
    graph, config = builder.compile(), {"callbacks": [tracer]}
    state = await graph.ainvoke(TASK, config) if is_async else graph.invoke(TASK, config)
    assert state["answer"] == ANSWER
    (root,) = tracer.roots
    (node,) = root.child_runs
    assert (node.name, [run.name for run in node.child_runs]) == ("read", ["MemAgentReader"])
    assert SECRET not in repr([(run.inputs, run.outputs, run.events) for run in runs_below(node.child_runs)])


@pytest.mark.parametrize("is_async", [False, True])
async def test_handlers_of_a_tool_itself_see_no_text_with_none(is_async: bool) -> None:
    seen = Everything()
    tool = MemAgentTool(reader(), context=DOCUMENT, callbacks=[seen])
    asked = {"question": QUESTION}
    assert ANSWER in str(await tool.ainvoke(asked) if is_async else tool.invoke(asked))
    assert seen.seen
    assert SECRET not in seen.text()


@pytest.mark.parametrize("mode", ["elided", "full", "none"])
@pytest.mark.parametrize("kind", ["as_node", "build_graph"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_the_custom_stream_of_a_graph_has_the_memory_and_its_event_what_traces_hold(
    kind: str, mode: Any, is_async: bool
) -> None:
    subject, tracer = reader(trace_inputs=mode), Recorder()
    builder: Any = StateGraph(dict)
    builder.add_node("read", subject.as_node())
    builder.add_edge(START, "read")
    graph: Any = builder.compile() if kind == "as_node" else build_graph(subject, load=lambda _: DOCUMENT)
    task, options = {**TASK, "source": "a name"}, {"config": {"callbacks": [tracer]}, "stream_mode": "custom"}
    if is_async:
        written = [data async for data in graph.astream(task, **options)]
    else:
        written = list(graph.stream(task, **options))
    assert [data["memagent_step"]["memory"] for data in written] == [MEMORY] * 3
    assert {data["memory"] for _, data, _ in tracer.custom} == {"<19 characters>" if mode == "none" else MEMORY}
