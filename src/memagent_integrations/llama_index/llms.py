"""How LlamaIndex's LLMs are copied and called. Their classes are recognised by names, so no integration is needed."""

from __future__ import annotations

import asyncio
import weakref
from inspect import getattr_static
from typing import Any, TypeVar

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms import LLM, CustomLLM
from llama_index.core.llms.structured_llm import StructuredLLM

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


def class_names(llm: LLM) -> set[str]:
    """Return the names of the LLM's class and of those that it is derived from."""
    return {kind.__name__ for kind in type(llm).__mro__}


def completes(llm: LLM, metadata: LLMMetadata) -> bool:
    """Return whether the LLM is called by `complete`: it is no chat model, or its `chat` only calls `complete`.

    Such a `chat` reports each call twice to callbacks.
    """
    if isinstance(llm, StructuredLLM):
        return False
    own_chat = getattr_static(type(llm), "chat") is not getattr_static(CustomLLM, "chat")
    return not metadata.is_chat_model or not own_chat or bool(class_names(llm) & {"HuggingFaceLLM", "LlamaCPP"})


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
