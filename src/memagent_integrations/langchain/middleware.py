"""The memory of a conversation: an agent's middleware that folds old messages into a reader's memory."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NotRequired

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

from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.conversation import MEMORY_TEMPLATE, QUESTION, render_memory, transcript
from memagent_integrations.errors import BackendError, MissingExtra, UsageError
from memagent_integrations.langchain.notes import NoteTaking
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
except ImportError as error:
    raise MissingExtra.extra("langchain", "langchain") from error
_log = logging.getLogger(__name__)


class MemoryState(AgentState[Any]):
    """The state of an agent, with its memory of the messages that are gone."""

    memory: NotRequired[str]


class MemAgentMiddleware(AgentMiddleware[MemoryState, Any]):
    """Keeps an agent's conversation within a budget: its oldest messages are folded into a memory, which the model sees in its system prompt.

    Before a call of the model, when the messages have more than `budget_tokens`, the newest ones that fit into `keep_tokens` (half of it, by
    default) are kept. The others are read by `reader`, which writes the memory anew, and are removed. A tool call stays with its result, the
    last message of the user stays, and what is kept begins with one of theirs. `token_counter` counts messages; LangChain's approximate one
    is too low for texts that are not in a European language.

    The memory is the key "memory" of the agent's state: a checkpointer keeps it, `agent.update_state(config, {"memory": ...})` edits it.
    `question` says what it is kept for, `shown` how it stands in the system prompt.

    If the reader fails, or its model writes no memory, the messages stay and the memory is as it was. The error is raised, and the next turn
    tries again; with `on_failure="later"` this turn goes on with all its messages after an error of the model or its server. A section that the
    server's content filter withholds would be withheld again: it is passed over, with a warning in the log.

    Raises:
        UsageError: a setting is wrong.
        BackendError: the reader's model failed or wrote no memory; `Reader.read` lists what else a turn may raise.
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
        shown: str = MEMORY_TEMPLATE,
        on_failure: Literal["raise", "later"] = "raise",
    ) -> None:
        super().__init__()
        checked_reader(reader)
        check_int(budget_tokens=budget_tokens, **drop_none(keep_tokens=keep_tokens))
        if keep_tokens is not None and keep_tokens >= budget_tokens:
            raise UsageError(
                f"keep_tokens has to be below budget_tokens ({budget_tokens}), not {keep_tokens}: else each turn folds a message"
            )
        if not isinstance(question, str) or not question.strip():
            raise UsageError("the question is empty")
        if not callable(token_counter):
            raise UsageError("token_counter has to be a function that counts the tokens of messages")
        if not isinstance(shown, str) or "{memory}" not in shown:
            raise UsageError("shown has to have {memory}, where the memory stands")
        if on_failure not in ("raise", "later"):
            raise UsageError(f"on_failure has to be 'raise' or 'later', not {on_failure!r}")
        self.reader = reader
        self.budget_tokens, self.keep_tokens = budget_tokens, keep_tokens or budget_tokens // 2
        self.token_counter = token_counter
        self.question, self.shown, self.on_failure = question, shown, on_failure

    def before_model(self, state: MemoryState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Fold the oldest messages into the memory if there are too many."""
        if not (old := self._old(state["messages"])):
            return None
        with self._put_off():
            return _folded(self._notes(state, old).take(), old)
        return None

    async def abefore_model(self, state: MemoryState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """`before_model`, async."""
        if not (old := self._old(state["messages"])):
            return None
        with self._put_off():
            return _folded(await self._notes(state, old).atake(), old)
        return None

    def _notes(self, state: MemoryState, old: Sequence[AnyMessage]) -> NoteTaking:
        said = transcript((_head(message), _body(message)) for message in old)
        return NoteTaking(self.reader, self.question, said, old, memory=state.get("memory") or "", strict=True)

    @contextmanager
    def _put_off(self) -> Iterator[None]:
        """A failure of the model or its server is passed over where the next turn is to try again."""
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

    def _old(self, messages: Sequence[AnyMessage]) -> list[AnyMessage]:
        """The messages to fold: none while all are within the budget."""
        if self.token_counter(messages) <= self.budget_tokens:
            return []
        units = _units(messages)
        asked = max((number for number, unit in enumerate(units) if isinstance(unit[0], HumanMessage)), default=None)
        kept = {number for number, unit in enumerate(units) if isinstance(unit[0], SystemMessage)} | {
            asked,
            len(units) - 1,
        }
        size = sum(self.token_counter(units[number]) for number in kept if number is not None)
        for number in reversed(range(len(units))):
            if number not in kept:
                size += self.token_counter(units[number])
                if size > self.keep_tokens:
                    break
                kept.add(number)
        begin = min(
            (number for number in kept if number is not None and isinstance(units[number][0], HumanMessage)), default=0
        )
        return [
            message
            for number, unit in enumerate(units)
            if number not in kept or (number < begin and not isinstance(unit[0], SystemMessage))
            for message in unit
        ]

    def _with_memory(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        memory = request.state.get("memory")
        if not memory:
            return request
        text = render_memory(self.shown, str(memory))
        if request.system_message is None:
            return request.override(system_message=SystemMessage(text))
        before = request.system_message.content  # blocks stay blocks: they may say what the provider is to cache
        content = (
            f"{before}\n\n{text}" if isinstance(before, str) else [*before, {"type": "text", "text": f"\n\n{text}"}]
        )
        return request.override(system_message=SystemMessage(content))


def _head(message: BaseMessage) -> str:
    if isinstance(message, ToolMessage):
        return f"Tool, {'error' if message.status == 'error' else 'result'} of call {message.tool_call_id}"
    return {"human": "User", "ai": "Assistant"}.get(message.type, message.type) + (
        f" ({message.name})" if message.name else ""
    )


def _body(message: BaseMessage) -> str:
    content = message.content if isinstance(message.content, list) else [message.content]
    lines = [line for block in content if (line := _line(block))]
    if isinstance(message, AIMessage):
        for call in (*message.tool_calls, *message.invalid_tool_calls):
            arguments = (
                call["args"]
                if isinstance(call["args"], str)
                else json.dumps(call["args"], ensure_ascii=False, default=str)
            )
            lines.append(f"calls {call['name']}({arguments}), call {call['id']}")
    return "\n".join(lines) or "(nothing)"


def _line(block: Any) -> str:
    """A block of a message in words: its text, else what kind it is, with what there is to be read in it."""
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in ("text", "text-plain") and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind in _UNSAID:
        return ""
    return f"[{kind}] {json.dumps(_readable(block), ensure_ascii=False, default=str)}".removesuffix(" {}")


def _readable(value: Any) -> Any:
    """What can be read in a block: without the bytes of pictures and files, and without what only a provider needs."""
    if isinstance(value, dict):
        return {
            name: kept
            for name, item in value.items()
            if name not in _UNREADABLE and (kept := _readable(item)) not in (None, "", [], {})
        }
    if isinstance(value, list):
        return [kept for item in value if (kept := _readable(item)) not in (None, "", [], {})]
    return None if isinstance(value, str) and _BINARY.fullmatch(value) else value


_UNSAID = (
    "reasoning",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_call",
    "tool_call_chunk",
    "function_call",
)  # calls are listed apart
_UNREADABLE = ("type", "id", "index", "extras", "cache_control", "base64", "signature", "encrypted_content")
_BINARY = re.compile(r"data:[^,]{0,200},.*|[A-Za-z0-9+/]{512,}={0,2}", re.DOTALL)


def _units(messages: Sequence[AnyMessage]) -> list[list[AnyMessage]]:
    """The messages in units that stay together: one, or a call of tools with its results."""
    units: list[list[AnyMessage]] = []
    calling: dict[str | None, list[AnyMessage]] = {}
    for message in messages:
        if isinstance(message, ToolMessage) and message.tool_call_id in calling:
            calling[message.tool_call_id].append(message)
            continue
        units.append([message])
        if isinstance(message, AIMessage):
            calling |= {call["id"]: units[-1] for call in message.tool_calls}
    return units


def _folded(notes: AIMessage, old: Sequence[AnyMessage]) -> dict[str, Any]:
    """The state's update: the new memory, and the messages in it gone."""
    if unread := notes.response_metadata["memagent"]["outcomes"].get("kept"):
        _log.warning(
            "the server's content filter withheld the memory of %s sections of old messages; what they say is not in the memory",
            unread,
        )
    return {"memory": str(notes.text), "messages": [RemoveMessage(id=str(message.id)) for message in old]}
