"""Call a model within limits: retry while it helps, give up when it takes too long, refuse while the server is down."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, NoReturn, TypeVar

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from memagent_integrations import scopes
from memagent_integrations.backends import Backend
from memagent_integrations.breaker import Breaker
from memagent_integrations.checks import Number, check_int, check_number, drop_none
from memagent_integrations.errors import BackendError, CallTimeout, MemAgentError, RunTimeout
from memagent_integrations.loop import Turns, advance, exchange
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.schedule import Waiting
from memagent_integrations.scopes import Scope, slices
from memagent_integrations.telemetry import under

_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 60.0  # seconds; when a server asks for a longer one, the call is not retried
_ALMOST = 0.05  # seconds by which a client's own time limit, set to the same time, may come before ours
_BURST = 10  # retries that may follow one another at once
_BACKOFF = wait_random_exponential(multiplier=0.5, max=8)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to wait for a slow model, and how often to retry a failing one.

    Args:
        call_timeout: seconds for one try of a call, to a server that counts tokens as well; None: as long as the
            backend waits.
        run_timeout: seconds for one reading, from its first call on; None: no limit.
        max_retries: retries of one call; None: the backend's `max_retries`.
        empty_retries: how often a reply that holds no memory or no answer is asked for again.
        retry_ratio: retries allowed for each call, over all readings of the reader, beyond the first ten.
        breaker_threshold: after this many failed calls in a row, over all readings, calls are refused ...
        breaker_cooldown: ... for this many seconds; then one call is let through, and decides.

    A call that takes too long is cancelled, and its connection closed. Only a model that offers no way to do that, as
    one in this process, goes on in the background, and its reply is discarded.

    Raises:
        UsageError: a limit is not a number in its range.
    """

    call_timeout: Number[float | None] = None
    run_timeout: Number[float | None] = None
    max_retries: Number[int | None] = None
    empty_retries: Number[int] = 2
    retry_ratio: Number[float] = 0.2
    breaker_threshold: Number[int] = 10
    breaker_cooldown: Number[float] = 30.0

    def __post_init__(self) -> None:
        check_number(least=0.001, most=1e9, **drop_none(call_timeout=self.call_timeout, run_timeout=self.run_timeout))
        check_number(most=1e6, retry_ratio=self.retry_ratio, breaker_cooldown=self.breaker_cooldown)
        check_int(breaker_threshold=self.breaker_threshold)
        check_int(least=0, empty_retries=self.empty_retries, **drop_none(max_retries=self.max_retries))


def limited(turns: Turns, run_timeout: float | None, waiting: Waiting | None = None) -> Turns:
    """Return the loop with a deadline on its prompts: `run_timeout` seconds after the first call.

    The time that the reading is `waiting` between its steps does not count.
    """
    return _limited(turns, run_timeout, lambda: waiting.paused if waiting else 0.0) if run_timeout else turns


def _limited(turns: Turns, run_timeout: float, paused: Callable[[], float]) -> Turns:
    deadline, begun = time.monotonic() - paused() + run_timeout, False
    reply: Reply | MemAgentError | None = None
    with closing(turns):
        while isinstance(state := Scope(deadline + paused()).run(advance, turns, reply), Prompt):
            if not begun:  # a recorded step costs no call, only what it counts
                deadline, begun = time.monotonic() - paused() + run_timeout, not state.recorded
            reply = yield from exchange(replace(state, deadline=deadline + paused()))
    return state


