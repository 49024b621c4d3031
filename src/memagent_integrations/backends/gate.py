"""Readings of a batch side by side: a backend that computes prompts together gets those of all readings at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain

from memagent_integrations.backends.around import BackendAround
from memagent_integrations.backends.base import Backend
from memagent_integrations.errors import MemAgentError
from memagent_integrations.records import Prompt, Reply


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    """A prompt that waits for those of the other readings."""

    backend: Backend
    prompt: Prompt
    outcome: Future[Reply] = field(default_factory=Future)


class Gate:
    """Where the readings of a batch meet: `at_a_time` of them run, and once each has a prompt, all are asked together.

    Every one of the `readings` has to be a `member` in the end, unless the batch is stopped.
    """

    def __init__(self, readings: int, at_a_time: int) -> None:
        self._left, self._at_a_time = readings, at_a_time
        self._waiting: list[_Pending] = []
        self._stopped = False
        self._lock = threading.Lock()

    def gathered(self, backend: Backend) -> Backend:
        """Return a backend that passes its calls through this gate."""
        return _Gathered(self, backend)

    @contextmanager
    def member(self) -> Iterator[None]:
        """Make the block one of the readings: when it ends, the others no longer wait for it."""
        try:
            yield
        finally:
            _ask(self._leave())

    @asynccontextmanager
    async def amember(self) -> AsyncIterator[None]:
        """`member`, async."""
        try:
            yield
        finally:
            if pending := self._leave():
                await asyncio.to_thread(_ask, pending)

    def stop(self) -> None:
        """Let no more calls through: nobody takes the results of the readings that are left."""
        with self._lock:
            self._stopped = True
            for pending in self._waiting:
                pending.outcome.cancel()
            self._waiting.clear()

    def join(self, pending: _Pending) -> list[_Pending]:
        """Add a prompt to those that wait; return all of them if they are complete, for the caller to ask.

        Raises:
            CancelledError: the batch was stopped.
        """
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._waiting.append(pending)
            return self._complete()

    def withdraw(self, pending: _Pending) -> None:
        """Remove a prompt whose reading was cancelled."""
        with self._lock:
            self._waiting = [other for other in self._waiting if other is not pending]

    def _leave(self) -> list[_Pending]:
        with self._lock:
            self._left -= 1
            return self._complete()

    def _complete(self) -> list[_Pending]:
        if len(self._waiting) < min(self._at_a_time, self._left):
            return []
        complete, self._waiting = self._waiting, []
        return complete


class _Gathered(BackendAround):
    """A backend whose calls wait at a gate."""

    def __init__(self, gate: Gate, backend: Backend) -> None:
        self._stand_for(backend)
        self._gate = gate

    def complete(self, prompt: Prompt) -> Reply:
        pending = _Pending(backend=self._backend, prompt=prompt)
        _ask(self._gate.join(pending))
        return pending.outcome.result()

    async def acomplete(self, prompt: Prompt) -> Reply:
        pending = _Pending(backend=self._backend, prompt=prompt)
        try:
            if complete := self._gate.join(pending):
                await asyncio.to_thread(_ask, complete)
            return await asyncio.wrap_future(pending.outcome)
        except asyncio.CancelledError:
            self._gate.withdraw(pending)
            raise


def _ask(pending: list[_Pending]) -> None:
    """Get the replies to these prompts, those of each backend together, and pass them on."""
    for backend in {id(one.backend): one.backend for one in pending}.values():
        own = [one for one in pending if one.backend is backend]
        size = backend.batch_size if backend.batch_size > 1 else backend.concurrency
        for first in range(0, len(own), size):
            _ask_one(backend, own[first : first + size])


def _ask_one(backend: Backend, pending: list[_Pending]) -> None:
    outcomes: list[Reply | BaseException]
    try:
        outcomes = [*_outcomes(backend, [one.prompt for one in pending])]
    except BaseException as error:  # each reading raises it where it waits
        outcomes = [error] * len(pending)
    for one, outcome in zip(pending, outcomes, strict=True):
        with suppress(InvalidStateError):  # its reading was cancelled meanwhile
            if isinstance(outcome, BaseException):
                one.outcome.set_exception(outcome)
            else:
                one.outcome.set_result(outcome)


def _outcomes(backend: Backend, prompts: list[Prompt]) -> list[Reply | MemAgentError]:
    if backend.batch_size > 1 or len(prompts) == 1:
        return backend.complete_batch(prompts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(chain.from_iterable(pool.map(lambda prompt: backend.complete_batch([prompt]), prompts)))
