"""Where the readings of a graph are in their documents, between two steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig

from memagent_integrations.reader.position import Position

_CACHED_POSITIONS = 256  # each holds a chunk and the text after it; the oldest are dropped first


class Positions:
    """A cache of positions by thread, document and chunk; what it lacks can be computed again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[tuple[tuple[Any, ...], Position]] = []  # a key may occur more than once

    def take(self, state: Mapping[str, Any], config: RunnableConfig) -> Position | None:
        """Remove and return the position of a state, since only one step can advance it; None if it is not there."""
        key = _key(state, config)
        with self._lock:
            index = next((index for index, (other, _) in enumerate(self._entries) if other == key), None)
            return None if index is None else self._entries.pop(index)[1]

    def put(self, state: Mapping[str, Any], config: RunnableConfig, position: Position) -> None:
        """Keep the position of a state."""
        with self._lock:
            self._entries = [*self._entries, (_key(state, config), position)][-_CACHED_POSITIONS:]


def _key(state: Mapping[str, Any], config: RunnableConfig) -> tuple[Any, ...]:
    return config.get("configurable", {}).get("thread_id"), repr(state["source"]), state["chunk"], state["digest"]
