"""The part of the command line that trains: `memagent train`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memagent_integrations.errors import MemAgentError, MissingExtra, UsageError
from memagent_integrations.evaluation.data import Data
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.settings import given
from memagent_integrations.streams import printable
from memagent_integrations.training import data as sets
from memagent_integrations.training.mixture import Drawn, Mixture

train_app = typer.Typer(help="Train a model to keep what matters: data, sft, run, plot.", rich_markup_mode=None)

_Mixture = Annotated[Path, typer.Argument(metavar="MIXTURE.toml", help="Tasks, their lengths and weights.", show_default=False)]
_Model = Annotated[str, typer.Option(help="The model, as for `memagent read`.")]
_DataDir = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Folder of data sets; else they are downloaded.", show_default=False)]
_Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")]
_Out = Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="A row a question.", show_default=False)]
_Rows = Annotated[int, typer.Option(metavar="N", help="Rows that the set is to have.", show_default=False)]
_Without = Annotated[int, typer.Option(metavar="N", help="Leave out what the model answers unread, in one of N tries.")]
_Between = Annotated[
    tuple[float, float] | None,
    typer.Option(metavar="LOW HIGH", help="Keep what the model reads with a mean score between the two.", show_default=False),
]
_Tries = Annotated[int, typer.Option(metavar="N", help="Readings of which --keep-between takes the mean.")]
_Chunk = Annotated[int | None, typer.Option(metavar="N", help="Most tokens of the document in one prompt [5000].", show_default=False)]
_Memory = Annotated[int | None, typer.Option(metavar="N", help="Most tokens of the memory [1024].", show_default=False)]
_Written = Annotated[int | None, typer.Option("--output-tokens", metavar="N", help="Most tokens that a call may write.", show_default=False)]
_Window = Annotated[int | None, typer.Option(metavar="N", help="The model's context window, in tokens.", show_default=False)]
_BaseUrl = Annotated[str | None, typer.Option(metavar="URL", help="Address of an OpenAI-compatible endpoint.", show_default=False)]
_Tokenizer = Annotated[str | None, typer.Option(metavar="T", help="hf:NAME, tiktoken:ENCODING or approximate.", show_default=False)]
_Temperature = Annotated[float, typer.Option(metavar="X", help="Sampling temperature: the tries have to differ.")]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
_Recipe = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The model, its data, and how it learns.", show_default=False)]
_Policy = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The policy, a new folder.", show_default=False)]
_Folder = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Checkpoints, metrics, the policy.", show_default=False)]
_Adapter = Annotated[Path | None, typer.Option(metavar="DIR", help="A LoRA adapter to go on from, that of a warm start.", show_default=False)]
_Trained = Annotated[Path, typer.Argument(metavar="DIR", help="Where `memagent train run` writes.", show_default=False)]
_Picture = Annotated[Path | None, typer.Option("--output", "-o", metavar="OUT.png", help="The picture [DIR/curves.png].", show_default=False)]


@train_app.callback()
def train() -> None:
    """Train a model to keep what matters."""


@train_app.command("data", short_help="Make a training set.")
def make_data(
    mixture: _Mixture,
    output: _Out,
    rows: _Rows,
    seed: _Seed = 0,
    data: _DataDir = None,
    model: _Model = "smollm2",
    without_context: _Without = 2,
    keep_between: _Between = None,
    tries: _Tries = 4,
    chunk_tokens: _Chunk = None,
    memory_tokens: _Memory = None,
    output_tokens: _Written = None,
    window: _Window = None,
    base_url: _BaseUrl = None,
    tokenizer: _Tokenizer = None,
    temperature: _Temperature = 1.0,
    quiet: _Quiet = False,
) -> None:
    """Write questions of a mixture with their documents to a file, which is then a task of its own ("jsonl:OUT.jsonl").

    A run that was interrupted goes on with the same command; with more rows the file grows.
    """
    drawn_from, source = Mixture.load(mixture), Data(data)
    drawn_from.tasks(source)  # what is wrong with them is told before a model is loaded
    filters = sets.Filters(without_context=without_context, between=keep_between, tries=tries)
    budgets: dict[str, Any] = {"chunk_tokens": chunk_tokens, "memory_tokens": memory_tokens, "output_tokens": output_tokens}
    options = given(base_url=base_url, tokenizer=tokenizer, temperature=temperature)
    prompts = None if model.startswith("policy:") else PromptSet.default(answer_format="boxed")
    with Reader(model, prompts=prompts, window=window, backend_options=options, **budgets) as reader:
        into = sets.TrainingSet(output, sets.made_with(drawn_from, seed, reader, filters))
        with _progress(rows, into.state, quiet=quiet) as told:
            state = sets.build(into, drawn_from, rows=rows, seed=seed, data=source, reader=reader, filters=filters, told=told)
    typer.echo(f"{output}: {sets.summary(state)}")


@train_app.command("sft", short_help="Warm a policy up on constructed readings.")
def warm_up(recipe: _Recipe, output: _Policy, data: _DataDir = None, quiet: _Quiet = False) -> None:
    """Show a model constructed readings of the recipe's mixture, and write it as a policy to go on from (`adapter` in the recipe)."""
    told = replace(_learning("recipe").Recipe.load(recipe), adapter=None)
    if output.exists():
        raise UsageError(f"{str(output)!r} is there already; name another folder")
    with _bar("warm start", None, quiet=quiet) as advance, told.reader() as reader:
        for loss in told.shown(reader, Data(data)):
            advance(f"loss {loss:.4f}")
        told.save(reader, output)
    typer.echo(f"{output}: a policy")


