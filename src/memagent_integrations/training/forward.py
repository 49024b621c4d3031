"""Log-probabilities of what was written, with common prefixes computed once; gradients equal the plain computation's.

    for part in forwards(model, rows, ...):
        loss_of(part).backward()  # before the next part is taken

A part is one pass through the model: rows of one padded width or, where they begin alike, their common prefix and the
rest of each. The head of the model, the matrix of the whole vocabulary, is computed only where rows wrote.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memagent_integrations.backends.past import Past
from memagent_integrations.backends.prefixes import Bundle
from memagent_integrations.training.attention import sharing
from memagent_integrations.training.conversations import Sampled

_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Nats by which two computations of one log-probability may differ, by dtype; other dtypes: `_ROUGH`."""
_ROUGH = 0.2
_PROBABILITIES_AT_ONCE = 1 << 23  # 32 MiB in float32


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows that were computed together.

    `rows` are their numbers, `lengths` the tokens that each wrote. `logprobs` and `entropies` are (tokens,): row after
    row. Entropies carry no gradient, and are None unless they were asked for.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    logprobs: Tensor
    entropies: Tensor | None


def forwards(
    model: Any,
    rows: Sequence[Sampled],
    shared: Sequence[Bundle],
    *,
    temperature: float,
    tokens: int,
    entropies: bool = False,
) -> Iterator[MicroBatch]:
    """Yield the log-probabilities of what the rows wrote, in parts of at most `tokens` tokens, padding included.

    A part has at least one row. With gradients on, call `backward` on what is computed from a part before taking the
    next one.
    """
    window = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for bundle in shared:
        prefix = _round_down(bundle.shared)
        for numbers, width in _split(rows, bundle.rows, prefix, tokens, window):
            yield _forward(model, rows, numbers, prefix, width, temperature, entropies)


def scores(
    model: Any, rows: Sequence[Sampled], shared: Sequence[Bundle], *, temperature: float, tokens: int
) -> list[Tensor]:
    """Return the log-probabilities of what each row wrote, each (tokens of the row,), without gradients."""
    logprobs: dict[int, Tensor] = {}
    with torch.no_grad():
        for part in forwards(model, rows, shared, temperature=temperature, tokens=tokens):
            logprobs.update(zip(part.rows, part.logprobs.split_with_sizes(part.lengths), strict=True))
    return [logprobs[number] for number in range(len(rows))]


def cannot_share(model: Any) -> str | None:
    """Return why a model cannot compute a prefix once for several rows; None: it can.

    It is tried on two rows of random tokens. Gradients are cleared.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "gradient checkpointing keeps no keys and values"
    size = model.config.get_text_config(decoder=True).vocab_size
    first, second = torch.randint(size, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [_row(first, 20), _row(first[:16] + second[16:], 18)]
    shared, plain = ([Bundle(shared=tokens, rows=(0, 1))] for tokens in (16, 0))
    try:
        Past(model, rows[0].prompt_ids[:16])
        logprobs = [scores(model, rows, bundles, temperature=1.0, tokens=1024) for bundles in (shared, plain)]
        for part in forwards(model, rows, shared, temperature=1.0, tokens=1024):
            if part.logprobs.requires_grad:
                torch.autograd.backward(part.logprobs.sum())
        model.zero_grad()
    except Exception as error:  # a model with a cache of its own kind may raise anything
        return f"it does not take keys and values from outside ({type(error).__name__}: {error})"
    pairs = zip(*logprobs, strict=True)
    difference = max(float((row - plain_row).abs().max()) for row, plain_row in pairs)
    if not difference < _TOLERANCES.get(model.dtype, _ROUGH):  # also where it is NaN
        return f"its log-probabilities are {difference:.2g} from those of the plain computation"
    return None


def _row(ids: Sequence[int], prompt: int) -> Sampled:
    return Sampled(
        text="", prompt_ids=array("i", ids[:prompt]), output_ids=array("i", ids[prompt:]), logprobs=array("f")
    )


def padded(tokens: int) -> int:
    """Return the length to which rows of so many tokens are padded.

    Lengths are multiples of 64 from 512 tokens on, and of an eighth to a sixteenth of shorter ones: oneDNN keeps a
    compiled kernel for every shape it has met, so there have to be few.
    """
    step = _step(tokens)
    return -(-tokens // step) * step


def _round_down(tokens: int) -> int:
    """Return how much of a prefix is computed once: the rest, at most 63 tokens, is left to the rows."""
    return tokens - tokens % _step(tokens)


def _step(tokens: int) -> int:
    return min(max(1 << tokens.bit_length() >> 4, 1), 64)


def _split(
    rows: Sequence[Sampled], numbers: Sequence[int], prefix: int, tokens: int, window: int | None
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield row numbers, the longest rows first, in parts of at most `tokens` tokens, and the width of their rows.

    The width is that of the tokens after the prefix, and is padded, but not beyond the model's window.
    """
    lengths = {number: len(rows[number].prompt_ids) + len(rows[number].output_ids) - prefix for number in numbers}
    order = sorted(numbers, key=lambda number: -lengths[number])
    while order:
        longest = lengths[order[0]]
        width = padded(longest) if window is None else max(min(padded(longest), window - prefix), longest)
        fitting = max((tokens - prefix) // width, 1)
        yield tuple(order[:fitting]), width
        del order[:fitting]


def _forward(
    model: Any,
    rows: Sequence[Sampled],
    numbers: tuple[int, ...],
    prefix: int,
    width: int,
    temperature: float,
    entropies: bool,
) -> MicroBatch:
    """Compute some rows, each `width` tokens wide, after their prefix."""
    part = [rows[number] for number in numbers]
    texts = [(row.prompt_ids[prefix:] + row.output_ids).tolist() for row in part]
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])  # padding behind a row changes nothing
    positions = torch.arange(prefix, prefix + width).expand(len(part), -1)
    if prefix:
        ids = torch.cat([torch.tensor(part[0].prompt_ids[:prefix].tolist()), ids.flatten()])[None]
        positions = torch.cat([torch.arange(prefix), positions.flatten()])[None]
    # The token before the first one that a row wrote predicts it.
    starts = [width * number + len(row.prompt_ids) - 1 for number, row in enumerate(part)]
    written = [torch.arange(start, start + len(row.output_ids)) for start, row in zip(starts, part, strict=True)]
    outputs = torch.tensor([token for row in part for token in row.output_ids], device=model.device)
    with ExitStack() as stack:
        options = stack.enter_context(sharing(model, prefix, len(part))) if prefix else {}
        logits = _logits(model, torch.cat(written), input_ids=ids, position_ids=positions, **options)
    logprobs, entropy = _Chosen.apply(logits, outputs, temperature, entropies)  # type: ignore[no-untyped-call]
    lengths = tuple(len(row.output_ids) for row in part)
    return MicroBatch(rows=numbers, lengths=lengths, logprobs=logprobs, entropies=entropy if entropies else None)


