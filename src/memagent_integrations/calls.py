"""Calls of a model within limits: retried while that helps, given up when they take too long, refused while the model's server is down."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from memagent_integrations.checks import check_int, check_number, drop_none
from memagent_integrations.errors import BackendError, CallTimeout, MemAgentError, RunTimeout
from memagent_integrations.loop import Turns, advance, exchange
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.telemetry import under

if TYPE_CHECKING:
    from memagent_integrations.backends import Backend

_MOST_WAIT = 60.0  # a server that asks for a longer pause is not asked again
_ALMOST = 0.05  # seconds by which a client's own time limit, which is the same, may come before ours
_BURST = 10  # retries that can be had at once
_BACKOFF = wait_random_exponential(multiplier=0.5, max=8)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to wait for a slow model, and how often to retry a failing one.

    Args:
        call_timeout: seconds for one try of a call; None: as many as the backend waits.
        run_timeout: seconds for one reading, from its first call on; None: any number.
        max_retries: retries of one call; None: the backend's `max_retries`.
        retry_ratio: retries for each call made, over all readings of the reader, beyond ten.
        breaker_threshold: after this many consecutive failed calls, across all readings, calls are refused
        breaker_cooldown: for this many seconds; then one is let through, and decides.

    A sync call that takes too long keeps running in the background, and its reply is discarded; an async one is cancelled.

    Raises:
        UsageError: a limit is not a number in its range.
    """

    call_timeout: float | None = None
    run_timeout: float | None = None
    max_retries: int | None = None
    retry_ratio: float = 0.2
    breaker_threshold: int = 10
    breaker_cooldown: float = 30.0

    def __post_init__(self) -> None:
        check_number(least=0.001, most=1e9, **drop_none(call_timeout=self.call_timeout, run_timeout=self.run_timeout))
        check_number(most=1e6, retry_ratio=self.retry_ratio, breaker_cooldown=self.breaker_cooldown)
        check_int(breaker_threshold=self.breaker_threshold)
        check_int(least=0, **drop_none(max_retries=self.max_retries))


def limited(turns: Turns, run_timeout: float | None) -> Turns:
    """The loop `turns`, whose prompts have a deadline: `run_timeout` seconds after the first call."""
    return _limited(turns, run_timeout) if run_timeout else turns


def _limited(turns: Turns, run_timeout: float) -> Turns:
    deadline = None
    with closing(turns):
        state = advance(turns, None)
        while isinstance(state, Prompt):
            if not deadline and not state.recorded:
                deadline = time.monotonic() + run_timeout
            state = advance(turns, (yield from exchange(replace(state, deadline=deadline))))
    return state


