"""`memagent read --watch`: show the memory as it changes."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any, cast
from unicodedata import category, east_asian_width

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from memagent_integrations.changes import difference
from memagent_integrations.cli.progress import ReadingProgress
from memagent_integrations.cli.streams import HeldStream, printable
from memagent_integrations.records import Plan, Step

# this green stands out from white as much as from black, whatever a theme makes of bold
_STYLES = {-1: "dim strike", 0: "", 1: "bold color(28)"}
_WORD = re.compile(r"\S+\s*|\s+")
_LOW = 16  # on a terminal with fewer lines than this, nothing but the memory gets space
_MOST_REMOVED = 12  # words shown of a passage that was removed
_CELLS = str.maketrans({"\t": "    ", "\u200c": "\ufffd", "\u200d": "\ufffd"})  # joined letters have no certain width


class WatchedReading(ReadingProgress):
    """Shows the memory under the bar, with what the last step added and removed.

    Without a terminal the memory is text after each step's line. From `begin` to `stop` the display uses the terminal's
    second screen, which leaves nothing behind and is redrawn when its size changes. Frames are drawn by the clock and
    not at every step: thousands of recorded steps cost no more than a few.
    """

    def __init__(
        self, console: Console, beginning: str = "starting", *, quiet: bool = False, question: str = ""
    ) -> None:
        super().__init__(console, beginning, quiet=quiet)
        self._question = " ".join(_safe(question).split())
        self._last: tuple[int, Step] | None = None
        self._live = Live(
            console=console,
            screen=True,
            get_renderable=self._display,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._has_screen = self.on_terminal and console.is_interactive and not console.legacy_windows

    def begin(self, plan: Plan | None) -> None:
        """Show that the reading begins: the display replaces the bar."""
        super().begin(plan)
        if self._has_screen:
            self._bar.stop()
            sys.stderr = cast(Any, HeldStream(sys.stderr))  # else the end of the display would take it away
            # no wrapping: a line that this terminal finds too long must not move the others
            self._console.out("\x1b[?7l", highlight=False, end="")
            self._live.start(refresh=True)

    def stop(self) -> None:
        """Take the display away, which leaves the terminal to the answer."""
        if self._live.is_started:
            self._live.stop()
            self._console.out("\x1b[?7h", highlight=False, end="")
            if isinstance(sys.stderr, HeldStream):
                sys.stderr = sys.stderr.release()
        super().stop()

    def step(self, step: Step) -> None:
        """Show the memory after a step."""
        super().step(step)
        if step.phase != "memory":
            return
        self._last = (step.index - self._first, step)
        if not self._has_screen:
            memory = _safe(step.memory).split("\n") if step.memory != step.memory_before else []
            self._line("\n".join((f"  {_describe(step)}", *(f"    {line}" for line in memory))), always=True)

    def _display(self) -> Group:
        """Return at most as many lines as the terminal has."""
        width, height = self._console.size
        low = height < _LOW
        question = _first_lines(self._question, width, 1 if low else 3, "bold")
        if self._last is None:
            return Group(*question, self._bar)
        number, step = self._last
        description = _first_lines(f"{self._label(number)} · {_describe(step)}", width, 3, "dim")
        space = [] if low else [Text()]
        head: list[RenderableType] = [*question, self._bar, *space, *description, *space]
        return Group(*head, *_excerpt(_memory(step.memory_before, step.memory, width), width, height - len(head)))


def _excerpt(lines: list[Text], width: int, height: int) -> list[Text]:
    """Return at most `height` lines, from a little above the first change on; the last one says what is not shown."""
    if len(lines) <= height:
        return lines
    height = max(height - 1, 0)
    changes = [number for number, line in enumerate(lines) if any(line.spans)]
    start = max(min((changes or [0])[0] - height // 3, len(lines) - height), 0)
    hidden = ((start, "above"), (len(lines) - start - height, "below"))
    counts = [f"{count:,} {'line' if count == 1 else 'lines'} {where}" for count, where in hidden if count]
    note = f"not shown: {', '.join(counts)}"
    if hidden_changes := sum(not start <= number < start + height for number in changes):
        note += f" ({hidden_changes:,} changed)"
    return [*lines[start : start + height], *_first_lines(note, width, 1, "dim")]


def _describe(step: Step) -> str:
    """Say what became of the memory, and where the chunk came from."""
    outcome = f"memory {step.outcome}"
    if step.outcome == "kept":
        outcome += ", the section is lost"
    if step.cut:
        outcome += ", cut"
    if not step.span:
        return outcome
    first, *others = step.span.sources or (step.span,)
    name = _safe(getattr(first, "document_id", "the text")).replace("\n", " ")
    name = name if len(name) <= 40 else f"…{name[-39:]}"  # the end of a path says most
    more = f" and {len(others)} more" if others else ""
    return f"{outcome} · characters {first.start:,}-{first.end:,} of {name}{more}"


@lru_cache(maxsize=1)  # a step is drawn many times
def _memory(before: str, after: str, width: int) -> list[Text]:
    """Return the lines of a memory, with what was added and what was removed."""
    text, separated = Text(), True
    for sign, part in difference(_safe(before), _safe(after)):
        words, space = part.rstrip(), part[len(part.rstrip()) :]
        removed = words.split() if sign < 0 else []
        if len(removed) > _MOST_REMOVED:  # the memory as it is now matters more
            words = f"{' '.join(removed[:_MOST_REMOVED])} … ({len(removed) - _MOST_REMOVED:,} more words)"
        text.append("" if separated else " ").append(words, _STYLES[sign]).append(space)
        separated = bool(space)  # the space is missing where one of the two texts ends
    return _lines(text, width) if text.plain.strip() else [Text("the memory is empty", style="dim")]


def _first_lines(text: str, width: int, most: int, style: str) -> list[Text]:
    lines = _lines(Text(text, style=style), width - 1) if text else []
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1].append("…")]


def _lines(text: Text, width: int) -> list[Text]:
    """Break the text into lines of at most `width` cells, between words where possible."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        breaks, column = [], 0
        for word in _WORD.finditer(line.plain):
            if column and column + sum(map(_cells, word[0].rstrip())) > width:
                breaks.append(word.start())
                column = 0
            for index, char in enumerate(word[0], word.start()):
                if column and column + _cells(char) > width and not char.isspace():
                    breaks.append(index)
                    column = 0
                column += _cells(char)
        lines.extend(line.divide(breaks))
    for line in lines:
        line.rstrip()
        line.no_wrap, line.overflow = True, "crop"
    return lines


@lru_cache(maxsize=4096)
def _cells(char: str) -> int:
    """Return the most cells that any terminal gives a character: they differ, and text beyond the edge is lost."""
    least = 0 if category(char) in ("Mn", "Me") and char != "\ufe0f" else 2 if east_asian_width(char) in "FW" else 1
    return max(cell_len(char), least)


def _safe(text: str) -> str:
    return printable(text.replace("\r\n", "\n")).translate(_CELLS)
