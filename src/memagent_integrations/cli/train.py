"""`memagent train`: make a training set, train a policy on demonstrations and by reward, and draw its curves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memagent_integrations import policies, training
from memagent_integrations.checks import drop_none
from memagent_integrations.cli import options, progress
from memagent_integrations.cli.streams import show
from memagent_integrations.evaluation.data import Data
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.training import data as sets
from memagent_integrations.training.mixture import Drawn, Mixture

if TYPE_CHECKING:
    from memagent_integrations.training.base import Training
    from memagent_integrations.training.recipe import Recipe

train_app = typer.Typer(help="Train a model to keep what matters: data, sft, run, plot.", rich_markup_mode=None)

_SHOWN_METRICS = (
    "loss",
    "reward",
    "validation",
    "collapsed",
    "failed",
    "kl",
    "entropy",
    "gradient_norm",
    "rollout_seconds",
    "learn_seconds",
    "tokens_per_second",
)

_MixtureFile = Annotated[
    Path, typer.Argument(metavar="MIXTURE.toml", help="Tasks, their lengths and weights.", show_default=False)
]
_Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")]
_SetFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="A row a question.", show_default=False)
]
_Rows = Annotated[int, typer.Option(metavar="N", help="Rows that the set is to have.", show_default=False)]
_WithoutContext = Annotated[
    int, typer.Option(metavar="N", help="Leave out what the model answers unread, in one of N tries.")
]
_KeepBetween = Annotated[
    tuple[float, float] | None,
    typer.Option(
        metavar="LOW HIGH", help="Keep what the model reads with a mean score between the two.", show_default=False
    ),
]
_Tries = Annotated[int, typer.Option(metavar="N", help="Readings of which --keep-between takes the mean.")]
_Temperature = Annotated[float, typer.Option(metavar="X", help="Sampling temperature: the tries have to differ.")]
_RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE.toml", help="The model, its data, and how it learns.", show_default=False)
]
_RunFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="Checkpoints, metrics, the policy.", show_default=False)
]
_Adapter = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A LoRA adapter to start from, that of sft.", show_default=False),
]
_TrainedModel = Annotated[
    str | None, typer.Option(metavar="NAME", help="The model to train, given again.", show_default=False)
]
_Reward = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="The recipe's reward function, given again.", show_default=False),
]
_Trackers = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A tracker of the recipe, given again.", show_default=False)
]
_ServerFolder = Annotated[
    str | None, typer.Option(metavar="DIR", help="The folder of the recipe's server, given again.", show_default=False)
]
_TrainedFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Where `memagent train sft` or `run` writes.", show_default=False)
]
_Picture = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="OUT.png", help="The picture [DIR/curves.png].", show_default=False),
]


@train_app.callback()
def train() -> None:
    """Train a model to keep what matters."""


@train_app.command("data", short_help="Make a training set.")
def make_data(
    mixture_file: _MixtureFile,
    output: _SetFile,
    rows: _Rows,
    seed: _Seed = 0,
    data: options.DataDir = None,
    model: options.Model = "smollm2",
    without_context: _WithoutContext = 2,
    keep_between: _KeepBetween = None,
    tries: _Tries = 4,
    chunk_tokens: options.ChunkTokens = None,
    memory_tokens: options.MemoryTokens = None,
    output_tokens: options.OutputTokens = None,
    window: options.Window = None,
    base_url: options.BaseUrl = None,
    tokenizer: options.Tokenizer = None,
    temperature: _Temperature = 1.0,
    quiet: options.Quiet = False,
) -> None:
    """Write questions of a mixture with their documents to a file, which is then a task of its own ("jsonl:OUT.jsonl").

    A run that was interrupted continues with the same command; with more rows the file grows.
    """
    mixture, source = Mixture.load(mixture_file), Data(data)
    mixture.tasks(source)  # reports what is wrong with the tasks before a model is loaded
    filters = sets.Filters(without_context=without_context, between=keep_between, tries=tries)
    with Reader(
        model,
        prompts=None if policies.names_policy(model) else PromptSet.default(answer_format="boxed"),
        window=window,
        chunk_tokens=chunk_tokens,
        memory_tokens=memory_tokens,
        output_tokens=output_tokens,
        backend_options=drop_none(base_url=base_url, tokenizer=tokenizer, temperature=temperature),
    ) as reader:
        training_set = sets.TrainingSet(output, sets.made_with(mixture, seed, reader, filters))
        with _question_progress(rows, training_set.state, quiet=quiet) as on_question:
            state = sets.build(
                training_set,
                mixture,
                rows=rows,
                seed=seed,
                data=source,
                reader=reader,
                filters=filters,
                on_question=on_question,
            )
    show(f"{output}: {sets.summary(state)}")


@train_app.command("sft", short_help="Train a policy on constructed readings.")
def imitate(
    recipe_file: _RecipeFile,
    output: _RunFolder,
    adapter: _Adapter = None,
    model: _TrainedModel = None,
    tracker: _Trackers = None,
    data: options.DataDir = None,
    quiet: options.Quiet = False,
) -> None:
    """Train on constructed readings of the recipe's mixture; when it is done, the policy is in DIR/policy.

    A training that was interrupted continues with the same command. `memagent train run` starts from the result if it
    is given DIR/policy/adapter.
    """
    given = training.Given(model=model, trackers=tuple(tracker or ()))
    recipe = training.recipe.Recipe.load(recipe_file, given, sft=True)
    _train(recipe.sft_trainer(output, Data(data), adapter=adapter), recipe, "demonstrations", quiet=quiet)


@train_app.command("run", short_help="Train a policy by the reward of its answers.")
def learn(
    recipe_file: _RecipeFile,
    output: _RunFolder,
    adapter: _Adapter = None,
    model: _TrainedModel = None,
    reward: _Reward = None,
    tracker: _Trackers = None,
    base_url: options.BaseUrl = None,
    server_folder: _ServerFolder = None,
    data: options.DataDir = None,
    quiet: options.Quiet = False,
) -> None:
    """Train by multi-conversation DAPO; when it is done, the policy is in DIR/policy.

    A run that was interrupted continues with the same command. A recipe does not by itself run code, send anything to a
    server or a service, or have a model fetched: what it names of these is given again.
    """
    if reward is not None:  # one of the user's own is imported from the current folder, behind all that is installed
        sys.path.append(str(Path.cwd()))
    given = training.Given(
        model=model,
        adapter=str(adapter) if adapter else None,
        reward=reward,
        trackers=tuple(tracker or ()),
        base_url=base_url,
        server_folder=server_folder,
    )
    recipe = training.recipe.Recipe.load(recipe_file, given)
    _train(recipe.trainer(output, Data(data)), recipe, "training", quiet=quiet)


@train_app.command("plot", short_help="Draw the curves of a training.")
def draw(folder: _TrainedFolder, output: _Picture = None) -> None:
    """Draw what was rewarded and what was learned."""
    picture = output or folder / "curves.png"
    training.plots.curves(training.metrics.read(folder / "metrics.jsonl"), picture)
    show(str(picture))


def _train(trainer: Training, recipe: Recipe, what: str, *, quiet: bool) -> None:
    """Do what is left of a training, and write its policy."""
    is_main = trainer.accelerator.is_main_process
    shown = _step_progress(what, trainer.settings.steps, trainer.progress.step, quiet=quiet or not is_main)
    with shown as on_step, trainer.reader:
        for line in trainer.train():
            on_step(_metrics_line(line))
        if is_main:
            training.recipe.save_best(trainer, recipe)
            policy = trainer.folder / "policy"
            show(f"{policy}: a policy; read with it: --model policy:{policy}")
        trainer.accelerator.end_training()


def _metrics_line(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a batch that a person wants to see; `failed` only if something did."""
    shown = [name for name in _SHOWN_METRICS if name in metrics and (metrics[name] or name != "failed")]
    return ", ".join(f"{name.replace('_', ' ')} {metrics[name]:.3g}" for name in shown)


@contextmanager
def _step_progress(what: str, total: int, done: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line after each step of a training."""
    step = done
    with progress.counted(what, total, done, quiet=quiet) as notify:

        def on_step(line: str) -> None:
            nonlocal step
            step += 1
            notify(f"{what}, {line}", f"{what} {step}: {line}")

        yield on_step


@contextmanager
def _question_progress(rows: int, state: sets.State, *, quiet: bool) -> Iterator[sets.OnQuestion]:
    """Yield a function that shows, after each question, how far the set is."""
    with progress.counted("training set", rows, state.rows, quiet=quiet) as notify:

        def on_question(drawn: Drawn, reason: str | None, state: sets.State) -> None:
            left_out = f"{drawn.task.name}, {sum(state.left_out.values())} left out"
            notify(left_out, f"{drawn.sample.id}: {reason or f'row {state.rows}'}", state.rows)

        yield on_question
