"""What becomes of a conversation when its old messages cannot be folded: it waits, or it goes on without a section."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from helpers.scripted_agent import SMALL, THREAD, AgentModel, middleware, send, ten_a_message, texts
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver

from memagent_integrations import BackendError, ContextOverflow, MemAgentReader, ScriptedBackend, UsageError
from memagent_integrations.langchain.middleware import MemAgentMiddleware
from memagent_integrations.langchain.notes import Folding
from memagent_integrations.records import Prompt, Reply

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
DOWN = BackendError("the server went away", retryable=True)
BAD = "SECRET"
"""A word of a section that the model does not read."""


class StatusError(Exception):
    """An error as the SDKs of model servers raise it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status


class Notes(BaseChatModel):
    """Notes how many sections it has read; a section with the bad word gets `outcome`: a message, or an error."""

    outcome: Any

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        text = messages[-1].text
        section = text.partition("<section>\n")[2].partition("\n</section>")[0]
        before = text.partition("<memory>\n")[2].partition("\n</memory>")[0].split()
        read = int(before[0]) if before[0].isdigit() else 0
        answer = AIMessage(f"{read + 1} read")
        if BAD in section:
            if isinstance(self.outcome, Exception):
                raise self.outcome
            answer = self.outcome
        return ChatResult(generations=[ChatGeneration(message=answer)])


def refused(**fields: Any) -> AIMessage:
    return AIMessage(**({"content": "", "response_metadata": {"finish_reason": "stop"}} | fields))


FOR_GOOD: dict[str, Any] = {
    "a refusal of the Responses API": refused(content=[{"type": "refusal", "refusal": "I cannot help with that."}]),
    "a refusal in LangChain's standard blocks": refused(
        content=[{"type": "non_standard", "value": {"type": "refusal", "refusal": "I cannot."}}]
    ),
    "a refusal of the Chat Completions API": refused(additional_kwargs={"refusal": "I cannot."}),
    "a refusal of Anthropic": refused(response_metadata={"stop_reason": "refusal"}),
    "a content filter": refused(response_metadata={"finish_reason": "content_filter"}),
    "Gemini's safety": refused(response_metadata={"finish_reason": "SAFETY"}),
    "an empty reply": refused(),
    "only thinking": AIMessage("<think>Hm.</think>"),
    "a bad request": StatusError(400, "the prompt was flagged"),
    "a request that cannot be processed": StatusError(422, "unprocessable"),
    "a prompt that is too long after all": StatusError(400, "context_length_exceeded"),
    "an error that nothing is known of": RuntimeError("CUDA error"),
}


def folding(outcome: Any, **settings: Any) -> tuple[AgentModel, Any]:
    """Return an agent that folds four of five messages, and its model."""
    settings = {"budget_tokens": 50, "keep_tokens": 30, "token_counter": ten_a_message} | settings
    reader = MemAgentReader(Notes(outcome=outcome), tokenizer="approximate", **SMALL)
    model = AgentModel()
    agent = create_agent(
        model,
        middleware=[MemAgentMiddleware(reader, **settings)],
        checkpointer=InMemorySaver(),
        system_prompt="Be kind.",
    )
    return model, agent


