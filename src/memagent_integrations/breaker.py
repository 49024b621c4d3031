"""A circuit breaker: a model whose calls keep failing is left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from memagent_integrations.errors import BackendError, RunTimeout


class Breaker:
    """Refuses calls for `cooldown` seconds after `threshold` failures in a row; then it lets one call through.

    If that call succeeds, all others are let through as well. Only failures that may pass (`retryable`) count; other
    failures are about a single prompt. A call that was cancelled counts neither way.
    """

    def __init__(self, threshold: int, cooldown: float) -> None:
        self._threshold, self._cooldown = threshold, cooldown
        self._lock = threading.Lock()
        self._failures, self._open_until = 0, 0.0
        self._trial_running = False

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Refuse the block, which makes a call, or run it and note how it ends.

        Raises:
            BackendError: the call is refused.
        """
        with self._lock:
            is_trial = self._check(name)
            self._trial_running = self._trial_running or is_trial
        try:
            yield
        except BaseException as error:
            with self._lock:
                if is_trial:
                    self._trial_running = False
                self._note_failure(error, reopen=is_trial)
            raise
        with self._lock:
            self._failures, self._trial_running = 0, False

    @contextmanager
    def query(self, name: str) -> Iterator[None]:
        """Refuse the block, which asks the server for something else than a reply, or run it and note only a failure.

        Raises:
            BackendError: the query is refused.
        """
        with self._lock:
            self._check(name)
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._note_failure(error, reopen=True)
            raise

    def _check(self, name: str) -> bool:
        """Return whether this is the one call that is let through although the last ones have failed."""
        if self._failures < self._threshold:
            return False
        if self._trial_running or time.monotonic() < self._open_until:
            raise BackendError(
                f"{name} was not asked: its last {self._threshold} calls failed; "
                f"the next is made {self._cooldown:g} s after them",
                retryable=True,
            )
        return True

    def _note_failure(self, error: BaseException, *, reopen: bool) -> None:
        if isinstance(error, BackendError) and error.retryable and not isinstance(error, RunTimeout):
            self._failures += 1
            if self._failures == self._threshold or (reopen and self._failures > self._threshold):
                self._open_until = time.monotonic() + self._cooldown