@train_app.command("run", short_help="Train a policy by the reward of its answers.")
def learn(recipe: _Recipe, output: _Folder, adapter: _Adapter = None, data: _DataDir = None, quiet: _Quiet = False) -> None:
    """Train by multi-conversation DAPO. A run that was interrupted goes on with the same command; the policy is in DIR/policy when it is through."""
    learning = _learning("recipe")
    told = learning.Recipe.load(recipe)
    told = replace(told, adapter=str(adapter)) if adapter else told
    trainer = told.trainer(output, Data(data))
    with (
        _bar("training", told.training.steps, begun=trainer.place.step, quiet=quiet or not trainer.accelerator.is_main_process) as advance,
        trainer.reader,
    ):
        for line in trainer.train():
            advance(_line(line))
        if trainer.accelerator.is_main_process:
            learning.finished(trainer, told)
            typer.echo(f"{output / 'policy'}: a policy; read with it: --model policy:{output / 'policy'}")


@train_app.command("plot", short_help="Draw the curves of a training.")
def draw(folder: _Trained, output: _Picture = None) -> None:
    """A picture of what was rewarded and what was learned."""
    lines = _learning("metrics").read(folder / "metrics.jsonl")
    _learning("plots").curves(lines, output or folder / "curves.png")
    typer.echo(str(output or folder / "curves.png"))


def _learning(module: str) -> Any:
    """A part of the package that needs torch: the other commands do without.

    Raises:
        MissingExtra: a package of the extra "train" is not installed.
    """
    try:
        return importlib.import_module(f"memagent_integrations.training.{module}")
    except MemAgentError:
        raise
    except ImportError as error:
        raise MissingExtra.extra(error.name or str(error), "train") from error


def _line(told: dict[str, float]) -> str:
    """What a person wants to know of a batch."""
    names = ("reward", "validation", "collapsed", "kl", "entropy", "gradient_norm", "rollout_seconds", "learn_seconds")
    return ", ".join(f"{name.replace('_', ' ')} {told[name]:.3g}" for name in names if name in told)


@contextmanager
def _bar(what: str, total: int | None, *, quiet: bool, begun: int = 0) -> Iterator[Callable[[str], None]]:
    """How far a training is, on standard error: a bar on a terminal, a line a step elsewhere."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        shown, step = bar.add_task(what, total=total, completed=begun), begun

        def advance(line: str) -> None:
            nonlocal step
            step += 1
            bar.update(shown, advance=1, description=f"{what}, {line}")
            if not quiet and not console.is_terminal:
                console.print(f"{what} {step}: {line}", markup=False, soft_wrap=True)

        yield advance


@contextmanager
def _progress(rows: int, begun: sets.State, *, quiet: bool) -> Iterator[sets.Told]:
    """How far a set is, on standard error: a bar on a terminal, a line a question elsewhere."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        shown = bar.add_task("training set", total=rows, completed=begun.rows)

        def told(drawn: Drawn, reason: str | None, state: sets.State) -> None:
            bar.update(shown, completed=state.rows, description=f"{drawn.task.name}, {sum(state.left_out.values())} left out")
            if not quiet and not console.is_terminal:
                line = f"{drawn.sample.id}: {reason or f'row {state.rows}'}"
                console.print(printable(line), markup=False, soft_wrap=True)

        yield told
