"""`memagent read` and `memagent runs resume`: read files for a question and write the answer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from memagent_integrations import ownership
from memagent_integrations.calls import Limits
from memagent_integrations.checks import drop_none
from memagent_integrations.cli import inputs, models, options
from memagent_integrations.cli import questions as asking
from memagent_integrations.cli.cited import cited
from memagent_integrations.cli.plan import show_plans
from memagent_integrations.cli.progress import ReadingProgress
from memagent_integrations.cli.runs import is_part_of, open_journal
from memagent_integrations.cli.streams import STDIN, console, show, tell, text_given, write
from memagent_integrations.cli.watch import WatchedReading
from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.lineage import memory_after
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Reading, Step

_Models = tuple[str | None, str | None]
"""The names of the model, and of the one that answers, if it is another."""

_Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE...", help="Text files, read in this order; - is standard input.", show_default=False),
]
_OptionalFiles = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE...]", help="Text files; - is standard input.", show_default=False)
]
_Questions = Annotated[
    list[str],
    typer.Option("--question", "-q", help="What to answer; several are answered in one pass.", show_default=False),
]
_Model = Annotated[
    str, typer.Option(help="smollm2, openai:NAME, llamacpp:FILE.gguf, transformers:NAME, vllm:NAME or policy:DIR.")
]
_GivenModel = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="The model of the run, given again.", show_default=False)
]
_GivenAnswerModel = Annotated[
    str | None,
    typer.Option("--answer-model", metavar="NAME", help="The model that answers, given again.", show_default=False),
]
_AnswerTokenizer = Annotated[
    str | None, typer.Option(metavar="T", help="Tokenizer of the model that answers.", show_default=False)
]
_Stream = Annotated[bool, typer.Option("--stream", help="Write the answer as the model gives it.")]
_Citations = Annotated[bool, typer.Option("--citations", help="Write the places that the answer rests on behind it.")]
_Json = Annotated[bool, typer.Option("--json", help="Write the whole reading as JSON in place of the answer.")]
_Trace = Annotated[
    Path | None,
    typer.Option(metavar="OUT.json", help="Save the reading; what there is of it if it fails.", show_default=False),
]
_Plan = Annotated[bool, typer.Option("--plan", help="Only tell what the reading would take.")]
_Watch = Annotated[bool, typer.Option("--watch", help="Show the memory as it changes.")]
_Journal = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Record every step in this file, and go on from what it holds.", show_default=False
    ),
]
_Run = Annotated[
    str | None, typer.Option(metavar="NAME", help="The reading's name in the journal.", show_default=False)
]
_Memory = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Carry on the memory of this name in the journal.", show_default=False),
]
_MemoryText = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Start from this memory; - reads standard input.", show_default=False),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a reading starts from: a memory, or one that the journal has under a name; and the name of its run."""

    run: str | None = None
    memory: str | None = None
    text: str | None = None

    def check(self, files: Sequence[str], journal_file: Path | None) -> None:
        """Raise a UsageError for what is wrong with it."""
        if self.run is not None and not journal_file:
            raise UsageError("--run names a reading in a journal; give --journal too")
        if self.memory is not None and not journal_file:
            raise UsageError("--memory names a memory in a journal; give --journal too")
        if self.memory is not None and (self.run is not None or self.text is not None):
            raise UsageError("--memory has runs and a text of its own: it excludes --run and --memory-text")
        if self.text == STDIN and STDIN in files:
            raise UsageError("standard input can be read once only")

    def arguments(self, reader: Reader) -> dict[str, Any]:
        """Return the arguments of `Reader.read`."""
        if self.memory is not None and reader.journal:
            return {"memory": reader.journal.memory(self.memory)}
        text = self.text and text_given(self.text)
        return {"memory": (text or "").strip(), "run": self.run}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What a command shows of a reading, and how."""

    stream: bool
    citations: bool
    as_json: bool
    trace: Path | None
    watch: bool
    quiet: bool


def read(
    files: _Files,
    questions: _Questions,
    model: _Model = "smollm2",
    answer_model: options.AnswerModel = None,
    base_model: options.BaseModel = None,
    chunk_tokens: options.ChunkTokens = None,
    memory_tokens: options.MemoryTokens = None,
    output_tokens: options.OutputTokens = None,
    question_tokens: options.QuestionTokens = None,
    overlap_tokens: options.OverlapTokens = None,
    window: options.Window = None,
    layout: options.LayoutOption = None,
    prompts: options.Prompts = None,
    base_url: options.BaseUrl = None,
    answer_base_url: options.AnswerBaseUrl = None,
    tokenizer: options.Tokenizer = None,
    temperature: options.Temperature = None,
    stream: _Stream = False,
    citations: _Citations = False,
    as_json: _Json = False,
    trace: _Trace = None,
    journal: _Journal = None,
    run: _Run = None,
    memory: _Memory = None,
    memory_text: _MemoryText = None,
    call_timeout: options.CallTimeout = None,
    run_timeout: options.RunTimeout = None,
    on_lost_section: options.LostSection = None,
    lookup: options.Lookup = 0,
    strategy: options.StrategyOption = None,
    segments: options.Segments = None,
    reread: options.Reread = 0,
    plan: _Plan = False,
    watch: _Watch = False,
    quiet: options.Quiet = False,
) -> None:
    """Read FILE... for a question, or several in one pass, and write the answers to standard output."""
    output = Output(stream=stream, citations=citations, as_json=as_json, trace=trace, watch=watch, quiet=quiet)
    _check(files, output, plan=plan, journal_file=journal)
    if answer_base_url is not None and answer_model is None:
        raise UsageError("--answer-base-url is the address of --answer-model; give that too")
    start = Start(run=run, memory=memory, text=memory_text)
    start.check(files, journal)
    if len(questions) > 1:
        asking.check(questions, stream=stream, watch=watch, trace=trace, run=run, memory=memory)
    make_reader = partial(
        Reader,
        model,
        answer_model=answer_model,
        answer_options=drop_none(base_url=answer_base_url, temperature=temperature if answer_model else None),
        prompts=PromptSet.from_reference(prompts) if prompts else None,
        layout=layout,
        chunk_tokens=chunk_tokens,
        memory_tokens=memory_tokens,
        output_tokens=output_tokens,
        question_tokens=question_tokens,
        overlap_tokens=overlap_tokens,
        limits=Limits(call_timeout=call_timeout, run_timeout=run_timeout),
        on_lost_section=on_lost_section or "error",
        lookup=lookup,
        strategy=strategy or "sequential",
        segments=segments,
        reread=reread,
        backend_options=drop_none(
            model=options.base_of(model, base_model),
            window=window,
            base_url=base_url,
            tokenizer=tokenizer,
            temperature=temperature,
        ),
    )
    if plan:
        models.fetch_needed((base_model or model, answer_model), quiet=quiet)
        with make_reader() as reader:
            show_plans(reader.plans(questions, inputs.document(files)), as_json=as_json)
    else:
        names = (base_model or model, answer_model)
        make_recorded = partial(make_reader, journal=journal)
        if len(questions) > 1:
            _answer_all(make_recorded, names, questions, files, start, output)
        else:
            _answer(make_recorded, names, questions[0], files, start, output)


def resume(
    journal_file: options.JournalFile,
    run: options.RunName,
    files: _OptionalFiles = None,
    model: _GivenModel = None,
    answer_model: _GivenAnswerModel = None,
    base_model: options.BaseModel = None,
    window: options.Window = None,
    base_url: options.BaseUrl = None,
    answer_base_url: options.AnswerBaseUrl = None,
    tokenizer: options.Tokenizer = None,
    answer_tokenizer: _AnswerTokenizer = None,
    stream: _Stream = False,
    citations: _Citations = False,
    as_json: _Json = False,
    trace: _Trace = None,
    call_timeout: options.CallTimeout = None,
    run_timeout: options.RunTimeout = None,
    on_lost_section: options.LostSection = None,
    watch: _Watch = False,
    quiet: options.Quiet = False,
) -> None:
    """Read FILE... on, or the files that the run began with if none are given.

    Question, models, prompts and budgets are those of the run. One that was not read by you on this machine does not
    choose files, servers and models that are loaded: give these again.
    """
    output = Output(stream=stream, citations=citations, as_json=as_json, trace=trace, watch=watch, quiet=quiet)
    with open_journal(journal_file) as journal:
        recorded = journal.run(run)
        files = files or (list(recorded.files) if recorded.own else [])
        if not files:
            raise UsageError(
                f"the run {run} read no files, the journal does not know which, or {ownership.unknown()}; "
                f"name what it is to read on: memagent runs resume {quote(run)} FILE..."
            )
        _check(files, output, plan=False, journal_file=journal_file)
        make_reader = partial(
            Reader.from_run,
            journal,
            run,
            model=model,
            limits=Limits(call_timeout=call_timeout, run_timeout=run_timeout),
            on_lost_section=on_lost_section or "error",
            backend_options=drop_none(
                model=options.base_of(model, base_model), window=window, base_url=base_url, tokenizer=tokenizer
            ),
            answer_model=answer_model,
            answer_options=drop_none(base_url=answer_base_url, tokenizer=answer_tokenizer),
        )
        own = journal.settings(run) if recorded.own else {}
        names = (base_model or model or own.get("model"), answer_model or own.get("answer_model"))
        _answer(make_reader, names, recorded.question, files, Start(run=run), output)


def _check(files: Sequence[str], output: Output, *, plan: bool, journal_file: Path | None) -> None:
    """Raise a UsageError for what is wrong with the call, before a model is loaded."""
    trace = output.trace
    if output.stream and output.as_json:
        raise UsageError("--stream and --json exclude one another")
    inputs.check(files, twice=plan)
    if trace and (trace.is_dir() or not os.access(trace.parent, os.W_OK)):
        problem = "it is a directory" if trace.is_dir() else "its folder does not exist or may not be written to"
        raise UsageError(f"cannot write {trace}: {problem}")
    if trace and journal_file and is_part_of(trace, journal_file):
        raise UsageError(f"the trace would overwrite the journal: {trace}")
    if trace and trace.exists() and any(os.path.samestat(trace.stat(), _stat(file)) for file in files):
        raise UsageError(f"the trace would overwrite a document: {trace} is among the files to read")


def _stat(file: str) -> os.stat_result:
    return os.fstat(0) if file == STDIN else Path(file).stat()


def _answer_all(
    make_reader: Callable[[], Reader],
    names: _Models,
    questions: Sequence[str],
    files: Sequence[str],
    start: Start,
    output: Output,
) -> None:
    """Load the models, read once for all questions, and write the answers."""
    models.fetch_needed(names, quiet=output.quiet)
    with _loading(names, quiet=output.quiet) as loading, make_reader() as reader:
        memory = start.arguments(reader)["memory"]
        loading.stop()
        with _going_on(reader, None):
            readings = asking.ask(reader, questions, files, memory=memory, quiet=output.quiet)
    asking.write_answers(readings, files, as_json=output.as_json, citations=output.citations)


def _answer(
    make_reader: Callable[[], Reader],
    names: _Models,
    question: str,
    files: Sequence[str],
    start: Start,
    output: Output,
) -> None:
    """Load the models, read, and write the answer."""
    models.fetch_needed(names, quiet=output.quiet)
    display = partial(WatchedReading, question=question) if output.watch else ReadingProgress
    with _loading(names, display, quiet=output.quiet) as progress, make_reader() as reader:
        with _going_on(reader, start.run):
            reading = _read(reader, question, files, start, progress, output)
        progress.done(reading)
    for warning in reading.warnings:
        tell(f"warning: {warning}")
    try:
        if output.trace:
            reading.save(output.trace)
    finally:
        if not output.stream:
            write(reading.to_json() if output.as_json else reading.answer or "")
        if output.citations and not output.as_json:  # JSON holds them anyway
            show("\n".join(["", *cited(reading, files)]))


def _loading(
    names: _Models, display: Callable[..., ReadingProgress] = ReadingProgress, *, quiet: bool
) -> ReadingProgress:
    """Return the display of a reading, which shows first that the models are loaded."""
    return display(console(), f"loading {' and '.join(filter(None, names))}", quiet=quiet)


@contextmanager
def _going_on(reader: Reader, run: str | None) -> Iterator[None]:
    """Have an interruption of the block say how to go on, if there is a journal; the run may not be in it yet."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if not reader.journal:
            raise
        how = "the same command"
        if run and any(each.name == run and each.own for each in reader.journal.runs()):
            how = f"memagent runs resume {quote(run)} --journal {quote(str(reader.journal.path))}"
        raise type(stop)(f"{str(stop) or 'interrupted'}; {how} goes on from here") from None


