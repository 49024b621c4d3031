"""Records what LlamaIndex's instrumentation sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from pydantic import Field

from memagent_integrations.llama_index import MemAgentStep
from memagent_integrations.records import Step

Handler = TypeVar("Handler")


class EventLog(BaseEventHandler):
    """Keeps every event."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        return [event.class_name() for event in self.events if "InProgress" not in event.class_name()]

    @property
    def steps(self) -> list[Step]:
        return [event.step for event in self.events if isinstance(event, MemAgentStep)]


@contextmanager
def instrumented(handler: Handler) -> Iterator[Handler]:
    """Add a handler of events or spans to LlamaIndex's root dispatcher."""
    root = get_dispatcher()
    kind = "event_handlers" if isinstance(handler, BaseEventHandler) else "span_handlers"
    before = getattr(root, kind)
    setattr(root, kind, [*before, handler])
    try:
        yield handler
    finally:
        setattr(root, kind, before)
