"""A recipe: a whole training in one file, with the model, how it reads, its questions, and how it learns."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.tracking import get_available_trackers
from pydantic import ConfigDict, TypeAdapter

from memagent_integrations import files, policies
from memagent_integrations.backends import embedded
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.samples import Task
from memagent_integrations.evaluation.tasks.files import PREFIX
from memagent_integrations.policies import Policy
from memagent_integrations.prompts import AnswerFormat, PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Budgets, Layout
from memagent_integrations.training import checkpoints, export, metrics, tables
from memagent_integrations.training.base import Training
from memagent_integrations.training.demonstrations import Example, examples
from memagent_integrations.training.given import NOTHING, Given
from memagent_integrations.training.mixture import Drawn, Mixture, check_lengths
from memagent_integrations.training.rollouts import answer_reward, load_reward
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.served import ServedSampler
from memagent_integrations.training.settings import Settings
from memagent_integrations.training.sft import SftSettings, SftTrainer
from memagent_integrations.training.trainer import Trainer

_TRANSFORMERS = "transformers:"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Held-out questions: `samples` of an evaluation task at each of its lengths."""

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
class Server:
    """A vLLM server that writes the rollouts, as of `ServedSampler`. If it needs a key, that is in OPENAI_API_KEY."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    base_url: str
    folder: str | None = None
    concurrency: int = 64
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a whole training: its model, its questions, and how it learns.

    Args:
        model: "transformers:NAME", with a folder or a GGUF file in place of the name, or "smollm2-raw".
        mixture: the file of the `Mixture` to train on, relative to the recipe.
        adapter: a LoRA adapter to start from, that of `sft`.
        layout: order of the blocks in the prompts.
        no_change: let the policy say that a section brings nothing new.
        answer_format: "boxed" takes the answer from a box.
        budgets: as of `Reader`.
        training: as of `Settings`.
        sft: the settings of `memagent train sft`, as of `SftSettings`.
        validation: questions to evaluate on during either training.
        reward: a function "package.module:name" of a reading and a `Drawn`, in place of the task's metric.
        trackers: of accelerate ("tensorboard", "wandb", "trackio", ...), which get the metrics too.
        rollout_tokens: most tokens that are sampled together, prompts and replies; by default as of `Sampler`.
        server: a vLLM server that writes the rollouts, in place of this process.
        cpu: train on the CPU even where there is a GPU.
        dtype: "bfloat16", "float32"; by default bfloat16 where the device computes it in hardware, else float32.

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
    sft: SftSettings = field(default_factory=SftSettings)
    validation: tuple[Validation, ...] = ()
    reward: str | None = None
    trackers: tuple[str, ...] = ()
    rollout_tokens: int | None = None
    server: Server | None = None
    cpu: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_int(**drop_none(rollout_tokens=self.rollout_tokens))
        names = [entry.name for entry in self.validation]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"the validation {twice[0]} stands there twice: give it all lengths at once")

    @classmethod
    def load(cls, path: str | Path, given: Given = NOTHING, *, sft: bool = False) -> Recipe:
        """Read a TOML file; paths in it are relative to the file.

        Code (`reward`), an address (`server`), a service (`trackers`) and a model to fetch are used only if they are
        `given` too. `sft`: the recipe is for `sft_trainer`, which uses less of it.

        Raises:
            UsageError: the file cannot be read, or is no recipe; the message names the key. Or it names what has to be
                given again.
        """
        recipe = tables.load(path, _RECIPE, "recipe", beside=("mixture", "adapter"))
        files.check_regular(recipe.mixture)
        return replace(recipe, **given.confirm(recipe, sft=sft))

    @property
    def prompts(self) -> PromptSet:
        """The prompts to train with."""
        return PromptSet.default(layout=self.layout, no_change=self.no_change, answer_format=self.answer_format)

    def reader(self) -> Reader:
        """Load the model on the device of this process, and return the reader whose policy learns.

        Raises:
            UsageError: the model is none that transformers loads.
        """
        if self.model not in embedded.EMBEDDED and not self.model.startswith(_TRANSFORMERS):
            known = ", ".join(embedded.EMBEDDED)
            raise UsageError(f"a model that is trained is transformers:NAME or one of {known}, not {self.model!r}")
        name = self.model.removeprefix(_TRANSFORMERS)
        options: dict[str, Any] = {
            "adapter": self.adapter,
            "temperature": self.training.temperature,
            "tokens": self.rollout_tokens,
            "device": str(PartialState(cpu=self.cpu).device),
            "dtype": self.dtype,
        }
        sampler = ServedSampler(name, **asdict(self.server), **options) if self.server else Sampler(name, **options)
        return Reader(sampler, prompts=self.prompts, **asdict(self.budgets))

    def trainer(self, folder: str | Path, data: Data, accelerator: Accelerator | None = None) -> Trainer:
        """Return the trainer, which resumes from what is in the folder.

        Raises:
            UsageError: the recipe does not fit its data or its model, or the folder holds another training.
        """
        has_trackers, accelerator = accelerator is not None, accelerator or self._accelerator(folder)
        mixture = Mixture.load(self.mixture)
        reward = answer_reward if self.reward is None else load_reward(self.reward)
        mixture.tasks(data)  # reports what is wrong with the tasks before a model is loaded
        validation_tasks = self._validation_tasks(mixture, data)
        checkpoints.check(folder)
        reader = self.reader()
        count, seed = reader.count, self.training.seed

        def draw(position: int, share: float) -> Drawn:
            return mixture.draw(position, seed=seed, share=share, data=data, count=count)

        trainer = Trainer(
            reader,
            draw,
            self.training,
            folder,
            validation=self._validation_questions(validation_tasks, reader),
            reward=reward,
            accelerator=accelerator,
            origin=self._origin(mixture) | {"reward": self.reward},
        )
        if not has_trackers:
            _begin_trackers(accelerator, asdict(self.training))
        return trainer

    def sft_trainer(
        self,
        folder: str | Path,
        data: Data,
        accelerator: Accelerator | None = None,
        *,
        adapter: str | Path | None = None,
    ) -> SftTrainer:
        """Return the trainer on constructed readings, which resumes from what is in the folder.

        The policy is prepared as the settings in `training` say, or goes on with an `adapter`. The recipe's own, which
        is that of a training by reward, and its `server` are not used.

        Raises:
            UsageError: as `trainer`, or a question of the mixture has no gold facts.
        """
        has_trackers, accelerator = accelerator is not None, accelerator or self._accelerator(folder)
        mixture = Mixture.load(self.mixture)
        mixture.tasks(data)
        validation_tasks = self._validation_tasks(mixture, data)
        checkpoints.check(folder)
        reader = replace(self, adapter=str(adapter) if adapter else None, server=None).reader()
        trainer = SftTrainer(
            reader,
            self._demonstrations(mixture, reader, data),
            self.sft,
            folder,
            training=self.training,
            validation=self._validation_questions(validation_tasks, reader),
            accelerator=accelerator,
            origin=self._origin(mixture),
        )
        if not has_trackers:
            _begin_trackers(accelerator, asdict(self.sft))
        return trainer

    def _demonstrations(self, mixture: Mixture, reader: Reader, data: Data) -> Iterator[Example]:
        """Yield the constructed readings of the mixture; if its lengths grow, in as many stages as it has lengths."""
        seed, readings = self.training.seed + 1, self.sft.readings
        stages = max(len(part.lengths) for part in mixture.parts) if mixture.curriculum == "growing" else 1
        for number in range(readings):
            drawn = mixture.draw(number, seed=seed, share=number / readings, data=data, count=reader.count)
            for example in examples(drawn.task, drawn.sample, reader):
                yield replace(example, stage=number * stages // readings)

    def _validation_questions(
        self, validation_tasks: Sequence[tuple[Task, Validation]], reader: Reader
    ) -> dict[str, list[Drawn]]:
        """Return the questions of the validation, by the name of the task with the length."""
        count, seed = reader.count, self.training.seed
        return {
            f"{entry.name}@{length}": [
                Drawn(task=task, length=length, sample=task.make(length, seed, number, count))
                for number in range(entry.samples)
            ]
            for task, entry in validation_tasks
            for length in entry.lengths or (0,)
        }

    def _validation_tasks(self, mixture: Mixture, data: Data) -> list[tuple[Task, Validation]]:
        """Load the tasks of the validation, and check that they have the lengths and samples and are not trained on."""
        pairs = [(tasks.load(entry.name, data), entry) for entry in self.validation]
        trained_on = {part.name for part in mixture.parts}
        for task, entry in pairs:
            check_lengths(entry.name, task, entry.lengths)
            if task.size is not None and entry.samples > task.size:
                raise UsageError(f"the validation {entry.name} has {task.size} samples, not {entry.samples}")
            if entry.name in trained_on and entry.name.startswith(PREFIX):
                raise UsageError(f"{entry.name} is trained on; validate with others")
        return pairs

    def _origin(self, mixture: Mixture) -> dict[str, Any]:
        """Return what the questions are made of: with another origin a training does not resume."""
        names = {*(part.name for part in mixture.parts), *(entry.name for entry in self.validation)}
        return {
            "files": {name: _digest(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX)},
            "mixture": asdict(mixture),
            "validation": [asdict(entry) for entry in self.validation],
        }

    def _accelerator(self, folder: str | Path) -> Accelerator:
        """Return the accelerator of this process.

        Processes wait long for one another, because the lengths of their documents differ.
        """
        if missing := set(self.trackers) - set(map(str, get_available_trackers())):
            raise UsageError(f"no tracker {min(missing)!r} that accelerate knows is installed; pip install it")
        waiting = InitProcessGroupKwargs(timeout=timedelta(hours=6))
        return Accelerator(
            cpu=self.cpu, log_with=list(self.trackers) or None, project_dir=str(folder), kwargs_handlers=[waiting]
        )

    def save(self, reader: Reader, folder: str | Path, lines: Iterable[dict[str, Any]] = ()) -> Policy:
        """Write a reader's policy as a directory that every backend loads, with a card of the training's figures.

        `lines` are the metrics of a training, by rewards or on demonstrations.

        Raises:
            UsageError: the directory exists, or cannot be written.
        """
        lines = list(lines)
        steps = [line for line in lines if line["step"]]
        figures = export.Figures(
            data=Path(self.mixture).name,
            steps=len(steps),
            rewards=[line["reward"] for line in steps if "reward" in line],
            scores=_validation_scores(lines),
            settings=self._card_settings(steps),
        )
        policy = Policy(model=self.model, prompts=reader.prompts, budgets=reader.budgets)
        backend: Any = reader.backend
        return export.save(backend.model, backend.tokenizer, folder, policy=policy, figures=figures)

    def _card_settings(self, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the settings that a card shows, by name; of a training on demonstrations also its loss."""
        if any("reward" in line for line in steps):
            shown, record = ("questions", "group", "updates", "learning_rate", "temperature", "kl"), self.training
            return {name.replace("_", " "): getattr(record, name) for name in (*shown, "seed")}
        settings = {
            name: getattr(self.sft, name) for name in ("readings", "passes", "batch", "learning_rate", "schedule")
        }
        loss = (
            {"loss": f"{steps[0]['loss']:.4g} in the first step, {steps[-1]['loss']:.4g} in the last"} if steps else {}
        )
        return loss | {name.replace("_", " "): value for name, value in settings.items()}


def save_best(trainer: Training, recipe: Recipe) -> Policy:
    """Write the best policy of a training (the last one, if nothing was evaluated) into `policy` in its folder.

    Raises:
        UsageError: it cannot be written.
    """
    best = trainer.folder / "best"
    if best.is_dir():
        checkpoints.load(trainer.policy.model, best)
    target = trainer.folder / "policy"
    if (target / policies.FILE).is_file():  # of the same training, when it had fewer steps
        shutil.rmtree(target)
    return recipe.save(trainer.reader, target, metrics.read(trainer.folder / "metrics.jsonl"))


def _validation_scores(lines: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the first and the best scores of a training, by the name of the validation set."""
    evaluated = [line for line in lines if "validation" in line]  # a line without it had failed calls
    if not evaluated:
        return {}
    first, best = evaluated[0], max(evaluated, key=lambda line: line["validation"])
    keys = sorted(key for key in first if key.startswith("validation/"))
    return {key.removeprefix("validation/"): (first[key], best[key]) for key in keys}


def _begin_trackers(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    accelerator.init_trackers("memagent", config={name: str(value) for name, value in settings.items()})


def _digest(file: str) -> str:
    with files.accessing("read", file), Path(file).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


_RECIPE = TypeAdapter(Recipe)
