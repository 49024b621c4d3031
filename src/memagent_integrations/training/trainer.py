"""Multi-conversation DAPO on one machine: read, reward, compare, learn.

One batch: every question is read by the policy several times (`rollouts`); a reading is worth its reward beside the others of its question
(`advantages`); every conversation of it, a memory update or the answer, learns from that number (`learning`). Source: MemAgent, arXiv:2507.02259.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import get_scheduler

from memagent_integrations.backends.base import digest
from memagent_integrations.backends.transformers import out_of_memory, release_tensors
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.reader import Reader
from memagent_integrations.training import metrics
from memagent_integrations.training.batches import deal
from memagent_integrations.training.checkpoints import LOCK, Checkpoints, Place
from memagent_integrations.training.forward import cannot_share, scores
from memagent_integrations.training.groups import compared, describe
from memagent_integrations.training.learning import Rows, backward
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.policy import named, recomputing, start, swapped, take
from memagent_integrations.training.rollouts import Failure, Reward, Rollout, answer_reward, roll_out
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Settings

_log = logging.getLogger(__name__)

Draw = Callable[[int, float], Drawn]
"""Question number n of the training data, at a share of the run (0.0 its beginning, 1.0 its end): the same n and share, the same question."""

_MEANS = [
    "reward",
    "reward_deviation",
    "collapsed",
    "failed",
    "steps_a_rollout",
    "answer_tokens",
    "memory_tokens",
    "kept",
    "cut",
]
_MEANS += ["loss", "clipped", "kl", "entropy", "gap", "shared", "tokens"]


@dataclass(kw_only=True)
class Batch:
    """The rollouts of this process for one batch, and its advantages."""

    rollouts: list[Rollout] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)


class Trainer:
    """Trains the policy of a reader.

    `train` is an iterator over the metrics of each batch; what it made so far is in `folder`, and another trainer with the same arguments goes on
    from there. The policy learns in place: a training in another folder takes one that is loaded anew.

    Args:
        reader: how the policy reads: its prompts, its budgets, and a `Sampler` as its backend.
        draw: the training data.
        settings: see `Settings`.
        folder: for metrics, checkpoints and saved readings.
        validation: by name, questions that are not in the training data; each is answered greedily every `evaluate_every` batches.
        reward: what a reading is worth; by default the score of its answer.
        accelerator: processes, which share the questions of a batch, and trackers that were begun with `init_trackers`; by default what the process
            was launched with.
        origin: what `draw`, `reward` and `validation` were made of, in JSON: with another one a training does not go on.

    Raises:
        UsageError: a setting is wrong, the policy is on another device or was trained elsewhere, or the folder holds a training with other settings,
            or what is none.
    """

    def __init__(
        self,
        reader: Reader,
        draw: Draw,
        settings: Settings,
        folder: str | Path,
        *,
        validation: Mapping[str, Sequence[Drawn]] | None = None,
        reward: Reward = answer_reward,
        accelerator: Accelerator | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(reader.backend, Sampler):
            raise UsageError(f"training takes a reader whose backend is a Sampler, not {reader.backend!r}")
        self.reader, self.policy, self.draw, self.settings = reader, reader.backend, draw, settings
        self.accelerator = accelerator or Accelerator(cpu=self.policy.model.device.type == "cpu")
        self.folder, self.validation, self.reward = Path(folder), dict(validation or {}), reward
        if self.policy.temperature != settings.temperature:
            raise UsageError(
                f"the policy samples with the temperature {self.policy.temperature}, the settings say {settings.temperature}"
            )
        own, given = self.policy.model.device, self.accelerator.device
        if (own.type, own.index or 0) != (given.type, given.index or 0):
            raise UsageError(
                f"the policy is on {own}, and this process trains on {given}: load it with device='{given}'"
            )
        if empty := [name for name, questions in self.validation.items() if not questions]:
            raise UsageError(f"the validation set {empty[0]} has no questions")
        if settings.questions % self.accelerator.num_processes:
            raise UsageError(
                f"questions ({settings.questions}) has to be a multiple of the processes ({self.accelerator.num_processes})"
            )
        take(self.policy, self.folder)
        start(self.policy, settings)
        self.optimizer = torch.optim.AdamW(
            list(named(self.policy.model).values()), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        total = settings.steps * settings.updates
        self.scheduler = get_scheduler(
            settings.schedule, self.optimizer, num_warmup_steps=settings.warmup, num_training_steps=total
        )
        reason = cannot_share(self.policy.model) if settings.share else None
        if reason:
            _log.warning(
                "every rollout is computed whole, as this model cannot share what rollouts begin with: %s", reason
            )
        self.policy.share = settings.share and not reason
        fingerprint = asdict(settings) | {
            "processes": self.accelerator.num_processes,
            "weights": self.policy.loaded,
            "budgets": asdict(reader.budgets),
            "prompts": digest(f"{reader.prompts}"),
            "origin": dict(origin or {}),
        }
        stateful = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpoints = Checkpoints(
            folder=self.folder, fingerprint=fingerprint, model=self.policy.model, stateful=stateful
        )
        with self.accelerator.main_process_first():
            begun = self.checkpoints.start()
        self.reference = begun if settings.kl else {}
        self.place = self.checkpoints.resume() or Place(positions=(0,) * self.accelerator.num_processes)
        self._drawn = self.place.positions[self.accelerator.process_index]
        self._within = False

    def train(self) -> Iterator[dict[str, float]]:
        """Go through the batches that are left; the metrics of each, when its checkpoint is written.

        What they mean stands in docs/training.md; times are in seconds, log-probabilities in nats.

        Raises:
            BackendError: no rollout of a batch came to an end, or the memory does not suffice.
            UsageError: a reward or a gradient is not finite, or the folder cannot be written.
        """
        with self._alone():
            yield from self._batches()

    def _batches(self) -> Iterator[dict[str, float]]:
        settings = self.settings
        if self.accelerator.is_main_process:
            metrics.rewind(self.folder / "metrics.jsonl", self.place.step)
        if not self.place.step and settings.evaluate_every and self.validation:
            self._record({"step": 0} | self.evaluate())
        while self.place.step < settings.steps:
            line = {"step": self.place.step + 1} | self.batch()
            positions = self.accelerator.gather(torch.tensor([self._drawn], device=self.accelerator.device)).tolist()
            self.place = replace(self.place, step=self.place.step + 1, positions=tuple(positions))
            if settings.evaluate_every and self.validation and self._due(settings.evaluate_every):
                line |= self.evaluate()
            self._record(line)
            if self._due(settings.save_every):
                self._by_one(lambda: self.checkpoints.save(self.place, keep=settings.keep))
            yield line

    def batch(self) -> dict[str, float]:
        """One batch: read, reward, compare, learn."""
        if self._within:
            raise UsageError(
                "a batch of this trainer was interrupted: make a new Trainer, which goes on from the last checkpoint"
            )
        self._within = True
        torch.manual_seed(
            random.Random(f"{self.settings.seed}/{self.place.step}/{self.accelerator.process_index}").getrandbits(63)
        )
        sums, began = Sums(), time.perf_counter()
        self._publish()
        batch = self.collect(sums)
        self._show(batch)
        read = time.perf_counter()
        rate = float(self.scheduler.get_last_lr()[0])  # of the first update
        norms = self.learn(batch, sums)
        learned = time.perf_counter()
        self._within = False
        line = sums.means(self.accelerator, _MEANS)
        tokens = line.pop("tokens", 0.0) * self.accelerator.num_processes
        line |= {"learning_rate": rate, "gradient_norm": sum(norms) / max(len(norms), 1), "updates": len(norms)}
        return line | {
            "rollout_seconds": read - began,
            "learn_seconds": learned - read,
            "tokens_a_second": tokens / (learned - began),
        }

    def collect(self, sums: Sums) -> Batch:
        """The rollouts of a batch, with their advantages; with dynamic sampling only those of groups that teach something.

        A question that cannot be read, by its own fault, is left out with a warning, and another one is asked in its place.
        """
        settings, batch = self.settings, Batch()
        wanted = settings.questions // self.accelerator.num_processes
        failures: list[Failure] = []
        groups = ended = 0
        for _ in range(1 + settings.refills):
            asked = [self._next() for _ in range(wanted - groups)]
            rollouts, failed = roll_out(
                self.reader, asked, group=settings.group, reward=self.reward, format_reward=settings.format_reward
            )
            failures += failed
            describe(rollouts, sums)
            kept, worth = compared(rollouts, settings, sums) if rollouts else ([], [])
            batch.rollouts += kept
            batch.advantages += worth
            sums.add("failed", [1.0] * len(failed) + [0.0] * len(rollouts))
            ended += len(rollouts)
            left_out = {failure.group: failure for failure in failed if failure.lasting}
            for failure in left_out.values():
                _log.warning("the question %s is left out: %s", failure.sample, failure.error)
            groups += len({rollout.group for rollout in kept}) if settings.dynamic else len(asked) - len(left_out)
            if groups == wanted:
                break
        if not self._total(ended):
            raise failures[0].error if failures else BackendError("no rollout of the batch came to an end")
        return batch

    def learn(self, batch: Batch, sums: Sums) -> list[float]:
        """The optimizer steps of a batch; the norm of the gradient at each."""
        settings, model = self.settings, self.policy.model
        rows = self._rows(batch)
        dealt = deal(rows.conversations, settings.updates, share=self.policy.share)
        total = self._total(sum(len(row.output_ids) for row in rows.conversations)) / settings.updates
        every = [bundle for part in dealt for bundle in part]
        prompts = sum(len(row.prompt_ids) for row in rows.conversations)
        sums.add("shared", [float(sum(bundle.saved() for bundle in every))], prompts)
        sums.add("tokens", [float(sum(len(row.prompt_ids) + len(row.output_ids) for row in rows.conversations))])
        norms: list[float] = []
        with self._memory():
            rows = self._scored(rows, every)
            for part in dealt if total else ():
                with recomputing(model):
                    backward(model, rows, part, settings, tokens=total, sums=sums, moved=bool(norms))
                norms.append(self._update())
        return norms

    def evaluate(self) -> dict[str, float]:
        """The mean score of greedy readings, by the name of the validation set; "validation" is the mean of these, and the best is kept.

        Where a call failed there is no such mean: "validation_failed" is their share.
        """
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        sums = Sums()
        self._publish()
        with self.policy.greedy():
            for name, questions in self.validation.items():
                own = questions[index::processes]
                rollouts, failed = roll_out(self.reader, own, group=1, reward=answer_reward)
                if lasting := [failure for failure in failed if failure.lasting]:
                    raise UsageError(
                        f"the question {lasting[0].sample} of the validation {name} cannot be read: {lasting[0].error}"
                    )
                sums.add(f"validation/{name}", [rollout.reward for rollout in rollouts])
                sums.add("failed", [1.0] * len(failed) + [0.0] * len(rollouts))
        line = sums.means(self.accelerator, [f"validation/{name}" for name in self.validation])
        line["validation_failed"] = sums.means(self.accelerator, ["failed"])["failed"]
        if not line["validation_failed"]:
            line["validation"] = mean(line[f"validation/{name}"] for name in self.validation)
            if self.place.best is None or line["validation"] > self.place.best:
                self.place = replace(self.place, best=line["validation"])
                self._by_one(lambda: self.checkpoints.keep_best(self.place))
        return line

    def _next(self) -> Drawn:
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        number = self._drawn * processes + index
        self._drawn += 1
        return self.draw(number, self.place.step / self.settings.steps)

    def _rows(self, batch: Batch) -> Rows:
        """A row for each conversation; those of advantage 0 count as tokens, and in the divergence from the start."""
        each = zip(batch.rollouts, batch.advantages, strict=True)
        pairs = [(said, worth) for rollout, worth in each for said in rollout.conversations]
        return Rows(conversations=[said for said, _ in pairs], advantages=[worth for _, worth in pairs])

    def _scored(self, rows: Rows, every: Sequence[Any]) -> Rows:
        """The rows with the probabilities that training computes for them, and those of the start."""
        settings, model = self.settings, self.policy.model

        def scored() -> list[Tensor]:
            return scores(model, rows.conversations, every, temperature=settings.temperature, tokens=settings.tokens)

        old = (
            scored() if settings.rescore and settings.updates > 1 else None
        )  # of one update, the forward pass that learns computes them too
        reference = None
        if settings.kl:
            with swapped(model, self.reference):
                reference = scored()
        return replace(rows, old=old, reference=reference)

    def _total(self, count: float) -> float:
        """That of all processes."""
        [total] = metrics.totals(self.accelerator, [count])
        return total

    def _update(self) -> float:
        """One step of the optimizer with the gradients of all processes; their norm."""
        parameters = list(named(self.policy.model).values())
        for parameter in parameters:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.accelerator.reduce(own, reduction="sum")
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        if not torch.isfinite(norm):
            what = f"the gradient of batch {self.place.step + 1} is {norm.item()}"
            raise UsageError(
                f"{what}; the last checkpoint is sound: look at the rewards, or begin anew with a lower learning_rate"
            )
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(norm)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """See that no other training writes into the folder."""
        if not self.accelerator.is_main_process:
            yield
            return
        try:
            with FileLock(self.folder / LOCK, timeout=0):
                yield
        except Timeout:
            raise UsageError(f"another training writes into {str(self.folder)!r}") from None

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Turn running out of memory into an error that names the setting to lower."""
        try:
            yield
        except Exception as error:
            if not out_of_memory(error):
                raise
            release_tensors(error)
            what = f"{self.policy.name} ran out of memory as it learned"
            raise BackendError(
                f"{what}; lower the training's tokens (now {self.settings.tokens:,}), or take gradient_checkpointing"
            ) from error

    def _due(self, every: int) -> bool:
        return self.place.step % every == 0 or self.place.step == self.settings.steps

    def _show(self, batch: Batch) -> None:
        """Save a reading for a person to look at."""
        every, step = self.settings.readings_every, self.place.step + 1
        if every and step % every == 0 and batch.rollouts and self.accelerator.is_main_process:
            folder = self.folder / "readings"
            folder.mkdir(parents=True, exist_ok=True)
            batch.rollouts[0].reading.save(folder / f"step-{step:06d}.json")

    def _by_one(self, write: Callable[[], None]) -> None:
        """One process writes, and the others wait."""
        if self.accelerator.is_main_process:
            write()
        self.accelerator.wait_for_everyone()

    def _publish(self) -> None:
        """Where a server writes replies, give it the weights as they are. One process does; the others are told the name that they have there."""
        names = [self.policy.publish() if self.accelerator.is_main_process else None]
        [self.policy.published] = broadcast_object_list(names)

    def _record(self, line: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            metrics.write(self.folder / "metrics.jsonl", line)
        self.accelerator.log(dict(line), step=int(line["step"]))
