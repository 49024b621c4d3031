"""The warm start: supervised steps on given replies, for models too small to find the form of a memory by chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from memagent_integrations.checks import check_int, check_number
from memagent_integrations.errors import UsageError
from memagent_integrations.records import Message
from memagent_integrations.training.forward import forwards
from memagent_integrations.training.policy import recomputing, trainable
from memagent_integrations.training.prefixes import whole
from memagent_integrations.training.sampler import Sampler

Demonstration = tuple[tuple[Message, ...], str]
"""A prompt, and the reply that the policy should give to it."""


def warm_start(
    policy: Sampler,
    demonstrations: Iterable[Demonstration],
    *,
    batch: int = 32,
    learning_rate: float = 1e-4,
    tokens: int = 16_384,
    max_grad_norm: float = 1.0,
) -> Iterator[float]:
    """Take a step on every `batch` replies, and yield its loss: the mean of -log p over the tokens of the replies.

    Raises:
        UsageError: a number is out of range, or no weights of the model learn.
        ContextOverflow: a prompt and its reply do not fit the window.
    """
    check_int(batch=batch, tokens=tokens)
    check_number(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
    parameters = list(trainable(policy.model).values())
    if not parameters:
        raise UsageError("no weights of this model learn; prepare it with training.policy.start")
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    replies = (policy.encode_reply(messages, reply) for messages, reply in demonstrations)
    while rows := list(islice(replies, batch)):
        total = sum(len(row.output_ids) for row in rows)
        batch_loss = 0.0
        with recomputing(policy.model):
            for part in forwards(policy.model, rows, [whole(rows)], temperature=1.0, tokens=tokens):
                loss = -part.logprobs.sum() / total
                torch.autograd.backward(loss)
                batch_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield batch_loss
