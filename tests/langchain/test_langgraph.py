from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest
from helpers.scripted_chat import ANSWER, DOCUMENT, Model, count, failing, reader, scripted, sections
from langchain_core.documents.base import Blob
from langchain_core.runnables import RunnableConfig
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

from memagent_integrations import BackendError, Limits, MemAgentReader, ScriptedBackend, UsageError
from memagent_integrations.langchain import positions as module
from memagent_integrations.langchain.graph import ReadingGraph, ReadingTask, build_graph
from memagent_integrations.records import Reading

TASK: ReadingTask = {"question": "Why?", "source": "four"}
TEXTS = {
    "four": DOCUMENT,
    "five": "Other words of another document. " * 155,
    "one": "A short text.",
    "none": "",
    "blank": " \n\n  ",
    "long": "Some words of a long document. " * 2200,
}


class Texts:
    """Documents by their names; knows how often each was loaded."""

    def __init__(self, **texts: Any) -> None:
        self.texts = TEXTS | texts
        self.loaded: list[str] = []

    def __call__(self, name: str) -> Any:
        self.loaded.append(name)
        return self.texts[name]


def graph(model: Any = None, **options: Any) -> ReadingGraph:
    read_by = model if isinstance(model, MemAgentReader) else reader(model)
    return build_graph(read_by, **({"load": Texts()} | options))


def thread(name: str = "one", **more: Any) -> RunnableConfig:
    return {"configurable": {"thread_id": name}, **more}  # type: ignore[typeddict-item]


# ---- what comes out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [reader, scripted])
async def test_the_graphs_answer_is_the_readers(make: Callable[[], MemAgentReader]) -> None:
    message = make().invoke({"question": "Why?", "context": DOCUMENT})
    details = message.response_metadata["memagent"]
    for state in (graph(make()).invoke(TASK), await graph(make()).ainvoke(TASK)):
        reported = message.usage_metadata
        assert reported
        usage = {
            "prompt_tokens": reported["input_tokens"],
            "completion_tokens": reported["output_tokens"],
            "cached_tokens": reported["input_token_details"]["cache_read"],
        }
        assert (state["answer"], state["chunk"], state["more"], state["usage"]) == (ANSWER, 4, False, usage)
        assert state["memory"] == details["memory"]
        assert len(json.dumps(state)) < 600


def test_the_chunks_are_the_readers() -> None:
    model, other = Model(), Model()
    graph(model).invoke(TASK)
    reader(other).invoke({"question": "Why?", "context": DOCUMENT})
    assert model.prompts == other.prompts
    assert "".join(sections(model)) == DOCUMENT


def test_a_file_is_the_default_and_a_blob_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(DOCUMENT)
    assert build_graph(reader()).invoke({"question": "Why?", "source": str(path)})["chunk"] == 4
    assert graph(load=Blob.from_path).invoke({"question": "Why?", "source": str(path)})["chunk"] == 4


async def test_a_short_document_and_an_empty_one() -> None:
    state = graph().invoke({"question": "Why?", "source": "one"})
    assert (state["chunk"], state["answer"], state["memory"]) == (1, ANSWER, "note")
    for name in ("none", "blank"):
        with pytest.raises(UsageError, match="the document is empty"):
            graph().invoke({"question": "Why?", "source": name})
        with pytest.raises(UsageError, match="the document is empty"):
            await graph().ainvoke({"question": "Why?", "source": name})


def test_the_document_is_loaded_once() -> None:
    texts = Texts()
    graph(load=texts).invoke(TASK)
    assert texts.loaded == ["four"]


