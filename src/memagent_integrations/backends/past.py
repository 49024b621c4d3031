"""The keys and values of a prefix that several prompts begin with, computed once, and kept for the next prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from memagent_integrations.backends.prefixes import LEAST


class Past:
    """The keys and values of a prefix, computed once for many rows, without gradients. `ids` are its tokens.

    Raises:
        ValueError: a layer of the model sees only a part of the text, or keeps something else than keys and values.
    """

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        config = model.config.get_text_config(decoder=True)
        cache: Any = DynamicCache(config=config)
        if getattr(model, "_is_stateful", False) or any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise ValueError("its layers see a part of the text")
        if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope"):
            raise ValueError("its positions depend on the length of the whole text")
        self.ids = list(ids)
        inputs = torch.tensor([self.ids], device=model.device)
        with torch.no_grad():
            model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._states = [state for layer in cache.layers for state in (layer.keys, layer.values)]

    def common(self, row: Sequence[int]) -> int:
        """Return how many tokens of the prefix a row begins with; its last token, which has to be computed, is none."""
        most = min(len(self.ids), len(row) - 1)
        return next((number for number in range(most) if self.ids[number] != row[number]), most)

    def cache(self, rows: int, tokens: int | None = None) -> DynamicCache:
        """Return a cache of its first `tokens` (None: all) for this many rows at once."""
        states = iter(state[:, :, :tokens].expand(rows, -1, -1, -1) for state in self._states)
        return DynamicCache(list(zip(states, states, strict=True)))


@dataclass(frozen=True, kw_only=True)
class SharedStart:
    """What rows begin with: so many `tokens`, in a `cache`; `cached` is how many of them each row did not compute."""

    tokens: int
    cached: tuple[int, ...]
    cache: DynamicCache


class PrefixCache:
    """Keeps the prefix that was computed last."""

    def __init__(self) -> None:
        self._kept: Past | None = None

    def clear(self) -> None:
        """Free its memory."""
        self._kept = None

    def start(self, model: Any, rows: Sequence[Sequence[int]], shared: int) -> SharedStart | None:
        """Return what these rows begin with: the kept prefix if it is half of each row, else their first `shared` ones.

        None: they share nothing.

        Raises:
            ValueError: the model cannot compute a prefix by itself.
        """
        known = min(map(self._kept.common, rows)) if self._kept else 0
        if self._kept and known >= LEAST and 2 * known >= max(map(len, rows)):
            cached = (known,) * len(rows)
            return SharedStart(tokens=known, cached=cached, cache=self._kept.cache(len(rows), known))
        if not shared:
            return None
        self._kept = None  # frees its memory before the next one needs it
        self._kept = Past(model, rows[0][:shared])
        cached = (0, *(shared,) * (len(rows) - 1))
        return SharedStart(tokens=shared, cached=cached, cache=self._kept.cache(len(rows)))
