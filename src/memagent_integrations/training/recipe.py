"""A training in one file: the model, how it reads, what it is asked, how it learns, and what comes out."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.tracking import get_available_trackers
from pydantic import ConfigDict, TypeAdapter

from memagent_integrations import policies
from memagent_integrations.backends import embedded
from memagent_integrations.checks import check_int, check_number, drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.tasks.files import PREFIX
from memagent_integrations.files import reason
from memagent_integrations.policies import Policy
from memagent_integrations.prompts import AnswerFormat, PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Budgets, Layout
from memagent_integrations.training import checkpoints, export, metrics, tables
from memagent_integrations.training.demonstrations import examples
from memagent_integrations.training.mixture import Drawn, Mixture, check_lengths
from memagent_integrations.training.policy import start
from memagent_integrations.training.rollouts import answer_reward, load_reward
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.served import ServedSampler
from memagent_integrations.training.settings import Settings
from memagent_integrations.training.trainer import Trainer
from memagent_integrations.training.warmstart import warm_start

_TRANSFORMERS = "transformers:"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Questions that are held out: `samples` of an evaluation task at each of its lengths."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: str
    lengths: tuple[int, ...] = ()
    samples: int = 32

    def __post_init__(self) -> None:
        check_int(samples=self.samples)
        for length in self.lengths:
            check_int(length=length)
        if self.name in tasks.TRAINING:
            raise UsageError(f"the questions of {self.name} are for training; validate with others")


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The warm start: how many constructed readings are shown, so many replies a step."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    readings: int = 1000
    batch: int = 32
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        check_int(readings=self.readings, batch=self.batch)
        check_number(learning_rate=self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A vLLM server that writes the rollouts, as of `ServedSampler`. Its key is in OPENAI_API_KEY, if it wants one."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    base_url: str
    folder: str | None = None
    concurrency: int = 64
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training.

    Args:
        model: "transformers:NAME", a folder or GGUF file in place of the name, or an embedded model ("smollm2").
        mixture: the file of the `Mixture` that is trained on, beside the recipe.
        adapter: a LoRA adapter to go on from, that of a warm start.
        layout: order of the blocks in the prompts.
        no_change: the policy may say that a section brings nothing new.
        answer_format: "boxed" takes the answer from a box.
        budgets: as of `Reader`.
        training: as of `Settings`.
        warm_start: what `memagent train sft` shows.
        validation: what is asked on the way.
        reward: a function "package.module:name" of a reading and a `Drawn`, in place of the task's metric.
        trackers: of accelerate ("tensorboard", "wandb", "trackio", ...), which are sent the metrics too.
        rollout_tokens: most tokens that are sampled together, prompts and replies; by default as of `Sampler`.
        server: a vLLM server that writes the rollouts, in place of this process.
        cpu: train on the CPU, even where there is a GPU.
        dtype: "bfloat16", "float32"; by default bfloat16 where an adapter learns on a GPU, and float32 elsewhere.

    Raises:
        UsageError: a setting is wrong.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    model: str
    mixture: str
    adapter: str | None = None
    layout: Layout = "section-first"
    no_change: bool = False
    answer_format: AnswerFormat = "boxed"
    budgets: Budgets = field(default_factory=Budgets)
    training: Settings = field(default_factory=Settings)
    warm_start: WarmStart = field(default_factory=WarmStart)
    validation: tuple[Validation, ...] = ()
    reward: str | None = None
    trackers: tuple[str, ...] = ()
    rollout_tokens: int | None = None
    server: Server | None = None
    cpu: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_int(**drop_none(rollout_tokens=self.rollout_tokens))
        names = [one.name for one in self.validation]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"the validation {twice[0]} stands there twice: give it all lengths at once")

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """The recipe in a TOML file; paths in it are beside the file.

        Raises:
            UsageError: the file cannot be read, or is no recipe; the message names the key.
        """
        return tables.load(path, _RECIPE, "recipe", beside=("mixture", "adapter"))

    @property
    def prompts(self) -> PromptSet:
        """Those that are trained with."""
        return PromptSet.default(layout=self.layout, no_change=self.no_change, answer_format=self.answer_format)

    def reader(self) -> Reader:
        """The reader whose policy learns; its model is loaded here, on the device of this process.

        Raises:
            UsageError: the model is none that transformers loads.
        """
        if self.model in embedded.EMBEDDED:
            name = str(embedded.pull(self.model))
        elif self.model.startswith(_TRANSFORMERS):
            name = self.model.removeprefix(_TRANSFORMERS)
        else:
            raise UsageError(
                f"a model that is trained is transformers:NAME or one of {', '.join(embedded.EMBEDDED)}, not {self.model!r}"
            )
        options: dict[str, Any] = {
            "adapter": self.adapter,
            "temperature": self.training.temperature,
            "tokens": self.rollout_tokens,
            "device": str(PartialState(cpu=self.cpu).device),
            "dtype": self.dtype or (None if self.training.lora or self.adapter else "float32"),
        }
        sampler = ServedSampler(name, **asdict(self.server), **options) if self.server else Sampler(name, **options)
        return Reader(sampler, prompts=self.prompts, **asdict(self.budgets))

    def trainer(self, folder: str | Path, data: Data, accelerator: Accelerator | None = None) -> Trainer:
        """The trainer; it goes on with what is in the folder.

        Raises:
            UsageError: the recipe does not fit its data or its model, or the folder holds another training.
        """
        given, accelerator = accelerator, accelerator or self._accelerator(folder)
        mixture, reward = (
            Mixture.load(self.mixture),
            load_reward(self.reward) if self.reward is not None else answer_reward,
        )
        mixture.tasks(data)  # what is wrong with them is told before a model is loaded
        held = [(tasks.load(one.name, data), one) for one in self.validation]
        trained = {part.name for part in mixture.parts}
        for task, one in held:
            check_lengths(one.name, task, one.lengths)
            if task.size is not None and one.samples > task.size:
                raise UsageError(f"the validation {one.name} has {task.size} samples, not {one.samples}")
            if one.name in trained and one.name.startswith(PREFIX):
                raise UsageError(f"{one.name} is trained on; validate with others")
        reader = self.reader()
        count, seed = reader.count, self.training.seed
        validation = {
            f"{one.name}@{length}": [
                Drawn(task=task, length=length, sample=task.make(length, seed, number, count))
                for number in range(one.samples)
            ]
            for task, one in held
            for length in one.lengths or (0,)
        }

        def draw(position: int, share: float) -> Drawn:
            return mixture.draw(position, seed=seed, share=share, data=data, count=count)

        names = {*trained, *(one.name for one in self.validation)}
        files = {name: _digest(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX)}
        origin = {
            "files": files,
            "mixture": asdict(mixture),
            "reward": self.reward,
            "validation": [asdict(one) for one in self.validation],
        }
        trainer = Trainer(
            reader,
            draw,
            self.training,
            folder,
            validation=validation,
            reward=reward,
            accelerator=accelerator,
            origin=origin,
        )
        if not given:
            accelerator.init_trackers(
                "memagent", config={name: str(value) for name, value in asdict(self.training).items()}
            )
        return trainer

    def _accelerator(self, folder: str | Path) -> Accelerator:
        """The processes that train: they wait long for one another, as their documents may differ in length."""
        if missing := set(self.trackers) - set(map(str, get_available_trackers())):
            raise UsageError(f"no tracker {min(missing)!r} that accelerate knows is installed; pip install it")
        waiting = InitProcessGroupKwargs(timeout=timedelta(hours=6))
        return Accelerator(
            cpu=self.cpu, log_with=list(self.trackers) or None, project_dir=str(folder), kwargs_handlers=[waiting]
        )

    def warm_up(self, reader: Reader, data: Data) -> Iterator[float]:
        """Show constructed readings to a reader's policy, which is made ready as `training` says; yields the loss of each step (`warm_start`).

        Raises:
            UsageError: a question of the mixture has no gold facts.
        """
        mixture, told = Mixture.load(self.mixture), self.warm_start
        policy = reader.backend
        if not isinstance(policy, Sampler):
            raise UsageError(f"a warm start takes a reader whose backend is a Sampler, not {policy!r}")
        if PartialState().num_processes > 1:
            raise UsageError("a warm start takes one process: run it without a launcher")
        start(policy, self.training)

        def replies() -> Iterable[Any]:
            for number in range(told.readings):
                share = number / told.readings
                drawn = mixture.draw(number, seed=self.training.seed + 1, share=share, data=data, count=reader.count)
                yield from (
                    (example.messages, example.target) for example in examples(drawn.task, drawn.sample, reader)
                )

        yield from warm_start(
            policy, replies(), batch=told.batch, learning_rate=told.learning_rate, tokens=self.training.tokens
        )

    def save(self, reader: Reader, folder: str | Path, lines: Iterable[dict[str, Any]] = ()) -> Policy:
        """The policy of a reader as a directory that every backend loads, with a card of the training's own figures.

        `lines` are the metrics of a training; without any it is a policy that was warmed up.

        Raises:
            UsageError: the directory is there already, or cannot be written.
        """
        told = list(lines)
        rewards = [line["reward"] for line in told if "reward" in line]
        evaluated = [line for line in told if "validation" in line]  # not where a call failed
        names = sorted(
            name.removeprefix("validation/")
            for name in (evaluated[0] if evaluated else ())
            if name.startswith("validation/")
        )
        best = max(evaluated, key=lambda line: line["validation"]) if evaluated else {}
        scores = {name: (evaluated[0][f"validation/{name}"], best[f"validation/{name}"]) for name in names}
        figures = export.Figures(
            data=Path(self.mixture).name,
            steps=len(rewards),
            rewards=rewards,
            scores=scores,
            settings=self._told(learned=bool(told)),
        )
        policy = Policy(model=self.model, prompts=reader.prompts, budgets=reader.budgets)
        backend: Any = reader.backend
        return export.save(backend.model, backend.tokenizer, folder, policy=policy, figures=figures)

    def _told(self, *, learned: bool) -> dict[str, Any]:
        """The settings that a card names."""
        if not learned:
            return {f"warm start, {name.replace('_', ' ')}": value for name, value in asdict(self.warm_start).items()}
        names = ("questions", "group", "updates", "learning_rate", "temperature", "kl", "seed")
        return {name.replace("_", " "): getattr(self.training, name) for name in names}


def finished(trainer: Trainer, recipe: Recipe) -> Policy:
    """The best policy of a training (the last one, where nothing was evaluated), in the directory `policy` of its folder.

    Raises:
        UsageError: it cannot be written.
    """
    best = trainer.folder / "best"
    if best.is_dir():
        checkpoints.load(trainer.policy.model, best)
    target = trainer.folder / "policy"
    if (target / policies.FILE).is_file():  # of the same training, when it was shorter
        shutil.rmtree(target)
    return recipe.save(trainer.reader, target, metrics.read(trainer.folder / "metrics.jsonl"))


def _digest(file: str) -> str:
    try:
        with Path(file).open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {file!r}: {reason(error)}") from error


_RECIPE = TypeAdapter(Recipe)
