"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from memagent_integrations.cli.streams import printable


def write_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write rows to standard output: on a terminal as a table, elsewhere as lines with tabs between the columns."""
    console = Console(highlight=False)
    if not console.is_terminal:
        for row in (columns, *rows):
            typer.echo("\t".join(row))
        return
    table = Table(*(Column(name, overflow="fold") for name in columns), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))  # a text may look like rich's markup
    console.print(table)


def one_line(text: str) -> str:
    """Return the text as one line that is harmless to a terminal."""
    return printable(" ".join(text.split()))
