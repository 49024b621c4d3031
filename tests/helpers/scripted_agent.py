"""A model for LangChain agents that follows a script, and a middleware for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

from memagent_integrations import MemAgentReader, ScriptedBackend
from memagent_integrations.langchain.middleware import MemAgentMiddleware
from memagent_integrations.records import Prompt

THREAD: Any = {"configurable": {"thread_id": "1"}}
SMALL: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50}


class AgentModel(BaseChatModel):
    """Replies with `script(messages)`; `calls` is the history."""

    script: Callable[[list[BaseMessage]], AIMessage] = lambda messages: AIMessage(f"You said {messages[-1].text}.")
    calls: list[list[BaseMessage]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Any:
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        self.calls.append(messages)
        return ChatResult(generations=[ChatGeneration(message=self.script(messages))])


def ten_a_message(messages: Sequence[BaseMessage]) -> int:
    return 10 * len(messages)


def noting() -> ScriptedBackend:
    """Return a backend whose memory says how many words the one before had."""

    def script(prompt: Prompt) -> str:
        memory = prompt.messages[0].content.partition("<memory>")[2].partition("</memory>")[0]
        return f"{len(memory.split())} words and a note"

    return ScriptedBackend(script)


def middleware(backend: ScriptedBackend | None = None, **settings: Any) -> MemAgentMiddleware:
    """Return a middleware for five messages, of which three are kept."""
    settings = {"budget_tokens": 50, "keep_tokens": 30, "token_counter": ten_a_message} | settings
    return MemAgentMiddleware(MemAgentReader(backend or noting(), **SMALL), **settings)


def texts(messages: Sequence[BaseMessage]) -> list[str]:
    return [str(message.text) for message in messages]


async def send(agent: Any, text: str, *, is_async: bool) -> dict[str, Any]:
    """Send a user's message to the agent; return its state."""
    message = {"messages": [HumanMessage(text)]}
    state: dict[str, Any] = await agent.ainvoke(message, THREAD) if is_async else agent.invoke(message, THREAD)
    return state
