"""The command line `memagent`: its commands, and how each of them ends.

The answer goes to standard output, everything else to standard error. Exit codes:

0 done, 1 a defect of this program, 2 the call or the input has to be changed, 3 the model or its server failed, 4 the
prompt does not fit the window, 5 the run was paused, 130 interrupted, 141 whatever read the output went away, 143
terminated.
"""

from __future__ import annotations

import io
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperGroup

from memagent_integrations import __version__
from memagent_integrations.cli.eval import eval_app
from memagent_integrations.cli.memories import memories_app
from memagent_integrations.cli.models import models_app
from memagent_integrations.cli.plan import plan
from memagent_integrations.cli.read import read, resume
from memagent_integrations.cli.runs import runs_app
from memagent_integrations.cli.streams import Terminated, abandon, one_line, safe_stderr, show, sigterm_raises, tell
from memagent_integrations.cli.train import train_app
from memagent_integrations.cli.view import make_page, serve_journal
from memagent_integrations.errors import BackendError, ContextOverflow, MemAgentError, RunPaused, UsageError

# click's UsageError, from wherever typer keeps its copy of click
_CommandLineError = cast(type[Exception], typer.BadParameter.__base__)
_ENDS = (typer.Exit, typer.Abort)
_EXIT_CODES: tuple[tuple[type[MemAgentError], int], ...] = ((ContextOverflow, 4), (BackendError, 3), (RunPaused, 5))

_Version = Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)]


class Commands(TyperGroup):
    """The group of all commands. It reports each error as one line on standard error and an exit code."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Take the options that stand before a command."""
        with _reported():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with sigterm_raises(), safe_stderr(), _told_warnings(), _reported():
            return super().invoke(ctx)


@contextmanager
def _told_warnings() -> Iterator[None]:
    """Have a warning be a line on standard error, without the line of code that it comes from."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *where: f"warning: {one_line(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextmanager
def _reported() -> Iterator[None]:
    """Turn an error into a line on standard error and an exit code."""
    try:
        yield
    except MemAgentError as error:
        _fail(str(error), next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 2))
    except Terminated as stop:
        _fail(str(stop), 143)
    except KeyboardInterrupt as stop:
        _fail(str(stop) or "interrupted", 130)
    except OSError as error:
        abandon(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(141) from None
        _fail(str(error), 2)
    except _CommandLineError as error:
        command = error.ctx.command_path if error.ctx else "memagent"  # type: ignore[attr-defined]
        _fail(f"{error.format_message()} ({command} --help)", 2)  # type: ignore[attr-defined]
    except _ENDS:
        raise
    except Exception:
        traceback.print_exc()
        raise typer.Exit(1) from None


def _fail(message: str, code: int) -> NoReturn:
    tell(f"memagent: {message}")
    raise typer.Exit(code)


app = typer.Typer(
    name="memagent", cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback(invoke_without_command=True)
def memagent(ctx: typer.Context, version: _Version = False) -> None:
    """Read documents of any length with a fixed context window.

    API keys are taken from the environment (OPENAI_API_KEY) alone.
    """
    if sys.stdout is None:  # checked here, because Python silently drops what is written to it
        raise UsageError("standard output is closed: the answer would be lost")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if version:
        show(f"memagent {__version__}")
    elif ctx.invoked_subcommand is None:
        show(ctx.get_help())


app.command("read", short_help="Read files and answer a question.")(read)
app.command("plan", short_help="Tell what a reading would take.")(plan)
app.command("serve", short_help="Show a journal in the browser.")(serve_journal)
app.command("trace", short_help="Make a page of a reading.")(make_page)
runs_app.command("resume", short_help="Go on with a reading that was interrupted.")(resume)
app.add_typer(models_app, name="models")
app.add_typer(runs_app, name="runs")
app.add_typer(memories_app, name="memories")
app.add_typer(eval_app, name="eval")
app.add_typer(train_app, name="train")
