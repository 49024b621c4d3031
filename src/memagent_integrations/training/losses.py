"""What one token adds to the loss. All tensors are flat: the tokens of all conversations, one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from memagent_integrations.settings import check_number

_FAR = 20.0  # differences of log-probabilities beyond this are taken as this: exp() of more means nothing


@dataclass(frozen=True, kw_only=True)
class Clip:
    """How far a token's probability may move in one batch of rollouts before it stops to count.

    The ratio of new to old probability counts between 1 - `low` and 1 + `high`; with a negative advantage the loss is bounded at `dual` times the
    advantage (`math.inf`, in TOML `inf`: not at all). Sources: PPO (arXiv:1707.06347); two bounds, DAPO (arXiv:2503.14476); dual clip,
    arXiv:1912.09729. The values are those of MemAgent (arXiv:2507.02259).

    Raises:
        UsageError: a bound is no such number.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0

    def __post_init__(self) -> None:
        check_number(most=1, clip_low=self.low)
        check_number(clip_high=self.high)
        if self.dual != math.inf:
            check_number(least=1, dual_clip=self.dual)


def policy_loss(new: Tensor, old: Tensor, advantage: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """The clipped loss of each token, and whether a bound holds it (then it has no gradient).

    Shapes: new, old, advantage (tokens,): log-probabilities of the tokens under the policy that learns and the one that wrote them, and the
    advantage of their rollout. Result: two of (tokens,). Gradients go through `new` alone.
    """
    ratio = (new - old).clamp(-_FAR, _FAR).exp()
    free, bound = -ratio * advantage, -ratio.clamp(1 - clip.low, 1 + clip.high) * advantage
    loss = torch.maximum(free, bound)
    held = bound > free
    most = -clip.dual * advantage
    over = (advantage < 0) & (loss > most)
    return torch.where(over, most, loss), held | over


def kl(new: Tensor, reference: Tensor) -> Tensor:
    """How far the policy went from the reference, estimated for each token: never negative, and of little variance.

    Shapes: log-probabilities (tokens,), result (tokens,). Source: the estimator k3 of J. Schulman, "Approximating KL divergence", 2020.
    """
    difference = (reference - new).clamp(-_FAR, _FAR)
    return difference.exp() - difference - 1


def correction(old: Tensor, sampled: Tensor, most: float) -> Tensor:
    """The weight of each token whose writer computed other probabilities than the trainer does: their ratio, `most` at most.

    Shapes: log-probabilities (tokens,) by the trainer and by the writer, result (tokens,). Source: truncated importance sampling (E. Ionides, 2008),
    for rollouts by another engine as in "Your efficient RL framework secretly brings you off-policy RL training" (F. Yao and others, 2025).
    """
    return (old - sampled).clamp(-_FAR, _FAR).exp().clamp(max=most)