def test_unknown_usage_stays_unknown() -> None:
    assert graph(Model(usage=False)).invoke(TASK)["usage"] == dict.fromkeys(
        ("prompt_tokens", "completion_tokens", "cached_tokens")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load": "x"}, "load has to be a function"),
        ({"interrupt_after": ["read"]}, "no node 'read'; it has begin, read_chunk, answer"),
        ({"interrupt_before": "reads"}, "no node 'reads'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        graph(**options)


def test_wrong_readers_and_tasks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="MemAgentReader, not Model"):
        build_graph(Model())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="without a journal"):
        graph(reader(journal=tmp_path / "runs.db"))
    for task in ({"question": "Why?"}, {"source": "four"}):
        with pytest.raises(UsageError, match="'question' and 'source'"):
            graph().invoke(task)
    with pytest.raises(UsageError, match="the question is empty"):
        graph().invoke({"question": " ", "source": "four"})
    with pytest.raises(UsageError, match="reading the document failed: KeyError: 'six'"):
        graph().invoke({"question": "Why?", "source": "six"})
    with pytest.raises(UsageError, match="cannot read"):
        build_graph(reader()).invoke({"question": "Why?", "source": str(tmp_path / "none.txt")})


# ---- failures and resuming -------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_killed_process_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(TEXTS["five"])
    script = """
import os
from langgraph.checkpoint.sqlite import SqliteSaver
from memagent_integrations import MemAgentReader, ScriptedBackend
from memagent_integrations.langchain.graph import build_graph
calls = []
def say(prompt):
    if len(calls) == 3:
        os._exit(9)
    calls.append(prompt)
    return "note" if prompt.phase == "memory" else "the answer"
reader = MemAgentReader(ScriptedBackend(say), chunk_tokens=200, memory_tokens=50)
config = {"configurable": {"thread_id": "1"}}
with SqliteSaver.from_conn_string("graph.db") as saver:
    graph = build_graph(reader, checkpointer=saver)
    graph.invoke({"question": "Why?", "source": "text.txt"}, config, durability="sync")
"""
    died = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert died.returncode == 9, died.stderr
    monkeypatch.chdir(tmp_path)
    backend = ScriptedBackend(lambda prompt: "note" if prompt.phase == "memory" else "the answer")
    with SqliteSaver.from_conn_string("graph.db") as saver:
        subject = MemAgentReader(backend, chunk_tokens=200, memory_tokens=50)
        state = build_graph(subject, checkpointer=saver).invoke(None, thread("1"))
    assert (len(backend.prompts), state["chunk"], state["answer"]) == (3, 5, "the answer")


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_a_retry_in_one_process_does_not_load_anew(error: BaseException) -> None:
    texts = Texts()
    compiled = graph(failing(2, error), load=texts, checkpointer=InMemorySaver())
    with pytest.raises((BackendError, ValueError, KeyboardInterrupt)):
        compiled.invoke(TASK, thread())
    assert compiled.invoke(None, thread())["chunk"] == 4
    assert texts.loaded == ["four"]


def test_a_failing_answer_is_asked_for_again() -> None:
    model = failing(4)
    compiled = graph(model, checkpointer=InMemorySaver())
    with pytest.raises(BackendError):
        compiled.invoke(TASK, thread())
    assert compiled.get_state(thread()).next == ("answer",)
    assert compiled.invoke(None, thread())["answer"] == ANSWER
    assert len(model.prompts) == 6


def test_a_document_that_breaks_keeps_what_was_read() -> None:
    broken = [True]

    def lines(_: str) -> Iterator[str]:
        for start in range(0, len(DOCUMENT), 100):
            if start > 2500 and broken:
                raise OSError("no more pages")
            yield DOCUMENT[start : start + 100]

    model = Model()
    compiled = graph(model, load=lines, checkpointer=InMemorySaver())
    with pytest.raises(UsageError, match="no more pages"):
        compiled.invoke(TASK, thread())
    assert compiled.get_state(thread()).values["chunk"] == len(model.prompts) == 2
    broken.clear()
    assert compiled.invoke(None, thread())["answer"] == ANSWER
    assert "".join(sections(model)) == DOCUMENT


