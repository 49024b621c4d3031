"""An agent's middleware that folds the old messages of a conversation into a memory."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal, NotRequired, cast

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.utils import count_tokens_approximately
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from memagent_integrations.checks import check_int, check_question, drop_none
from memagent_integrations.conversation import MEMORY_TEMPLATE, QUESTION, render_memory
from memagent_integrations.errors import BackendError, MissingExtra, UsageError
from memagent_integrations.langchain.notes import Folding
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader
from memagent_integrations.langchain.transcripts import transcript_of
from memagent_integrations.reader.folding import PassedOver

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
except ImportError as error:
    raise MissingExtra.extra("langchain", "langchain") from error
_log = logging.getLogger(__name__)


class Missing(TypedDict):
    """A section of old messages that is not in the memory: its text, and what is wrong with it."""

    text: str
    reason: str


class MemoryState(AgentState[Any]):
    """The state of an agent, with the memory of the messages that were removed, and what of them is not in it."""

    memory: NotRequired[str]
    passed_over: NotRequired[list[Missing]]


class MemAgentMiddleware(AgentMiddleware[MemoryState, Any]):
    """Keeps an agent's conversation within a budget: folds the oldest messages into a memory in the system prompt.

    Before a call of the model, if the messages have more than `budget_tokens`, the newest that fit into
    `keep_tokens` (default: half of the budget) are kept. `reader` reads the others and rewrites the memory, and
    they are removed. A tool call stays with its result, the user's last message stays, and what is kept begins with
    a message of the user's. `token_counter` counts messages; LangChain's approximate counter is too low for texts
    in non-European languages.

    The memory is the key "memory" of the agent's state: a checkpointer keeps it, and
    `agent.update_state(config, {"memory": ...})` edits it. `question` says what the memory is for, and
    `memory_template` shows it in the system prompt.

    No section of the old messages holds up the conversation: one that the model or a content filter refuses, that
    leaves no memory in three tries, or with which the model's server fails for good is passed over. Its text and the
    reason are then in the list "passed_over" of the state and in the log, and the system prompt says that something is
    missing. A failure that may pass (a connection, a busy server), and one that is not about the section (the key, the
    model's name), leaves messages and memory as they are: the error is raised, and the next turn tries again; with
    `on_failure="later"` the turn continues with all messages.

    Raises:
        UsageError: a setting is wrong.
        BackendError: the reader's model failed; `Reader.read` lists what else a turn may raise.
    """

    state_schema = MemoryState

    def __init__(
        self,
        reader: MemAgentReader,
        *,
        budget_tokens: int = 8000,
        keep_tokens: int | None = None,
        token_counter: Callable[[Sequence[BaseMessage]], int] = count_tokens_approximately,
        question: str = QUESTION,
        memory_template: str = MEMORY_TEMPLATE,
        on_failure: Literal["raise", "later"] = "raise",
    ) -> None:
        super().__init__()
        checked_reader(reader)
        check_int(budget_tokens=budget_tokens, **drop_none(keep_tokens=keep_tokens))
        if keep_tokens is not None and keep_tokens >= budget_tokens:
            raise UsageError(
                f"keep_tokens has to be below budget_tokens ({budget_tokens}), not {keep_tokens}: "
                "else each turn folds a message"
            )
        check_question(question)
        if not callable(token_counter):
            raise UsageError("token_counter has to be a function that counts the tokens of messages")
        if not isinstance(memory_template, str) or "{memory}" not in memory_template:
            raise UsageError("memory_template has to have {memory}, where the memory stands")
        if on_failure not in ("raise", "later"):
            raise UsageError(f"on_failure has to be 'raise' or 'later', not {on_failure!r}")
        self.reader = reader
        self.budget_tokens, self.keep_tokens = budget_tokens, keep_tokens or budget_tokens // 2
        self.token_counter = token_counter
        self.question, self.memory_template, self.on_failure = question, memory_template, on_failure

    def before_model(self, state: MemoryState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Fold the oldest messages into the memory if there are too many."""
        if not (old := self._to_fold(state["messages"])):
            return None
        with self._failures():
            folding = self._folding(state, old)
            return _update(folding.take(), folding.passed_over, state, old)
        return None

    async def abefore_model(self, state: MemoryState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """`before_model`, async."""
        if not (old := self._to_fold(state["messages"])):
            return None
        with self._failures():
            folding = self._folding(state, old)
            return _update(await folding.atake(), folding.passed_over, state, old)
        return None

    def _folding(self, state: MemoryState, old: Sequence[AnyMessage]) -> Folding:
        text = transcript_of(old)
        return Folding(self.reader, self.question, text, traced=old, memory=state.get("memory") or "")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Log a failure of the model or its server, instead of raising it, if the next turn is to try again."""
        try:
            yield
        except BackendError as error:
            if self.on_failure == "raise":
                raise
            _log.warning("the memory could not be brought up to date, its messages wait for the next turn: %s", error)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Show the memory to the model."""
        return handler(self._with_memory(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call`, async."""
        return await handler(self._with_memory(request))

    def _to_fold(self, messages: Sequence[AnyMessage]) -> list[AnyMessage]:
        """Return the messages to fold: none while all are within the budget."""
        if self.token_counter(messages) <= self.budget_tokens:
            return []
        units = _units(messages)
        of_user = [index for index, unit in enumerate(units) if isinstance(unit[0], HumanMessage)]
        of_system = [index for index, unit in enumerate(units) if isinstance(unit[0], SystemMessage)]
        kept = {*of_system, *of_user[-1:], len(units) - 1}
        size = sum(self.token_counter(units[index]) for index in kept)
        for index in reversed(range(len(units))):
            if index not in kept:
                size += self.token_counter(units[index])
                if size > self.keep_tokens:
                    break
                kept.add(index)
        begin = next((index for index in of_user if index in kept), 0)
        stays = {index for index in kept if index >= begin}.union(of_system)
        return [message for index, unit in enumerate(units) if index not in stays for message in unit]

    def _with_memory(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        state = cast(MemoryState, request.state)
        memory, missing = state.get("memory"), state.get("passed_over")
        parts = [str(memory)] if memory else []
        if missing:
            parts.append(f"(Parts of the conversation that could not be noted, and are missing here: {len(missing)})")
        if not parts:
            return request
        text = render_memory(self.memory_template, "\n\n".join(parts))
        if request.system_message is None:
            return request.override(system_message=SystemMessage(text))
        content = request.system_message.content
        if isinstance(content, str):
            return request.override(system_message=SystemMessage(f"{content}\n\n{text}"))
        # blocks stay blocks: they may say what the provider is to cache
        return request.override(system_message=SystemMessage([*content, {"type": "text", "text": f"\n\n{text}"}]))


def _units(messages: Sequence[AnyMessage]) -> list[list[AnyMessage]]:
    """Group the messages into units that stay together: one message, or tool calls with their results."""
    units: list[list[AnyMessage]] = []
    unit_of_call: dict[str | None, list[AnyMessage]] = {}
    for message in messages:
        if isinstance(message, ToolMessage) and message.tool_call_id in unit_of_call:
            unit_of_call[message.tool_call_id].append(message)
            continue
        units.append([message])
        if isinstance(message, AIMessage):
            unit_of_call |= {call["id"]: units[-1] for call in message.tool_calls}
    return units


def _update(
    notes: AIMessage, passed_over: Sequence[PassedOver], state: MemoryState, old: Sequence[AnyMessage]
) -> dict[str, Any]:
    """Return the state's update: the new memory, what is not in it, and the removal of the folded messages."""
    update = {"memory": str(notes.text), "messages": [RemoveMessage(id=str(message.id)) for message in old]}
    for section in passed_over:
        _log.warning(
            "a section of old messages (%s characters) is not in the memory: %s", len(section.text), section.reason
        )
    return update | (
        {"passed_over": [*(state.get("passed_over") or ()), *map(asdict, passed_over)]} if passed_over else {}
    )
