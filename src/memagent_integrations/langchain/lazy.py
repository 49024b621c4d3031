"""A value that is computed at its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Lazy:
    """A value computed at its first use, by one thread, and again when the key changes. Its copies are empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entry: tuple[tuple[Any, ...], Any] | None = None

    def get(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Return the value for `key`, from `compute` unless the last call had the same key."""
        with self._lock:
            if self._entry is None or not all(map(_same, self._entry[0], key)):
                self._entry = key, compute()
            return self._entry[1]

    def __eq__(self, other: object) -> bool:
        """Return True for any other: what is computed once is no part of what holds it."""
        return isinstance(other, Lazy)

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[Lazy], tuple[()]]:
        return Lazy, ()


def _same(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, str) and left == right)
