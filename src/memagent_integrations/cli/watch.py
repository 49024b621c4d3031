"""The memory as it changes, shown while the command line reads: `--watch`."""

from __future__ import annotations

import re
from functools import lru_cache
from unicodedata import category, east_asian_width

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from memagent_integrations.changes import difference
from memagent_integrations.cli.progress import ReadingProgress
from memagent_integrations.cli.streams import printable
from memagent_integrations.records import Plan, Step

_STYLES = {
    -1: "dim strike",
    0: "",
    1: "bold color(28)",
}  # this green stands out from white as much as from black, whatever a theme makes of bold
_WORD = re.compile(r"\S+\s*|\s+")
_LOW = 16  # on a terminal of fewer lines, the memory gets all the room that there is
_GONE = 12  # most words shown of a passage that was taken out


class WatchedReading(ReadingProgress):
    """Shows the memory under the bar, with what the last step put in and took out. Without a terminal it is text after each step's line.

    From `begin` to `stop` the display has the terminal's second screen, which leaves nothing behind and is drawn anew when its size changes.
    A frame is made when it is time for one, not at every step: thousands of recorded steps cost no more than a few.
    """

    def __init__(
        self, console: Console, beginning: str = "starting", *, quiet: bool = False, question: str = ""
    ) -> None:
        super().__init__(console, beginning, quiet=quiet)
        self._question = " ".join(_safe(question).split())
        self._last: Step | None = None
        self._live = Live(console=console, screen=True, get_renderable=self._display)
        self._has_screen = self.on_terminal and console.is_interactive and not console.legacy_windows

    def begin(self, plan: Plan | None) -> None:
        """The reading begins: the display takes the place of the bar."""
        super().begin(plan)
        if self._has_screen:
            self._bar.stop()
            self._console.out(
                "\x1b[?7l", highlight=False, end=""
            )  # a line that this terminal finds too long must not move the others
            self._live.start(refresh=True)

    def stop(self) -> None:
        """Take the display away, to leave the terminal to the answer."""
        if self._live.is_started:
            self._live.stop()
            self._console.out("\x1b[?7h", highlight=False, end="")
        super().stop()

    def step(self, step: Step) -> None:
        """A step is done."""
        super().step(step)
        if step.phase != "memory":
            return
        self._last = step
        if not self._has_screen:
            memory = _safe(step.memory).split("\n") if step.memory != step.memory_before else []
            self._line("\n".join((f"  {_told(step)}", *(f"    {line}" for line in memory))), always=True)

    def _display(self) -> Group:
        """As many lines as the terminal has, or fewer."""
        width, height = self._console.size
        low, step = height < _LOW, self._last
        question = _beginning(self._question, width, 1 if low else 3, "bold")
        if step is None:
            return Group(*question, self._bar)
        told = _beginning(f"{self._label(step.index)} · {_told(step)}", width, 3, "dim")
        space = [] if low else [Text()]
        head: list[RenderableType] = [*question, self._bar, *space, *told, *space]
        return Group(*head, *_part(_memory(step.memory_before, step.memory, width), width, height - len(head)))


def _part(lines: list[Text], width: int, room: int) -> list[Text]:
    """As much of the memory as there is room for, from a little above the first change on, and what is missing."""
    if len(lines) <= room:
        return lines
    room = max(room - 1, 0)
    changes = [number for number, line in enumerate(lines) if any(line.spans)]
    start = max(min((changes or [0])[0] - room // 3, len(lines) - room), 0)
    hidden = ((start, "above"), (len(lines) - start - room, "below"))
    note = "not shown: " + ", ".join(
        f"{count:,} {'line' if count == 1 else 'lines'} {where}" for count, where in hidden if count
    )
    missed = sum(not start <= number < start + room for number in changes)
    return [
        *lines[start : start + room],
        *_beginning(f"{note} ({missed:,} changed)" if missed else note, width, 1, "dim"),
    ]


def _told(step: Step) -> str:
    """What became of the memory, and where the chunk came from."""
    outcome = (
        f"memory {step.outcome}"
        + (", the reply was unusable" if step.outcome == "kept" else "")
        + (", cut" if step.cut else "")
    )
    if not step.span:
        return outcome
    first, *others = step.span.sources or (step.span,)
    name = _safe(getattr(first, "document_id", "the text")).replace("\n", " ")
    name = name if len(name) <= 40 else f"…{name[-39:]}"  # a path says most at its end
    return f"{outcome} · characters {first.start:,}-{first.end:,} of {name}" + (
        f" and {len(others)} more" if others else ""
    )


@lru_cache(maxsize=1)  # a step is drawn many times
def _memory(before: str, after: str, width: int) -> list[Text]:
    """The lines of a memory, with what was put in and what was taken out."""
    text, parted = Text(), True
    for sign, part in difference(_safe(before), _safe(after)):
        words, space = part.rstrip(), part[len(part.rstrip()) :]
        gone = words.split() if sign < 0 else []
        if len(gone) > _GONE:  # what is there now is what counts
            words = f"{' '.join(gone[:_GONE])} … ({len(gone) - _GONE:,} more words)"
        text.append("" if parted else " ").append(words, _STYLES[sign]).append(space)
        parted = bool(space)  # it is missing where one of the two texts ends
    return _lines(text, width) if text.plain.strip() else [Text("the memory is empty", style="dim")]


def _beginning(text: str, width: int, most: int, style: str) -> list[Text]:
    lines = _lines(Text(text, style=style), width - 1) if text else []
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1].append("…")]


def _lines(text: Text, width: int) -> list[Text]:
    """The text in lines of at most `width` cells, broken between words where they let it."""
    found: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        breaks, column = [], 0
        for word in _WORD.finditer(line.plain):
            if column and column + sum(map(_cells, word[0].rstrip())) > width:
                breaks.append(word.start())
                column = 0
            for place, char in enumerate(word[0], word.start()):
                if column and column + _cells(char) > width and not char.isspace():
                    breaks.append(place)
                    column = 0
                column += _cells(char)
        found.extend(line.divide(breaks))
    for line in found:
        line.rstrip()
        line.no_wrap, line.overflow = True, "crop"
    return found


@lru_cache(maxsize=4096)
def _cells(char: str) -> int:
    """The most cells that a terminal may give a character. They do not agree, and what is beyond the edge is lost."""
    least = 0 if category(char) in ("Mn", "Me") and char != "\ufe0f" else 2 if east_asian_width(char) in "FW" else 1
    return max(cell_len(char), least)


def _safe(text: str) -> str:
    return printable(text.replace("\r\n", "\n")).replace("\t", "    ")
