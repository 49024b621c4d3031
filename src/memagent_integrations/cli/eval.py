"""The part of the command line that measures: `memagent eval`."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from memagent_integrations import __version__
from memagent_integrations.checks import drop_none
from memagent_integrations.cli import options, progress
from memagent_integrations.cli.streams import printable
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation import baselines, harness, plots, report, tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.results import Result, Results, merged
from memagent_integrations.evaluation.samples import Task
from memagent_integrations.files import reason
from memagent_integrations.reader import Reader

eval_app = typer.Typer(help="Measure readers on the published benchmarks: run, report.", rich_markup_mode=None)

_Tasks = Annotated[
    list[str],
    typer.Option(
        "--task",
        "-t",
        metavar="NAME[@N,N]",
        help="A benchmark, with its lengths; more than once for several.",
        show_default=False,
    ),
]
_Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--length", "-l", metavar="N", help="Length of tasks without one [those published].", show_default=False
    ),
]
_Readers = Annotated[
    list[str] | None,
    typer.Option("--reader", "-r", metavar="NAME", help="A reader to compare [memagent].", show_default=False),
]
_Out = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="OUT.jsonl", help="A line a sample; none is made twice.", show_default=False
    ),
]
_Samples = Annotated[int, typer.Option(metavar="N", help="Samples a task and length.")]
_Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the samples.")]
_Concurrency = Annotated[int, typer.Option(metavar="N", help="Samples at a time.")]
_Window = Annotated[
    int | None, typer.Option(metavar="N", help="The context window that every reader keeps to.", show_default=False)
]
_Files = Annotated[
    list[Path], typer.Argument(metavar="RESULTS.jsonl...", help="What `memagent eval run` wrote.", show_default=False)
]
_Folder = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Write tables and pictures here.", show_default=False),
]
_Against = Annotated[
    str | None,
    typer.Option("--against", metavar="READER", help="Compare every other reader with this one.", show_default=False),
]


@eval_app.command("run", short_help="Ask readers the questions of benchmarks.")
def run(
    task: _Tasks,
    output: _Out,
    length: _Lengths = None,
    reader: _Readers = None,
    samples: _Samples = 16,
    seed: _Seed = 0,
    data: options.DataDir = None,
    model: options.Model = "smollm2",
    concurrency: _Concurrency = 1,
    chunk_tokens: options.Chunk = None,
    memory_tokens: options.Memory = None,
    output_tokens: options.Written = None,
    window: _Window = None,
    base_url: options.BaseUrl = None,
    tokenizer: options.Tokenizer = None,
    temperature: options.Temperature = None,
    quiet: options.Quiet = False,
) -> None:
    """Ask every reader the same questions of the same documents, and write each answer with its score, its calls and its whole reading.

    A run that was interrupted goes on with the same command.
    """
    source, readers = Data(data), list(dict.fromkeys(reader or ["memagent"]))
    todo = harness.jobs([_task(name, source, length) for name in dict.fromkeys(task)], readers, samples)
    budgets: dict[str, Any] = {
        "chunk_tokens": chunk_tokens,
        "memory_tokens": memory_tokens,
        "output_tokens": output_tokens,
    }
    options = drop_none(base_url=base_url, tokenizer=tokenizer, temperature=temperature)
    with Reader(model, window=window, backend_options=options, **budgets) as own:
        backend = own.backend
        address = str(backend.identity.get("base_url"))  # without what is secret in it
        made = {
            "model": backend.name,
            "backend": backend.identity,
            "budgets": vars(own.budgets),
            "window": window,
            "seed": seed,
        }
        made["prompts"] = own.prompts.name
        command = [argument.replace(base_url, address) if base_url else argument for argument in sys.argv[1:]]
        noted = {"command": command, "memagent-integrations": __version__, "python": platform.python_version()}
        results = Results(output, made, noted)
        contestants = {name: baselines.make(name, backend, own.budgets, window, own.prompts) for name in readers}
        with _progress(todo, results, quiet=quiet) as told:
            harness.evaluate(todo, contestants, results, seed=seed, count=own.count, concurrency=concurrency, told=told)
    typer.echo(printable(report.markdown(report.rows(results))))


def _task(name: str, data: Data, lengths: Sequence[int] | None) -> Task:
    """A task by its name, with the lengths that stand behind an @ in it, else those of all, else its own."""
    plain, at, own = (
        (name, "", "") if name.startswith(tasks.FILE) else name.partition("@")
    )  # a file's name may have an @
    task = tasks.load(plain, data)
    if not at:
        return replace(task, lengths=tuple(lengths)) if lengths else task
    if task.unit is None:
        raise UsageError(f"the documents of {plain} are as long as they are, so {name!r} is no task")
    try:
        return replace(task, lengths=tuple(map(int, own.split(","))))
    except ValueError:
        raise UsageError(f"lengths are whole numbers, as in {plain}@4096,32768, not {own[:80]!r}") from None


@eval_app.command("report", short_help="Tables and pictures of results.")
def show(files: _Files, output: _Folder = None, against: _Against = None) -> None:
    """Tell what results say: a table with 95 % intervals, beside published figures; with --output also as CSV, and pictures."""
    results = merged([Results(file) for file in files])
    table = report.rows(results)
    told = report.markdown(table)
    if against:
        told += "\n\n" + report.comparisons(report.compared(results, against))
    typer.echo(printable(told))
    if output:
        _write(output, results, table, told)


@contextmanager
def _progress(todo: Sequence[harness.Job], results: Results, *, quiet: bool) -> Iterator[Callable[[Result], None]]:
    """How far a run is, on standard error: a bar on a terminal, a line a sample elsewhere."""
    failed = 0
    with progress.counted("evaluating", len(todo), sum(job.key in results for job in todo), quiet=quiet) as shown:

        def told(result: Result) -> None:
            nonlocal failed
            failed += result.error is not None
            verdict = f"{result.score:.2f}" if result.error is None else f"failed: {' '.join(result.error.split())}"
            shown(
                f"{result.task} {result.length:,} {result.reader}" + (f", {failed} failed" if failed else ""),
                f"{result.task} {result.length} {result.reader} {result.number}: {verdict}",
            )

        yield told


def _write(folder: Path, results: Sequence[Result], table: Sequence[report.Row], told: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.md").write_text(told + "\n", encoding="utf-8")
        (folder / "table.csv").write_text(report.as_csv(table), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {str(folder)!r}: {reason(error)}") from error
    pictures: list[tuple[Callable[..., None], Any, str]] = [
        (plots.accuracy, table, "accuracy.png"),
        (plots.cost, table, "cost.png"),
        (plots.depths, results, "depths.png"),
        (plots.survival, results, "survival.png"),
    ]
    for draw, shown, name in pictures:
        with suppress(plots.NothingToDraw):  # not every run has tokens, needles and readings
            draw(shown, folder / name)