@pytest.mark.parametrize("stop", range(4))
async def test_a_stream_that_is_left_after_an_update_is_gone_on_with(stop: int) -> None:
    """LangGraph keeps the writes of a node that is cancelled after them, so they have to name the next node."""
    for _ in range(4):
        model = Model()
        compiled = graph(model, checkpointer=InMemorySaver())
        stream = compiled.astream(TASK, thread(), stream_mode="custom")
        for _ in range(stop + 1):
            await anext(stream)
        await stream.aclose()
        state = await compiled.ainvoke(None, thread())
        assert (state["answer"], state["chunk"]) == (ANSWER, 4)


@pytest.mark.parametrize("checkpointer", [None, InMemorySaver()])
def test_after_a_first_chunk_that_failed_a_reading_begins_with_the_document_as_it_is_now(checkpointer: Any) -> None:
    model, texts = failing(0), Texts()
    compiled = graph(model, load=texts, checkpointer=checkpointer)
    with pytest.raises(BackendError):
        compiled.invoke(TASK, thread())
    texts.texts["four"] = TEXTS["five"]
    compiled.invoke({**TASK, "question": "Why now?"}, thread())
    assert "".join(sections(model)[1:]) == TEXTS["five"]


async def test_readings_of_one_document_side_by_side_load_it_once_each() -> None:
    texts = Texts()
    states = await graph(load=texts).abatch([{**TASK, "question": f"Why {number}?"} for number in range(4)])
    assert [state["chunk"] for state in states] == [4] * 4
    assert texts.loaded == ["four"] * 4


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"chunk": "a"}, "chunk"),
        ({"chunk": None}, "chunk"),
        ({"usage": 5}, "usage"),
        ({"usage": {"a": 1}}, "usage"),
        ({"digest": 1}, "digest"),
    ],
)
def test_a_state_that_no_graph_left(changed: dict[str, Any], named: str) -> None:
    model = Model()
    compiled = graph(model, checkpointer=InMemorySaver(), interrupt_after=["read_chunk"])
    compiled.invoke(TASK, thread())
    compiled.update_state(thread(), changed)
    with pytest.raises(UsageError, match=f"^{named} in the state is not what a graph keeps there"):
        compiled.invoke(None, thread())
    assert len(model.prompts) == 1, "nothing is asked of the model before"


@pytest.mark.parametrize("node", ["begin", "read_chunk"])
def test_a_thread_that_did_not_begin(node: str) -> None:
    compiled = graph(checkpointer=InMemorySaver())
    compiled.update_state(thread(), TASK, as_node=node)
    with pytest.raises(UsageError, match="a thread begins with a question and a source"):
        compiled.invoke(None, thread())


@pytest.mark.parametrize("source", ["x" * 20_000, Blob.from_data("x" * 20_000), ["x" * 300] * 40])
def test_a_document_is_no_reference(source: Any) -> None:
    with pytest.raises(UsageError, match="source has to be a small reference"):
        graph(load=lambda text: text).invoke({"question": "Why?", "source": source})


async def test_a_load_that_cannot_be() -> None:
    async def load(_: str) -> str:
        return DOCUMENT

    async def lines(_: str) -> Any:
        yield DOCUMENT

    for compiled, message in [(graph(load=load), "plain function"), (graph(load=lines), "not an async iterator")]:
        with pytest.raises(UsageError, match=message):
            compiled.invoke(TASK)
        with pytest.raises(UsageError, match=message):
            await compiled.ainvoke(TASK)


def test_limits_of_a_whole_reading_are_refused() -> None:
    with pytest.raises(UsageError, match="run_timeout bounds a reading in one call"):
        graph(reader(limits=Limits(run_timeout=5)))


