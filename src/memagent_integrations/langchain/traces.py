"""Keep text out of traces: callback handlers that follow a reading, and see numbers and names but no text of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from contextvars import copy_context
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, cast

from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, Generation, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config

from memagent_integrations.langchain.inputs import elided
from memagent_integrations.langchain.messages import STEP
from memagent_integrations.langchain.models import mapped
from memagent_integrations.langchain.muted import with_handlers

_NAMES = (  # keys whose values are names and numbers, which are no text of the reading
    *("model", "model_name", "model_provider", "ls_model_name", "ls_provider", "_type", "type", "run_type", "id"),
    *("finish_reason", "stop_reason", "done_reason", "service_tier", "system_fingerprint", "cut"),
)


class TextElided(Exception):
    """What a trace shows for an error of a reading whose traces hold no text: only the name of its class."""


@contextmanager
def without_text(config: RunnableConfig | None) -> Iterator[RunnableConfig]:
    """Yield the config with handlers that see no text; in the block, those that LangChain finds itself see none either.

    These are the ones in context variables (`collect_runs`, `get_usage_metadata_callback`, a tracer) and in environment
    variables. A generator must not yield inside the block.
    """
    handlers = _Handlers()
    config = ensure_config(config)
    manager = with_handlers(CallbackManager.configure(config.get("callbacks")), handlers.quiet)
    found = [(var, value) for var, value in copy_context().items() if isinstance(value, BaseCallbackHandler)]
    tokens = [(var, var.set(handlers.quiet(value))) for var, value in found]
    try:
        yield {**config, "callbacks": manager}
    finally:
        for var, token in reversed(tokens):
            var.reset(token)


def quiet_model(model: Any) -> Any:
    """Return the model with no handler of its own that sees text: it may have some bound to it, or as a field."""
    if isinstance(model, RunnableBindingBase):
        factories = [_quiet_factory(factory) for factory in model.config_factories]
        config = {**model.config, "callbacks": quiet_callbacks(model.config.get("callbacks"))}
        bound = quiet_model(model.bound)
        return model.model_copy(update={"bound": bound, "config": config, "config_factories": factories})
    if isinstance(model, BaseLanguageModel) and model.callbacks:
        return model.model_copy(update={"callbacks": quiet_callbacks(model.callbacks)})
    return mapped(model, quiet_model)


def quiet_callbacks(callbacks: Any) -> Any:
    """Return the callbacks, a list or a manager, with handlers that see no text."""
    return with_handlers(callbacks, _Handlers().quiet)


def _quiet_factory(factory: Callable[[RunnableConfig], RunnableConfig]) -> Callable[[RunnableConfig], RunnableConfig]:
    def make(config: RunnableConfig) -> RunnableConfig:
        made = factory(config)
        return {**made, "callbacks": quiet_callbacks(made.get("callbacks"))}

    return make


class _Handlers:
    """Quiet handlers, one for each handler: LangChain recognises a handler that it has added by its identity."""

    def __init__(self) -> None:
        self._quiet: dict[int, BaseCallbackHandler] = {}

    def quiet(self, handler: BaseCallbackHandler) -> BaseCallbackHandler:
        if issubclass(type(handler), QuietHandler) or _is_output(handler):
            return handler
        return self._quiet.setdefault(id(handler), cast("BaseCallbackHandler", QuietHandler(handler)))


def _is_output(handler: BaseCallbackHandler) -> bool:
    """Return whether this handler makes LangGraph's stream of messages, which is the program's output and no trace."""
    return type(handler).__module__.startswith("langgraph.")


class QuietHandler:
    """A handler that passes events on without text. It passes for its handler's class, which LangChain asks for."""

    def __init__(self, handler: BaseCallbackHandler) -> None:
        self._handler = handler

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._handler)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._handler, name)
        if name in ("tap_output_iter", "tap_output_aiter"):
            return partial(_tap if name == "tap_output_iter" else _atap, attribute)
        if not name.startswith("on_"):
            return attribute
        quiet = _EVENTS.get(name, _drop)
        return partial(_acall, quiet, attribute) if iscoroutinefunction(attribute) else partial(_call, quiet, attribute)

    def copy_with_metadata_defaults(self, *, metadata: Any = None, tags: Any = None) -> QuietHandler:
        """Return a quiet copy of a tracer with more metadata (LangChain's hook for what a model was called with)."""
        tracer: Any = self._handler
        return QuietHandler(tracer.copy_with_metadata_defaults(metadata=_quiet(metadata), tags=tags))


async def _atap(tap: Callable[..., Any], run_id: Any, output: Any) -> AsyncGenerator[Any]:
    """Pass the chunks of a run on, and their like without text to the handler of an event stream."""
    chunks: list[Any] = []

    async def quiet() -> AsyncGenerator[Any]:
        async for chunk in output:
            chunks.append(chunk)
            yield _quiet(chunk)

    async with aclosing(tap(run_id, quiet())) as tapped:
        async for _ in tapped:
            yield chunks.pop()


