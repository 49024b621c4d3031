"""What the command line shows while it works, on standard error: a bar on a terminal, a plain line for each step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
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

from memagent_integrations.cli.streams import printable
from memagent_integrations.records import Plan, Reading, Step

Told = Callable[..., None]
_EMPTY = Plan(chunks=0, calls=0, document_tokens=0, prompt_tokens=0, completion_tokens=0)


@contextmanager
def counted(what: str, total: int | None, begun: int = 0, *, quiet: bool = False) -> Iterator[Told]:
    """How far something is that consists of many, on standard error: a bar on a terminal, a line each elsewhere.

    What is yielded is called with a description for the bar, with the line, and with how many are done (None: one more).
    """
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=begun)

        def told(description: str, line: str, completed: int | None = None) -> None:
            if completed is None:
                bar.advance(task)
            bar.update(task, completed=completed, description=description)
            if not quiet and not console.is_terminal:
                console.print(printable(line), markup=False, soft_wrap=True)

        yield told


class ReadingProgress:
    """Shows how far a reading is. Without a terminal each step is one line; `quiet` shows nothing.

    Tokens are those of the document, and tokens per second are by the time in the model, so that they tell the time left.
    """

    def __init__(self, console: Console, beginning: str = "starting", *, quiet: bool = False) -> None:
        self._console, self.quiet = console, quiet
        columns = (  # where the terminal is narrow, the bar gives way
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(max_width=20)),
            _Rate(table_column=Column(no_wrap=True)),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not self.on_terminal)
        self._task = self._bar.add_task(beginning, total=None, rate=None, due=None)
        self._plan = _EMPTY
        self._began = time.monotonic()
        self._tokens, self._seconds, self._read, self._recorded = 0, 0.0, 0, 0

    @property
    def on_terminal(self) -> bool:
        """Whether a bar is shown."""
        return self._console.is_terminal and not self._console.is_dumb_terminal and not self.quiet

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away, to leave the terminal to the answer."""
        self._bar.stop()

    def begin(self, plan: Plan | None) -> None:
        """The reading begins; `plan` is None when the length of the document is unknown."""
        self._plan = plan or _EMPTY
        self._began = time.monotonic()
        self._bar.update(self._task, description=self._label(0), total=self._plan.document_tokens or None, refresh=True)

    def step(self, step: Step) -> None:
        """A step is done."""
        size, recorded = step.span.tokens if step.span else 0, step.reply.recorded
        self._tokens += size
        if recorded:
            self._recorded += 1
        else:
            self._read += size
            self._seconds += step.reply.seconds
        rate = self._read / max(self._seconds or time.monotonic() - self._began, 1e-6)
        rest = self._plan.document_tokens - self._tokens
        left = rest / rate if rest > 0 and rate else None
        due = None if left is None else time.monotonic() + left
        if step.span:
            behind = step.index + 1
            coming = "answer" if behind == self._plan.chunks else self._label(behind)
            self._bar.update(self._task, description=coming, completed=self._tokens, rate=rate, due=due, refresh=True)
            ending = f", about {_clock(left)} left" if left else ""
            told = "recorded" if recorded else f"{rate:,.0f} tokens/s{ending}"
            self._line(f"{self._label(step.index)}: {size:,} tokens, {told}")

    def done(self, reading: Reading) -> None:
        """The reading is complete."""
        self.stop()
        seconds, calls = time.monotonic() - self._began, [step for step in reading.steps if not step.reply.recorded]
        usage = reading.new_usage
        counts = (
            ("prompt", usage.prompt_tokens),
            ("completion", usage.completion_tokens),
            ("cached", usage.cached_tokens),
        )
        told = ", ".join(f"{name} {count:,}" for name, count in counts if count is not None)
        recorded = f", {self._recorded} steps were recorded" if self._recorded else ""
        spent = f" (tokens: {told})" if told else ""
        self._line(
            f"read {self._read:,} tokens in {len(calls)} calls and {_clock(seconds)}{spent}{recorded}", always=True
        )

    def _label(self, number: int) -> str:
        planned = number < self._plan.chunks  # a file may have grown since the plan
        return f"chunk {number + 1} of {self._plan.chunks}" if planned else f"chunk {number + 1}"

    def _line(self, text: str, *, always: bool = False) -> None:
        if not self.quiet and (always or not self.on_terminal):
            self._console.out(text, highlight=False)


class PullProgress:
    """Shows how far a download is: a bar on a terminal, one line elsewhere. Call it with the bytes had and the bytes in all."""

    def __init__(self, console: Console, name: str, *, quiet: bool = False) -> None:
        columns = (
            TextColumn("fetching {task.description}"),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task(name, total=None)
        if not quiet and not console.is_terminal:
            console.out(f"fetching {name}", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, have: int, total: int | None) -> None:
        """Take the state of the download."""
        self._bar.update(self._task, completed=have, total=total)


class _Rate(ProgressColumn):
    """Tokens read, tokens per second, time left (counted down between the steps) or else the time gone."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """The text for one task."""
        rate, due = task.fields["rate"], task.fields["due"]
        total = f"/{task.total:,.0f}" if task.total else " tokens"
        parts = [f"{task.completed:,.0f}{total}", f"{rate:,.0f} tokens/s"] if rate else []
        left = due - time.monotonic() if due else 0
        parts.append(f"{_clock(left)} left" if left > 0 else _clock(task.elapsed or 0))
        return Text(" · ".join(parts), style="progress.remaining")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
