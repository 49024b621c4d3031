"""From rollouts to gradients: the loss of multi-conversation DAPO over the conversations of a batch.

The mean runs over all tokens of all conversations of all processes (token mean): a long conversation weighs more than a
short one. All tokens also weigh the same where a batch is dealt into several optimizer steps: each step divides by the
mean number of tokens per step, not by its own number. Source: MemAgent (arXiv:2507.02259), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memagent_integrations.backends.prefixes import Bundle
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.forward import MicroBatch, forwards
from memagent_integrations.training.losses import correction, kl, token_loss
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The conversations of a batch, each with the advantage of its rollout.

    `old` and `reference` are the log-probabilities of what each wrote, under the policy at the beginning of the batch
    and under the start policy. `old` None: those of the first forward pass (`Settings.rescore`), else of the sampling.
    `reference` None: no divergence term.
    """

    conversations: Sequence[Sampled]
    advantages: Sequence[float]
    old: Sequence[Tensor] | None = None
    reference: Sequence[Tensor] | None = None


def backward(
    model: Any,
    rows: Rows,
    shared: Sequence[Bundle],
    settings: Settings,
    *,
    tokens: float,
    sums: Sums,
    moved: bool = False,
) -> None:
    """Add the gradients of the rows in `shared` to those of the model; the loss is divided by `tokens`.

    `moved` says that the policy has been updated since it wrote the rows, so its probabilities have changed too.
    """
    temperature = settings.temperature
    for part in forwards(
        model, rows.conversations, shared, temperature=temperature, tokens=settings.tokens, entropies=True
    ):
        torch.autograd.backward(_loss(part, rows, settings, sums, moved) / tokens)


def _loss(part: MicroBatch, rows: Rows, settings: Settings, sums: Sums, moved: bool) -> Tensor:
    """Return the loss of a part, summed over its tokens."""
    new = part.logprobs
    sampled = _flat([torch.tensor(rows.conversations[number].logprobs) for number in part.rows], new)
    if rows.old is not None:
        old = _flat([rows.old[number] for number in part.rows], new)
    else:
        old = new.detach() if settings.rescore else sampled
    if rows.old is not None or not moved:
        sums.add("gap", ((new if rows.old is None else old) - sampled).abs())
    each = torch.tensor([rows.advantages[number] for number in part.rows], dtype=new.dtype, device=new.device)
    advantage = each.repeat_interleave(torch.tensor(part.lengths, device=new.device))
    weight = correction(old, sampled, settings.correction) if settings.correction is not None else 1.0
    reference = _flat([rows.reference[number] for number in part.rows], new) if rows.reference is not None else None
    loss, clipped = token_loss(new, old, advantage, settings.clip, weight=weight, reference=reference, beta=settings.kl)
    if reference is not None:
        sums.add("kl", kl(new.detach(), reference))
    sums.add("loss", loss)
    sums.add("clipped", clipped)
    if part.entropies is not None:
        sums.add("entropy", part.entropies)
    return loss.sum()


def _flat(values: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(values)).to(device=like.device, dtype=like.dtype)
