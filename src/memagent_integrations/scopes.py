"""How long the work of a reading may wait: until a deadline, and until somebody cancels it.

    with Scope(deadline) as scope:      what runs in the block, and in threads that copy its context, keeps to the scope
    for seconds in slices(60): ...      a long wait in short parts, which ends with the scope

A scope within another keeps to both. Whoever holds a scope may cancel it, from any thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import ContextVar, Token
from functools import partial
from queue import Empty, SimpleQueue
from typing import ParamSpec, Self, TypeVar

_SLICE = 0.25  # seconds: so soon is a wait over after its scope was cancelled
_GRACE = 1.0  # seconds that threads get to hear of it
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Scope:
    """A deadline, by the clock of `time.monotonic`, and whether somebody has cancelled what runs in the scope.

    `extend`: its deadline holds even where the scope around it has an earlier one.
    """

    def __init__(self, deadline: float = math.inf, *, extend: bool = False) -> None:
        self._outer = _CURRENT.get()
        self.deadline: float = min(deadline, math.inf if extend or not self._outer else self._outer.deadline)
        self._cancelled = False
        self._token: Token[Scope | None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether this scope or one around it was cancelled."""
        return self._cancelled or bool(self._outer and self._outer.cancelled)

    def cancel(self) -> None:
        """End all waiting in the scope, soon."""
        self._cancelled = True

    def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function in this scope; several threads may do so at a time."""
        token = _CURRENT.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _CURRENT.reset(token)

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token
        _CURRENT.reset(self._token)


_CURRENT: ContextVar[Scope | None] = ContextVar("memagent_scope", default=None)


def deadline() -> float:
    """Return the time of `time.monotonic` until which the caller may wait; perhaps infinite."""
    scope = _CURRENT.get()
    return scope.deadline if scope else math.inf


def check() -> None:
    """Go on only if nobody has cancelled what the caller is part of.

    Raises:
        CancelledError: somebody has.
    """
    if (scope := _CURRENT.get()) and scope.cancelled:
        raise CancelledError


def slices(seconds: float | None = None) -> Iterator[float]:
    """Yield the lengths of short waits, one at least, that follow one another for so many seconds (None: for ever).

    They end before that at the deadline of the scope, and there are none after it.

    Raises:
        CancelledError: the scope was cancelled.
    """
    ends = min(math.inf if seconds is None else time.monotonic() + seconds, deadline())
    check()
    while time.monotonic() < deadline():
        yield max(min(ends - time.monotonic(), _SLICE), 0.001)
        if time.monotonic() >= ends:
            return
        check()


def acquired(lock: threading.Lock | threading.Semaphore, seconds: float | None = None) -> bool:
    """Return whether the lock was acquired in so many seconds (None: however long it takes), before the deadline.

    Raises:
        CancelledError: the scope was cancelled.
    """
    return any(lock.acquire(timeout=part) for part in slices(seconds))


def sleep(seconds: float) -> None:
    """Sleep; end with the scope.

    Raises:
        CancelledError: the scope was cancelled.
    """
    for part in slices(seconds):
        time.sleep(part)


async def in_thread(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of a function that runs in a thread; if the task is cancelled, its waiting ends as well."""
    scope = Scope()
    try:
        return await asyncio.to_thread(scope.run, partial(function, *args, **kwargs))
    except asyncio.CancelledError:
        scope.cancel()
        raise


def side_by_side(tasks: Sequence[Callable[[], _T]], size: int) -> list[_T]:
    """Return the results of the tasks, at most `size` of which run at a time, each in a thread.

    If one raises, or the caller is interrupted, the others are cancelled. They get a second to end, and no task keeps
    the process alive.
    """
    scope, left = Scope(), SimpleQueue[tuple[int, Callable[[], _T]]]()
    outcomes = SimpleQueue[tuple[int, _T | None, BaseException | None]]()
    for numbered in enumerate(tasks):
        left.put(numbered)

    def work() -> None:
        with suppress(Empty):
            while not scope.cancelled:
                number, task = left.get_nowait()
                try:
                    outcomes.put((number, scope.run(task), None))
                except BaseException as error:
                    outcomes.put((number, None, error))

    threads = [
        threading.Thread(target=work, name=f"memagent {number}", daemon=True) for number in range(min(size, len(tasks)))
    ]
    results: dict[int, _T] = {}
    try:
        for thread in threads:
            thread.start()
        while len(results) < len(tasks):
            number, result, error = _taken(outcomes)
            if error:
                raise error
            results[number] = result  # type: ignore[assignment]
        return [results[number] for number in range(len(tasks))]
    except BaseException:
        scope.cancel()
        ends = time.monotonic() + _GRACE
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join(max(ends - time.monotonic(), 0))
        raise


def _taken(queue: SimpleQueue[_T]) -> _T:
    while True:
        check()
        with suppress(Empty):
            return queue.get(timeout=_SLICE)
