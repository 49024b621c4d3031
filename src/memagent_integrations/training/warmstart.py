"""The warm start: a policy is shown replies before it learns from its own, for models too small to stumble on the form of a memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from memagent_integrations.checks import check_int, check_number
from memagent_integrations.errors import UsageError
from memagent_integrations.records import Message
from memagent_integrations.training.forward import forwards
from memagent_integrations.training.policy import named, recomputing
from memagent_integrations.training.prefixes import whole
from memagent_integrations.training.sampler import Sampler

Shown = tuple[tuple[Message, ...], str]
"""A prompt and the reply that is shown for it."""


def warm_start(
    policy: Sampler,
    shown: Iterable[Shown],
    *,
    batch: int = 32,
    learning_rate: float = 1e-4,
    tokens: int = 16_384,
    max_grad_norm: float = 1.0,
) -> Iterator[float]:
    """Supervised steps over `batch` replies each, until there are no more; yields the loss of each: the mean of -log p over all tokens shown.

    Raises:
        UsageError: a number is wrong, nothing of the model learns, or a prompt does not fit its window.
    """
    check_int(batch=batch, tokens=tokens)
    check_number(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
    parameters = list(named(policy.model).values())
    if not parameters:
        raise UsageError("no weights of this model learn; make it ready with training.policy.start")
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    replies = (policy.shown(messages, reply) for messages, reply in shown)
    while rows := list(islice(replies, batch)):
        total = sum(len(row.output_ids) for row in rows)
        spent = 0.0
        with recomputing(policy.model):
            for part in forwards(policy.model, rows, [whole(rows)], temperature=1.0, tokens=tokens):
                loss = -part.logprobs.sum() / total
                torch.autograd.backward(loss)
                spent += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield spent
