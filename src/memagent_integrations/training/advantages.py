"""From the rewards of rollouts to what each of them is worth beside the others of its group."""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(rewards: Tensor, groups: Tensor, *, scale: bool = False) -> Tensor:
    """By how much each rollout did better than the mean of its group; with `scale`, in standard deviations of the group.

    Shapes: rewards (rollouts,), groups (rollouts,) whole numbers that name the group of each; result (rollouts,). The deviation is that of a
    sample (n - 1), and a group whose rewards are all equal has advantages of 0. Taken before rollouts are spread over their conversations: a rollout
    of many turns counts once. Sources: GRPO (arXiv:2402.03300), equation 3; without the division, as MemAgent (arXiv:2507.02259) and Dr. GRPO
    (arXiv:2503.20783).
    """
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    apart: Tensor = rewards - _sums(rewards, group, len(sizes))[group] / sizes[group]
    centred = torch.where(
        informative(rewards, groups), apart, torch.zeros_like(apart)
    )  # equal ones are an ulp apart, which Adam makes a step of
    if not scale:
        return centred
    deviation = (_sums(centred**2, group, len(sizes)) / (sizes - 1).clamp(min=1)).sqrt()[group]
    return torch.where(deviation > 0, centred / deviation, centred)


def informative(rewards: Tensor, groups: Tensor) -> Tensor:
    """Whether the group of each rollout has rewards that differ: the others teach nothing.

    Shapes: as `advantages`; result (rollouts,), bool. Source: dynamic sampling of DAPO (arXiv:2503.14476), equation 11.
    """
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    least = torch.full((len(sizes),), torch.inf, dtype=rewards.dtype).scatter_reduce(0, group, rewards, "amin")
    most = torch.full((len(sizes),), -torch.inf, dtype=rewards.dtype).scatter_reduce(0, group, rewards, "amax")
    return (most > least)[group]


def overlong(lengths: Tensor, limits: Tensor, buffers: Tensor) -> Tensor:
    """What a reply loses because it is long: 0 up to `limit - buffer` tokens, then a straight line down to -1 at the limit.

    Shapes: all (replies,), in tokens; result (replies,). Source: soft over-long punishment of DAPO (arXiv:2503.14476), equation 13.
    """
    return ((limits - buffers - lengths) / buffers).clamp(min=-1.0, max=0.0)


def _sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values.dtype).index_add(0, group, values)