class Calls:
    """Makes the calls of all readings of a reader, within its limits.

    A call that runs into a limit ends with a retryable `BackendError`.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._breaker = Breaker(limits.breaker_threshold, limits.breaker_cooldown)
        self._lock = threading.Lock()
        self._retries_left = float(_BURST)  # a token bucket, as in gRPC's retry throttling
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[type[Calls], tuple[Limits]]:
        return Calls, (self.limits,)  # a copy has a breaker and a bucket of its own

    def count(self, backend: Backend, text: str) -> int:
        """Return the number of tokens of a text. Many servers count themselves, so this may be a call as well."""
        return self.query(backend, lambda: backend.count(text))

    def query(self, backend: Backend, request: Callable[[], _T]) -> _T:
        """Return the result of `request`, which asks the backend about itself; with retries.

        A success does not close the breaker: a server may answer this while its model is down.
        """
        with self._breaker.query(backend.name):
            ends = self.limits.run_timeout and min(time.monotonic() + self.limits.run_timeout, scopes.deadline())

            def attempt() -> _T:
                deadline = self._deadline(ends)
                with Scope(deadline), self._client_timeouts(ends, deadline):
                    return request()

            return self._retried(backend, ends, attempt)

    def warn(self, message: str) -> None:
        """Log a warning about the model, once for all readings."""
        with self._lock:
            known = message in self._warned
            self._warned.add(message)
        if not known:
            _log.warning("%s", message)

    def complete(self, backend: Backend, prompt: Prompt) -> Reply:
        """Return the reply to one prompt."""

        def attempt() -> Reply:
            timed_prompt, deadline = self._with_deadline(prompt)
            return self._run_in_time(prompt, deadline, lambda: backend.complete(timed_prompt))

        with self._call(backend):
            return self._retried(backend, prompt.deadline, attempt)

    async def acomplete(self, backend: Backend, prompt: Prompt) -> Reply:
        """Return the reply to one prompt."""

        async def attempt() -> Reply:
            timed_prompt, deadline = self._with_deadline(prompt)
            async with self._timeout(prompt, deadline):
                return await backend.acomplete(timed_prompt)

        with self._call(backend):
            return await self._aretried(backend, prompt.deadline, attempt)

    def stream(self, backend: Backend, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply in pieces, then the whole reply. It is retried only before the first piece."""

        def attempt() -> tuple[str | Reply | None, Generator[str | Reply]]:
            pieces = self._pieces(backend, prompt)
            return next(pieces, None), pieces

        with self._call(backend):
            piece, pieces = self._retried(backend, prompt.deadline, attempt)
            with closing(pieces):
                while piece is not None:
                    yield piece
                    piece = next(pieces, None)

    async def astream(self, backend: Backend, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """Yield the reply in pieces, then the whole reply. It is retried only before the first piece."""

        async def attempt() -> tuple[str | Reply | None, AsyncGenerator[str | Reply]]:
            pieces = self._apieces(backend, prompt)
            return await anext(pieces, None), pieces

        with self._call(backend):
            piece, pieces = await self._aretried(backend, prompt.deadline, attempt)
            async with aclosing(pieces):
                while piece is not None:
                    yield piece
                    piece = await anext(pieces, None)

    def complete_batch(self, backend: Backend, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to prompts that are computed together, in this process, and so are not retried."""
        timed = [self._with_deadline(prompt) for prompt in prompts]
        in_time = {n: prompt for n, (prompt, deadline) in enumerate(timed) if deadline > time.monotonic()}
        replies: dict[int, Reply | MemAgentError] = {}
        if in_time:
            batch, latest = list(in_time.values()), max(deadline for _, deadline in timed)
            with suppress(CallTimeout):
                results = self._run_in_time(prompts[0], latest, lambda: backend.complete_batch(batch))
                replies = dict(zip(in_time, results, strict=True))
        return [replies.get(n) or self._timeout_error(prompt.deadline) for n, prompt in enumerate(prompts)]

    def _pieces(self, backend: Backend, prompt: Prompt) -> Generator[str | Reply]:
        timed_prompt, deadline = self._with_deadline(prompt)
        pieces, context = backend.stream(timed_prompt), copy_context()

        def next_piece() -> str | Reply | None:
            return self._run_in_time(prompt, deadline, lambda: next(pieces, None), context, pieces.close)

        try:
            while (piece := next_piece()) is not None:
                yielded = time.monotonic()
                yield piece
                deadline = _extended(deadline, time.monotonic() - yielded, prompt)
        except GeneratorExit:
            pieces.close()
            raise

    async def _apieces(self, backend: Backend, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        timed_prompt, deadline = self._with_deadline(prompt)
        async with aclosing(backend.astream(timed_prompt)) as pieces:
            while True:
                async with self._timeout(prompt, deadline):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yielded = time.monotonic()
                yield piece
                deadline = _extended(deadline, time.monotonic() - yielded, prompt)

    @contextmanager
    def _call(self, backend: Backend) -> Iterator[None]:
        """Let the breaker decide about one call and note how it ends; the call earns a share of a retry."""
        with self._breaker.call(backend.name):
            with self._lock:
                self._retries_left = min(self._retries_left + self.limits.retry_ratio, _BURST)
            yield

    def _retried(self, backend: Backend, deadline: float | None, attempt: Callable[[], _T]) -> _T:
        """Return the result of `attempt`, with retries."""
        try:
            return attempt()  # most succeed, and do without the machinery
        except BackendError as error:
            attempts: Iterator[Callable[[], _T]] = chain((partial(_raise, error),), repeat(attempt))
            retrying = Retrying(**self._retry_options(backend, deadline), sleep=scopes.sleep)
            answer: _T = retrying(lambda: next(attempts)())
            return answer

    async def _aretried(self, backend: Backend, deadline: float | None, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """`_retried`, async."""
        try:
            return await attempt()
        except BackendError as error:
            attempts: Iterator[Callable[[], Awaitable[_T]]] = chain((partial(_raise, error),), repeat(attempt))

            async def again() -> _T:
                return await next(attempts)()

            answer: _T = await AsyncRetrying(**self._retry_options(backend, deadline))(again)
            return answer

    def _retry_options(self, backend: Backend, deadline: float | None) -> dict[str, Any]:
        """Return the arguments of tenacity's `Retrying`, which say when a call is retried."""
        return {
            "retry": retry_if_exception(lambda error: isinstance(error, BackendError) and error.retryable),
            "wait": _pause,
            "stop": partial(self._must_stop, self._max_retries(backend), deadline),
            "reraise": True,
        }

    def _max_retries(self, backend: Backend) -> int:
        return backend.max_retries if self.limits.max_retries is None else self.limits.max_retries

    def _must_stop(self, max_retries: int, deadline: float | None, state: RetryCallState) -> bool:
        """Return whether the call that just failed is not retried; otherwise take a retry from the bucket."""
        if state.attempt_number > max_retries or _requested_pause(state) > _LONGEST_PAUSE:
            return True
        if deadline and time.monotonic() + state.upcoming_sleep >= deadline:
            return True
        with self._lock:
            if self._retries_left < 1:
                return True
            self._retries_left -= 1
            return False

    def _with_deadline(self, prompt: Prompt) -> tuple[Prompt, float]:
        """Return the prompt with the deadline of a call that begins now, and that deadline (which may be infinite)."""
        deadline = self._deadline(prompt.deadline)
        return (prompt if deadline == math.inf else replace(prompt, deadline=deadline)), deadline

    def _deadline(self, ends: float | None) -> float:
        """Return until when a call may take that begins now, in a reading that ends at `ends`; perhaps infinite."""
        return min(time.monotonic() + (self.limits.call_timeout or math.inf), ends or math.inf)

    def _run_in_time(
        self,
        prompt: Prompt,
        deadline: float,
        call: Callable[[], _T],
        context: Context | None = None,
        when_late: Callable[[], None] = lambda: None,
    ) -> _T:
        """Return the result of `call`.

        A call that takes too long is cancelled, and `when_late` runs at its end. So is one whose caller is interrupted.

        Raises:
            CallTimeout: the deadline has passed.
        """
        scope = Scope(deadline)

        def traced_call() -> _T:
            with under(prompt.context):
                return scope.run(call)

        if deadline == math.inf:
            return traced_call()
        outcome: Future[_T] = Future()
        context = context or copy_context()

        def run() -> None:
            try:
                result = context.run(traced_call)
                if outcome.cancelled():
                    context.run(when_late)
                else:
                    outcome.set_result(result)
            except InvalidStateError:  # it was cancelled just now
                context.run(when_late)
            except BaseException as error:
                with suppress(InvalidStateError):
                    outcome.set_exception(error)

        seconds = deadline - time.monotonic()
        if seconds > 0:
            threading.Thread(target=run, name="memagent call", daemon=True).start()
        try:
            if seconds <= 0 or (not _is_done(outcome, seconds) and outcome.cancel()):
                raise self._timeout_error(prompt.deadline)
        except BaseException:
            scope.cancel()
            raise
        with self._client_timeouts(prompt.deadline, deadline):
            return outcome.result()

    @asynccontextmanager
    async def _timeout(self, prompt: Prompt, deadline: float) -> AsyncGenerator[None]:
        """Cancel the block at the deadline.

        Raises:
            CallTimeout: the deadline has passed.
        """
        seconds = deadline - time.monotonic()
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds) as timeout:
                with under(prompt.context), self._client_timeouts(prompt.deadline, deadline):
                    yield
        except TimeoutError as error:
            if timeout.expired():
                raise self._timeout_error(prompt.deadline) from error
            raise

    @contextmanager
    def _client_timeouts(self, ends: float | None, deadline: float) -> Iterator[None]:
        """Report a time-out of the client, which has the same deadline as we do, as ours."""
        try:
            yield
        except BackendError as error:
            if error.retryable and time.monotonic() >= deadline - _ALMOST:
                raise self._timeout_error(ends) from error
            raise

    def _timeout_error(self, ends: float | None) -> CallTimeout:
        limits = self.limits
        if ends and time.monotonic() >= ends - _ALMOST:
            return RunTimeout(
                f"the reading took more than its {limits.run_timeout:g} s (run_timeout); "
                "with a journal, read again to resume"
            )
        return CallTimeout(f"the model gave no reply within {limits.call_timeout:g} s (call_timeout)")


def _raise(error: BackendError) -> NoReturn:
    raise error


def _extended(deadline: float, seconds: float, prompt: Prompt) -> float:
    """Return the deadline, later by the `seconds` that the consumer of the reply took: they are not the model's."""
    return min(deadline + seconds, prompt.deadline or math.inf)


def _pause(state: RetryCallState) -> float:
    """Return the seconds to wait before a retry: a growing random pause, on top of the one that the server asks for."""
    return _BACKOFF(state) + _requested_pause(state)


def _requested_pause(state: RetryCallState) -> float:
    """Return the seconds that the server asked to wait; 0 if it did not."""
    seconds = getattr(state.outcome.exception() if state.outcome else None, "retry_after", None) or 0.0
    return float(seconds) if seconds > 0 else 0.0


def _is_done(outcome: Future[Any], seconds: float) -> bool:
    """Return whether there is an outcome after so many seconds at most."""
    return any(wait([outcome], part).done for part in slices(seconds))
