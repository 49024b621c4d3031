"""Compare the rollouts of a batch within their groups, and describe what the policy does in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memagent_integrations.training.advantages import advantages, informative
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.rollouts import Rollout, overlong_penalty
from memagent_integrations.training.settings import Settings


def compared(rollouts: Sequence[Rollout], settings: Settings, sums: Sums) -> tuple[list[Rollout], list[float]]:
    """Return the rollouts to learn from and the advantage of each.

    With dynamic sampling the rollouts of groups whose rewards are all equal are left out.
    """
    scored = torch.tensor([rollout.reward for rollout in rollouts])
    penalties = [overlong_penalty(rollout, settings.overlong) if settings.overlong else 0.0 for rollout in rollouts]
    rewards = torch.tensor([rollout.reward + penalty for rollout, penalty in zip(rollouts, penalties, strict=True)])
    groups = torch.tensor([rollout.group for rollout in rollouts])
    differ = informative(rewards, groups)
    each = advantages(rewards, groups, scale=settings.scale)
    for number in sorted(set(groups.tolist())):
        sums.add("reward_deviation", [float(scored[groups == number].std(correction=0))])
        sums.add("collapsed", [float(not differ[groups == number].any())])
    sums.add("reward", scored)
    chosen = [number for number in range(len(rollouts)) if differ[number] or not settings.dynamic]
    return [rollouts[number] for number in chosen], [float(each[number]) for number in chosen]


def describe(rollouts: Sequence[Rollout], sums: Sums) -> None:
    """Add up how much the policy writes, and how often a memory is kept or cut."""
    for rollout in rollouts:
        for step in rollout.reading.steps:
            name = "answer_tokens" if step.phase == "answer" else "memory_tokens"
            sums.add(name, [float(step.reply.usage.completion_tokens or 0)])
            if step.phase == "memory":
                sums.add("kept", [float(step.outcome == "kept")])
                sums.add("cut", [float(step.cut)])
        sums.add("steps_a_rollout", [float(len(rollout.reading.steps))])
