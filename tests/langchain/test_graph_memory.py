"""Graphs that start from a memory, and memories that LangGraph's store carries from thread to thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.carried import CHUNK_TOKENS, PARTS, QUESTION, WHOLE, carried_reader, strung
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.store.memory import InMemoryStore
from typing_extensions import TypedDict

from memagent_integrations import BackendError, Journal, MemAgentReader, ScriptedBackend, UsageError
from memagent_integrations.errors import InUse
from memagent_integrations.langchain.graph import ReadingGraph, build_graph
from memagent_integrations.records import Prompt

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
JOINED = carried_reader().read(QUESTION, WHOLE)
NAMESPACE = ("memagent",)
KEY = "case 42"


def graph(broken: Any = lambda prompt: None, **options: Any) -> ReadingGraph:
    backend = ScriptedBackend(lambda prompt: broken(prompt) or strung(prompt))
    reader = MemAgentReader(backend, chunk_tokens=CHUNK_TOKENS, memory_tokens=400)
    return build_graph(reader, **({"load": lambda number: PARTS[number]} | options))


async def run(subject: Any, value: Any, thread: str = "1", *, is_async: bool) -> dict[str, Any]:
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    state: dict[str, Any] = await subject.ainvoke(value, config) if is_async else subject.invoke(value, config)
    return state


def task(number: int, **more: Any) -> dict[str, Any]:
    return {"question": QUESTION, "source": number, **more}


@BOTH
async def test_documents_in_a_row_leave_what_their_join_leaves(is_async: bool) -> None:
    subject, memory = graph(), ""
    for number in range(len(PARTS)):
        state = await run(subject, task(number, memory=memory), is_async=is_async)
        memory = state["memory"]
    assert (state["memory"], state["answer"]) == (JOINED.memory, JOINED.answer)


@BOTH
async def test_other_threads_carry_a_memory_of_the_store_on(is_async: bool) -> None:
    store, saver = InMemoryStore(), InMemorySaver()
    for number in range(len(PARTS)):  # each graph may be another process
        subject = graph(store=store, checkpointer=saver)
        state = await run(subject, task(number, memory_key=KEY), f"thread {number}", is_async=is_async)
    assert (state["memory"], state["answer"]) == (JOINED.memory, JOINED.answer)
    item = store.get(NAMESPACE, KEY)
    assert item is not None
    assert item.value == {"memory": JOINED.memory}
    other = await run(graph(store=store), task(0, memory_key="another"), is_async=is_async)
    assert other["memory"] == "fact0 fact1 fact2"


@BOTH
async def test_a_thread_that_reads_anew_starts_from_what_it_is_given_now(is_async: bool) -> None:
    store = InMemoryStore()
    subject = graph(store=store, checkpointer=InMemorySaver())
    await run(subject, task(0, memory="mine"), is_async=is_async)
    state = await run(subject, task(1), is_async=is_async)
    assert state["memory"] == "fact3 fact4 fact5", "not from what the thread has read before"
    await run(subject, task(0, memory_key=KEY), is_async=is_async)
    await run(subject, task(2), is_async=is_async)
    item = store.get(NAMESPACE, KEY)
    assert item is not None
    assert item.value == {"memory": "fact0 fact1 fact2"}, "nor under a key that another reading had"
    *_, last = subject.stream(task(1, memory="mine"), {"configurable": {"thread_id": "1"}}, stream_mode="values")
    assert last["memory"] == "mine fact3 fact4 fact5"


@BOTH
@pytest.mark.parametrize("call", range(4))
async def test_a_reading_that_fails_leaves_the_store_and_is_resumed(call: int, is_async: bool) -> None:
    store, saver = InMemoryStore(), InMemorySaver()
    await run(graph(store=store), task(0, memory_key=KEY), is_async=is_async)

    def broken(prompt: Prompt) -> Any:
        return BackendError("the server went away") if prompt.index == call else None

    with pytest.raises(BackendError):
        await run(graph(broken, store=store, checkpointer=saver), task(1, memory_key=KEY), is_async=is_async)
    item = store.get(NAMESPACE, KEY)
    assert item is not None
    assert item.value == {"memory": "fact0 fact1 fact2"}
    state = await run(graph(store=store, checkpointer=saver), None, is_async=is_async)
    assert state["memory"] == "fact0 fact1 fact2 fact3 fact4 fact5"
    item = store.get(NAMESPACE, KEY)
    assert item is not None
    assert item.value == {"memory": state["memory"]}


@BOTH
async def test_a_memory_that_another_thread_changed_meanwhile_is_not_overwritten(is_async: bool) -> None:
    store = InMemoryStore()
    waiting = graph(store=store, checkpointer=InMemorySaver(), interrupt_after=["read_chunk"])
    await run(waiting, task(0, memory_key=KEY), is_async=is_async)
    await run(graph(store=store), task(1, memory_key=KEY), is_async=is_async)
    for _ in range(2):
        await run(waiting, None, is_async=is_async)
    with pytest.raises(InUse, match="the memory 'case 42' has changed since this reading began; begin it anew"):
        await run(waiting, None, is_async=is_async)
    item = store.get(NAMESPACE, KEY)
    assert item is not None
    assert item.value == {"memory": "fact3 fact4 fact5"}
    await run(waiting, task(0, memory_key=KEY), is_async=is_async)
    for _ in range(3):
        state = await run(waiting, None, is_async=is_async)
    assert state["memory"] == "fact3 fact4 fact5 fact0 fact1 fact2"


class Failing(InMemoryStore):
    """A store that writes, and fails all the same, once."""

    failed = False

    def put(self, *args: Any, **options: Any) -> None:
        super().put(*args, **options)
        self._fail()

    async def aput(self, *args: Any, **options: Any) -> None:
        await super().aput(*args, **options)
        self._fail()

    def _fail(self) -> None:
        if not self.failed:
            self.failed = True
            raise ConnectionError("the database went away")


@BOTH
async def test_an_answer_that_is_asked_for_again_does_not_meet_its_own_memory(is_async: bool) -> None:
    store = Failing()
    subject = graph(store=store, checkpointer=InMemorySaver())
    with pytest.raises(ConnectionError):
        await run(subject, task(0, memory_key=KEY), is_async=is_async)
    assert (await run(subject, None, is_async=is_async))["answer"] == "fact0 fact1 fact2"


@BOTH
async def test_a_person_writes_the_memory_in_the_store(is_async: bool) -> None:
    store = InMemoryStore()
    store.put(("users", "ada"), KEY, {"memory": "known before"})
    subject = graph(store=store, namespace=("users", "ada"))
    assert (await run(subject, task(0, memory_key=KEY), is_async=is_async))["memory"].startswith("known before fact0")
    store.put(("users", "ada"), KEY, {"text": "of something else"})
    with pytest.raises(UsageError, match="holds no memory"):
        await run(subject, task(0, memory_key=KEY), is_async=is_async)


@BOTH
async def test_what_cannot_be_started_from_costs_no_call(is_async: bool, tmp_path: Path) -> None:
    called: list[Prompt] = []
    with Journal(tmp_path / "runs.db") as journal:
        for subject, more, message in [
            (graph(called.append), {"memory": "word " * 500}, "the memory has 501 tokens, its budget is 400"),
            (graph(called.append), {"memory": 5}, "memory has to be text"),
            (graph(called.append), {"memory": journal.memory("case")}, "memory has to be text.* memory_key"),
            (graph(called.append), {"memory_key": KEY}, "give build_graph a store"),
            (graph(called.append, store=InMemoryStore()), {"memory_key": 5}, "memory_key has to be"),
            (graph(called.append, store=InMemoryStore()), {"memory_key": KEY, "memory": "m"}, "not both"),
        ]:
            with pytest.raises(UsageError, match=message):
                await run(subject, task(0, **more), is_async=is_async)
    assert called == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "memory"}, "store has to be a store of LangGraph"),
        ({"namespace": ()}, "namespace has to be"),
        ({"namespace": "memagent"}, "namespace has to be"),
        ({"namespace": ("a.b",)}, "namespace has to be"),
        ({"namespace": ("langgraph", "a")}, "namespace has to be"),
        ({"namespace": ("a", 5)}, "namespace has to be"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        graph(**options)


class Case(TypedDict, total=False):
    question: str
    source: int
    memory_key: str
    answer: str


@BOTH
async def test_a_graph_in_a_graph_has_the_store_of_the_outer_one(is_async: bool) -> None:
    store = InMemoryStore()
    outer: Any = StateGraph(Case)
    outer.add_node("reading", graph())
    outer.add_edge(START, "reading")
    outer.add_edge("reading", END)
    subject = outer.compile(store=store, checkpointer=InMemorySaver())
    for number in range(2):
        state = await run(subject, task(number, memory_key=KEY), str(number), is_async=is_async)
    assert state["answer"] == "fact0 fact1 fact2 fact3 fact4 fact5"
    assert store.get(NAMESPACE, KEY) is not None
