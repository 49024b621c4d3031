"""A value that is made at its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Lazy:
    """A value that is made at its first use, by one thread, and again for another key. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: tuple[tuple[Any, ...], Any] | None = None

    def get(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The value that `make` made for `key`."""
        with self._lock:
            if self._made is None or not all(map(_same, self._made[0], key)):
                self._made = key, make()
            return self._made[1]

    def __reduce__(self) -> tuple[type[Lazy], tuple[()]]:
        return Lazy, ()


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str) and one == other)
