"""A reader as a node of a LangGraph graph: it reads keys of the state, and writes parts of the reading to others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

from memagent_integrations.errors import UsageError
from memagent_integrations.langchain.messages import Answered
from memagent_integrations.langchain.runless import Runless

_MESSAGES = "messages"
_PARTS: dict[str, Callable[[Answered], Any]] = {
    "answer": lambda answered: str(answered.message.text),
    "message": lambda answered: answered.message,
    "messages": lambda answered: [answered.message],
    "memory": lambda answered: answered.reading.memory,
    "usage": lambda answered: answered.message.usage_metadata,
    "parsed": lambda answered: answered.parsed,
    "citations": lambda answered: answered.message.response_metadata["memagent"]["citations"],
    "reading": lambda answered: answered.reading,
}


def reader_node(
    read: Callable[[Any, RunnableConfig], Answered],
    aread: Callable[[Any, RunnableConfig], Awaitable[Answered]],
    *,
    question_key: str,
    context_key: str,
    memory_key: str | None,
    answer_key: str,
    parts: Mapping[str, str] | None,
) -> Runnable[Any, dict[str, Any]]:
    """Return the node; see `MemAgentReader.as_node`.

    Raises:
        UsageError: there is no such part.
    """
    writes = {answer_key: "messages" if answer_key == _MESSAGES else "answer"} if parts is None else dict(parts)
    if unknown := sorted(map(str, set(writes.values()) - _PARTS.keys())):
        raise UsageError(f"there is no part {unknown[0]!r} of a reading; there are: {', '.join(_PARTS)}")

    def task(state: Any) -> dict[str, Any]:
        task = {"question": _from_state(state, question_key), "context": _from_state(state, context_key)}
        return task | ({"memory": _from_state(state, memory_key, "")} if memory_key else {})

    def update(answered: Answered) -> dict[str, Any]:
        return {key: _PARTS[part](answered) for key, part in writes.items()}

    def node(state: Any, config: RunnableConfig) -> dict[str, Any]:
        return update(read(task(state), config))

    async def anode(state: Any, config: RunnableConfig) -> dict[str, Any]:
        return update(await aread(task(state), config))

    return Runless("memagent", node, anode)


def _from_state(state: Any, key: str, *default: Any) -> Any:
    try:
        return state[key] if isinstance(state, Mapping) else getattr(state, key)
    except (KeyError, AttributeError) as error:
        if default:
            return default[0]
        raise UsageError(
            f"the state has no {key!r}; name its keys: reader.as_node(question_key=..., context_key=...)"
        ) from error
