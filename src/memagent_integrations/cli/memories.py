"""`memagent memories`: list, show, set and delete the named memories of a journal."""

from __future__ import annotations

from typing import Annotated

import typer

from memagent_integrations.cli import options
from memagent_integrations.cli.runs import open_journal
from memagent_integrations.cli.streams import one_line, text_given, write
from memagent_integrations.cli.tables import write_table
from memagent_integrations.errors import UsageError

_Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of a memory, as `memagent memories list` shows it.", show_default=False),
]
_Text = Annotated[
    str,
    typer.Option("--text", metavar="TEXT", help="What it is to hold; - reads standard input.", show_default=False),
]

memories_app = typer.Typer(help="Named memories: list, show, set, delete.", rich_markup_mode=None)


@memories_app.command("list", short_help="List the memories.")
def list_memories(journal_file: options.JournalFile) -> None:
    """List the named memories of a journal, with the number of readings that each has carried on.

    On a terminal it is a table, elsewhere a line for each memory with tabs between the columns.
    """
    with open_journal(journal_file, readonly=True) as journal:
        rows = [(memory.name, str(len(memory.runs)), one_line(memory.text)) for memory in journal.memories()]
    write_table(("memory", "readings", "text"), rows)


@memories_app.command("show", short_help="Write what a memory holds.")
def show_memory(journal_file: options.JournalFile, name: _Name) -> None:
    """Write what a memory holds now."""
    with open_journal(journal_file, readonly=True) as journal:
        memory = journal.memory(name)
        if memory not in journal.memories():
            raise UsageError(f"{journal.path} holds no memory {name!r}")
        write(memory.text)


@memories_app.command("set", short_help="Replace what a memory holds.")
def set_memory(journal_file: options.JournalFile, name: _Name, text: _Text) -> None:
    """Replace what a memory holds. What was read with it stays read."""
    with open_journal(journal_file) as journal:
        journal.memory(name).set(text_given(text).strip())


@memories_app.command("delete", short_help="Remove a memory.")
def delete_memory(journal_file: options.JournalFile, name: _Name) -> None:
    """Remove a memory from the journal; its runs stay."""
    with open_journal(journal_file) as journal:
        journal.memory(name).delete()
