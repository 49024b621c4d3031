"""The part of the command line that trains: `memagent train`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from memagent_integrations import training
from memagent_integrations.checks import drop_none
from memagent_integrations.cli import options, progress
from memagent_integrations.evaluation.data import Data
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.training import data as sets
from memagent_integrations.training.mixture import Drawn, Mixture

train_app = typer.Typer(help="Train a model to keep what matters: data, sft, run, plot.", rich_markup_mode=None)

_Mixture = Annotated[
    Path, typer.Argument(metavar="MIXTURE.toml", help="Tasks, their lengths and weights.", show_default=False)
]
_Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")]
_Out = Annotated[
    Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="A row a question.", show_default=False)
]
_Rows = Annotated[int, typer.Option(metavar="N", help="Rows that the set is to have.", show_default=False)]
_Without = Annotated[int, typer.Option(metavar="N", help="Leave out what the model answers unread, in one of N tries.")]
_Between = Annotated[
    tuple[float, float] | None,
    typer.Option(
        metavar="LOW HIGH", help="Keep what the model reads with a mean score between the two.", show_default=False
    ),
]
_Tries = Annotated[int, typer.Option(metavar="N", help="Readings of which --keep-between takes the mean.")]
_Temperature = Annotated[float, typer.Option(metavar="X", help="Sampling temperature: the tries have to differ.")]
_Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE.toml", help="The model, its data, and how it learns.", show_default=False)
]
_Policy = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="The policy, a new folder.", show_default=False)
]
_Folder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="Checkpoints, metrics, the policy.", show_default=False)
]
_Adapter = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A LoRA adapter to go on from, that of a warm start.", show_default=False),
]
_Trained = Annotated[Path, typer.Argument(metavar="DIR", help="Where `memagent train run` writes.", show_default=False)]
_Picture = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="OUT.png", help="The picture [DIR/curves.png].", show_default=False),
]


@train_app.callback()
def train() -> None:
    """Train a model to keep what matters."""


@train_app.command("data", short_help="Make a training set.")
def make_data(
    mixture: _Mixture,
    output: _Out,
    rows: _Rows,
    seed: _Seed = 0,
    data: options.DataDir = None,
    model: options.Model = "smollm2",
    without_context: _Without = 2,
    keep_between: _Between = None,
    tries: _Tries = 4,
    chunk_tokens: options.Chunk = None,
    memory_tokens: options.Memory = None,
    output_tokens: options.Written = None,
    window: options.Window = None,
    base_url: options.BaseUrl = None,
    tokenizer: options.Tokenizer = None,
    temperature: _Temperature = 1.0,
    quiet: options.Quiet = False,
) -> None:
    """Write questions of a mixture with their documents to a file, which is then a task of its own ("jsonl:OUT.jsonl").

    A run that was interrupted goes on with the same command; with more rows the file grows.
    """
    drawn_from, source = Mixture.load(mixture), Data(data)
    drawn_from.tasks(source)  # what is wrong with them is told before a model is loaded
    filters = sets.Filters(without_context=without_context, between=keep_between, tries=tries)
    budgets: dict[str, Any] = {
        "chunk_tokens": chunk_tokens,
        "memory_tokens": memory_tokens,
        "output_tokens": output_tokens,
    }
    backend_options = drop_none(base_url=base_url, tokenizer=tokenizer, temperature=temperature)
    prompts = None if model.startswith("policy:") else PromptSet.default(answer_format="boxed")
    with Reader(model, prompts=prompts, window=window, backend_options=backend_options, **budgets) as reader:
        into = sets.TrainingSet(output, sets.made_with(drawn_from, seed, reader, filters))
        with _rows(rows, into.state, quiet=quiet) as told:
            state = sets.build(
                into, drawn_from, rows=rows, seed=seed, data=source, reader=reader, filters=filters, told=told
            )
    typer.echo(f"{output}: {sets.summary(state)}")


@train_app.command("sft", short_help="Warm a policy up on constructed readings.")
def warm_up(recipe: _Recipe, output: _Policy, data: options.DataDir = None, quiet: options.Quiet = False) -> None:
    """Show a model constructed readings of the recipe's mixture, and write it as a policy to go on from (`adapter` in the recipe)."""
    told = replace(
        training.part("recipe").Recipe.load(recipe), adapter=None, server=None
    )  # the adapter is made here, and nothing is sampled
    training.part("export").check(output)
    with _steps("warm start", None, quiet=quiet) as advance, told.reader() as reader:
        for loss in told.warm_up(reader, Data(data)):
            advance(f"loss {loss:.4f}")
        told.save(reader, output)
    typer.echo(f"{output}: a policy")


@train_app.command("run", short_help="Train a policy by the reward of its answers.")
def learn(
    recipe: _Recipe,
    output: _Folder,
    adapter: _Adapter = None,
    data: options.DataDir = None,
    quiet: options.Quiet = False,
) -> None:
    """Train by multi-conversation DAPO. A run that was interrupted goes on with the same command; the policy is in DIR/policy when it is through."""
    sys.path.insert(0, "")  # a reward of one's own stands where the command runs
    learning = training.part("recipe")
    told = learning.Recipe.load(recipe)
    told = replace(told, adapter=str(adapter)) if adapter else told
    trainer = told.trainer(output, Data(data))
    with (
        _steps(
            "training",
            told.training.steps,
            begun=trainer.place.step,
            quiet=quiet or not trainer.accelerator.is_main_process,
        ) as advance,
        trainer.reader,
    ):
        for line in trainer.train():
            advance(_line(line))
        if trainer.accelerator.is_main_process:
            learning.finished(trainer, told)
            typer.echo(f"{output / 'policy'}: a policy; read with it: --model policy:{output / 'policy'}")
        trainer.accelerator.end_training()


@train_app.command("plot", short_help="Draw the curves of a training.")
def draw(folder: _Trained, output: _Picture = None) -> None:
    """A picture of what was rewarded and what was learned."""
    lines = training.part("metrics").read(folder / "metrics.jsonl")
    training.part("plots").curves(lines, output or folder / "curves.png")
    typer.echo(str(output or folder / "curves.png"))


def _line(told: dict[str, float]) -> str:
    """What a person wants to know of a batch."""
    names = (
        "reward",
        "validation",
        "collapsed",
        "failed",
        "kl",
        "entropy",
        "gradient_norm",
        "rollout_seconds",
        "learn_seconds",
    )
    shown = [name for name in names if name in told and (told[name] or name != "failed")]
    return ", ".join(f"{name.replace('_', ' ')} {told[name]:.3g}" for name in shown)


@contextmanager
def _steps(what: str, total: int | None, *, quiet: bool, begun: int = 0) -> Iterator[Callable[[str], None]]:
    """How far a training is."""
    step = begun
    with progress.counted(what, total, begun, quiet=quiet) as shown:

        def advance(line: str) -> None:
            nonlocal step
            step += 1
            shown(f"{what}, {line}", f"{what} {step}: {line}")

        yield advance


@contextmanager
def _rows(rows: int, begun: sets.State, *, quiet: bool) -> Iterator[sets.Told]:
    """How far a set is."""
    with progress.counted("training set", rows, begun.rows, quiet=quiet) as shown:

        def told(drawn: Drawn, reason: str | None, state: sets.State) -> None:
            left_out = f"{drawn.task.name}, {sum(state.left_out.values())} left out"
            shown(left_out, f"{drawn.sample.id}: {reason or f'row {state.rows}'}", state.rows)

        yield told