class Calls:
    """Makes the calls of all readings of a reader, within its limits. A call that meets one ends with a `BackendError` that is retryable."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._breaker = _Breaker(limits.breaker_threshold, limits.breaker_cooldown)
        self._lock = threading.Lock()
        self._retries = float(_BURST)  # a bucket of tokens, as in gRPC's retry throttling

    def count(self, backend: Backend, text: str) -> int:
        """Tokens of a text: with many endpoints that is a call too."""
        return self.query(backend, lambda: backend.count(text))

    def query(self, backend: Backend, question: Callable[[], _T]) -> _T:
        """What the backend says of itself. It may say that while its model is down: so it closes no breaker."""
        with self._breaker.aside(backend.name):
            if not self._most(backend):  # a model in this process is asked often
                return question()
            answer: _T = Retrying(**self._retrying(backend, None))(question)
        return answer

    def complete(self, backend: Backend, prompt: Prompt, cancelled: threading.Event | None = None) -> Reply:
        """The reply to one prompt. Once `cancelled` is set, it is not retried any more."""

        def once() -> Reply:
            timed, deadline = self._timed(prompt)
            return self._in_time(prompt, deadline, lambda: backend.complete(timed))

        with self._allowed(backend):
            reply: Reply = Retrying(**self._retrying(backend, prompt.deadline), sleep=partial(_sleep, cancelled))(once)
        return reply

    async def acomplete(self, backend: Backend, prompt: Prompt) -> Reply:
        """`complete`, async."""

        async def once() -> Reply:
            timed, deadline = self._timed(prompt)
            async with self._awaited(prompt, deadline):
                return await backend.acomplete(timed)

        with self._allowed(backend):
            return await AsyncRetrying(**self._retrying(backend, prompt.deadline))(once)

    def stream(self, backend: Backend, prompt: Prompt) -> Generator[str | Reply]:
        """The reply in pieces, and then the whole. It is not retried once the first piece is there."""

        def begun() -> tuple[str | Reply | None, Generator[str | Reply]]:
            pieces = self._pieces(backend, prompt)
            return next(pieces, None), pieces

        with self._allowed(backend):
            start: tuple[str | Reply | None, Generator[str | Reply]] = Retrying(
                **self._retrying(backend, prompt.deadline)
            )(begun)
            first, pieces = start
            with closing(pieces):
                while first is not None:
                    yield first
                    first = next(pieces, None)

    async def astream(self, backend: Backend, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""

        async def begun() -> tuple[str | Reply | None, AsyncGenerator[str | Reply]]:
            pieces = self._apieces(backend, prompt)
            return await anext(pieces, None), pieces

        with self._allowed(backend):
            start: tuple[str | Reply | None, AsyncGenerator[str | Reply]] = await AsyncRetrying(
                **self._retrying(backend, prompt.deadline)
            )(begun)
            first, pieces = start
            async with aclosing(pieces):
                while first is not None:
                    yield first
                    first = await anext(pieces, None)

    def complete_batch(self, backend: Backend, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """The replies to prompts that are computed together, in this process: they are not retried."""
        timed = [self._timed(prompt) for prompt in prompts]
        begun = {place: prompt for place, (prompt, deadline) in enumerate(timed) if deadline > time.monotonic()}
        made: dict[int, Reply | MemAgentError] = {}
        if begun:
            latest = max(deadline for _, deadline in timed)
            with suppress(CallTimeout):
                made = dict(
                    zip(
                        begun,
                        self._in_time(prompts[0], latest, lambda: backend.complete_batch(list(begun.values()))),
                        strict=True,
                    )
                )
        return [made.get(place) or self._too_late(prompt) for place, prompt in enumerate(prompts)]

    def _pieces(self, backend: Backend, prompt: Prompt) -> Generator[str | Reply]:
        timed, deadline = self._timed(prompt)
        pieces, context = backend.stream(timed), copy_context()
        try:
            while (
                piece := self._in_time(prompt, deadline, lambda: next(pieces, None), context, pieces.close)
            ) is not None:
                given = time.monotonic()
                yield piece
                deadline = min(
                    deadline + time.monotonic() - given, prompt.deadline or math.inf
                )  # the model does not answer for whoever reads
        except GeneratorExit:
            pieces.close()
            raise

    async def _apieces(self, backend: Backend, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        timed, deadline = self._timed(prompt)
        async with aclosing(backend.astream(timed)) as pieces:
            while True:
                async with self._awaited(prompt, deadline):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                given = time.monotonic()
                yield piece
                deadline = min(deadline + time.monotonic() - given, prompt.deadline or math.inf)

    @contextmanager
    def _allowed(self, backend: Backend) -> Iterator[None]:
        """One call, unless too many before it have failed."""
        with self._breaker.passed(backend.name):
            with self._lock:
                self._retries = min(self._retries + self.limits.retry_ratio, _BURST)
            yield

    def _retrying(self, backend: Backend, deadline: float | None) -> dict[str, Any]:
        """When a call is retried, for tenacity."""
        return {
            "retry": retry_if_exception(lambda error: isinstance(error, BackendError) and error.retryable),
            "wait": _pause,
            "stop": partial(self._enough, self._most(backend), deadline),
            "reraise": True,
        }

    def _most(self, backend: Backend) -> int:
        """How often a call of this backend is repeated."""
        return backend.max_retries if self.limits.max_retries is None else self.limits.max_retries

    def _enough(self, most: int, deadline: float | None, state: RetryCallState) -> bool:
        if state.attempt_number > most or _asked(state) > _MOST_WAIT:
            return True
        if deadline and time.monotonic() + state.upcoming_sleep >= deadline:
            return True
        with self._lock:
            if self._retries < 1:
                return True
            self._retries -= 1
            return False

    def _timed(self, prompt: Prompt) -> tuple[Prompt, float]:
        """The prompt with the time by which the call that begins now has to be through, and that time."""
        deadline = min(time.monotonic() + (self.limits.call_timeout or math.inf), prompt.deadline or math.inf)
        return (prompt if deadline == math.inf else replace(prompt, deadline=deadline)), deadline

    def _in_time(
        self,
        prompt: Prompt,
        deadline: float,
        call: Callable[[], _T],
        context: Context | None = None,
        late: Callable[[], None] = lambda: None,
    ) -> _T:
        """What `call` returns; when that takes too long it goes on without us, in its thread, and ends with `late`."""

        def made() -> _T:
            with under(prompt.context):
                return call()

        if deadline == math.inf:
            return made()
        outcome: Future[_T] = Future()
        context = context or copy_context()

        def run() -> None:
            try:
                result = context.run(made)
                if outcome.cancelled():
                    context.run(late)
                else:
                    outcome.set_result(result)
            except InvalidStateError:  # it was cancelled this moment
                context.run(late)
            except BaseException as error:
                with suppress(InvalidStateError):
                    outcome.set_exception(error)

        left = deadline - time.monotonic()
        if left > 0:
            threading.Thread(target=run, name="memagent call", daemon=True).start()
        if left <= 0 or (wait([outcome], left).not_done and outcome.cancel()):
            raise self._too_late(prompt)
        with self._in_limit(prompt, deadline):
            return outcome.result()

    @asynccontextmanager
    async def _awaited(self, prompt: Prompt, deadline: float) -> AsyncGenerator[None]:
        """A block that is cancelled when it takes too long."""
        left = deadline - time.monotonic()
        try:
            async with asyncio.timeout(None if left == math.inf else left) as time_left:
                with under(prompt.context), self._in_limit(prompt, deadline):
                    yield
        except TimeoutError as error:
            if time_left.expired():
                raise self._too_late(prompt) from error
            raise

    @contextmanager
    def _in_limit(self, prompt: Prompt, deadline: float) -> Iterator[None]:
        """A block in which a client's own time limit, which is the same as ours, is told as ours."""
        try:
            yield
        except BackendError as error:
            if error.retryable and time.monotonic() >= deadline - _ALMOST:
                raise self._too_late(prompt) from error
            raise

    def _too_late(self, prompt: Prompt) -> CallTimeout:
        if prompt.deadline and time.monotonic() >= prompt.deadline - _ALMOST:
            return RunTimeout(
                f"the reading took more than its {self.limits.run_timeout:g} s (run_timeout); with a journal, read again to resume"
            )
        return CallTimeout(f"the model gave no reply within {self.limits.call_timeout:g} s (call_timeout)")


