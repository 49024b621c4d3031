"""Log-probabilities of what was written, with common prefixes computed once; gradients equal the plain computation's.

    for part in forwards(model, rows, ...):
        loss_of(part).backward()  # before the next part is taken

The common prefix of a bundle goes through the model once. Its keys and values are detached, every part of the bundle
reads them, and at the end the gradients that the parts left on them go back through the prefix. So the memory needed is
that of one prefix and one part.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.prefixes import Bundle, Ids

_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Nats by which two computations of one log-probability may differ, by dtype; other dtypes: `_ROUGH`."""
_ROUGH = 0.2
_PROBABILITIES_AT_ONCE = 1 << 26  # 256 MiB in float32


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows that were computed together.

    `rows` are their numbers, `lengths` the tokens that each wrote. `logprobs` and `entropies` are (tokens,): row after
    row. Entropies carry no gradient, and are 0 where gradients are off.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    logprobs: Tensor
    entropies: Tensor


def forwards(
    model: Any, rows: Sequence[Sampled], shared: Sequence[Bundle], *, temperature: float, tokens: int
) -> Iterator[MicroBatch]:
    """Yield the log-probabilities of what the rows wrote, in parts of at most `tokens` tokens, padding included.

    A part has at least one row. With gradients on, call `backward` on what is computed from a part before taking the
    next one.
    """
    for bundle in shared:
        past = Past(model, rows[bundle.rows[0]].prompt_ids[: bundle.shared]) if bundle.shared else None
        for numbers in _split(rows, bundle, tokens):
            yield _forward(model, rows, numbers, bundle.shared, past, temperature)
        if past:
            past.backward()


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


class Past:
    """The keys and values of a prefix, computed once for many rows, and the way back for their gradients.

    Raises:
        ValueError: a layer of the model sees only a part of the text.
    """

    def __init__(self, model: Any, ids: Ids) -> None:
        cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
        inputs = torch.tensor([ids.tolist()], device=model.device)
        model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if any(layer.is_sliding for layer in cache.layers):
            raise ValueError("its layers see a part of the text")
        self._computed = [state for layer in cache.layers for state in (layer.keys, layer.values)]
        self._detached = [state.detach().requires_grad_(torch.is_grad_enabled()) for state in self._computed]

    def cache(self, rows: int) -> DynamicCache:
        """Return a cache for this many rows at once."""
        states = iter(state.expand(rows, -1, -1, -1) for state in self._detached)
        return DynamicCache(list(zip(states, states, strict=True)))

    def backward(self) -> None:
        """Send the gradients that the rows left on the keys and values back through the prefix."""
        pairs = [
            (computed, detached.grad)
            for computed, detached in zip(self._computed, self._detached, strict=True)
            if computed.requires_grad and detached.grad is not None
        ]
        if pairs:
            torch.autograd.backward([computed for computed, _ in pairs], [gradient for _, gradient in pairs])


def _split(rows: Sequence[Sampled], bundle: Bundle, tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield the row numbers of a bundle, the longest first, in parts of at most `tokens` tokens with the prefix."""
    lengths = {
        number: len(rows[number].prompt_ids) - bundle.shared + len(rows[number].output_ids) for number in bundle.rows
    }
    order = sorted(bundle.rows, key=lambda number: -lengths[number])
    while order:
        fitting = max((tokens - bundle.shared) // lengths[order[0]], 1)
        yield tuple(order[:fitting])
        del order[:fitting]


def _forward(
    model: Any, rows: Sequence[Sampled], numbers: tuple[int, ...], shared: int, past: Past | None, temperature: float
) -> MicroBatch:
    """Compute some rows after their prefix of `shared` tokens."""
    part = [rows[number] for number in numbers]
    texts = [(row.prompt_ids[shared:] + row.output_ids).tolist() for row in part]
    starts = [len(row.prompt_ids) - shared - 1 for row in part]  # logits here predict the row's first written token
    width, first = max(map(len, texts)), min(starts)
    padded = [text + [0] * (width - len(text)) for text in texts]  # padding behind a row changes nothing in it
    inputs = torch.tensor(padded, device=model.device)
    positions = torch.arange(first, width - 1, device=model.device)
    cache = past.cache(len(part)) if past else None
    logits = model(input_ids=inputs, past_key_values=cache, use_cache=past is not None, logits_to_keep=positions).logits
    if logits.shape[1] == width:  # the model ignores `logits_to_keep`
        logits = logits[:, first:-1]
    ends = [len(text) - 1 for text in texts]
    start, end = (torch.tensor(column, device=model.device)[:, None] for column in (starts, ends))
    written = (positions >= start) & (positions < end)
    logprobs, entropies = _chosen(logits, inputs[:, first + 1 :], temperature)
    return MicroBatch(
        rows=numbers,
        lengths=tuple(len(row.output_ids) for row in part),
        logprobs=logprobs[written],
        entropies=entropies[written],
    )


def _chosen(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token and the entropy of its distribution, in nats.

    Shapes: logits (rows, tokens, vocabulary), tokens (rows, tokens); result two of (rows, tokens). The backward pass
    recomputes slices: the probabilities of all tokens in float32 would take more memory than the model.
    """
    learning = torch.is_grad_enabled()

    def compute(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.log_softmax((logits if logits.dtype == torch.float64 else logits.float()) / temperature, dim=-1)
        chosen = every.gather(-1, tokens[..., None])[..., 0]
        with torch.no_grad():
            entropies = -(every.exp() * every).sum(dim=-1) if learning else torch.zeros_like(chosen)
        return chosen, entropies

    size = max(_PROBABILITIES_AT_ONCE // (logits.shape[0] * logits.shape[2]), 1)
    slices = zip(torch.split(logits, size, dim=1), torch.split(tokens, size, dim=1), strict=True)
    computed = [checkpoint(compute, *part, use_reentrant=False, preserve_rng_state=False) for part in slices]
    logprobs, entropies = zip(*computed, strict=True)
    return torch.cat(logprobs, dim=1), torch.cat(entropies, dim=1)