def _logits(model: Any, where: Tensor, *, input_ids: Tensor, position_ids: Tensor, **options: Any) -> Tensor:
    """Return the logits (tokens, vocabulary) at some positions of all rows, counted row after row.

    The hidden states of these positions are picked out where they enter the head, so that the model itself computes
    whatever it does before and after it.
    """
    device = model.device
    where, inputs = where.to(device), {"input_ids": input_ids.to(device), "position_ids": position_ids.to(device)}
    with _picking(model.get_output_embeddings(), where):
        logits: Tensor = model(**inputs, use_cache=False, **options).logits.flatten(0, 1)
    if len(logits) == input_ids.numel() != len(where):  # the model computes its logits without the head
        return logits[where]
    return logits


@contextmanager
def _picking(head: torch.nn.Module | None, where: Tensor) -> Iterator[None]:
    """Let the head compute some positions alone: its input (rows, tokens, size) becomes (1, positions, size)."""
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1)[where][None], *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


class _Chosen(torch.autograd.Function):
    """The log-probability of each token and, if asked for, the entropy of its distribution, in nats.

    Shapes: logits (tokens, vocabulary), tokens (tokens,); result two of (tokens,). The probabilities, which in float32
    would take more memory than the model, are computed slice by slice, again in the backward pass.
    """

    @staticmethod
    def forward(
        context: Any, logits: Tensor, tokens: Tensor, temperature: float, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        chosen, entropy = [], []
        for part, ids in _slices(logits, tokens):
            scores = _scores(part, temperature)
            norms = scores.logsumexp(dim=-1)
            chosen.append(scores.gather(-1, ids[:, None])[:, 0] - norms)
            if entropies:
                shares = (scores - norms[:, None]).exp()
                entropy.append(norms - (shares * scores).sum(dim=-1))
        context.save_for_backward(logits, tokens)
        context.temperature = temperature
        result = torch.cat(chosen)
        entropy_result = torch.cat(entropy) if entropies else result.new_zeros(0)
        context.mark_non_differentiable(entropy_result)
        return result, entropy_result

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens = context.saved_tensors
        result = torch.empty_like(logits)
        size = _tokens_at_once(logits)
        weights, targets = torch.split(gradient / context.temperature, size), torch.split(result, size)
        for (part, ids), weight, target in zip(_slices(logits, tokens), weights, targets, strict=True):
            # d log p(chosen) / d score = 1 at the chosen token, minus the probability of each
            shares = _scores(part, context.temperature).softmax(dim=-1).mul_(-weight[:, None])
            target.copy_(shares.scatter_add_(-1, ids[:, None], weight[:, None]))
        return result, None, None, None


def _slices(logits: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = _tokens_at_once(logits)
    return zip(torch.split(logits, size), torch.split(tokens, size), strict=True)


def _tokens_at_once(logits: Tensor) -> int:
    return max(_PROBABILITIES_AT_ONCE // logits.shape[1], 1)


def _scores(logits: Tensor, temperature: float) -> Tensor:
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return scores if temperature == 1 else scores / temperature
