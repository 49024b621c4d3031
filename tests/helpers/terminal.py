"""Text that would give a terminal orders, and what reaches one."""

from __future__ import annotations

import os
import re

HOSTILE = (
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 [bold red]markup[/] \u202eright to left\u202c \x9b2J \x08\r\x0c "
    "a\u0301\u0301 \u200b\u2066 中文字 🙂 \ud800 \u2028 \x00"
)
ORDERS = (
    "\x1b[31mred \x1b]52;c;aGFjaw==\x07 \x1b]0;title\x1b\\ \x1bc \x1b[2J \x9b2J \x9d0;title\x9c "
    "\u202eright \u2066 \x08\r"
)
"""A colour, the clipboard, the title twice, a reset, clearing twice, another direction, and the line written over."""
_OF_A_DISPLAY = re.compile(r"\x1b\[(?:[0-9;]*m|H|\?25[lh]|\?1049[lh]|\?7[lh]|2K|1A)|\r(?=\x1b\[2K|\n)")


def assert_harmless(output: str) -> None:
    """Check that a terminal gets no commands but for colours, the cursor, and the change of screens."""
    rest = _OF_A_DISPLAY.sub("", output)
    assert not [char for char in rest if not char.isprintable() and char not in "\n\r"]
    assert "\x1b[31m" not in output, "red is no colour of a display"


def written_to(terminal: int) -> bytes:
    """All that is written to a terminal until its other end is closed."""
    shown = b""
    try:
        while block := os.read(terminal, 1 << 16):
            shown += block
    except OSError:  # the other end is closed: a terminal reports that as an error
        pass
    os.close(terminal)
    return shown