@BOTH
@pytest.mark.parametrize("on_failure", ["raise", "later"])
@pytest.mark.parametrize("outcome", FOR_GOOD.values(), ids=FOR_GOOD.keys())
async def test_a_bad_section_is_passed_over_and_the_conversation_goes_on(
    outcome: Any, on_failure: Any, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, agent = folding(outcome, on_failure=on_failure)
    with caplog.at_level(logging.WARNING):
        for text in ("one", f"the {BAD} word", "three", "four"):
            state = await send(agent, text, is_async=is_async)
    (section,) = state["passed_over"]
    assert BAD in section["text"], "what is not in the memory is kept"
    assert section["reason"]
    assert "is not in the memory" in caplog.text
    assert section["reason"] in caplog.text
    assert texts(state["messages"]) == ["three", "You said three.", "four", "You said four."]
    system = model.calls[-1][0]
    assert isinstance(system, SystemMessage)
    assert "could not be noted, and are missing here: 1" in system.text, "the agent knows that something is missing"
    for text in ("five", "six"):
        state = await send(agent, text, is_async=is_async)
    assert state["memory"] == "1 read"
    assert len(state["passed_over"]) == 1, "later folds pass nothing over"
    assert texts(state["messages"]) == ["five", "You said five.", "six", "You said six."]


@BOTH
async def test_only_the_bad_section_of_a_fold_is_passed_over(is_async: bool) -> None:
    _, agent = folding(StatusError(400, "flagged"), budget_tokens=80, keep_tokens=10)
    filler = " and many more words" * 25
    for number in range(4):
        await send(agent, f"{BAD if number == 2 else 'text'} {number}{filler}", is_async=is_async)
    state = await send(agent, "last", is_async=is_async)
    passed_over = state["passed_over"]
    assert all(BAD in section["text"] for section in passed_over), "in what was said, and in what was said again"
    assert len(passed_over) == 2
    assert int(state["memory"].split()[0]) >= 4


async def test_what_is_passed_over_is_in_no_trace() -> None:
    collector = RunCollectorCallbackHandler()
    reader = MemAgentReader(ScriptedBackend(lambda prompt: ""), **SMALL)
    folding = Folding(reader, "Why?", f"The {BAD} word.", traced="x")
    notes = folding.take({"callbacks": [collector]})
    assert (await folding.atake()).text == notes.text == ""
    assert [section.text for section in folding.passed_over] == [f"The {BAD} word."]
    assert BAD not in str(notes)
    (run,) = collector.traced_runs
    assert BAD not in str(run.outputs)


FOR_NOW: dict[str, Any] = {
    "a connection": ConnectionError("the server is gone"),
    "a busy server": StatusError(503, "try again later"),
    "too many requests": StatusError(429, "slow down"),
    "a wrong key": StatusError(401, "no such key"),
    "a key without rights": StatusError(403, "not yours"),
    "an unknown model": StatusError(404, "no such model"),
}


@BOTH
@pytest.mark.parametrize("outcome", FOR_NOW.values(), ids=FOR_NOW.keys())
async def test_a_failure_that_is_not_the_sections_loses_nothing(outcome: Any, is_async: bool) -> None:
    _, agent = folding(outcome)
    for text in ("one", f"the {BAD} word", "three"):
        await send(agent, text, is_async=is_async)
    before = agent.get_state(THREAD).values
    for _ in range(4):
        with pytest.raises(BackendError):
            await send(agent, "four", is_async=is_async)
    after = agent.get_state(THREAD).values
    assert texts(after["messages"])[: len(before["messages"])] == texts(before["messages"])
    assert "memory" not in after
    assert "passed_over" not in after
    _, agent = folding(outcome, on_failure="later")
    for text in ("one", f"the {BAD} word", "three", "four"):
        state = await send(agent, text, is_async=is_async)
    assert len(state["messages"]) == 8
    assert "passed_over" not in state


@BOTH
async def test_a_fold_that_fails_loses_nothing(is_async: bool) -> None:
    script = ["All were greeted.", DOWN, "All were greeted again."]
    backend, model = ScriptedBackend(script), AgentModel()
    agent = create_agent(model, middleware=[middleware(backend)], checkpointer=InMemorySaver())
    for text in ("one", "two", "three", "four", "five"):
        await send(agent, text, is_async=is_async)
    before = agent.get_state(THREAD).values
    with pytest.raises(BackendError, match="went away"):
        await send(agent, "six", is_async=is_async)
    after = agent.get_state(THREAD).values
    assert after["memory"] == before["memory"] == "All were greeted."
    assert texts(after["messages"]) == [*texts(before["messages"]), "six"]
    state = (
        await agent.ainvoke(None, THREAD) if is_async else agent.invoke(None, THREAD)
    )  # the turn goes on where it stopped
    assert state["memory"] == "All were greeted again."
    assert texts(state["messages"])[-2:] == ["six", "You said six."]


@BOTH
async def test_later(is_async: bool) -> None:
    backend, model = ScriptedBackend([DOWN, DOWN, "All were greeted."]), AgentModel()
    agent = create_agent(model, middleware=[middleware(backend, on_failure="later")], checkpointer=InMemorySaver())
    for text in ("one", "two", "three", "four"):
        state = await send(agent, text, is_async=is_async)
    assert "memory" not in state
    assert len(state["messages"]) == len(model.calls[-1]) + 1 == 8, "the turn goes on with all messages"
    state = await send(agent, "five", is_async=is_async)
    assert "memory" not in state
    assert len(state["messages"]) == 10
    state = await send(agent, "six", is_async=is_async)
    assert state["memory"] == "All were greeted."
    assert texts(state["messages"]) == ["five", "You said five.", "six", "You said six."]
    assert all(text in backend.prompts[-1].messages[0].content for text in ("one", "two", "three", "four"))


@BOTH
async def test_an_empty_reply_is_asked_for_again(is_async: bool) -> None:
    backend = ScriptedBackend(["", " ", "All were greeted."])
    agent = create_agent(AgentModel(), middleware=[middleware(backend)], checkpointer=InMemorySaver())
    for text in ("one", "two", "three", "four"):
        state = await send(agent, text, is_async=is_async)
    assert (state["memory"], len(backend.prompts)) == ("All were greeted.", 3)
    assert "passed_over" not in state


@BOTH
async def test_after_its_tries_a_section_that_leaves_no_memory_is_passed_over(is_async: bool) -> None:
    backend = ScriptedBackend(lambda prompt: "")
    agent = create_agent(AgentModel(), middleware=[middleware(backend)], checkpointer=InMemorySaver())
    for text in ("one", "two", "three", "four"):
        state = await send(agent, text, is_async=is_async)
    assert len(backend.prompts) == 3
    assert "wrote no memory" in state["passed_over"][0]["reason"]
    assert (state["memory"], len(state["messages"])) == ("", 4)


@BOTH
async def test_the_old_memory_outlives_a_section_that_is_passed_over(is_async: bool) -> None:
    replies: list[Callable[[Prompt], Any]] = [
        lambda _: "All were greeted.",
        lambda _: Reply(text="I cannot.", finish_reason="content_filter"),
        lambda prompt: f"still: {'All were greeted.' in prompt.messages[0].content}",
    ]
    calls = iter(replies)
    agent = create_agent(
        AgentModel(),
        middleware=[middleware(ScriptedBackend(lambda prompt: next(calls)(prompt)))],
        checkpointer=InMemorySaver(),
    )
    for number in range(8):
        state = await send(agent, f"text {number}", is_async=is_async)
        if number == 5:
            assert (state["memory"], len(state["passed_over"])) == ("All were greeted.", 1)
    assert state["memory"] == "still: True"
    agent.update_state(THREAD, {"passed_over": []})
    assert agent.get_state(THREAD).values["passed_over"] == []


@BOTH
async def test_settings_that_are_wrong_are_not_put_off(is_async: bool) -> None:
    for wrong, error, message in [
        ({"question": "why " * 2000}, UsageError, r"the question has .* tokens"),
        ({}, ContextOverflow, "but the window holds 300"),
    ]:
        settings: Any = {"budget_tokens": 50, "keep_tokens": 30, "token_counter": ten_a_message, **wrong}
        window = {"window": 300} if error is ContextOverflow else {}
        reader = MemAgentReader(ScriptedBackend(lambda prompt: "noted"), **SMALL, **window)
        agent = create_agent(
            AgentModel(),
            middleware=[MemAgentMiddleware(reader, on_failure="later", **settings)],
            checkpointer=InMemorySaver(),
        )
        for text in ("one", "two", "three"):
            await send(agent, text, is_async=is_async)
        with pytest.raises(error, match=message):
            await send(agent, "four", is_async=is_async)
