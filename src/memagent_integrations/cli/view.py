"""`memagent trace` and `memagent serve`: look at readings, as a page or in the browser."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from memagent_integrations import files, serve
from memagent_integrations.checks import drop_none
from memagent_integrations.cli import options
from memagent_integrations.cli.runs import is_part_of, open_journal
from memagent_integrations.cli.streams import Terminated, show
from memagent_integrations.errors import UsageError
from memagent_integrations.reader import Reader
from memagent_integrations.records import Reading
from memagent_integrations.trace import save_trace

_Port = Annotated[int, typer.Option(metavar="N", help="Port on 127.0.0.1; 0 is any free one.")]
_Trace = Annotated[
    str, typer.Argument(metavar="TRACE.json", help="What --trace or --json wrote, or with --journal the name of a run.")
]
_Page = Annotated[
    Path, typer.Option("--output", "-o", metavar="PAGE.html", help="Where to write the page.", show_default=False)
]
_Journal = Annotated[
    Path | None, typer.Option("--journal", metavar="FILE", help="The journal that holds the run.", show_default=False)
]


def serve_journal(
    journal_file: options.JournalFile,
    port: _Port = 0,
    window: options.Window = None,
    base_url: options.BaseUrl = None,
) -> None:
    """Write the address of a page that follows the runs of a journal, and serve it until Ctrl-C.

    The page pauses runs, edits their memory and continues them from any step.
    """
    backend_options = drop_none(window=window, base_url=base_url)
    resume = partial(Reader.from_run, backend_options=backend_options, on_lost_section="skip")  # the page tells it
    with open_journal(journal_file) as journal:
        server = serve.Server(journal, resume, port=port)
        try:
            show(server.url)
            sys.stdout.flush()
            server.run()
        except Terminated:
            raise
        except KeyboardInterrupt:  # the usual way to end it
            return


def make_page(trace: _Trace, page: _Page, journal_file: _Journal = None) -> None:
    """Write a page that shows every version of the memory.

    It shows a reading that --trace saved, or with --journal the run that TRACE.json names.
    """
    if journal_file:
        if is_part_of(page, journal_file):
            raise UsageError(f"the page would overwrite the journal: {page}")
        with open_journal(journal_file, readonly=True) as journal:
            reading = journal.reading(trace)
    else:
        if page.exists() and Path(trace).exists() and page.samefile(trace):
            raise UsageError(f"the page would overwrite the reading: {page}")
        reading = Reading.from_json(files.read_bytes(trace))
    save_trace(reading, page)
