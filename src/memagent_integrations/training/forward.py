"""Log-probabilities of what was written, with what many prompts share computed once: the gradients are those of the plain computation.

    for part in forwards(model, rows, ...):
        loss_of(part).backward()      # before the next part is taken

A bundle's shared beginning goes through the model once. Its keys and values are cut off from that computation, each part of the bundle reads them,
and the gradients that the parts leave on them go back through the beginning at the end. So the memory needed is that of one beginning and one part.
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

_NEAR = {torch.float32: 1e-3, torch.float64: 1e-6}  # nats between two computations of one log-probability; in bfloat16:
_ROUGH = 0.2
_AT_ONCE = 1 << 26  # probabilities: 256 MiB


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some rows, computed together.

    `rows` are their numbers, `lengths` the tokens that each wrote; `logprobs` and `entropies` are flat, (tokens,): row after row. Entropies carry no
    gradient, and are left at 0 where nothing learns.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    logprobs: Tensor
    entropies: Tensor


def forwards(
    model: Any, rows: Sequence[Sampled], shared: Sequence[Bundle], *, temperature: float, tokens: int
) -> Iterator[MicroBatch]:
    """The log-probabilities of what the rows wrote, in parts of at most `tokens` tokens (padding counts; a part has one row at least).

    With gradients, `backward` has to be called on what is made of a part before the next one is taken.
    """
    for bundle in shared:
        past = Past(model, rows[bundle.rows[0]].prompt_ids[: bundle.shared]) if bundle.shared else None
        for part in _parts(rows, bundle, tokens):
            yield _part(model, rows, part, bundle.shared, past, temperature)
        if past:
            past.backward()


def scores(
    model: Any, rows: Sequence[Sampled], shared: Sequence[Bundle], *, temperature: float, tokens: int
) -> list[Tensor]:
    """The log-probabilities of what each row wrote, each (tokens of the row,), without gradients."""
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for part in forwards(model, rows, shared, temperature=temperature, tokens=tokens):
            found.update(zip(part.rows, part.logprobs.split_with_sizes(part.lengths), strict=True))
    return [found[number] for number in range(len(rows))]


def cannot_share(model: Any) -> str | None:
    """Why a model cannot read a beginning once for several rows; None: it can. It is tried, on rows of random tokens; gradients are cleared."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "gradient checkpointing keeps no keys and values"
    size = model.config.get_text_config(decoder=True).vocab_size
    one, other = torch.randint(size, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [_row(one, 20), _row(one[:16] + other[16:], 18)]
    try:
        ways = [
            scores(model, rows, [Bundle(shared=shared, rows=(0, 1))], temperature=1.0, tokens=1024)
            for shared in (16, 0)
        ]
        for part in forwards(model, rows, [Bundle(shared=16, rows=(0, 1))], temperature=1.0, tokens=1024):
            if part.logprobs.requires_grad:
                torch.autograd.backward(part.logprobs.sum())
        model.zero_grad()
    except Exception as error:  # models with caches of their own kind
        return f"it does not take keys and values from outside ({type(error).__name__}: {error})"
    apart = max(float((shared - plain).abs().max()) for shared, plain in zip(*ways, strict=True))
    if not apart < _NEAR.get(model.dtype, _ROUGH):
        return f"its log-probabilities are {apart:.2g} from those of the plain computation"
    return None


def _row(ids: Sequence[int], prompt: int) -> Sampled:
    return Sampled(
        text="", prompt_ids=array("i", ids[:prompt]), output_ids=array("i", ids[prompt:]), logprobs=array("f")
    )


class Past:
    """The keys and values of a beginning, for many rows to read, and the way back of their gradients."""

    def __init__(self, model: Any, ids: Ids) -> None:
        cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
        model(
            input_ids=torch.tensor([ids.tolist()], device=model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if any(layer.is_sliding for layer in cache.layers):
            raise ValueError("its layers see a part of the text")
        self._made = [state for layer in cache.layers for state in (layer.keys, layer.values)]
        self._read: list[Tensor] = [state.detach().requires_grad_(torch.is_grad_enabled()) for state in self._made]

    def cache(self, rows: int) -> DynamicCache:
        """For so many rows at once."""
        states = iter(state.expand(rows, -1, -1, -1) for state in self._read)
        return DynamicCache(list(zip(states, states, strict=True)))

    def backward(self) -> None:
        """Send what the rows left on the keys and values back through the beginning."""
        met = [
            (made, read.grad)
            for made, read in zip(self._made, self._read, strict=True)
            if made.requires_grad and read.grad is not None
        ]
        if met:
            torch.autograd.backward([made for made, _ in met], [gradient for _, gradient in met])


def _parts(rows: Sequence[Sampled], bundle: Bundle, tokens: int) -> Iterator[tuple[int, ...]]:
    """The rows of a bundle, the longest first, so many at a time that the tokens suffice, with those that they share."""
    lengths = {
        number: len(rows[number].prompt_ids) - bundle.shared + len(rows[number].output_ids) for number in bundle.rows
    }
    order = sorted(bundle.rows, key=lambda number: -lengths[number])
    while order:
        fitting = max((tokens - bundle.shared) // lengths[order[0]], 1)
        yield tuple(order[:fitting])
        del order[:fitting]


def _part(
    model: Any, rows: Sequence[Sampled], numbers: tuple[int, ...], shared: int, past: Past | None, temperature: float
) -> MicroBatch:
    taken = [rows[number] for number in numbers]
    texts = [(row.prompt_ids[shared:] + row.output_ids).tolist() for row in taken]
    begins = [
        len(row.prompt_ids) - shared - 1 for row in taken
    ]  # from here on the tokens that come next are those that a row wrote
    width, first = max(map(len, texts)), min(begins)
    inputs = torch.tensor(
        [text + [0] * (width - len(text)) for text in texts], device=model.device
    )  # what follows a row changes nothing in it
    places = torch.arange(first, width - 1, device=model.device)
    cache = past.cache(len(taken)) if past else None
    logits = model(input_ids=inputs, past_key_values=cache, use_cache=past is not None, logits_to_keep=places).logits
    if logits.shape[1] == width:  # a model that keeps them all
        logits = logits[:, first:-1]
    begin, end = (torch.tensor(of, device=model.device)[:, None] for of in (begins, [len(text) - 1 for text in texts]))
    wrote = (places >= begin) & (places < end)
    logprobs, entropies = _chosen(logits, inputs[:, first + 1 :], temperature)
    return MicroBatch(
        rows=numbers,
        lengths=tuple(len(row.output_ids) for row in taken),
        logprobs=logprobs[wrote],
        entropies=entropies[wrote],
    )


def _chosen(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The log-probability of each token and the entropy of where it was chosen, in nats.

    Shapes: logits (rows, tokens, vocabulary), tokens (rows, tokens); result two of (rows, tokens). Slices are computed anew on the way back: the
    probabilities of all tokens in float32 would take more memory than the model.
    """
    learning = torch.is_grad_enabled()

    def slice_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.log_softmax((logits if logits.dtype == torch.float64 else logits.float()) / temperature, dim=-1)
        chosen = every.gather(-1, tokens[..., None])[..., 0]
        with torch.no_grad():
            entropies = -(every.exp() * every).sum(dim=-1) if learning else torch.zeros_like(chosen)
        return chosen, entropies

    size = max(_AT_ONCE // (logits.shape[0] * logits.shape[2]), 1)
    slices = zip(torch.split(logits, size, dim=1), torch.split(tokens, size, dim=1), strict=True)
    found = [checkpoint(slice_of, *one, use_reentrant=False, preserve_rng_state=False) for one in slices]
    return torch.cat([logprobs for logprobs, _ in found], dim=1), torch.cat(
        [entropies for _, entropies in found], dim=1
    )
