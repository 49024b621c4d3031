"""Structured answers as LangChain's chat models give them: the object, or a dict of message, object and error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from memagent_integrations.errors import BackendError
from memagent_integrations.langchain.messages import Answered, message_fields


def parsed_of(message: AIMessage) -> Any:
    """Return the object in a message."""
    return message.additional_kwargs["parsed"]


def raw_and_parsed(
    read: Callable[..., Answered], aread: Callable[..., Awaitable[Answered]]
) -> Runnable[Any, dict[str, Any]]:
    """Return a runnable that gives the message, the object in it, and the error of an answer that does not fit."""

    def run(input: Any, config: RunnableConfig, **bound: Any) -> dict[str, Any]:
        try:
            return _fit(read(input, config, **bound).message)
        except BackendError as error:
            return _unfit(error)

    async def arun(input: Any, config: RunnableConfig, **bound: Any) -> dict[str, Any]:
        try:
            return _fit((await aread(input, config, **bound)).message)
        except BackendError as error:
            return _unfit(error)

    return RunnableLambda(run, arun, name="memagent_structured")


def _fit(message: AIMessage) -> dict[str, Any]:
    return {"raw": message, "parsed": parsed_of(message), "parsing_error": None}


def _unfit(error: BackendError) -> dict[str, Any]:
    """Return the answer that does not fit, with its error; raise the error of a reading that came to no answer."""
    reading = error.reading
    if reading is None or not reading.steps or reading.steps[-1].phase != "answer":
        raise error
    raw = AIMessage(content=reading.steps[-1].reply.text, **message_fields(reading))
    return {"raw": raw, "parsed": None, "parsing_error": error}
