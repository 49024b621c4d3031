"""Multi-conversation DAPO on one machine: read, reward, compare, learn.

In a batch the policy reads every question several times (`rollouts`). The advantage of a reading is its reward compared
with the other readings of its question (`advantages`). All conversations of the reading, its memory updates and its
answer, learn from that number (`learning`). Source: MemAgent, arXiv:2507.02259.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import get_scheduler

from memagent_integrations import files
from memagent_integrations.backends.base import digest
from memagent_integrations.backends.transformers import out_of_memory, release_tensors
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.reader import Reader
from memagent_integrations.training import metrics
from memagent_integrations.training.batches import deal
from memagent_integrations.training.checkpoints import LOCK, Checkpoints, Progress
from memagent_integrations.training.forward import cannot_share, scores
from memagent_integrations.training.groups import compared, describe
from memagent_integrations.training.learning import Rows, backward
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.policy import recomputing, reserve, start, swapped, trainable
from memagent_integrations.training.prefixes import Bundle
from memagent_integrations.training.rollouts import Failure, Reward, Rollout, answer_reward, roll_out
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Settings

_log = logging.getLogger(__name__)

Draw = Callable[[int, float], Drawn]
"""Return question number n of the training data at a share of the run (0.0 its beginning, 1.0 its end).

The same number and share have to give the same question."""

_BATCH_MEANS = (
    "reward",
    "reward_deviation",
    "collapsed",
    "failed",
    "steps_a_rollout",
    "answer_tokens",
    "memory_tokens",
    "kept",
    "cut",
    "loss",
    "clipped",
    "kl",
    "entropy",
    "gap",
    "shared",
    "tokens",
)


@dataclass(kw_only=True)
class Batch:
    """The rollouts of this process for one batch, and the advantage of each."""

    rollouts: list[Rollout] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)


class Trainer:
    """Train the policy of a reader.

    `train` yields the metrics of each batch. Another trainer with the same arguments resumes from what is in `folder`.
    The policy learns in place: a training in another folder needs one that is loaded anew.

    Args:
        reader: how the policy reads: its prompts, its budgets, and a `Sampler` as its backend.
        draw: the training data.
        settings: see `Settings`.
        folder: for metrics, checkpoints and saved readings.
        validation: by name, questions that are not in the training data; each is answered greedily every
            `evaluate_every` batches.
        reward: the reward of a reading; by default the score of its answer.
        accelerator: the processes, which share the questions of a batch, and the trackers begun with `init_trackers`;
            by default what the process was launched with.
        origin: what `draw`, `reward` and `validation` were made of, in JSON: with another origin a training does not
            resume.

    Raises:
        UsageError: a setting is wrong, the policy is on another device or was trained elsewhere, or the folder holds a
            training with other settings, or other files.
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
        self._check()
        reserve(self.policy, self.folder)
        start(self.policy, settings)
        parameters = list(trainable(self.policy.model).values())
        self.optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        updates = settings.steps * settings.updates
        self.scheduler = get_scheduler(
            settings.schedule, self.optimizer, num_warmup_steps=settings.warmup, num_training_steps=updates
        )
        self._set_sharing()
        self.checkpoints = Checkpoints(
            folder=self.folder,
            fingerprint=self._fingerprint(origin or {}),
            model=self.policy.model,
            stateful={"optimizer": self.optimizer, "scheduler": self.scheduler},
        )
        with self.accelerator.main_process_first():
            start_weights = self.checkpoints.start()
        self.reference = start_weights if settings.kl else {}
        self.progress = self.checkpoints.resume() or Progress(positions=(0,) * self.accelerator.num_processes)
        self._drawn = self.progress.positions[self.accelerator.process_index]
        self._in_batch = False

    def _check(self) -> None:
        """Check that the arguments fit together, before anything is changed or written.

        Raises:
            UsageError: they do not.
        """
        policy, settings, processes = self.policy, self.settings, self.accelerator.num_processes
        if policy.temperature != settings.temperature:
            raise UsageError(
                f"the policy samples with the temperature {policy.temperature}, the settings say {settings.temperature}"
            )
        has, needs = policy.model.device, self.accelerator.device
        if (has.type, has.index or 0) != (needs.type, needs.index or 0):
            raise UsageError(
                f"the policy is on {has}, and this process trains on {needs}: load it with device='{needs}'"
            )
        if empty := [name for name, questions in self.validation.items() if not questions]:
            raise UsageError(f"the validation set {empty[0]} has no questions")
        if settings.questions % processes:
            raise UsageError(f"questions ({settings.questions}) has to be a multiple of the processes ({processes})")

    def _set_sharing(self) -> None:
        """Compute common prefixes once if the settings say so and the model can."""
        reason = cannot_share(self.policy.model) if self.settings.share else None
        if reason:
            problem = "every rollout is computed whole, as this model cannot share what rollouts begin with"
            _log.warning("%s: %s", problem, reason)
        self.policy.share = self.settings.share and not reason

    def _fingerprint(self, origin: Mapping[str, Any]) -> dict[str, Any]:
        """Return everything that another trainer has to have in common with this one to resume."""
        return asdict(self.settings) | {
            "processes": self.accelerator.num_processes,
            "weights": self.policy.loaded,
            "budgets": asdict(self.reader.budgets),
            "prompts": digest(f"{self.reader.prompts}"),
            "origin": dict(origin),
        }

    def train(self) -> Iterator[dict[str, float]]:
        """Do the batches that are left, and yield the metrics of each when its checkpoint is written.

        docs/training.md explains the metrics; times are in seconds, log-probabilities in nats.

        Raises:
            BackendError: no rollout of a batch succeeded, or the memory does not suffice.
            UsageError: a reward or a gradient is not finite, or the folder cannot be written.
        """
        with self._exclusive():
            yield from self._batches()

    def _batches(self) -> Iterator[dict[str, float]]:
        settings = self.settings
        if self.accelerator.is_main_process:
            metrics.rewind(self.folder / "metrics.jsonl", self.progress.step)
        if not self.progress.step and settings.evaluate_every and self.validation:
            self._record({"step": 0} | self.evaluate())
        while self.progress.step < settings.steps:
            line = {"step": self.progress.step + 1} | self.batch()
            positions = self.accelerator.gather(torch.tensor([self._drawn], device=self.accelerator.device)).tolist()
            self.progress = replace(self.progress, step=self.progress.step + 1, positions=tuple(positions))
            if settings.evaluate_every and self.validation and self._due(settings.evaluate_every):
                line |= self.evaluate()
            self._record(line)
            if self._due(settings.save_every):
                self._on_main_process(lambda: self.checkpoints.save(self.progress, keep=settings.keep))
            yield line

    def batch(self) -> dict[str, float]:
        """Do one batch (read, reward, compare, learn), and return its metrics.

        Raises:
            UsageError: the batch before it was interrupted; or as `train`.
        """
        if self._in_batch:
            problem = "a batch of this trainer was interrupted"
            raise UsageError(f"{problem}: make a new Trainer, which goes on from the last checkpoint")
        self._in_batch = True
        seed = f"{self.settings.seed}/{self.progress.step}/{self.accelerator.process_index}"
        torch.manual_seed(random.Random(seed).getrandbits(63))
        sums, began = Sums(), time.perf_counter()
        self._publish()
        batch = self.collect(sums)
        self._save_reading(batch)
        collected = time.perf_counter()
        learning_rate = float(self.scheduler.get_last_lr()[0])  # of the first update
        norms = self.learn(batch, sums)
        learned = time.perf_counter()
        self._in_batch = False
        line = sums.means(self.accelerator, _BATCH_MEANS)
        tokens = line.pop("tokens", 0.0) * self.accelerator.num_processes
        return line | {
            "learning_rate": learning_rate,
            "gradient_norm": sum(norms) / max(len(norms), 1),
            "updates": len(norms),
            "rollout_seconds": collected - began,
            "learn_seconds": learned - collected,
            "tokens_a_second": tokens / (learned - began),
        }

    def collect(self, sums: Sums) -> Batch:
        """Return the rollouts of a batch with their advantages.

        With dynamic sampling, groups whose rewards are all equal are replaced. A question that can never be read is
        left out with a warning, and another one is drawn in its place.
        """
        settings, batch = self.settings, Batch()
        wanted = settings.questions // self.accelerator.num_processes
        failures: list[Failure] = []
        groups = succeeded = 0
        for _ in range(1 + settings.refills):
            questions = [self._next_question() for _ in range(wanted - groups)]
            rollouts, failed = roll_out(
                self.reader,
                questions,
                group=settings.group,
                reward=self.reward,
                format_reward=settings.format_reward,
            )
            failures += failed
            describe(rollouts, sums)
            kept, advantages = compared(rollouts, settings, sums) if rollouts else ([], [])
            batch.rollouts += kept
            batch.advantages += advantages
            sums.add("failed", [1.0] * len(failed) + [0.0] * len(rollouts))
            succeeded += len(rollouts)
            unreadable = {failure.group: failure for failure in failed if failure.lasting}
            for failure in unreadable.values():
                _log.warning("the question %s is left out: %s", failure.sample, failure.error)
            groups += len({rollout.group for rollout in kept}) if settings.dynamic else len(questions) - len(unreadable)
            if groups == wanted:
                break
        if not self._total(succeeded):
            raise failures[0].error if failures else BackendError("no rollout of the batch came to an end")
        return batch

    def learn(self, batch: Batch, sums: Sums) -> list[float]:
        """Do the optimizer steps of a batch, and return the gradient norm of each."""
        settings, model = self.settings, self.policy.model
        rows = _rows(batch)
        parts = deal(rows.conversations, settings.updates, share=self.policy.share)
        bundles = [bundle for part in parts for bundle in part]
        prompt_tokens = sum(len(row.prompt_ids) for row in rows.conversations)
        output_tokens = sum(len(row.output_ids) for row in rows.conversations)
        sums.add("shared", [float(sum(bundle.saved() for bundle in bundles))], prompt_tokens)
        sums.add("tokens", [float(prompt_tokens + output_tokens)])
        tokens_per_update = self._total(output_tokens) / settings.updates
        norms: list[float] = []
        with self._advise_on_memory():
            rows = self._scored(rows, bundles)
            for part in parts if tokens_per_update else ():
                with recomputing(model):
                    backward(model, rows, part, settings, tokens=tokens_per_update, sums=sums, moved=bool(norms))
                norms.append(self._update())
        return norms

    def evaluate(self) -> dict[str, float]:
        """Answer the validation questions greedily, and keep the policy if it is the best so far.

        Returns "validation/NAME", the mean score of each validation set, "validation", the mean of these, and
        "validation_failed", the share of failed readings. If any failed there is no "validation".

        Raises:
            UsageError: a question can never be read.
        """
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        sums = Sums()
        self._publish()
        with self.policy.greedy():
            for name, questions in self.validation.items():
                rollouts, failed = roll_out(self.reader, questions[index::processes], group=1, reward=answer_reward)
                if unreadable := [failure for failure in failed if failure.lasting]:
                    question = f"the question {unreadable[0].sample} of the validation {name}"
                    raise UsageError(f"{question} cannot be read: {unreadable[0].error}")
                sums.add(f"validation/{name}", [rollout.reward for rollout in rollouts])
                sums.add("failed", [1.0] * len(failed) + [0.0] * len(rollouts))
        line = sums.means(self.accelerator, [f"validation/{name}" for name in self.validation])
        line["validation_failed"] = sums.means(self.accelerator, ["failed"])["failed"]
        if not line["validation_failed"]:
            line["validation"] = mean(line[f"validation/{name}"] for name in self.validation)
            if self.progress.best is None or line["validation"] > self.progress.best:
                self.progress = replace(self.progress, best=line["validation"])
                self._on_main_process(lambda: self.checkpoints.keep_best(self.progress))
        return line

    def _next_question(self) -> Drawn:
        number = self._drawn * self.accelerator.num_processes + self.accelerator.process_index
        self._drawn += 1
        return self.draw(number, self.progress.step / self.settings.steps)

    def _scored(self, rows: Rows, bundles: Sequence[Bundle]) -> Rows:
        """Return the rows with their log-probabilities under the policy as it is now and under the start policy."""
        settings, model = self.settings, self.policy.model

        def score() -> list[Tensor]:
            return scores(model, rows.conversations, bundles, temperature=settings.temperature, tokens=settings.tokens)

        # With one update per batch, the forward pass that learns computes the same log-probabilities.
        old = score() if settings.rescore and settings.updates > 1 else None
        reference = None
        if settings.kl:
            with swapped(model, self.reference):
                reference = score()
        return replace(rows, old=old, reference=reference)

    def _total(self, count: float) -> float:
        """Return the sum of a number over all processes."""
        [total] = metrics.totals(self.accelerator, [count])
        return total

    def _update(self) -> float:
        """Do one optimizer step with the summed gradients of all processes, and return their norm.

        Raises:
            UsageError: the norm is not finite; the weights are unchanged.
        """
        parameters = list(trainable(self.policy.model).values())
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.accelerator.reduce(gradient, reduction="sum")
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        if not torch.isfinite(norm):
            problem = f"the gradient of batch {self.progress.step + 1} is {norm.item()}; the last checkpoint is sound"
            raise UsageError(f"{problem}: look at the rewards, or begin anew with a lower learning_rate")
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _exclusive(self) -> AbstractContextManager[None]:
        """Return a lock on the folder, held by the main process.

        Raises:
            UsageError: another training holds it.
        """
        if not self.accelerator.is_main_process:
            return nullcontext()
        busy = UsageError(f"another training writes into {str(self.folder)!r}")
        return files.lock(self.folder / LOCK, busy)

    @contextmanager
    def _advise_on_memory(self) -> Iterator[None]:
        """Turn running out of memory into an error that names the setting to lower."""
        try:
            yield
        except Exception as error:
            if not out_of_memory(error):
                raise
            release_tensors(error)
            problem = f"{self.policy.name} ran out of memory as it learned"
            advice = f"lower the training's tokens (now {self.settings.tokens:,}), or take gradient_checkpointing"
            raise BackendError(f"{problem}; {advice}") from error

    def _due(self, every: int) -> bool:
        return self.progress.step % every == 0 or self.progress.step == self.settings.steps

    def _save_reading(self, batch: Batch) -> None:
        """Save a reading for a person to look at, every `readings_every` batches."""
        every, step = self.settings.readings_every, self.progress.step + 1
        if every and step % every == 0 and batch.rollouts and self.accelerator.is_main_process:
            folder = self.folder / "readings"
            folder.mkdir(parents=True, exist_ok=True)
            batch.rollouts[0].reading.save(folder / f"step-{step:06d}.json")

    def _on_main_process(self, action: Callable[[], None]) -> None:
        """Call `action` in the main process; the others wait for it."""
        if self.accelerator.is_main_process:
            action()
        self.accelerator.wait_for_everyone()

    def _publish(self) -> None:
        """Publish the current weights from the main process, and send their name on the server to all processes."""
        names = [self.policy.publish() if self.accelerator.is_main_process else None]
        [self.policy.published] = broadcast_object_list(names)

    def _record(self, line: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            metrics.write(self.folder / "metrics.jsonl", line)
        self.accelerator.log(dict(line), step=int(line["step"]))


def _rows(batch: Batch) -> Rows:
    """Return a row per conversation; those of advantage 0 still count as tokens, and in the divergence."""
    pairs = [
        (conversation, advantage)
        for rollout, advantage in zip(batch.rollouts, batch.advantages, strict=True)
        for conversation in rollout.conversations
    ]
    return Rows(
        conversations=[conversation for conversation, _ in pairs], advantages=[advantage for _, advantage in pairs]
    )
