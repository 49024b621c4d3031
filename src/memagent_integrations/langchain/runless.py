"""A runnable that starts no run of its own: what is around a reader would trace the document that the reader elides."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config

Tracing = Callable[[RunnableConfig], AbstractContextManager[RunnableConfig]]
"""Makes the config for the runs of a block."""


class Runless(Runnable[Any, Any]):
    """A sync and an async function as a runnable. The runs in it are those of what the functions call.

    `tracing` makes the config for them.
    """

    def __init__(
        self, name: str, run: Callable[..., Any], arun: Callable[..., Any], tracing: Tracing = nullcontext
    ) -> None:
        self.name, self._run, self._arun, self._tracing = name, run, arun, tracing

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Call the function."""
        with self._tracing(ensure_config(config)) as config:
            return self._run(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Call the async function."""
        with self._tracing(ensure_config(config)) as config:
            return await self._arun(input, config, **kwargs)


async def shown(events: Any, show: Callable[[Any], Any]) -> AsyncGenerator[Any]:
    """Yield the events of an event stream, those of its first run as `show` gives them."""
    root = None
    async with aclosing(events) as stream:
        async for event in stream:
            root = root or event["run_id"]
            yield show(event) if event["run_id"] == root else event
