"""Multi-conversation DAPO on one machine: read, reward, compare, learn.

In a batch the policy reads every question several times (`rollouts`). The advantage of a reading is its reward compared
with the other readings of its question (`advantages`). All conversations of the reading, its memory updates and its
answer, learn from that number (`learning`). Source: MemAgent, arXiv:2507.02259.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from memagent_integrations.backends.prefixes import Bundle
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.reader import Reader
from memagent_integrations.training import metrics
from memagent_integrations.training.base import Training
from memagent_integrations.training.batches import deal
from memagent_integrations.training.forward import scores
from memagent_integrations.training.groups import compared, describe
from memagent_integrations.training.learning import Rows, backward
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.policy import recomputing, swapped
from memagent_integrations.training.rollouts import Failure, Reward, Rollout, answer_reward, roll_out
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


class Trainer(Training):
    """Train the policy of a reader by the rewards of its own readings; `train` yields the metrics of each batch.

    Another trainer with the same arguments resumes from what is in `folder`. The policy learns in place: a training in
    another folder needs one that is loaded anew.

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
        self.draw, self.reward = draw, reward
        super().__init__(
            reader,
            settings,
            folder,
            validation=validation,
            accelerator=accelerator,
            recorded=asdict(settings) | {"origin": dict(origin or {})},
        )
        self._drawn = self.progress.positions[self.accelerator.process_index]

    def _check(self) -> None:
        super()._check()
        has, says, processes = self.policy.temperature, self.settings.temperature, self.accelerator.num_processes
        if has != says:
            raise UsageError(f"the policy samples with the temperature {has}, the settings say {says}")
        if (questions := self.settings.questions) % processes:
            raise UsageError(f"questions ({questions}) has to be a multiple of the processes ({processes})")

    def batch(self) -> dict[str, float]:
        """Do one batch (read, reward, compare, learn), and return its metrics."""
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
        positions = self.accelerator.gather(torch.tensor([self._drawn], device=self.accelerator.device)).tolist()
        self.progress = replace(self.progress, positions=tuple(positions))
        line = sums.means(self.accelerator, _BATCH_MEANS)
        tokens = line.pop("tokens", 0.0) * self.accelerator.num_processes
        return line | {
            "learning_rate": learning_rate,
            "gradient_norm": sum(norms) / max(len(norms), 1),
            "updates": len(norms),
            "rollout_seconds": collected - began,
            "learn_seconds": learned - collected,
            "tokens_per_second": tokens / (learned - began),
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
        with self._advise_on_memory(rows.conversations):
            rows = self._scored(rows, bundles)
            for part in parts if tokens_per_update else ():
                with recomputing(model):
                    backward(model, rows, part, settings, tokens=tokens_per_update, sums=sums, moved=bool(norms))
                norms.append(self._update())
        return norms

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

    def _save_reading(self, batch: Batch) -> None:
        """Save a reading for a person to look at, every `readings_every` batches."""
        every, step = self.settings.readings_every, self.progress.step + 1
        if every and step % every == 0 and batch.rollouts and self.accelerator.is_main_process:
            folder = self.folder / "readings"
            folder.mkdir(parents=True, exist_ok=True)
            batch.rollouts[0].reading.save(folder / f"step-{step:06d}.json")


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
