"""A document that a person has to give: LangGraph's interrupts inside of what is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

import pytest
from helpers.scripted_chat import ANSWER, DOCUMENT, scripted
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from memagent_integrations import UsageError
from memagent_integrations.langchain import build_graph

THREAD: RunnableConfig = {"configurable": {"thread_id": "one"}}
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


class Asked(BaseLoader):
    """Loads what a person gives."""

    def lazy_load(self) -> Iterator[Document]:
        yield Document("The first page. ")
        yield Document(interrupt("what does the second page say?"))


def pages() -> Iterator[str]:
    yield "The first page. "
    yield interrupt("what does the second page say?")


class State(TypedDict, total=False):
    question: str
    answer: str


async def run(graph: Any, value: Any, *, is_async: bool) -> Any:
    return await graph.ainvoke(value, THREAD) if is_async else graph.invoke(value, THREAD)


@BOTH
@pytest.mark.parametrize("trace_inputs", ["elided", "none"])
@pytest.mark.parametrize("document", [Asked, pages, lambda: RunnableLambda(lambda _: interrupt("which?"))])
async def test_a_document_may_ask_a_person(document: Any, trace_inputs: str, is_async: bool) -> None:
    reader = scripted(trace_inputs=trace_inputs)
    node = RunnableLambda(lambda state: {**state, "context": document()}) | reader.as_node()
    graph = StateGraph(State).add_node("read", node).add_edge(START, "read").compile(checkpointer=InMemorySaver())
    state = await run(graph, {"question": "Why?"}, is_async=is_async)
    assert [type(stop.value) for stop in state["__interrupt__"]] == [str]
    state = await run(graph, Command(resume=DOCUMENT), is_async=is_async)
    assert state["answer"] == ANSWER


@BOTH
async def test_what_loads_the_document_of_a_graph_may_ask_a_person(is_async: bool) -> None:
    graph = build_graph(scripted(), load=lambda source: interrupt(f"where is {source}?"), checkpointer=InMemorySaver())
    state = await run(graph, {"question": "Why?", "source": "the book"}, is_async=is_async)
    assert [stop.value for stop in state["__interrupt__"]] == ["where is the book?"]
    state = await run(graph, Command(resume=DOCUMENT), is_async=is_async)
    assert (state["answer"], state["chunk"]) == (ANSWER, 4)


def test_any_other_error_of_a_document_stays_an_error_that_says_so() -> None:
    def broken() -> Iterator[str]:
        yield "The first page. "
        raise ValueError("no more pages")

    with pytest.raises(UsageError, match=r"reading the document failed: ValueError: no more pages"):
        scripted().invoke({"question": "Why?", "context": broken()})