async def test_a_cancelled_step_leaves_the_state_as_it_was() -> None:
    begun = asyncio.Event()

    class Slow(Model):
        async def _agenerate(self, *args: Any, **options: Any) -> Any:
            if len(self.prompts) == 2 and not begun.is_set():
                begun.set()
                await asyncio.sleep(60)
            return await super()._agenerate(*args, **options)

    model, texts = Slow(), Texts()
    compiled = graph(model, load=texts, checkpointer=InMemorySaver())
    running = asyncio.create_task(compiled.ainvoke(TASK, thread()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await compiled.aget_state(thread())).values["chunk"] == 2
    assert (await compiled.ainvoke(None, thread()))["answer"] == ANSWER
    assert ("".join(sections(model)), texts.loaded) == (DOCUMENT, ["four"])


def test_a_changed_document_is_noticed() -> None:
    model, texts, saver = failing(2), Texts(), InMemorySaver()
    with pytest.raises(BackendError):
        graph(model, load=texts, checkpointer=saver).invoke(TASK, thread())
    read = "".join(sections(model)[:2])
    for changed in ("X" + DOCUMENT, "Short.", read, read.replace("Some", "Sore")):
        texts.texts["four"] = changed
        with pytest.raises(
            UsageError, match=r"the text before chunk 2 is not what was read|the document ends at chunk 2"
        ):
            graph(load=texts, checkpointer=saver).invoke(None, thread())
    texts.texts["four"] = DOCUMENT
    with pytest.raises(UsageError, match="the text before chunk 2"):
        graph(reader(chunk_tokens=150), load=texts, checkpointer=saver).invoke(None, thread())
    assert graph(load=texts, checkpointer=saver).invoke(None, thread())["answer"] == ANSWER


def test_a_thread_reads_anew_when_it_is_asked_again() -> None:
    model = Model()
    compiled = graph(model, checkpointer=InMemorySaver())
    compiled.invoke(TASK, thread())
    state = compiled.invoke({"question": "Who?", "source": "five"}, thread())
    assert (state["chunk"], state["memory"], state["usage"]["prompt_tokens"]) == (5, "note note note note note", 60)
    assert compiled.invoke({"question": "Whence?"}, thread())["chunk"] == 5  # of the same document


# ---- the state -------------------------------------------------------------------------------------------


def test_what_is_kept_in_the_process_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHED_POSITIONS", 3)
    alive: list[weakref.ref[Any]] = []

    class Lines:
        def __iter__(self) -> Iterator[str]:
            alive.append(weakref.ref(self))
            yield from (DOCUMENT[start : start + 100] for start in range(0, len(DOCUMENT), 100))

    compiled = graph(load=lambda _: Lines(), checkpointer=InMemorySaver(), interrupt_after=["read_chunk"])
    for number in range(8):
        compiled.invoke(TASK, thread(str(number)))
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 3
    for number in range(8):
        while compiled.get_state(thread(str(number))).next:
            state = compiled.invoke(None, thread(str(number)))
        assert state["chunk"] == 4
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


# ---- edits and time travel -------------------------------------------------------------------------------


async def test_an_edit_keeps_to_the_budget() -> None:
    model = Model()
    compiled = graph(model, checkpointer=InMemorySaver(), interrupt_after=["read_chunk"])
    await compiled.ainvoke(TASK, thread())
    await compiled.aupdate_state(thread(), {"memory": "word " * 60})
    with pytest.raises(UsageError, match=r"the memory has .* tokens, its budget is 50"):
        await compiled.ainvoke(None, thread())
    await compiled.aupdate_state(thread(), {"memory": 7})
    with pytest.raises(UsageError, match="the memory has to be text, not int"):
        await compiled.ainvoke(None, thread())
    await compiled.aupdate_state(thread(), {"memory": ""})
    assert (await compiled.ainvoke(None, thread()))["memory"] == "note"
    assert len(model.prompts) == 2


def test_stops_before_nodes() -> None:
    compiled = graph(checkpointer=InMemorySaver(), interrupt_before=["answer"])
    state = compiled.invoke(TASK, thread())
    assert (state["chunk"], state["answer"], compiled.get_state(thread()).next) == (4, None, ("answer",))
    assert compiled.invoke(None, thread())["answer"] == ANSWER
    everywhere = graph(checkpointer=InMemorySaver(), interrupt_after="*")
    everywhere.invoke(TASK, thread())
    assert everywhere.get_state(thread()).next == ("read_chunk",)
    by_call = graph(checkpointer=InMemorySaver())
    assert by_call.invoke(TASK, thread(), interrupt_after=["read_chunk"])["chunk"] == 1


def test_time_travel() -> None:
    model = Model()
    texts = Texts()
    compiled = graph(model, load=texts, checkpointer=InMemorySaver())
    compiled.invoke(TASK, thread())
    history = {
        snapshot.values["chunk"]: snapshot
        for snapshot in compiled.get_state_history(thread())
        if snapshot.next == ("read_chunk",)
    }
    assert {number: snapshot.values["memory"] for number, snapshot in history.items()} == {
        0: "",
        1: "note",
        2: "note note",
        3: "note note note",
    }
    before = len(model.prompts)
    state = compiled.invoke(None, history[2].config)  # read chunks 2 and 3 again
    assert (state["answer"], state["memory"], len(model.prompts) - before, texts.loaded) == (
        ANSWER,
        "note note note note",
        3,
        ["four"] * 2,
    )
    fork = compiled.update_state(history[3].config, {"memory": "Another past."})
    state = compiled.invoke(None, fork)
    assert (state["memory"], len(model.prompts) - before) == ("Another past. note", 5)
    assert "".join(sections(model)[:4]) == DOCUMENT
    assert sections(model)[-1] == sections(model)[3]


# ---- side by side ----------------------------------------------------------------------------------------


async def test_threads_do_not_mix() -> None:
    model, texts = Model(), Texts()
    compiled = graph(model, load=texts, checkpointer=InMemorySaver(), interrupt_after=["read_chunk"])
    sources = {"a": "four", "b": "five", "c": "four"}
    for name, source in sources.items():
        compiled.invoke({"question": f"Why {name}?", "source": source}, thread(name))
    while any(compiled.get_state(thread(name)).next for name in sources):
        for name in sources:
            if compiled.get_state(thread(name)).next:
                compiled.invoke(None, thread(name))
    assert sorted(texts.loaded) == ["five", "four", "four"]
    for name, source in sources.items():
        prompts = [text for text in model.prompts if f"Why {name}?" in text]
        assert "".join(sections(Model(prompts=prompts))) == TEXTS[source]
    states = await asyncio.gather(
        *(graph(load=texts).ainvoke({"question": "Why?", "source": source}) for source in sources.values())
    )
    assert [state["chunk"] for state in states] == [4, 5, 4]


async def test_the_loop_is_not_blocked() -> None:
    loop = asyncio.get_running_loop()

    def seen() -> None:
        """The event loop has a turn while this waits; blocked, it would not."""
        turn = threading.Event()
        loop.call_soon_threadsafe(turn.set)
        assert turn.wait(30)

    def slow(_: str) -> str:
        seen()
        return TEXTS["one"]

    def slowly(text: str) -> int:
        seen()
        return count(text)

    state = await graph(reader(tokenizer=slowly), load=slow).ainvoke({"question": "Why?", "source": "one"})
    assert state["answer"] == ANSWER


def test_a_graph_inside_a_graph() -> None:
    class Outer(TypedDict, total=False):
        question: str
        source: str
        answer: str

    builder = StateGraph(Outer)
    builder.add_node("inner", graph())
    builder.add_edge(START, "inner")
    builder.add_edge("inner", END)
    outer = builder.compile(checkpointer=InMemorySaver())
    assert outer.invoke({"question": "Why?", "source": "five"}, thread(recursion_limit=5)) == {
        "question": "Why?",
        "source": "five",
        "answer": ANSWER,
    }


# ---- streams and runs ------------------------------------------------------------------------------------


def check_stream(events: list[tuple[str, Any]]) -> None:
    updates = [next(iter(data.items())) for mode, data in events if mode == "updates"]
    assert [name for name, _ in updates] == ["begin", *["read_chunk"] * 4, "answer"]
    assert [data["memory"] for name, data in updates if name == "read_chunk"] == [
        "note",
        "note note",
        "note note note",
        "note note note note",
    ]
    custom = [data["memagent_step"] for mode, data in events if mode == "custom"]
    assert [(data["step"], data["memory"].count("note")) for data in custom] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert custom[0]["chunk"]["start"] == 0
    pieces = [data for mode, data in events if mode == "messages"]
    assert "".join(message.text for message, _ in pieces) == ANSWER
    assert len(pieces) > 3
    assert {details["langgraph_node"] for _, details in pieces} == {"answer"}


async def test_stream_modes() -> None:
    modes = ["updates", "custom", "messages"]
    check_stream(list(graph().stream(TASK, stream_mode=modes)))
    check_stream([event async for event in graph().astream(TASK, stream_mode=modes)])
    values = list(graph().stream(TASK, stream_mode="values"))
    assert [value.get("chunk") for value in values] == [None, 0, 1, 2, 3, 4, 4]


async def test_events_of_version_2() -> None:
    events = [event async for event in graph().astream_events(TASK, version="v2")]
    custom = [event["data"]["step"] for event in events if event["event"] == "on_custom_event"]
    assert custom == [0, 1, 2, 3]


async def test_runs_are_children_of_their_nodes() -> None:
    for run_graph in ("invoke", "ainvoke"):
        runs = RunCollectorCallbackHandler()
        compiled, config = (
            graph(),
            RunnableConfig(callbacks=[runs], tags=["mine"], run_name="reading", run_id=uuid.uuid4()),
        )
        await compiled.ainvoke(TASK, config) if run_graph == "ainvoke" else compiled.invoke(TASK, config)
        (root,) = runs.traced_runs
        assert (root.name, [child.name for child in root.child_runs]) == (
            "reading",
            ["begin", *["read_chunk"] * 4, "answer"],
        )
        calls = [[call for call in node.child_runs if call.run_type == "llm"] for node in root.child_runs]
        assert [[call.name for call in of_node] for of_node in calls] == [
            [],
            *[["memagent_memory"]] * 4,
            ["memagent_answer"],
        ]
        assert all("nostream" in call.tags and "mine" in call.tags for of_node in calls[1:5] for call in of_node)
        assert "nostream" not in calls[5][0].tags
        assert [of_node[0].extra["metadata"]["memagent_step"] for of_node in calls[1:]] == [0, 1, 2, 3, 4]
        assert DOCUMENT[:100] not in json.dumps(root.inputs)


# ---- the reader as a node --------------------------------------------------------------------------------


class Typed(BaseModel):
    ask: str
    text: str
    told: str = ""


def test_a_node_tells_which_key_is_missing() -> None:
    node = reader().as_node()
    assert node.invoke({"question": "Why?", "context": DOCUMENT}) == {"answer": ANSWER}
    with pytest.raises(UsageError, match=r"the state has no 'context'; name its keys: reader.as_node"):
        node.invoke({"question": "Why?"})
    with pytest.raises(UsageError, match="the state has no 'question'"):
        node.invoke(Typed(ask="", text=""))


@pytest.mark.heavy
def test_without_langgraph_the_reader_is_there() -> None:
    script = """
import sys
from memagent_integrations import MemAgentReader, MissingExtra
if "langgraph" in sys.modules:
    raise SystemExit("the reader imports LangGraph")
sys.modules["langgraph"] = None
try:
    import memagent_integrations.langchain.graph
except MissingExtra as error:
    assert "[langchain]" in error.command
else:
    raise SystemExit("the graph was imported without LangGraph")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_reading_survives_a_checkpoint() -> None:
    class State(TypedDict, total=False):
        question: str
        context: str
        reading: Reading

    node = scripted().as_node(parts={"reading": "reading"})
    graph = StateGraph(State).add_node("read", node).add_edge(START, "read").compile(checkpointer=InMemorySaver())
    reading = graph.invoke({"question": "Why?", "context": DOCUMENT}, thread())["reading"]
    kept = graph.get_state(thread()).values["reading"]
    assert kept == reading
    assert kept.citations == reading.citations
    assert hash(kept.steps[0].span) == hash(reading.steps[0].span)
