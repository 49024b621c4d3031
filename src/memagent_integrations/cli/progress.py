"""Progress on standard error: a bar on a terminal, a plain line for each step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from memagent_integrations.checks import drop_none
from memagent_integrations.cli.streams import PrintableStream, console, one_line, printable
from memagent_integrations.records import NO_USAGE, Plan, Reading, Step

_EMPTY = Plan(chunks=0, calls=0, document_tokens=0, prompt_tokens=0, completion_tokens=0)


class Notify(Protocol):
    """A function that shows progress."""

    def __call__(self, description: str, line: str, completed: int | None = None) -> None:
        """Show that `completed` items are done (None: one more), by a description beside the bar or else by a line."""


class _Bar(Progress):
    """A bar that leaves nothing behind. What is written to standard error meanwhile stands above it."""

    def __init__(self, *columns: ProgressColumn, console: Console, disable: bool) -> None:
        super().__init__(*columns, console=console, disable=disable, transient=True, redirect_stdout=False)

    def start(self) -> None:
        """Show the bar."""
        super().start()
        if isinstance(sys.stderr, FileProxy):  # rich takes commands from what it passes on
            sys.stderr = cast(Any, PrintableStream(sys.stderr))


@contextmanager
def counted(what: str, total: int | None, done: int = 0, *, quiet: bool = False) -> Iterator[Notify]:
    """Yield a function that shows the progress after each item of `total`; `done` items are done already."""
    terminal = console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _Bar(*columns, console=terminal, disable=quiet or not terminal.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=done)

        def notify(description: str, line: str, completed: int | None = None) -> None:
            if completed is None:
                bar.advance(task)
            bar.update(task, completed=completed, description=one_line(description))
            if not quiet and not terminal.is_terminal:
                terminal.out(one_line(line))

        yield notify


class _Display:
    """A bar that is shown while a `with` block runs."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away, which leaves the terminal to the answer."""
        self._bar.stop()


class ReadingProgress(_Display):
    """Shows how far a reading is. Without a terminal each step is one line; `quiet` shows nothing.

    Tokens are those of the document. Tokens per second count only the time spent in the model, so that they predict
    the time left.
    """

    def __init__(self, console: Console, beginning: str = "starting", *, quiet: bool = False) -> None:
        self._console, self.quiet = console, quiet
        columns = (  # where the terminal is narrow, the bar gives way
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(max_width=20)),
            _Rate(table_column=Column(no_wrap=True)),
        )
        self._bar = _Bar(*columns, console=console, disable=not self.on_terminal)
        self._task = self._bar.add_task(one_line(beginning), total=None, rate=None, due=None)
        self._plan = _EMPTY
        self._began = time.monotonic()
        self._tokens, self._seconds, self._read, self._recorded = 0, 0.0, 0, 0
        self._first = 0  # the number of the first step since the document is read from its beginning

    @property
    def on_terminal(self) -> bool:
        """Whether a bar is shown."""
        return self._console.is_terminal and not self._console.is_dumb_terminal and not self.quiet

    def begin(self, plan: Plan | None) -> None:
        """Show that the reading begins; `plan` is None when the length of the document is unknown."""
        self._plan = plan or _EMPTY
        self._began = time.monotonic()
        self._show(self._label(0), total=self._plan.document_tokens or None)

    def step(self, step: Step) -> None:
        """Show that a step is done."""
        segment, merge = (step.span.segment, step.span.merge) if step.span else (None, False)
        size, recorded = step.span.tokens if step.span and not merge else 0, step.reply.recorded
        self._tokens += size
        if recorded:
            self._recorded += 1
        else:
            self._read += size
            self._seconds += step.reply.seconds
        spent = self._seconds if segment is None else 0.0  # side by side, calls take less time than their sum
        rate = self._read / max(spent or time.monotonic() - self._began, 1e-6)
        tokens_left = self._plan.document_tokens - self._tokens
        seconds_left = tokens_left / rate if tokens_left > 0 and rate else None
        due = None if seconds_left is None else time.monotonic() + seconds_left
        if merge and segment is not None:
            self._line(f"memory of segment {segment + 1} merged")
        elif step.span:
            number = step.index - self._first + 1
            following = "answer" if number == self._plan.chunks else self._label(number)
            self._show(following, completed=self._tokens, rate=rate, due=due)
            remaining = f", about {_clock(seconds_left)} left" if seconds_left else ""
            speed = "recorded" if recorded else f"{rate:,.0f} tokens/s{remaining}"
            self._line(f"{self._label(number - 1)}: {size:,} tokens, {speed}")
        elif step.outcome == "insufficient":
            self._first, self._tokens = step.index + 1, 0
            self._show(self._label(0), completed=0)
            self._line("the memory does not suffice: the document is read once more")

    def done(self, reading: Reading) -> None:
        """Take the bar away, and show what the complete reading cost."""
        self.stop()
        recorded = f", {self._recorded} steps were recorded" if self._recorded else ""
        self._line(f"read {self._read:,} tokens {cost_of([reading], self._began)}{recorded}", always=True)

    def _show(self, description: str, **values: Any) -> None:
        self._bar.update(self._task, description=description, refresh=True, **values)

    def _label(self, number: int) -> str:
        planned = number < self._plan.chunks  # a file may have grown since the plan
        return f"chunk {number + 1} of {self._plan.chunks}" if planned else f"chunk {number + 1}"

    def _line(self, text: str, *, always: bool = False) -> None:
        if not self.quiet and (always or not self.on_terminal):
            self._console.out(printable(text), highlight=False)


class PullProgress(_Display):
    """Shows how far a download is: a bar on a terminal, one line elsewhere."""

    def __init__(self, console: Console, name: str, *, quiet: bool = False) -> None:
        columns = (
            TextColumn("fetching {task.description}", markup=False),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = _Bar(*columns, console=console, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task(name, total=None)
        if not quiet and not console.is_terminal:
            console.out(f"fetching {name}", highlight=False)

    def __call__(self, received: int, total: int | None) -> None:
        """Show that `received` bytes of `total` have arrived."""
        self._bar.update(self._task, completed=received, total=total)


class _Rate(ProgressColumn):
    """Tokens read, tokens per second, and the time left (counted down between steps), else the time elapsed."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Return the text for one task."""
        rate, due = task.fields["rate"], task.fields["due"]
        total = f"/{task.total:,.0f}" if task.total else " tokens"
        parts = [f"{task.completed:,.0f}{total}", f"{rate:,.0f} tokens/s"] if rate else []
        seconds_left = due - time.monotonic() if due else 0
        parts.append(f"{_clock(seconds_left)} left" if seconds_left > 0 else _clock(task.elapsed or 0))
        return Text(" · ".join(parts), style="progress.remaining")


def cost_of(readings: Sequence[Reading], began: float) -> str:
    """Say what readings cost that began at this time of `time.monotonic`: calls, time and tokens."""
    calls = sum(step.reply.tries for reading in readings for step in reading.steps if not step.reply.recorded)
    usage = sum((reading.new_usage for reading in readings), NO_USAGE)
    counts = drop_none(prompt=usage.prompt_tokens, completion=usage.completion_tokens, cached=usage.cached_tokens)
    tokens = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    spent = f" (tokens: {tokens})" if tokens else ""
    return f"in {calls} calls and {_clock(time.monotonic() - began)}{spent}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
