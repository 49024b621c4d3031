"""Rollouts: each question read several times by the policy, and the reward of each reading."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from memagent_integrations.errors import ContextOverflow, MemAgentError, UsageError
from memagent_integrations.prompts import last_boxed
from memagent_integrations.reader import Reader
from memagent_integrations.records import Reading
from memagent_integrations.training.advantages import overlong
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.mixture import Drawn

Reward = Callable[[Reading, Drawn], float]
"""The reward of a reading of a question; a reading without an answer has `answer` None."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A reading and its reward; `group` is the index of its question in the call of `roll_out`."""

    group: int
    reading: Reading
    reward: float

    @property
    def conversations(self) -> tuple[Sampled, ...]:
        """The calls of the policy: one per memory update, and one for the answer."""
        return tuple(step.reply for step in self.reading.steps if isinstance(step.reply, Sampled))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A reading that measures nothing of the policy, because a call failed or the question cannot be read.

    `group` is as of `Rollout`, `sample` the id of the question.
    """

    group: int
    sample: str
    error: MemAgentError

    @property
    def lasting(self) -> bool:
        """Whether the question would fail again: it is too long, its document is empty, the window is too small."""
        return isinstance(self.error, UsageError | ContextOverflow)


def roll_out(
    reader: Reader, questions: Sequence[Drawn], *, group: int, reward: Reward, format_reward: float = 0.0
) -> tuple[list[Rollout], list[Failure]]:
    """Read every question `group` times, side by side, and return the rollouts and the failures.

    A reading failed where a call failed. Nonsense written by the policy is a rollout, and so is an empty memory, which
    is not asked for again. An answer in the prescribed form gets `format_reward` on top of its reward.

    Raises:
        UsageError: a reward is no finite number.
    """
    jobs, groups = [], []
    for number, drawn in enumerate(questions):
        text = drawn.sample.document()  # one object for the group, which `read_many` chunks once
        jobs += [(drawn.sample.question, text)] * group
        groups += [number] * group
    reader = reader.changed(on_lost_section="skip", limits=replace(reader.calls.limits, empty_retries=0))
    rollouts: list[Rollout] = []
    failures: list[Failure] = []
    for number, reading in zip(groups, reader.read_many(jobs), strict=True):
        if reading.error and not (reading.steps and reading.steps[-1].is_answer):
            failures.append(Failure(group=number, sample=questions[number].sample.id, error=reading.error))
        else:
            total = _finite(reward(reading, questions[number])) + format_reward * _in_form(reading)
            rollouts.append(Rollout(group=number, reading=reading, reward=total))
    return rollouts, failures


def answer_reward(reading: Reading, drawn: Drawn) -> float:
    """Return the score of the answer by the metric of its task (`evaluation.scoring`), from 0.0 to 1.0."""
    return drawn.score(reading)


def _finite(reward: object) -> float:
    try:
        number = float(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"a reward has to be a finite number, not {reward!r}")
    return number


def _in_form(reading: Reading) -> bool:
    r"""Return whether the answer has a \boxed{}."""
    return bool(reading.steps) and last_boxed(reading.steps[-1].reply.text) is not None


def overlong_penalty(rollout: Rollout, buffer: int) -> float:
    """Return the over-long penalty of a rollout, from -1 to 0: the mean of `overlong` over its conversations."""
    steps, budgets = rollout.reading.steps, rollout.reading.budgets
    lengths = torch.tensor([float(step.reply.usage.completion_tokens or 0) for step in steps])
    limits = torch.tensor([float(budgets.output(step.phase)) for step in steps])
    return float(overlong(lengths, limits, limits.clamp(max=buffer)).mean())


def load_reward(name: str) -> Reward:
    """Import the reward function "package.module:function".

    Raises:
        UsageError: there is no such function.
    """
    module, _, attribute = name.partition(":")
    try:
        reward: Reward = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"the reward {name!r} has to be package.module:function ({error})") from error
    if not callable(reward):
        raise UsageError(f"the reward {name!r} is no function")
    return reward
