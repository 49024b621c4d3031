"""Sections that the model wrote no memory for, as a user of LangChain and LangGraph sees them."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from memagent_integrations import Limits, MemAgentReader, ScriptedBackend, UsageError
from memagent_integrations.errors import NoMemory
from memagent_integrations.langchain import build_graph
from memagent_integrations.records import Prompt

TEXT = "".join(f"Day {number} was fair. " for number in range(60))
QUESTION = "How was the weather?"


def backend(lost: str = "Day 30 ") -> ScriptedBackend:
    def reply(prompt: Prompt) -> str:
        if prompt.phase == "answer":
            return "fair"
        return "" if lost in prompt.messages[-1].content else "noted"

    return ScriptedBackend(reply)


def reader(**settings: Any) -> MemAgentReader:
    return MemAgentReader(settings.pop("model", backend()), chunk_tokens=100, memory_tokens=20, **settings)


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream"])
async def test_the_message_tells_what_was_lost(how: str) -> None:
    value, subject = {"question": QUESTION, "context": TEXT}, reader(on_lost_section="skip")
    if how == "stream":
        *_, message = subject.stream(value)
    else:
        message = subject.invoke(value) if how == "invoke" else await subject.ainvoke(value)
    details = message.response_metadata["memagent"]
    (lost,) = details["lost_sections"]
    assert "Day 30 " in TEXT[lost["start"] : lost["end"]]
    assert details["warnings"][0].startswith("sections lost: 1 of")
    assert details["calls"] == details["chunks"] + 1 + 2, "tries are calls"
    with pytest.raises(NoMemory):
        reader().invoke(value)


def test_the_setting_is_checked_and_saved() -> None:
    with pytest.raises(UsageError, match="on_lost_section"):
        reader(on_lost_section="ignore")
    assert reader(on_lost_section="skip").with_structured_output({"type": "object"}).reader.on_lost_section == "skip"  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_graph_tells_what_was_lost(is_async: bool) -> None:
    task = {"question": QUESTION, "source": "log"}
    graph = build_graph(reader(on_lost_section="skip"), load=lambda _: TEXT, checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t"}}
    state = await graph.ainvoke(task, thread) if is_async else graph.invoke(task, thread)
    ((start, end),) = state["lost_sections"]
    assert "Day 30 " in TEXT[start:end]
    assert state["warnings"] == [
        f"sections lost: 1 of {state['chunk']}, for which the model wrote no memory (characters {start:,}-{end:,})"
    ]
    again = build_graph(reader(model=backend("none of them")), load=lambda _: TEXT, checkpointer=graph.checkpointer)
    state = again.invoke(task, thread)
    assert (state["lost_sections"], state["warnings"]) == ([], []), "a new reading begins anew"


def test_a_graph_that_lost_a_section_is_resumed_there() -> None:
    saver, thread = InMemorySaver(), {"configurable": {"thread_id": "t"}}
    graph = build_graph(reader(limits=Limits(empty_retries=0)), load=lambda _: TEXT, checkpointer=saver)
    with pytest.raises(NoMemory, match="section 2 is lost"):
        graph.invoke({"question": QUESTION, "source": "log"}, thread)  # type: ignore[arg-type]
    healed = build_graph(reader(model=backend("none of them")), load=lambda _: TEXT, checkpointer=saver)
    state = healed.invoke(None, thread)  # type: ignore[arg-type]
    assert (state["answer"], state["warnings"]) == ("fair", [])
