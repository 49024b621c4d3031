"""The rollouts of a batch: what each is worth beside the others of its question, and what they show of the policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memagent_integrations.training.advantages import advantages, informative
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.rollouts import Rollout, too_long
from memagent_integrations.training.settings import Settings


def compared(rollouts: Sequence[Rollout], settings: Settings, sums: Sums) -> tuple[list[Rollout], list[float]]:
    """The rollouts that are learned from, and the advantage of each; with dynamic sampling those of groups that teach nothing are left out."""
    scored = torch.tensor([rollout.reward for rollout in rollouts])
    rewards = torch.tensor(
        [rollout.reward + (too_long(rollout, settings.overlong) if settings.overlong else 0.0) for rollout in rollouts]
    )
    groups = torch.tensor([rollout.group for rollout in rollouts])
    differ = informative(rewards, groups)
    worth = advantages(rewards, groups, scale=settings.scale)
    for number in sorted(set(groups.tolist())):
        own = scored[groups == number]
        sums.add("reward_deviation", [float(own.std(correction=0))])
        sums.add("collapsed", [float(not differ[groups == number].any())])
    sums.add("reward", scored)
    chosen = [number for number in range(len(rollouts)) if differ[number] or not settings.dynamic]
    return [rollouts[number] for number in chosen], [float(worth[number]) for number in chosen]


def describe(rollouts: Sequence[Rollout], sums: Sums) -> None:
    """What the policy does: how much it writes, and how often a memory is kept or cut."""
    for rollout in rollouts:
        for step in rollout.reading.steps:
            sums.add(
                "answer_tokens" if step.phase == "answer" else "memory_tokens",
                [float(step.reply.usage.completion_tokens or 0)],
            )
            if step.phase == "memory":
                sums.add("kept", [float(step.outcome == "kept")])
                sums.add("cut", [float(step.cut)])
        sums.add("steps_a_rollout", [float(len(rollout.reading.steps))])
