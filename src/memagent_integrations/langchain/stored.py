"""Memories in LangGraph's store: what one thread has read, another one carries on."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from memagent_integrations.errors import InUse, MissingExtra, UsageError

try:
    from langgraph.config import get_store
    from langgraph.store.base import BaseStore, Item
except ImportError as error:
    raise MissingExtra.extra("langgraph", "langchain") from error

_FIELD = "memory"  # of the value in the store


class StoredMemories:
    """Memories in the store of the graph that runs, each under a key in one namespace.

    A memory has no lock: a reading that ends when another one has changed the memory meanwhile is an error.

    Raises:
        UsageError: this cannot be a namespace.
    """

    def __init__(self, namespace: tuple[str, ...]) -> None:
        parts = namespace if isinstance(namespace, tuple) else ()
        if not parts or parts[0] == "langgraph" or not all(map(_is_label, parts)):
            raise UsageError(
                f"namespace has to be a tuple of names without dots, not beginning with 'langgraph', not {namespace!r}"
            )
        self._namespace = namespace

    def start(self, key: str) -> tuple[str, str]:
        """Return the memory that a reading starts from, and its digest.

        Raises:
            UsageError: there is no store, or the key has something else in it.
        """
        return _with_digest(key, _store().get(self._namespace, key))

    async def astart(self, key: str) -> tuple[str, str]:
        """`start`, async."""
        return _with_digest(key, await _store().aget(self._namespace, key))

    def leave(self, key: str, digest: str, memory: str) -> None:
        """Write the memory that a reading leaves, which has started from the one with this digest.

        Raises:
            InUse: another one is there now.
        """
        store = _store()
        _check(key, digest, memory, store.get(self._namespace, key))
        store.put(self._namespace, key, {_FIELD: memory})

    async def aleave(self, key: str, digest: str, memory: str) -> None:
        """`leave`, async."""
        store = _store()
        _check(key, digest, memory, await store.aget(self._namespace, key))
        await store.aput(self._namespace, key, {_FIELD: memory})


def checked_store(store: Any) -> BaseStore | None:
    """Return the store.

    Raises:
        UsageError: it is none of LangGraph's.
    """
    if not isinstance(store, BaseStore | None):
        raise UsageError(f"store has to be a store of LangGraph (a BaseStore), not {type(store).__name__}")
    return store


def _is_label(part: Any) -> bool:
    return isinstance(part, str) and bool(part) and "." not in part and "\0" not in part


def _store() -> BaseStore:
    store: BaseStore | None = get_store()
    if store is None:
        raise UsageError("memory_key names a memory in LangGraph's store; give build_graph a store (store=...)")
    return store


def _with_digest(key: str, item: Item | None) -> tuple[str, str]:
    memory = item.value.get(_FIELD) if item else ""
    if not isinstance(memory, str):
        raise UsageError(f"the store holds no memory under {key!r}, but something else")
    return memory, sha256(memory.encode("utf-8", "surrogatepass")).hexdigest()


def _check(key: str, digest: str, memory: str, item: Item | None) -> None:
    there, digest_there = _with_digest(key, item)
    if digest_there != digest and there != memory:  # the same: an answer that is asked for again
        raise InUse(f"the memory {key!r} has changed since this reading began; begin it anew, on top of what is there")
