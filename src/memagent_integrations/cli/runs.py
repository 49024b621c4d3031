"""`memagent runs`: list, show, export, edit, pause and delete the runs of a journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memagent_integrations.cli import options
from memagent_integrations.cli.streams import one_line, show, text_given, write
from memagent_integrations.cli.tables import write_table
from memagent_integrations.errors import UsageError
from memagent_integrations.journal import Journal

_Memory = Annotated[
    str,
    typer.Option(
        metavar="TEXT", help="What the memory is to hold after that step; - reads standard input.", show_default=False
    ),
]
_Step = Annotated[int, typer.Option(metavar="N", help="The step, counted from 0.", show_default=False)]
_As = Annotated[str | None, typer.Option("--as", metavar="NAME", help="Name of the branch.", show_default=False)]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="OUT.json", help="Where to; standard output if not given.", show_default=False
    ),
]

_COLUMNS = ("run", "steps", "state", "model", "begun", "branch of", "question")

runs_app = typer.Typer(
    help="Recorded readings: list, show, pause, resume, edit, export, delete.", rich_markup_mode=None
)


def open_journal(file: Path, *, readonly: bool = False) -> Journal:
    """Open the journal in a file that has to exist."""
    if not file.is_file():
        raise UsageError(f"there is no journal {file}")
    return Journal(file, readonly=readonly)


def is_part_of(file: Path, journal_file: Path) -> bool:
    """Return whether a file is, or would be, the journal's database or one of its side files, under whatever name."""
    database = journal_file.resolve()
    parts = [database.with_name(database.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]
    return file.resolve() in parts or (file.exists() and any(part.exists() and file.samefile(part) for part in parts))


@runs_app.command("list", short_help="List the runs.")
def list_runs(journal_file: options.JournalFile) -> None:
    """List the runs of a journal, oldest first.

    On a terminal it is a table, elsewhere a line for each run with tabs between the columns.
    """
    rows = []
    with open_journal(journal_file, readonly=True) as journal:
        for run in journal.runs():
            branch = f"{run.parent} after {run.parent_step}" if run.parent else ""
            created = f"{run.created:%Y-%m-%d %H:%M}"
            rows.append((run.name, str(run.steps), run.state, run.model, created, branch, one_line(run.question)))
    write_table(_COLUMNS, rows)


@runs_app.command("show", short_help="Show the memory after every step of a run.")
def show_run(journal_file: options.JournalFile, run: options.RunName) -> None:
    """Show a run: its question, the memory after every step, the answer."""
    with open_journal(journal_file, readonly=True) as journal:
        reading = journal.reading(run)
    show(f"question: {reading.question}")
    if reading.steps and reading.steps[0].memory_before:
        show(f"\n-- starts from\n{reading.steps[0].memory_before}")
    for step in reading.steps:
        if step.phase == "memory":
            where = f"characters {step.span.start:,}-{step.span.end:,}" if step.span else ""
            outcome = f"{step.outcome}, cut" if step.cut else step.outcome
            show(f"\n-- step {step.index}, {where}: {outcome}\n{step.memory}")
        elif not step.is_answer:
            show(f"\n-- step {step.index}: the memory does not suffice, the document is read once more")
    show(f"\nanswer: {reading.answer}" if reading.answer else f"\n{reading.error}")
    for warning in reading.warnings:
        show(f"warning: {warning}")


@runs_app.command("export", short_help="Write a run as JSON.")
def export_run(journal_file: options.JournalFile, run: options.RunName, output: _Output = None) -> None:
    """Write the recorded reading of a run as JSON, as `memagent read --json` does."""
    if output and is_part_of(output, journal_file):
        raise UsageError(f"the export would overwrite the journal: {output}")
    with open_journal(journal_file, readonly=True) as journal:
        reading = journal.reading(run)
    if output:
        reading.save(output)
    else:
        write(reading.to_json())


@runs_app.command("edit", short_help="Change the memory after a step, in a new branch.")
def edit_run(
    journal_file: options.JournalFile, run: options.RunName, step: _Step, memory: _Memory, branch: _As = None
) -> None:
    """Make a branch of a run with another memory after a step, and write the branch's name.

    `memagent runs resume` continues it.
    """
    with open_journal(journal_file) as journal:
        show(journal.edit(run, step, memory=text_given(memory), name=branch))


@runs_app.command("pause", short_help="Stop a reading after its current step.")
def pause_run(journal_file: options.JournalFile, run: options.RunName) -> None:
    """Stop the reading of a run, in whatever process, after its current step.

    `memagent runs resume` continues it.
    """
    with open_journal(journal_file) as journal:
        journal.pause(run)


@runs_app.command("delete", short_help="Remove a run.")
def delete_run(journal_file: options.JournalFile, run: options.RunName) -> None:
    """Remove a run from the journal; its branches stay."""
    with open_journal(journal_file) as journal:
        journal.delete(run)
