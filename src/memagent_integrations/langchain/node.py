"""What runs a reader and gives something else than its message: a node of a LangGraph graph, a structured answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.langchain.messages import message_fields
from memagent_integrations.records import Reading

Outcome = tuple[Reading, AIMessage]
"""A reading, and the message about it."""

_MESSAGES = "messages"
_PARTS: dict[str, Callable[[Reading, AIMessage], Any]] = {
    "answer": lambda _, message: str(message.text),
    "message": lambda _, message: message,
    "messages": lambda _, message: [message],
    "memory": lambda reading, _: reading.memory,
    "usage": lambda _, message: message.usage_metadata,
    "parsed": lambda _, message: message.additional_kwargs.get("parsed"),
    "citations": lambda _, message: message.response_metadata["memagent"].get("citations", []),
    "reading": lambda reading, _: reading,
}


def reader_node(
    read: Callable[[Any, RunnableConfig], Outcome],
    aread: Callable[[Any, RunnableConfig], Awaitable[Outcome]],
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

    def update(outcome: Outcome) -> dict[str, Any]:
        return {key: _PARTS[part](*outcome) for key, part in writes.items()}

    def node(state: Any, config: RunnableConfig) -> dict[str, Any]:
        return update(read(task(state), config))

    async def anode(state: Any, config: RunnableConfig) -> dict[str, Any]:
        return update(await aread(task(state), config))

    return RunnableLambda(node, anode, name="memagent")


def raw_and_parsed(
    read: Callable[..., Outcome], aread: Callable[..., Awaitable[Outcome]]
) -> Runnable[Any, dict[str, Any]]:
    """Return a runnable that gives the message, the object in it, and the error of an answer that does not fit."""

    def run(input: Any, config: RunnableConfig, **bound: Any) -> dict[str, Any]:
        try:
            return _with_raw(read(input, config, **bound)[1])
        except BackendError as error:
            return _unfit(error)

    async def arun(input: Any, config: RunnableConfig, **bound: Any) -> dict[str, Any]:
        try:
            return _with_raw((await aread(input, config, **bound))[1])
        except BackendError as error:
            return _unfit(error)

    return RunnableLambda(run, arun, name="memagent_structured")


def _with_raw(message: AIMessage) -> dict[str, Any]:
    return {"raw": message, "parsed": message.additional_kwargs["parsed"], "parsing_error": None}


def _unfit(error: BackendError) -> dict[str, Any]:
    """Return the answer that does not fit, with its error; raise the error of a reading that came to no answer."""
    reading = error.reading
    if reading is None or not reading.steps or reading.steps[-1].phase != "answer":
        raise error
    raw = AIMessage(content=reading.steps[-1].reply.text, **message_fields(reading))
    return {"raw": raw, "parsed": None, "parsing_error": error}


def _from_state(state: Any, key: str, *default: Any) -> Any:
    try:
        return state[key] if isinstance(state, Mapping) else getattr(state, key)
    except (KeyError, AttributeError) as error:
        if default:
            return default[0]
        raise UsageError(
            f"the state has no {key!r}; name its keys: reader.as_node(question_key=..., context_key=...)"
        ) from error