class _Breaker:
    """Refuses calls when the last `threshold` have failed, for `cooldown` seconds. Then one is let through: its success lets in all others.

    Only failures that may pass count (`retryable`): the others are about one prompt, and a call that was cancelled tells nothing.
    """

    def __init__(self, threshold: int, cooldown: float) -> None:
        self._threshold, self._cooldown = threshold, cooldown
        self._lock = threading.Lock()
        self._failures, self._open_until, self._trial = 0, 0.0, False

    @contextmanager
    def passed(self, name: str) -> Iterator[None]:
        """A call, which decides when it is the one that is let through."""
        with self._lock:
            trial = self._check(name)
            self._trial = self._trial or trial
        try:
            yield
        except BaseException as error:
            with self._lock:
                if trial:
                    self._trial = False
                self._failed(error, again=trial)
            raise
        with self._lock:
            self._failures, self._trial = 0, False

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Something else that is asked of the server: refused as calls are, and its failure counts, but not its success."""
        with self._lock:
            self._check(name)
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._failed(error, again=True)
            raise

    def _check(self, name: str) -> bool:
        """Whether the breaker is open, and this is let through all the same."""
        if self._failures < self._threshold:
            return False
        if self._trial or time.monotonic() < self._open_until:
            raise BackendError(
                f"{name} was not asked: its last {self._threshold} calls failed; the next is made {self._cooldown:g} s after them",
                retryable=True,
            )
        return True

    def _failed(self, error: BaseException, *, again: bool) -> None:
        if isinstance(error, BackendError) and error.retryable and not isinstance(error, RunTimeout):
            self._failures += 1
            if self._failures == self._threshold or (again and self._failures > self._threshold):
                self._open_until = time.monotonic() + self._cooldown


def _pause(state: RetryCallState) -> float:
    """Seconds until a call is retried: a growing random pause, on top of what the server asks for."""
    return _BACKOFF(state) + _asked(state)


def _asked(state: RetryCallState) -> float:
    """The pause that the server asks for."""
    seconds = getattr(state.outcome.exception() if state.outcome else None, "retry_after", None) or 0.0
    return float(seconds) if seconds > 0 else 0.0


def _sleep(cancelled: threading.Event | None, seconds: float) -> None:
    """Wait, unless nobody waits for the outcome any more."""
    if (cancelled or threading.Event()).wait(seconds):
        raise CancelledError
