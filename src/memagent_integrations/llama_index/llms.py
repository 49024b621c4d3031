"""What LlamaIndex's LLM classes need to be told, and what they know: output limits, windows, templates, settings.

Classes are recognised by their names, so that no integration package has to be installed.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Mapping, Sequence
from enum import Enum
from inspect import getattr_static
from typing import Any, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import LLM, CustomLLM, MockLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.llms.structured_llm import StructuredLLM
from pydantic import BaseModel, SecretStr

from memagent_integrations.records import Message

_KEYWORDS = dict.fromkeys(("OpenAI", "Anthropic", "BedrockConverse", "Cohere", "LiteLLM", "MistralAI"), "max_tokens")
_KEYWORDS["OpenAIResponses"] = "max_output_tokens"
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_output", "num_predict")
"""Fields of an LLM, and keys of the options that it sends, which limit the output."""
_OPTIONS = ("additional_kwargs", "generate_kwargs")
_LOADED_WINDOWS = {
    "HuggingFaceLLM": ("_model", "config", "max_position_embeddings"),
    "Vllm": ("_client", "llm_engine", "model_config", "max_model_len"),
}
"""Where the class has its model, whose window it does not report."""
_SECRET = re.compile(r"(?:^|_)(?:api_?key|key|secret|password|token|credentials?|auth|authorization|headers)(?:_|$)")
L = TypeVar("L", bound=LLM)


def changed(llm: L, /, **fields: Any) -> L:
    """Return a copy of the LLM with other fields. Both share what is private to it: clients, a loaded model."""
    if not fields:
        return llm
    copy = llm.model_copy(update=fields)
    object.__setattr__(copy, "__pydantic_private__", llm.__pydantic_private__)  # a client that it makes later, too
    return copy


def reporting_to(llm: LLM, callbacks: CallbackManager | None) -> LLM:
    """Return the LLM, or a copy whose calls are reported to `callbacks`; of a structured LLM those of the LLM in it."""
    if callbacks is None:
        return llm
    if isinstance(llm, StructuredLLM):
        return changed(llm, llm=changed(llm.llm, callback_manager=callbacks))
    return changed(llm, callback_manager=callbacks)


def limited(llm: LLM, limit: int, keyword: str | None = None) -> tuple[LLM, dict[str, Any]] | None:
    """Return the LLM to call and the keyword arguments for it, so that it writes at most `limit` tokens.

    That LLM is a copy where the limit is a field that the class reads at each call. None: nothing is known that
    limits the class. `keyword` names the keyword argument that does.
    """
    if keyword:
        return llm, {keyword: limit}
    kinds = _kinds(llm)
    if kinds & {"GoogleGenAI", "Gemini"}:
        return llm, {"generation_config": {"max_output_tokens": limit}}
    if isinstance(llm, MockLLM):  # its max_tokens is the length of what it writes
        return None
    options = _limited_options(llm, limit, extra=["num_predict"] if "Ollama" in kinds else [])
    argument = next((_KEYWORDS[kind.__name__] for kind in type(llm).__mro__ if kind.__name__ in _KEYWORDS), None)
    arguments = {argument: limit} if argument and not options else {}
    fields = {name: getattr(llm, name) for name in _LIMITS if name in type(llm).model_fields}
    # a field of None is not sent: the keyword argument, or the options, hold in its place
    new = {name: limit for name, value in fields.items() if value is not None or not (arguments or options)}
    if not (new or arguments or options):
        return None
    differing = {name: limit for name in new if fields[name] != limit}
    return changed(llm, **differing, **options), arguments


def _limited_options(llm: LLM, limit: int, extra: Sequence[str]) -> dict[str, Any]:
    """Return the fields of options that name a limit, with this one in its place; `extra` is always named."""
    changes = {}
    for field in _OPTIONS:
        options = getattr(llm, field, None)
        if isinstance(options, Mapping) and (names := [*(name for name in _LIMITS if name in options), *extra]):
            changes[field] = {**options, **dict.fromkeys(names, limit)}
    return changes


def streams_usage(llm: LLM) -> bool:
    """Return whether the LLM has to be asked for the usage of a streamed call, in OpenAI's way, and is not yet."""
    return "OpenAI" in _kinds(llm) and "stream_options" not in (getattr(llm, "additional_kwargs", None) or {})


