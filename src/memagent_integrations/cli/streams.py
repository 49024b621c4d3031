"""The process and its streams, as the command line wants them: a signal is an exception, and what cannot be told costs no answer."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast
from unicodedata import category


def printable(text: str) -> str:
    """The text without what a terminal would take for an order."""
    return "".join(
        char if char.isprintable() or char in "\n\t" or category(char) == "Zs" else "\ufffd" for char in text
    )


class Terminated(KeyboardInterrupt):
    """SIGTERM. Whatever cleans up after Ctrl-C cleans up after it as well."""


class Expendable:
    """A stream that takes all that is written. When the stream behind it fails, the rest goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or do not."""
        try:
            return self._stream.write(text)
        except OSError:
            abandon(self._stream)
            return len(text)

    def flush(self) -> None:
        """Flush, or do not."""
        try:
            self._stream.flush()
        except OSError:
            abandon(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def abandon(stream: TextIO) -> None:
    """Let what is still to be written go nowhere, Python's last flush included: what it would be written to is gone or full."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM raises an exception, as Ctrl-C does."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice; the second must not cut off the saving
        raise Terminated("terminated")

    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # else whoever started this process wants something else
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def standard_error() -> Iterator[None]:
    """Nothing that is told on the way, and cannot be, costs the answer."""
    before = sys.stderr
    if before is None:  # the next file to be opened would get its number, and what C code tells
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
    elif isinstance(before, io.TextIOWrapper):
        before.reconfigure(errors="replace")
    sys.stderr = cast(TextIO, Expendable(sys.stderr))
    try:
        yield
    finally:
        sys.stderr = before
