"""Advantages: what each rollout's reward is worth beside the other rollouts of its group."""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(rewards: Tensor, groups: Tensor, *, scale: bool = False) -> Tensor:
    """Return each reward minus the mean of its group; with `scale`, divided by the group's standard deviation.

    Computed per rollout, before rollouts are expanded into conversations: a rollout of many turns counts once. The
    deviation is that of a sample (n - 1). A group whose rewards are all equal has advantages of exactly 0.

    Shapes: rewards (rollouts,); groups (rollouts,), integers that name each rollout's group; result (rollouts,).
    Sources: GRPO (arXiv:2402.03300), equation 3; without the division, MemAgent (arXiv:2507.02259) and Dr. GRPO
    (arXiv:2503.20783).
    """
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    distance: Tensor = rewards - _sums(rewards, group, len(sizes))[group] / sizes[group]
    # Equal rewards may differ from their mean by rounding, and Adam would make a full step of that.
    centred = torch.where(informative(rewards, groups), distance, torch.zeros_like(distance))
    if not scale:
        return centred
    deviation = (_sums(centred**2, group, len(sizes)) / (sizes - 1).clamp(min=1)).sqrt()[group]
    return torch.where(deviation > 0, centred / deviation, centred)


def informative(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return for each rollout whether the rewards of its group differ; other groups carry no signal.

    Shapes: as `advantages`; result (rollouts,), bool. Source: dynamic sampling of DAPO (arXiv:2503.14476), equation 11.
    """
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    least = torch.full((len(sizes),), torch.inf, dtype=rewards.dtype).scatter_reduce(0, group, rewards, "amin")
    most = torch.full((len(sizes),), -torch.inf, dtype=rewards.dtype).scatter_reduce(0, group, rewards, "amax")
    return (most > least)[group]


def overlong(lengths: Tensor, limits: Tensor, buffers: Tensor) -> Tensor:
    """Return the penalty of long replies: 0 up to `limit - buffer` tokens, then falling linearly to -1 at the limit.

    Shapes: all (replies,), in tokens; result (replies,). Source: soft over-long punishment of DAPO (arXiv:2503.14476),
    equation 13.
    """
    return ((limits - buffers - lengths) / buffers).clamp(min=-1.0, max=0.0)


def _sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values.dtype).index_add(0, group, values)
