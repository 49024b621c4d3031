"""Calls of a model within limits: repeated while that helps, given up when they take too long, not made while the model's server is down."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pybreaker import CircuitBreaker, CircuitBreakerError
from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from memagent_integrations.backends import Backend
from memagent_integrations.errors import BackendError, MemAgentError
from memagent_integrations.loop import Turns, advance
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.settings import check_int, check_number, given
from memagent_integrations.telemetry import under

MOST_WAIT = 120.0
"""A server that asks for more seconds of patience is not asked again."""
_FREE_RETRIES = 10
_BACKOFF = wait_random_exponential(multiplier=0.5, max=8)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a reader bears of a model that is slow or fails.

    Args:
        call_timeout: seconds that one try of a call may take; None: as many as the backend waits.
        run_timeout: seconds that one reading may take, from its first call on; None: any number.
        retry_share: repetitions allowed for each call made, over all readings of the reader, on top of ten. How often one call is repeated
            is the backend's `max_retries`.
        breaker_failures: when so many calls in a row have failed, of whatever reading, no more are made
        breaker_seconds: for so many seconds; then one is tried.

    A sync call that takes too long is left to itself, in a thread of its own; an async one is cancelled.

    Raises:
        UsageError: a limit is not a number of its range.
    """

    call_timeout: float | None = None
    run_timeout: float | None = None
    retry_share: float = 0.2
    breaker_failures: int = 10
    breaker_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_number(least=0.001, most=threading.TIMEOUT_MAX, **given(call_timeout=self.call_timeout, run_timeout=self.run_timeout))
        check_number(most=1e6, retry_share=self.retry_share, breaker_seconds=self.breaker_seconds)
        check_int(breaker_failures=self.breaker_failures)


def limited(turns: Turns, run_timeout: float | None) -> Turns:
    """The loop `turns`, nobody waiting for its calls any more when `run_timeout` seconds have gone by since the first of them."""
    deadline = None
    with closing(turns):
        state = advance(turns, None)
        while isinstance(state, Prompt):
            if run_timeout and not deadline and not state.recorded:
                deadline = time.monotonic() + run_timeout
            try:
                outcome: Reply | MemAgentError = yield replace(state, deadline=deadline)
            except MemAgentError as error:
                outcome = error
            state = advance(turns, outcome)
    return state


