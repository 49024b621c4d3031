"""Floating-point operations of this loop, and of full attention, by the length of the document.

A multiplication with an addition counts as two operations, and only matrix products count, as in Appendix B of PaLM
(arXiv:2204.02311); of the n x n products of attention half, because a token attends only to those before it. The keys
and values of a call are computed once, so to read a token costs what it costs to write one, but for the output layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Self

from pydantic import BaseModel, PositiveInt, ValidationError

from memagent_integrations.checks import Number, check_int
from memagent_integrations.errors import UsageError
from memagent_integrations.files import first_error, read_bytes
from memagent_integrations.records import Budgets

WINDOW = 8000
"""The "8K" of the published comparison, in which 1M is 125 times as much."""
LENGTHS = (WINDOW, 32_000, 128_000, 512_000, 1_000_000, 4_000_000)


class _Config(BaseModel):
    """What is read of a config.json."""

    num_hidden_layers: Number[PositiveInt]
    hidden_size: Number[PositiveInt]
    intermediate_size: Number[PositiveInt]
    num_attention_heads: Number[PositiveInt]
    num_key_value_heads: Number[PositiveInt | None] = None
    head_dim: Number[PositiveInt | None] = None
    vocab_size: Number[PositiveInt]
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None


class _Seeing(BaseModel):
    """A config.json of a model that takes images too has that of its language model in it."""

    text_config: _Config | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a decoder with gated feed-forward layers (Llama, Qwen, Mistral and others).

    The defaults are those of Qwen2.5-7B, from which the smaller one of MemAgent's released models was trained.

    Raises:
        UsageError: a size is not a positive number.
    """

    layers: int = 28
    hidden: int = 3584
    intermediate: int = 18944
    heads: int = 28
    kv_heads: int = 4
    head: int = 128
    vocabulary: int = 152064

    def __post_init__(self) -> None:
        check_int(**{size.name: getattr(self, size.name) for size in fields(self)})

    @classmethod
    def from_config(cls, path: str | Path) -> Self:
        """Return the sizes that a model's `config.json`, as transformers writes it, or the folder of one names.

        Raises:
            UsageError: the file cannot be read, lacks a size, or is of a mixture of experts.
        """
        path = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        text = read_bytes(path)
        try:
            config = _Seeing.model_validate_json(text).text_config or _Config.model_validate_json(text)
        except ValidationError as error:
            raise UsageError(f"{path} is not the config.json of a model like Llama: {first_error(error)}") from error
        if config.num_experts or config.num_local_experts or config.n_routed_experts:
            raise UsageError(f"{path}: the operations of a mixture of experts are not counted")
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head=config.head_dim or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
        )

    def flops(self, tokens: int, written: int) -> int:
        """Return the operations of a call: a sequence of `tokens`, of which the model wrote the last `written`."""
        attention = self.heads * self.head
        projections = self.hidden * (2 * attention + 2 * self.kv_heads * self.head)
        feed_forward = 3 * self.hidden * self.intermediate
        weights = self.layers * (projections + feed_forward) * tokens + self.hidden * self.vocabulary * written
        return 2 * weights + self.attention_flops(tokens)

    def attention_flops(self, tokens: int) -> int:
        """Return those of them that grow with the square of the length: queries with keys, and weights with values."""
        return 2 * self.layers * self.heads * self.head * tokens**2


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a document of `tokens` costs when every budget is used up, in floating-point operations.

    `loop` is the sum over the `calls` of a sequential reading without look-up. `full` is one call with the whole
    document in its prompt.
    """

    tokens: int
    calls: int
    loop: int
    full: int

    @property
    def windows(self) -> float:
        """The document's length in windows of 8K.

        To leading order the attention of a reading grows with it, and full attention with its square. These two are
        the published comparison of MemAgent's linear cost with the quadratic one (arXiv:2507.02259, Appendix A).
        """
        return self.tokens / WINDOW


def costs(size: ModelSize, budgets: Budgets, lengths: Iterable[int]) -> list[Cost]:
    """Return the cost of documents of these lengths, in tokens.

    Raises:
        UsageError: a length is not a positive number.
    """
    return [_cost(size, budgets, length) for length in lengths]


def _cost(size: ModelSize, budgets: Budgets, tokens: int) -> Cost:
    check_int(tokens=tokens)
    new = budgets.chunk_tokens - budgets.overlap_tokens  # tokens of a chunk that the one before did not have
    chunks = max(ceil((tokens - budgets.overlap_tokens) / new), 1)
    last = tokens - (chunks - 1) * new
    other = budgets.question_tokens + budgets.memory_tokens
    written, answer = budgets.output("memory"), budgets.output("answer")
    return Cost(
        tokens=tokens,
        calls=chunks + 1,
        loop=(chunks - 1) * size.flops(other + budgets.chunk_tokens + written, written)
        + size.flops(other + last + written, written)
        + size.flops(other + answer, answer),
        full=size.flops(budgets.question_tokens + tokens + answer, answer),
    )