def window_of(llm: LLM, metadata: LLMMetadata) -> int | None:
    """Return the context window of the LLM, None if it does not know it.

    3,900 is LlamaIndex's value for an unknown window, unless it was set, or the class calls its model with it.
    """
    if isinstance(llm, StructuredLLM):
        return window_of(llm.llm, metadata)
    kinds, window = _kinds(llm), metadata.context_window
    if "Ollama" in kinds:
        window = llm.additional_kwargs.get("num_ctx") or window  # type: ignore[attr-defined]
    elif window == DEFAULT_CONTEXT_WINDOW and "LlamaCPP" not in kinds:
        paths = [_LOADED_WINDOWS[kind] for kind in kinds if kind in _LOADED_WINDOWS]
        if paths:
            window = _attribute(llm, *paths[0])
        elif "context_window" not in llm.model_fields_set:
            return None
    return window if isinstance(window, int) and window > 0 else None


def _attribute(holder: Any, *names: str) -> Any:
    for name in names:
        holder = getattr(holder, name, None)
    return holder


def _kinds(llm: LLM) -> set[str]:
    return {kind.__name__ for kind in type(llm).__mro__}


def completes(llm: LLM, metadata: LLMMetadata) -> bool:
    """Return whether the LLM is called by `complete`: it is no chat model, or its `chat` only calls `complete`.

    Such a `chat` reports each call twice to callbacks.
    """
    if isinstance(llm, StructuredLLM):
        return False
    own_chat = getattr_static(type(llm), "chat") is not getattr_static(CustomLLM, "chat")
    return not metadata.is_chat_model or not own_chat or bool(_kinds(llm) & {"HuggingFaceLLM", "LlamaCPP"})


def is_synchronous(llm: LLM, method: str) -> bool:
    """Return whether the async method is that of `CustomLLM`, which calls the sync one and blocks the event loop."""
    return getattr_static(type(llm), method) is getattr_static(CustomLLM, method)


_loops: dict[int, tuple[weakref.ref[LLM], weakref.ref[asyncio.AbstractEventLoop]]] = {}
"""The event loop in which an LLM was used first, by its id: an LLM has no hash."""


def is_elsewhere(llm: LLM) -> bool:
    """Return whether the LLM was used first in another event loop: its SDK's async connections belong to that one."""
    key, loop = id(llm), asyncio.get_running_loop()
    known, first = _loops.get(key, (None, None))
    if known is None or first is None or known() is not llm:
        _loops[key] = weakref.ref(llm, lambda _: _loops.pop(key, None)), weakref.ref(loop)
        return False
    return first() is not loop


def chat_messages(system_prompt: str | None, messages: Sequence[Message]) -> list[ChatMessage]:
    """Return the messages of a prompt after the LLM's system prompt, in one system message at the beginning.

    Chat templates of many models know only one. A system prompt that the messages begin with is not said twice.
    """
    texts = [message.content for message in messages if message.role == "system"]
    if system_prompt and not (texts and texts[0].startswith(system_prompt)):
        texts.insert(0, system_prompt)
    system = [ChatMessage(role=MessageRole.SYSTEM, content="\n\n".join(texts))] if texts else []
    others = (message for message in messages if message.role != "system")
    return system + [ChatMessage(role=MessageRole(message.role), content=message.content) for message in others]


