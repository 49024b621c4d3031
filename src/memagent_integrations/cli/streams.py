"""Signals and standard streams: what a terminal gets is text, and an unwritable standard error costs no answer.

Models, servers, documents, file names and journals may hold commands for a terminal. All output of the command line
goes through here: data by `write`, what is made for people by `show` and `tell`, displays by `console`.
"""

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

import typer
from rich.console import Console

from memagent_integrations.errors import UsageError
from memagent_integrations.text_files import text_of_stream

STDIN = "-"
"""What stands for standard input in place of a file or a text."""

_HARMLESS = "\n\t\u200c\u200d"  # Persian, Indic scripts and emoji are written with joiners


def printable(text: str) -> str:
    """Return the text with U+FFFD in place of what a terminal would take for a command, or what reverses its lines."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in _HARMLESS or category(char) == "Zs" else "\ufffd"
        for char in text.replace("\r\n", "\n")
    )


def one_line(text: str) -> str:
    """Return the text as one `printable` line."""
    return printable(" ".join(text.split()))


def write(text: str, *, newline: bool = True) -> None:
    """Write data, such as an answer, to standard output: `printable` to a terminal, unchanged elsewhere."""
    # color: else what looks like colours would be taken out
    typer.echo(printable(text) if sys.stdout.isatty() else text, nl=newline, color=True)


def show(text: str) -> None:
    """Write what is made for people to standard output: `printable` in a pipe as well."""
    typer.echo(printable(text))


def tell(message: str) -> None:
    """Write a line to standard error."""
    typer.echo(one_line(message), err=True)


def console() -> Console:
    """Return rich's console on standard error. Its own commands reach the terminal, so its texts are made printable."""
    stream = sys.stderr.raw if isinstance(sys.stderr, PrintableStream) else sys.stderr
    # rich takes FORCE_COLOR for a terminal
    return Console(file=stream, highlight=False, force_terminal=None if stream.isatty() else False)


def stdin_text() -> Iterator[str]:
    """Yield standard input as it comes, line ends unchanged.

    Raises:
        UsageError: it is closed, or no text, as of `text_files.text_of_stream`.
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    yield from text_of_stream("standard input", cast(io.BufferedReader, sys.stdin.buffer))


def text_given(argument: str) -> str:
    """Return the text that an option gives; - is that of standard input.

    Raises:
        UsageError: as `stdin_text`.
    """
    return "".join(stdin_text()) if argument == STDIN else argument


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM. Whatever cleans up after Ctrl-C cleans up after this as well."""


class BestEffortStream:
    """A stream whose writes never fail: once the stream behind it fails, the rest is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, or drop it if the stream fails."""
        try:
            self._stream.write(text)
        except OSError:
            abandon(self._stream)
        return len(text)

    def flush(self) -> None:
        """Flush, or give the stream up if that fails."""
        try:
            self._stream.flush()
        except OSError:
            abandon(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrintableStream(BestEffortStream):
    """A best-effort stream of `printable` text, whoever writes it: logs, warnings, libraries, Python's tracebacks."""

    @property
    def raw(self) -> TextIO:
        """The stream for what writes commands of its own."""
        return cast(TextIO, BestEffortStream(self._stream))

    def write(self, text: str) -> int:
        """Write the text; a carriage return at its beginning is that of a progress bar."""
        bar = text.startswith("\r")
        super().write("\r" * bar + printable(text[bar:]))
        return len(text)


class HeldStream(BestEffortStream):
    """A stream that keeps what is written until `release`, while a display has the terminal."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._texts: list[str] = []

    def write(self, text: str) -> int:
        """Keep the text."""
        self._texts.append(text)
        return len(text)

    def release(self) -> Any:
        """Write what was kept, and return the stream."""
        self._stream.write("".join(self._texts))
        return self._stream


def abandon(stream: TextIO) -> None:
    """Send what is still to be written to the null device, Python's last flush included: its target is gone or full."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` in the main thread, as Ctrl-C raises KeyboardInterrupt."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice; the second must not cut off the saving
        raise Terminated("terminated")

    # any other handler was set on purpose by the program that started this process
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def safe_stderr() -> Iterator[None]:
    """Make all text on standard error printable; keep a closed, full or narrow one from costing the answer."""
    before = sys.stderr
    if before is None:  # the next file opened would get descriptor 2, and with it what C code writes there
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
    elif isinstance(before, io.TextIOWrapper):
        before.reconfigure(errors="replace")
    sys.stderr = cast(TextIO, PrintableStream(sys.stderr))
    try:
        yield
    finally:
        sys.stderr = before
