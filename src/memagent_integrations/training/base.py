"""What every training does: steps in a folder, with metrics, validation, the best policy kept, and exact resuming."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import get_scheduler

from memagent_integrations import files
from memagent_integrations.backends.base import digest
from memagent_integrations.backends.transformers import out_of_memory, release_tensors
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.reader import Reader
from memagent_integrations.training import metrics
from memagent_integrations.training.checkpoints import LOCK, Checkpoints, Progress
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.forward import cannot_share
from memagent_integrations.training.memory import room
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.optimizer import MasterAdamW
from memagent_integrations.training.policy import reserve, start, trainable
from memagent_integrations.training.rollouts import answer_reward, roll_out
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Settings

_log = logging.getLogger(__name__)


def policy_of(reader: Reader) -> Sampler:
    """Return the policy of a reader.

    Raises:
        UsageError: its backend cannot be trained.
    """
    if not isinstance(reader.backend, Sampler):
        raise UsageError(f"training takes a reader whose backend is a Sampler, not {reader.backend!r}")
    return reader.backend


class Training(ABC):
    """Train the policy of a reader, step by step; a subclass says in `batch` what a step is.

    `train` yields the metrics of each step. Another training with the same arguments resumes from what is in `folder`.
    The policy learns in place: a training in another folder needs one that is loaded anew.

    Args:
        reader: how the policy reads: its prompts, its budgets, and a `Sampler` as its backend.
        settings: how many steps, the optimizer, when to evaluate and to save, and what learns.
        folder: for metrics and checkpoints.
        validation: by name, questions that are not in the training data; each is answered greedily every
            `evaluate_every` steps.
        accelerator: the processes, and the trackers begun with `init_trackers`; by default what the process was
            launched with.
        recorded: what else another training must have in common with this one to resume, in JSON.

    Raises:
        UsageError: a setting is wrong, the policy is on another device or was trained elsewhere, or the folder holds a
            training with other settings, or other files.
    """

    def __init__(
        self,
        reader: Reader,
        settings: Settings,
        folder: str | Path,
        *,
        validation: Mapping[str, Sequence[Drawn]] | None,
        accelerator: Accelerator | None,
        recorded: Mapping[str, Any],
    ) -> None:
        self.reader, self.policy, self.settings, self.folder = reader, policy_of(reader), settings, Path(folder)
        self.accelerator = accelerator or Accelerator(cpu=self.policy.model.device.type == "cpu")
        self.validation = dict(validation or {})
        self._check()
        reserve(self.policy, self.folder)
        start(self.policy, settings)
        self._set_sharing()
        self._set_tokens()
        self.optimizer = MasterAdamW(
            trainable(self.policy.model).values(),
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        updates = settings.steps * settings.updates
        self.scheduler = get_scheduler(
            settings.schedule, self.optimizer, num_warmup_steps=settings.warmup, num_training_steps=updates
        )
        self.checkpoints = Checkpoints(
            folder=self.folder,
            fingerprint=self._fingerprint(recorded),
            model=self.policy.model,
            stateful={"optimizer": self.optimizer, "scheduler": self.scheduler},
        )
        with self.accelerator.main_process_first():
            start_weights = self.checkpoints.start()
        self.reference = start_weights if settings.kl else {}
        self.progress = self.checkpoints.resume() or Progress(positions=(0,) * self.accelerator.num_processes)
        self._in_batch = False

    @abstractmethod
    def batch(self) -> dict[str, float]:
        """Do one step, and return its metrics."""

    def train(self) -> Iterator[dict[str, float]]:
        """Do the steps that are left, and yield the metrics of each when its checkpoint is written.

        docs/training.md explains the metrics; times are in seconds, log-probabilities in nats.

        Raises:
            BackendError: no rollout of a batch succeeded, or the memory does not suffice.
            UsageError: a reward or a gradient is not finite, the folder cannot be written, or a step of this trainer
                was interrupted.
        """
        with self._exclusive():
            yield from self._steps()

    def _steps(self) -> Iterator[dict[str, float]]:
        settings = self.settings
        if self._in_batch:
            problem = "a batch of this trainer was interrupted"
            raise UsageError(f"{problem}: make a new {type(self).__name__}, which goes on from the last checkpoint")
        if self.accelerator.is_main_process:
            metrics.rewind(self.folder / "metrics.jsonl", self.progress.step)
        if not self.progress.step and settings.evaluate_every and self.validation:
            self._record({"step": 0} | self.evaluate())
        while self.progress.step < settings.steps:
            self._in_batch = True
            line = {"step": self.progress.step + 1} | self.batch()
            self._in_batch = False
            self.progress = replace(self.progress, step=self.progress.step + 1)
            if settings.evaluate_every and self.validation and self._due(settings.evaluate_every):
                line |= self.evaluate()
            self._record(line)
            if self._due(settings.save_every):
                self._on_main_process(lambda: self.checkpoints.save(self.progress, keep=settings.keep))
            yield line

    def evaluate(self) -> dict[str, float]:
        """Answer the validation questions greedily, and keep the policy if none before it was better.

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
            if self.progress.best is None or line["validation"] >= self.progress.best:
                self.progress = replace(self.progress, best=line["validation"])
                self._on_main_process(lambda: self.checkpoints.keep_best(self.progress))
        return line

    def _check(self) -> None:
        """Check that the arguments fit together, before anything is changed or written.

        Raises:
            UsageError: they do not.
        """
        has, needs = self.policy.model.device, self.accelerator.device
        if (has.type, has.index or 0) != (needs.type, needs.index or 0):
            raise UsageError(
                f"the policy is on {has}, and this process trains on {needs}: load it with device='{needs}'"
            )
        if empty := [name for name, questions in self.validation.items() if not questions]:
            raise UsageError(f"the validation set {empty[0]} has no questions")

    def _set_sharing(self) -> None:
        """Compute common prefixes once if the settings say so and the model can."""
        reason = cannot_share(self.policy.model) if self.settings.share else None
        if reason:
            problem = "every row is computed whole, as this model cannot share what rows begin with"
            _log.warning("%s: %s", problem, reason)
        self.policy.share = self.settings.share and not reason

    def _set_tokens(self) -> None:
        """Find out how much fits into the memory, and compute that much at once unless the settings say otherwise."""
        settings = self.settings
        self._room = room(
            self.policy.model,
            gradient_checkpointing=settings.gradient_checkpointing,
            processes=self.accelerator.num_processes,
        )
        self.settings = replace(settings, tokens=settings.tokens or self._room.tokens)

    def _fingerprint(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return everything that another training has to have in common with this one to resume."""
        return {
            **recorded,
            "processes": self.accelerator.num_processes,
            "weights": self.policy.loaded,
            "budgets": asdict(self.reader.budgets),
            "prompts": digest(f"{self.reader.prompts}"),
        }

    def _update(self) -> float:
        """Do one optimizer step with the summed gradients of all processes, and return their norm.

        Raises:
            UsageError: the norm is not finite; the weights are unchanged.
        """
        masters = self.optimizer.masters
        for weights in masters:
            gradient = torch.zeros_like(weights) if weights.grad is None else weights.grad
            weights.grad = self.accelerator.reduce(gradient, reduction="sum")
        norm = torch.nn.utils.clip_grad_norm_(masters, self.settings.max_grad_norm)
        if not torch.isfinite(norm):
            problem = f"the gradient of batch {self.progress.step + 1} is {norm.item()}; the last checkpoint is sound"
            raise UsageError(f"{problem}: look at the data and the rewards, or begin anew with a lower learning_rate")
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(norm)

    @contextmanager
    def _advise_on_memory(self, rows: Sequence[Sampled]) -> Iterator[None]:
        """Turn running out of memory, as these rows learn in the block, into an error that names the setting to lower.

        Raises:
            UsageError: a row cannot fit into the memory.
            BackendError: the memory did not suffice.
        """
        self._room.check(rows)
        try:
            yield
        except Exception as error:
            if not out_of_memory(error):
                raise
            release_tensors(error)
            problem = f"{self.policy.name} ran out of memory as it learned"
            advice = f"lower the training's tokens (now {self.settings.tokens:,}), or take gradient_checkpointing"
            raise BackendError(f"{problem}; {advice}") from error

    def _exclusive(self) -> AbstractContextManager[None]:
        """Return a lock on the folder, held by the main process.

        Raises:
            UsageError: another training holds it.
        """
        if not self.accelerator.is_main_process:
            return nullcontext()
        busy = UsageError(f"another training writes into {str(self.folder)!r}")
        return files.lock(self.folder / LOCK, busy)

    def _due(self, every: int) -> bool:
        return self.progress.step % every == 0 or self.progress.step == self.settings.steps

    def _on_main_process(self, action: Callable[[], None]) -> None:
        """Call `action` in the main process; the others wait for it."""
        if self.accelerator.is_main_process:
            action()
        self.accelerator.wait_for_everyone()

    def _publish(self) -> None:
        """Publish the current weights from the main process, and tell all processes their name on the server."""
        names = [self.policy.publish() if self.accelerator.is_main_process else None]
        [self.policy.published] = broadcast_object_list(names)

    def _record(self, line: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            metrics.write(self.folder / "metrics.jsonl", line)
        self.accelerator.log(dict(line), step=int(line["step"]))
