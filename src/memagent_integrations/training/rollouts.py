"""Rollouts: a question read several times by the policy, and what each reading is worth."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memagent_integrations.errors import ContextOverflow, MemAgentError, UsageError
from memagent_integrations.prompts import last_boxed
from memagent_integrations.reader import Reader
from memagent_integrations.records import Reading
from memagent_integrations.training.advantages import overlong
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.mixture import Drawn

Reward = Callable[[Reading, Drawn], float]
"""From a reading and what was asked to a number; a reading without an answer has `answer` None."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One reading of question number `group` of those that were asked together, and its reward."""

    group: int
    reading: Reading
    reward: float

    @property
    def conversations(self) -> tuple[Sampled, ...]:
        """The calls of the policy, one a memory update and one for the answer."""
        return tuple(step.reply for step in self.reading.steps if isinstance(step.reply, Sampled))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A reading of question number `group` that says nothing of the policy: a call failed, or the question cannot be read."""

    group: int
    sample: str
    error: MemAgentError

    @property
    def lasting(self) -> bool:
        """Whether the question will fail again: it is too long, its document is empty, the window is too small."""
        return isinstance(self.error, UsageError | ContextOverflow)


def roll_out(
    reader: Reader, asked: Sequence[Drawn], *, group: int, reward: Reward, format_reward: float = 0.0
) -> tuple[list[Rollout], list[Failure]]:
    """Every question read `group` times side by side, by the loop that reads; then the readings that failed.

    An answer in the prescribed form gets `format_reward` beside its reward.

    A policy that writes nonsense has failed at its task: that is a rollout. A reading failed where a call did: it says nothing of the policy.

    Raises:
        UsageError: the reward is no finite number.
    """
    jobs, whose = [], []
    for number, drawn in enumerate(asked):
        text = drawn.sample.document()  # one object: it is cut into chunks once for the group
        jobs += [(drawn.sample.question, text)] * group
        whose += [number] * group
    rollouts: list[Rollout] = []
    failed: list[Failure] = []
    for number, reading in zip(whose, reader.read_many(jobs), strict=True):
        if reading.error and (not reading.steps or reading.steps[-1].phase != "answer"):
            failed.append(Failure(group=number, sample=asked[number].sample.id, error=reading.error))
        else:
            worth = _number(reward(reading, asked[number])) + format_reward * _in_form(reading)
            rollouts.append(Rollout(group=number, reading=reading, reward=worth))
    return rollouts, failed


def answer_reward(reading: Reading, drawn: Drawn) -> float:
    """The score of the answer by the metric of its task (`evaluation.scoring`), from 0.0 to 1.0."""
    return 0.0 if reading.answer is None else drawn.task.score(reading.answer, drawn.sample)


def _number(worth: object) -> float:
    try:
        number = float(worth)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"a reward has to be a finite number, not {worth!r}")
    return number


def _in_form(reading: Reading) -> bool:
    r"""Whether the answer stands in a \boxed{}."""
    return bool(reading.steps) and last_boxed(reading.steps[-1].reply.text) is not None


def too_long(rollout: Rollout, buffer: int) -> float:
    """What a rollout loses because its replies are long: the mean over its conversations, from -1 to 0 however many there are."""
    steps, budgets = rollout.reading.steps, rollout.reading.budgets
    lengths = torch.tensor([float(step.reply.usage.completion_tokens or 0) for step in steps])
    limits = torch.tensor([float(budgets.output(step.phase)) for step in steps])
    return float(overlong(lengths, limits, limits.clamp(max=buffer)).mean())


def load_reward(name: str) -> Reward:
    """The reward of a dotted name, "package.module:function".

    Raises:
        UsageError: there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"the reward {name!r} has to be package.module:function ({error})") from error
    if not callable(found):
        raise UsageError(f"the reward {name!r} is no function")
    reward: Reward = found
    return reward
