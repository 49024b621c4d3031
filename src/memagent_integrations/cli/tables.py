"""Tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from memagent_integrations.cli.streams import printable, show


def write_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write rows to standard output: on a terminal as a table, elsewhere as lines with tabs between the columns."""
    lines = [[_cell(text) for text in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (columns, *lines):
            show("\t".join(line))
        return
    table = Table(*(Column(name, overflow="fold") for name in columns), box=None, pad_edge=False)
    for line in lines:
        table.add_row(*map(Text, line))  # a text may look like rich's markup
    Console(highlight=False).print(table)


def _cell(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\t", " ")
