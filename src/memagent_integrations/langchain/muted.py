"""Callbacks for calls whose tokens nobody is to see: those that write the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.tracers import _streaming

_STREAMING = tuple(
    getattr(_streaming, name)
    for name in ("_StreamingCallbackHandler", "_V2StreamingCallbackHandler")
    if hasattr(_streaming, name)
)
"""What LangChain recognises the handlers by that make a model stream: those of event streams and of LangGraph."""


def muted(config: RunnableConfig) -> RunnableConfig:
    """Return the config with callbacks that see each run, but no tokens, so that no model streams for them.

    A model streams in `invoke` as soon as a streaming handler listens, however it is wrapped. So each such handler is
    replaced by one that passes on everything else. Other handlers stay as they are.
    """
    config = ensure_config(config)  # with the callbacks of the run around it, if it has none of its own
    return {**config, "callbacks": with_handlers(config.get("callbacks"), _muted_handler)}


def with_handlers(callbacks: Any, change: Callable[[Any], Any]) -> Any:
    """Return callbacks of a config, or of a model, with each handler changed: a copy of a manager, or a list."""
    if not isinstance(callbacks, BaseCallbackManager):
        return [change(handler) for handler in callbacks] if callbacks else callbacks
    manager = callbacks.copy()
    manager.handlers = [change(handler) for handler in manager.handlers]
    manager.inheritable_handlers = [change(handler) for handler in manager.inheritable_handlers]
    return manager


@contextmanager
def within(config: RunnableConfig) -> Iterator[None]:
    """Make this config that of the run around the block: bindings merge its callbacks into those they are given."""
    token = var_child_runnable_config.set(config)
    try:
        yield
    finally:
        var_child_runnable_config.reset(token)


def _muted_handler(handler: Any) -> Any:
    return _Muted(handler) if isinstance(handler, _STREAMING) else handler


class _Muted:
    """A streaming handler that is told everything but tokens, and is not recognised as streaming."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        if name in ("_handler", "tap_output_iter", "tap_output_aiter"):
            raise AttributeError(name)
        return getattr(self._handler, name)

    def on_llm_new_token(self, *_: Any, **__: Any) -> None:
        """Drop a token."""

    def on_stream_event(self, *_: Any, **__: Any) -> None:
        """Drop a piece of a message."""