def _tap(tap: Callable[..., Any], run_id: Any, output: Any) -> Generator[Any]:
    """`_atap`, sync."""
    chunks: list[Any] = []

    def quiet() -> Generator[Any]:
        for chunk in output:
            chunks.append(chunk)
            yield _quiet(chunk)

    with closing(tap(run_id, quiet())) as tapped:
        for _ in tapped:
            yield chunks.pop()


def data_without_text(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of an event stream's event with a description in place of each text."""
    return {name: part if name == "error" else _quiet(part) for name, part in data.items()}


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _call(quiet: Callable[..., Arguments | None], event: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    shown = quiet(*args, **kwargs)
    return event(*shown[0], **shown[1]) if shown else None


async def _acall(quiet: Callable[..., Arguments | None], event: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    shown = quiet(*args, **kwargs)
    return await event(*shown[0], **shown[1]) if shown else None


def _drop(*_: Any, **__: Any) -> None:
    """Drop an event: what is not known may hold text."""


def _started(serialized: Any, value: Any, **kwargs: Any) -> Arguments:
    named = {name: part for name, part in (serialized or {}).items() if name in ("lc", "type", "id", "name")}
    return (named if serialized else serialized, _quiet(value)), _details(kwargs)


def _chat_started(serialized: Any, batches: list[list[BaseMessage]], **kwargs: Any) -> Arguments:
    quiet = [[_message(message) for message in messages] for messages in batches]
    return (_started(serialized, None)[0][0], quiet), _details(kwargs)


def _new_token(token: Any, **kwargs: Any) -> Arguments:
    return ("",), _details(kwargs) | {"chunk": None}


def _ended(value: Any, **kwargs: Any) -> Arguments:
    return (_quiet(value),), _details(kwargs)


def _failed(error: BaseException, **kwargs: Any) -> Arguments:
    """Return the error without its message, its traceback and its cause, each of which may quote the prompt."""
    plain = TextElided(type(error).__name__) if isinstance(error, Exception) else type(error)()
    return (plain,), _details(kwargs)


def _dispatched(name: str, data: Any, **kwargs: Any) -> Arguments:
    return (name, {**data, "memory": elided(data["memory"])} if name == STEP else _quiet(data)), kwargs


_EVENTS: dict[str, Callable[..., Arguments]] = {
    "on_chat_model_start": _chat_started,
    **dict.fromkeys(("on_llm_start", "on_chain_start", "on_tool_start", "on_retriever_start"), _started),
    **dict.fromkeys(("on_llm_end", "on_chain_end", "on_tool_end", "on_retriever_end"), _ended),
    **dict.fromkeys(("on_llm_error", "on_chain_error", "on_tool_error", "on_retriever_error"), _failed),
    "on_llm_new_token": _new_token,
    "on_custom_event": _dispatched,
}


def _details(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an event's keyword arguments: what was called, and with what, without text."""
    with_text = ("inputs", "outputs", "invocation_params", "options", "response")
    details = {name: _quiet(value) if name in with_text else value for name, value in kwargs.items()}
    if metadata := details.get("metadata"):  # the caller's own, and what LangChain tells of the model: "ls_stop", ...
        details["metadata"] = {**metadata, **_quiet({k: v for k, v in metadata.items() if str(k).startswith("ls_")})}
    return details


def _quiet(value: Any) -> Any:
    """Return the value with a description in place of each text; numbers and the names of models stay."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, BaseMessage):
        return _message(value)
    if isinstance(value, Document):
        return Document(elided(value.page_content))
    if isinstance(value, LLMResult):
        generations = [[_generation(item) for item in items] for items in value.generations]
        return LLMResult(generations=cast("Any", generations), llm_output=_quiet(value.llm_output))
    if isinstance(value, Mapping):
        return {name: part if name in _NAMES else _quiet(part) for name, part in value.items() if name != "logprobs"}
    if isinstance(value, list | tuple) and not any(isinstance(item, int | float) for item in value):
        return [_quiet(item) for item in value]  # of numbers, which may be tokens, only the length is told
    return elided(value)


def _message(message: BaseMessage) -> BaseMessage:
    text = elided(str(message.text)) if message.content else ""
    if isinstance(message, AIMessage):
        kind = AIMessageChunk if isinstance(message, AIMessageChunk) else AIMessage
        metadata = _quiet(message.response_metadata)
        return kind(content=text, usage_metadata=message.usage_metadata, response_metadata=metadata, id=message.id)
    if isinstance(message, ToolMessage):
        return ToolMessage(content=text, tool_call_id=message.tool_call_id, status=message.status, id=message.id)
    return (SystemMessage if isinstance(message, SystemMessage) else HumanMessage)(content=text, id=message.id)


def _generation(item: Any) -> Generation:
    if isinstance(item, ChatGeneration):
        return ChatGeneration(message=_message(item.message), generation_info=_quiet(item.generation_info))
    return Generation(text=elided(item.text), generation_info=_quiet(item.generation_info))
