"""`memagent eval`: run readers on benchmarks and report the results."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from memagent_integrations import __version__, files
from memagent_integrations.backends.gate import Gate
from memagent_integrations.checks import drop_none
from memagent_integrations.cli import options, progress
from memagent_integrations.cli.streams import show
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation import baselines, harness, plots, published, report, tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.leaderboard import Leaderboard
from memagent_integrations.evaluation.prices import Prices
from memagent_integrations.evaluation.results import Result, Results, merged
from memagent_integrations.evaluation.ruler import LengthOf, of_prompt, with_example
from memagent_integrations.evaluation.samples import Task
from memagent_integrations.prompts import PromptSet
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
_LengthOf = Annotated[
    LengthOf, typer.Option("--length-of", help="What a length in tokens counts: RULER counts the whole prompt.")
]
_Example = Annotated[bool, typer.Option("--example", help="Show RULER's example behind questions of vt and cwe.")]
_Readers = Annotated[
    list[str] | None,
    typer.Option("--reader", "-r", metavar="NAME", help="A reader to compare [memagent].", show_default=False),
]
_ResultFile = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="OUT.jsonl", help="A line a sample; none is made twice.", show_default=False
    ),
]
_Samples = Annotated[int, typer.Option(metavar="N", help="Samples a task and length.")]
_Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the samples.")]
_Concurrency = Annotated[
    int | None,
    typer.Option(metavar="N", help="Samples at a time [1, or those of the model's batches].", show_default=False),
]
_Window = Annotated[
    int | None, typer.Option(metavar="N", help="The context window that every reader keeps to.", show_default=False)
]
_ResultFiles = Annotated[
    list[Path], typer.Argument(metavar="RESULTS.jsonl...", help="What `memagent eval run` wrote.", show_default=False)
]
_Folder = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Write tables and pictures here.", show_default=False),
]
_Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="PAGE.html",
        help="Write a page of it, with every sample and its memories.",
        show_default=False,
    ),
]
_Against = Annotated[
    str | None,
    typer.Option("--against", metavar="READER", help="Compare every other reader with this one.", show_default=False),
]
_CachedPrice = Annotated[
    float | None,
    typer.Option(
        "--cached-price",
        metavar="X",
        help="Price of a million prompt tokens from a cache [that of any other].",
        show_default=False,
    ),
]


@eval_app.command("run", short_help="Ask readers the questions of benchmarks.")
def run(
    task: _Tasks,
    output: _ResultFile,
    length: _Lengths = None,
    length_of: _LengthOf = "document",
    example: _Example = False,
    reader: _Readers = None,
    samples: _Samples = 16,
    seed: _Seed = 0,
    data: options.DataDir = None,
    model: options.Model = "smollm2",
    base_model: options.BaseModel = None,
    concurrency: _Concurrency = None,
    chunk_tokens: options.ChunkTokens = None,
    memory_tokens: options.MemoryTokens = None,
    output_tokens: options.OutputTokens = None,
    window: _Window = None,
    base_url: options.BaseUrl = None,
    tokenizer: options.Tokenizer = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    prompts: options.Prompts = None,
    quiet: options.Quiet = False,
) -> None:
    """Ask every reader the same questions of the same documents.

    Each answer is written with its score, its calls and its whole reading.
    A run that was interrupted continues with the same command.
    """
    source, names = Data(data), list(dict.fromkeys(reader or ["memagent"]))
    given = PromptSet.from_reference(prompts) if prompts else None
    chosen = [_task(name, source, length) for name in dict.fromkeys(task)]
    if example:
        chosen = list(map(with_example, chosen))
    if length_of == "prompt":
        chosen = list(map(of_prompt, chosen))
    jobs = harness.jobs(chosen, names, samples)
    with Reader(
        model,
        window=window,
        chunk_tokens=chunk_tokens,
        memory_tokens=memory_tokens,
        output_tokens=output_tokens,
        prompts=given,
        backend_options=drop_none(
            model=options.base_of(model, base_model),
            base_url=base_url,
            tokenizer=tokenizer,
            temperature=temperature,
            top_p=top_p,
        ),
    ) as memagent:
        backend, budgets, templates = memagent.backend, memagent.budgets, memagent.prompts
        settings = {
            "model": backend.name,
            "backend": backend.identity,
            "budgets": vars(budgets),
            "window": window,
            "seed": seed,
            **({"example": True} if example else {}),
            **({"length_of": length_of} if length_of != "document" else {}),
            "prompts": published.prompts_named(templates) if given else templates.name,
        }
        address = str(backend.identity.get("base_url"))  # without the secrets that the given address may hold
        command = [argument.replace(base_url, address) if base_url else argument for argument in sys.argv[1:]]
        notes = {"command": command, "memagent-integrations": __version__, "python": platform.python_version()}
        results = Results(output, settings, notes)
        concurrency = concurrency or max(backend.batch_size, 1)
        gate = Gate(sum(job.key not in results for job in jobs), concurrency) if backend.batch_size > 1 else None
        backend = gate.gathered(backend) if gate else backend
        contestants = {name: baselines.make(name, backend, budgets, window, templates) for name in names}
        with _progress(jobs, results, quiet=quiet) as on_result:
            harness.evaluate(
                jobs,
                contestants,
                results,
                seed=seed,
                count=memagent.count,
                concurrency=concurrency,
                gate=gate,
                on_result=on_result,
            )
    show(_tables(report.rows(results, results.settings), report.totals(results)))


def _task(name: str, data: Data, common: Sequence[int] | None) -> Task:
    """Load a task by its name. Its lengths are those after the @ in the name, else the `common` ones, else its own."""
    if name.startswith(tasks.FILE):  # a file's name may have an @
        plain, at, lengths = name, "", ""
    else:
        plain, at, lengths = name.partition("@")
    task = tasks.load(plain, data)
    if not at:
        return replace(task, lengths=tuple(common)) if common else task
    if task.unit is None:
        raise UsageError(f"the documents of {plain} are as long as they are, so {name!r} is no task")
    try:
        return replace(task, lengths=tuple(map(int, lengths.split(","))))
    except ValueError:
        raise UsageError(f"lengths are whole numbers, as in {plain}@4096,32768, not {lengths[:80]!r}") from None


@eval_app.command("report", short_help="Tables and pictures of results.")
def report_results(
    result_files: _ResultFiles,
    output: _Folder = None,
    html: _Html = None,
    against: _Against = None,
    prompt_price: options.PromptPrice = None,
    completion_price: options.CompletionPrice = None,
    cached_price: _CachedPrice = None,
) -> None:
    """Write a table of results with 95 % intervals, beside published figures of the same metric and setup.

    Published figures of another setup follow under a heading that says what differs.

    A second table tells what a right answer took, over all tasks and for each: tokens, seconds and, with prices, money.

    With --output it is also written as CSV, with pictures. With --html it is also written as a page that needs no
    network: the tables, what facts survived, and behind each score its samples and their memories.
    """
    if html and any(html.exists() and file.exists() and html.samefile(file) for file in result_files):
        raise UsageError(f"the page would overwrite the results: {html}")
    prices = _prices(prompt_price, completion_price, cached_price)
    board = Leaderboard() if html else None
    sources = [Results(file, on_result=board.add if board else None) for file in result_files]
    results = merged(sources)
    rows = report.rows(results, sources[0].settings, prices=prices)
    totals = report.totals(results, prices=prices)
    text = _tables(rows, totals)
    compared = report.compared(results, against) if against else []
    if against:
        text += f"\n\n## {against} beside the others\n\n{report.comparisons(compared)}"
    show(text)
    if output:
        _write(output, results, rows, text)
    if html and board:
        files.write(html, board.page(results, rows, sources[0].settings, compared, totals))


def _tables(rows: Sequence[report.Row], totals: Sequence[report.Row]) -> str:
    return f"{report.markdown(rows)}\n\n{report.per_answer([*totals, *rows])}"


def _prices(prompt: float | None, completion: float | None, cached: float | None) -> Prices | None:
    """Return the prices; None without any."""
    if prompt is None and completion is None and cached is None:
        return None
    if prompt is None or completion is None:
        raise UsageError("a cost needs both --prompt-price and --completion-price")
    return Prices(prompt=prompt, completion=completion, cached=cached)


@contextmanager
def _progress(jobs: Sequence[harness.Job], results: Results, *, quiet: bool) -> Iterator[Callable[[Result], None]]:
    """Yield a function that shows, after each result, how far the run is."""
    failed = 0
    with progress.counted("evaluating", len(jobs), sum(job.key in results for job in jobs), quiet=quiet) as notify:

        def on_result(result: Result) -> None:
            nonlocal failed
            failed += result.error is not None and not result.too_long
            problem = "too long" if result.too_long else "failed"
            verdict = f"{result.score:.2f}" if result.error is None else f"{problem}: {result.error}"
            notify(
                f"{result.task} {result.length:,} {result.reader}" + (f", {failed} failed" if failed else ""),
                f"{result.task} {result.length} {result.reader} {result.number}: {verdict}",
            )

        yield on_result


def _write(folder: Path, results: Sequence[Result], rows: Sequence[report.Row], text: str) -> None:
    """Write a report's tables, and the pictures that the results have data for."""
    with files.accessing("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "table.md", text + "\n")
    files.write(folder / "table.csv", report.as_csv(rows))
    pictures: dict[str, Callable[[Path], None]] = {
        "accuracy.png": partial(plots.accuracy, rows),
        "cost.png": partial(plots.cost, rows),
        "per_answer.png": partial(plots.per_answer, rows),
        "depths.png": partial(plots.depths, results),
        "survival.png": partial(plots.survival, results),
    }
    for name, draw in pictures.items():
        with suppress(plots.NothingToDraw):  # not every run has tokens, needles and readings
            draw(folder / name)