def _read(
    reader: Reader, question: str, files: Sequence[str], start: Start, progress: ReadingProgress, output: Output
) -> Reading:
    """Read the files. When that fails on the way, save the steps so far as the trace."""
    steps: list[Step] = []

    def on_step(step: Step) -> None:
        steps.append(step)
        progress.step(step)

    arguments = start.arguments(reader)
    planned = not progress.quiet and inputs.rereadable(files)
    progress.begin(reader.plan(question, inputs.document(files)) if planned else None)
    try:
        if output.stream:
            return _stream(reader.stream(question, inputs.document(files), **arguments), progress, on_step)
        return reader.read(question, inputs.document(files), progress=on_step, **arguments)
    except (MemAgentError, KeyboardInterrupt) as error:
        if output.trace and steps:
            unfinished = Reading(
                question=question,
                answer=None,
                memory=memory_after(steps),
                steps=tuple(steps),
                model=reader.backend.name,
                answer_model=reader.answer_backend.name if reader.answer_backend is not reader.backend else None,
                budgets=reader.budgets,
                error=error if isinstance(error, MemAgentError) else MemAgentError(str(error) or "interrupted"),
            )
            unfinished.save(output.trace)
        raise


def _stream(
    events: Iterator[Step | str | Reading], progress: ReadingProgress, on_step: Callable[[Step], None]
) -> Reading:
    """Write the answer piece by piece as it comes, and return the reading."""
    answering = False
    for event in events:
        if isinstance(event, Reading):
            write("")
            return event
        if isinstance(event, Step):
            on_step(event)
        else:
            if not answering:
                progress.stop()  # the answer has the terminal from here
                answering = True
            write(event, newline=False)
    raise AssertionError("a stream ends with a reading")