class Calls:
    """Makes the calls of all readings of a reader, each within the limits. A call that ends at a limit is a `BackendError` worth another try."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._breaker = CircuitBreaker(limits.breaker_failures, limits.breaker_seconds, exclude=[_in_order], throw_new_error_on_trip=False)
        self._lock = threading.Lock()
        self._made, self._repeated = 0, 0

    def complete(self, backend: Backend, prompt: Prompt) -> Reply:
        """The reply to one prompt."""

        def made() -> Reply:
            with under(prompt.context):
                return backend.complete(prompt)

        def once() -> Reply:
            return self._in_time(self._deadline(prompt), prompt, made)

        with self._allowed(backend):
            reply: Reply = Retrying(**self._repeating(backend, prompt))(once)
        return reply

    async def acomplete(self, backend: Backend, prompt: Prompt) -> Reply:
        """`complete`, async."""

        async def once() -> Reply:
            async with self._awaited(self._deadline(prompt), prompt):
                return await backend.acomplete(prompt)

        with self._allowed(backend):
            return await AsyncRetrying(**self._repeating(backend, prompt))(once)

    def stream(self, backend: Backend, prompt: Prompt) -> Generator[str | Reply]:
        """The reply in pieces, and then the whole. It is not repeated once the first piece is there."""

        def begun() -> Generator[str | Reply]:
            pieces = self._pieces(backend, prompt)
            return _again(next(pieces, None), pieces)

        with self._allowed(backend):
            pieces: Generator[str | Reply] = Retrying(**self._repeating(backend, prompt))(begun)
            yield from pieces

    async def astream(self, backend: Backend, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""

        async def begun() -> AsyncGenerator[str | Reply]:
            pieces = self._apieces(backend, prompt)
            return _aagain(await anext(pieces, None), pieces)

        with self._allowed(backend):
            begun_pieces: AsyncGenerator[str | Reply] = await AsyncRetrying(**self._repeating(backend, prompt))(begun)
            async with aclosing(begun_pieces) as pieces:
                async for piece in pieces:
                    yield piece

    def complete_batch(self, backend: Backend, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """The replies to prompts that are computed together, in this process: they are not repeated."""
        deadlines = [self._deadline(prompt) for prompt in prompts]
        late = [deadline <= time.monotonic() for deadline in deadlines]
        waiting = [prompt for prompt, is_late in zip(prompts, late, strict=True) if not is_late]
        try:
            made = iter(self._in_time(max(deadlines), prompts[0], lambda: backend.complete_batch(waiting)) if waiting else ())
        except _TooLate:
            made, late = iter(()), [True] * len(prompts)
        return [self._too_late(prompt) if is_late else next(made) for prompt, is_late in zip(prompts, late, strict=True)]

    def _pieces(self, backend: Backend, prompt: Prompt) -> Generator[str | Reply]:
        deadline, pieces = self._deadline(prompt), backend.stream(prompt)

        def take() -> str | Reply | None:
            with under(prompt.context):
                return next(pieces, None)

        try:
            while (piece := self._in_time(deadline, prompt, take)) is not None:
                yield piece
        except GeneratorExit:  # at the end of our patience a piece is being made: then it cannot be closed
            pieces.close()
            raise

    async def _apieces(self, backend: Backend, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        deadline = self._deadline(prompt)
        async with aclosing(backend.astream(prompt)) as pieces:
            while True:
                async with self._awaited(deadline, prompt):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yield piece

    @contextmanager
    def _allowed(self, backend: Backend) -> Iterator[None]:
        """One call, unless too many before it have failed."""
        with self._lock:
            self._made += 1
        try:
            with self._breaker.calling():
                yield
        except CircuitBreakerError as error:
            raise BackendError(
                f"{backend.name} was not asked: its last {self.limits.breaker_failures} calls failed, the next one is made "
                f"{self.limits.breaker_seconds:g} s after them",
                retryable=True,
            ) from error

    def _repeating(self, backend: Backend, prompt: Prompt) -> dict[str, Any]:
        """When a call is repeated, for tenacity."""
        return {
            "retry": retry_if_exception(lambda error: isinstance(error, BackendError) and error.retryable),
            "wait": _pause,
            "stop": partial(self._enough, backend.max_retries, prompt),
            "reraise": True,
        }

    def _enough(self, max_retries: int, prompt: Prompt, state: RetryCallState) -> bool:
        pause = state.upcoming_sleep
        if state.attempt_number > max_retries or pause > MOST_WAIT or (prompt.deadline and time.monotonic() + pause >= prompt.deadline):
            return True
        with self._lock:
            self._repeated += 1
            return self._repeated > _FREE_RETRIES + self.limits.retry_share * self._made

    def _deadline(self, prompt: Prompt) -> float:
        """When a call that begins now has to be through."""
        return min(time.monotonic() + (self.limits.call_timeout or math.inf), prompt.deadline or math.inf)

    def _in_time(self, deadline: float, prompt: Prompt, call: Callable[[], _T]) -> _T:
        """What `call` returns; when that takes too long, it is left to itself."""
        if deadline == math.inf:
            return call()
        outcome: Future[_T] = Future()
        context = copy_context()

        def run() -> None:
            try:
                outcome.set_result(context.run(call))
            except BaseException as error:
                outcome.set_exception(error)

        left = deadline - time.monotonic()
        if left > 0:
            threading.Thread(target=run, name="memagent call", daemon=True).start()
        if left <= 0 or wait([outcome], left).not_done:
            raise self._too_late(prompt)
        return outcome.result()

    @asynccontextmanager
    async def _awaited(self, deadline: float, prompt: Prompt) -> AsyncGenerator[None]:
        """A block that is cancelled when it takes too long."""
        left = deadline - time.monotonic()
        try:
            async with asyncio.timeout(None if left == math.inf else left) as time_left:
                with under(prompt.context):
                    yield
        except TimeoutError as error:
            if time_left.expired():
                raise self._too_late(prompt) from error
            raise

    def _too_late(self, prompt: Prompt) -> _TooLate:
        if prompt.deadline and time.monotonic() >= prompt.deadline:
            return _TooLate(f"the reading took more than its {self.limits.run_timeout:g} s (run_timeout); with a journal, read again to go on")
        return _TooLate(f"the model gave no reply within {self.limits.call_timeout:g} s (call_timeout)")


class _TooLate(BackendError):
    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


def _in_order(error: BaseException) -> bool:
    """Whether the model's server is in order all the same: it is the prompt that is at fault, or nobody wants the reply any more."""
    return not isinstance(error, BackendError)


def _pause(state: RetryCallState) -> float:
    """Seconds until a call is repeated: what the server asks for, else more each time."""
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after", None)
    return _BACKOFF(state) if asked is None else float(asked)


def _again(first: _T | None, rest: Generator[_T]) -> Generator[_T]:
    with closing(rest):
        if first is not None:
            yield first
            yield from rest


async def _aagain(first: _T | None, rest: AsyncGenerator[_T]) -> AsyncGenerator[_T]:
    async with aclosing(rest):
        if first is not None:
            yield first
            async for piece in rest:
                yield piece
