"""The loss of each token. All tensors are flat: the tokens of all conversations, one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from memagent_integrations.checks import check_number

_FAR = 20.0  # differences of log-probabilities are clamped to this, so that exp() stays finite


@dataclass(frozen=True, kw_only=True)
class Clip:
    """How far a token's probability may move in one batch of rollouts before its gradient becomes 0.

    With a positive advantage that is where the ratio of new to old probability exceeds 1 + `high`, with a negative one
    where it falls below 1 - `low`. With a negative advantage the loss is also at most `dual` times |advantage|
    (`math.inf`, in TOML `inf`: no bound). Sources: PPO (arXiv:1707.06347); two bounds, DAPO (arXiv:2503.14476); dual
    clip, arXiv:1912.09729. The defaults are those of MemAgent (arXiv:2507.02259).

    Raises:
        UsageError: a bound is out of range.
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
    """Return the loss of each token, and whether a bound clips it (then it has no gradient).

    The loss is -min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most dual |A|, where r = exp(new - old).

    Shapes: new, old, advantage (tokens,): log-probabilities of the tokens under the policy that learns and the one that
    wrote them, and the advantage of their rollout. Result: two of (tokens,). Gradients flow through `new` alone.
    """
    ratio = (new - old).clamp(-_FAR, _FAR).exp()
    free, bound = -ratio * advantage, -ratio.clamp(1 - clip.low, 1 + clip.high) * advantage
    loss = torch.maximum(free, bound)
    clipped = bound > free
    most = -clip.dual * advantage
    over = (advantage < 0) & (loss > most)
    return torch.where(over, most, loss), clipped | over


def token_loss(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    clip: Clip,
    *,
    weight: Tensor | float = 1.0,
    reference: Tensor | None = None,
    beta: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return `weight` times the clipped loss of each token plus `beta` times its divergence from the reference.

    Shapes and the second result: as `policy_loss`. The caller takes the mean over all tokens of all conversations
    (MemAgent, arXiv:2507.02259, section 4).
    """
    loss, clipped = policy_loss(new, old, advantage, clip)
    loss = loss * weight
    return (loss if reference is None else loss + beta * kl(new, reference)), clipped


def kl(new: Tensor, reference: Tensor) -> Tensor:
    """Return an unbiased estimate of KL(policy, reference) at each token, in nats; it is never negative.

    The estimate is exp(d) - d - 1 with d = reference - new.

    Shapes: log-probabilities (tokens,), result (tokens,). Source: the estimator k3 of J. Schulman, "Approximating KL
    divergence", 2020.
    """
    difference = (reference - new).clamp(-_FAR, _FAR)
    return difference.exp() - difference - 1


def correction(old: Tensor, sampled: Tensor, most: float) -> Tensor:
    """Return the weight of each token: its probability by the trainer / that by the sampler, at most `most`.

    It corrects for a sampler that computes other probabilities than the trainer.

    Shapes: log-probabilities (tokens,) by the trainer and by the sampler, result (tokens,). Source: truncated
    importance sampling (E. Ionides, 2008), for rollouts by another engine as in "Your efficient RL framework secretly
    brings you off-policy RL training" (F. Yao and others, 2025).
    """
    return (old - sampled).clamp(-_FAR, _FAR).exp().clamp(max=most)