def completion_prompt(llm: LLM, metadata: LLMMetadata, messages: Sequence[Message]) -> str:
    """Return the text of a prompt for `complete`, formatted by the templates that the LLM has.

    One message is formatted as `LLM.predict` does: `completion_to_prompt`, then system prompt and query wrapper.
    Several are formatted by `messages_to_prompt`, as is one for a chat model, and where this is the only template.
    """
    by_messages = metadata.is_chat_model
    if not by_messages and len(messages) > 1:
        by_messages = _has_messages_template(llm) or not _has_completion_template(llm)
    elif not by_messages:
        by_messages = _has_messages_template(llm) and not _has_completion_template(llm)
    if by_messages:
        to_prompt = llm.messages_to_prompt or generic_messages_to_prompt
        return str(to_prompt(chat_messages(llm.system_prompt, messages)))
    text = "\n\n".join(str(message.content) for message in chat_messages(None, messages))
    text = text.removeprefix(llm.system_prompt or "").lstrip("\n") if len(messages) > 1 else text
    return llm._extend_prompt((llm.completion_to_prompt or default_completion_to_prompt)(text))


def _has_completion_template(llm: LLM) -> bool:
    """Return whether the LLM has a template for a single prompt."""
    wrapper = llm.query_wrapper_prompt
    wraps = wrapper is not None and wrapper.format(query_str="\0") != "\0"
    return wraps or llm.completion_to_prompt not in (None, default_completion_to_prompt)


def _has_messages_template(llm: LLM) -> bool:
    """Return whether the LLM has a template of its own for messages; a tokenizer of a base model has none."""
    own = llm.messages_to_prompt not in (None, generic_messages_to_prompt)
    return own and getattr(getattr(llm, "_tokenizer", None), "chat_template", True) is not None


def template_text(llm: LLM, metadata: LLMMetadata) -> str:
    """Return what the LLM's templates and its system prompt add to a prompt of one message."""
    inner = llm.llm if isinstance(llm, StructuredLLM) else llm
    if not completes(inner, metadata):
        return inner.system_prompt or ""
    return completion_prompt(inner, metadata, [Message(role="user", content="")])


def settings_of(llm: LLM) -> dict[str, Any]:
    """Return what decides the LLM's replies, as JSON: its plain settings and its templates, without secrets.

    Objects are left out (counters, callbacks, tokenizers, clients): they have no value that another process would
    find again. A setting that is empty is left out too.
    """
    names = (name for name, field in type(llm).model_fields.items() if not field.exclude and name not in _NO_SETTINGS)
    fields = {name: getattr(llm, name) for name in names}
    settings: dict[str, Any] = _plain(fields) or {}
    for name in ("messages_to_prompt", "completion_to_prompt"):
        template = getattr(llm, name)
        if qualified := getattr(template, "__qualname__", ""):
            settings[name] = f"{getattr(template, '__module__', '')}.{qualified}"
    if wrapper := llm.query_wrapper_prompt:
        settings["query_wrapper_prompt"] = wrapper.get_template()
    if isinstance(llm, StructuredLLM):
        settings["output"] = llm.output_cls.model_json_schema()
    return settings | {"class": llm.class_name()}


def secrets_of(llm: LLM) -> list[str]:
    """Return the keys and passwords that the LLM holds."""
    if isinstance(llm, StructuredLLM):
        return secrets_of(llm.llm)
    values = [getattr(llm, name) for name in type(llm).model_fields if _SECRET.search(name)]
    shown = [value.get_secret_value() if isinstance(value, SecretStr) else value for value in values]
    headers = [text for value in shown if isinstance(value, Mapping) for text in value.values()]
    return [text for text in [*shown, *headers] if isinstance(text, str) and text]


_EMPTY: tuple[Any, ...] = (None, "", [], {})
_NO_SETTINGS = ("callback_manager", "callbacks", "tokenizer", "rate_limiter", "verbose")


def _plain(value: Any) -> Any:
    """Return the value as JSON, None if it is not plain; of a mapping and of an object with fields what is plain."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, LLM):
        return settings_of(value)
    if isinstance(value, BaseModel):
        return _plain({name: getattr(value, name) for name in type(value).model_fields})
    if isinstance(value, Mapping):
        named = {str(name): _plain(item) for name, item in value.items() if not _SECRET.search(str(name).lower())}
        return {name: item for name, item in named.items() if item not in _EMPTY} or None
    if isinstance(value, (list, tuple)):  # messages in a list are a history
        items = [None if isinstance(item, BaseModel) else _plain(item) for item in value]
        return None if None in items else items
    return value if isinstance(value, (str, int, float)) else None
