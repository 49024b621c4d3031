"""Which prompts begin alike, so that the beginning is computed once for all of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Ids: TypeAlias = "array[int]"
"""Token ids, in four bytes each."""

LEAST = 64
"""Tokens of a beginning that is worth sharing."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Rows (their numbers) that begin with the same `shared` tokens; 0: each is computed whole."""

    shared: int
    rows: tuple[int, ...]

    def saved(self) -> int:
        """Tokens that need not be computed."""
        return self.shared * (len(self.rows) - 1)


def whole(prompts: Sequence[object]) -> Bundle:
    """All rows, none of which shares anything."""
    return Bundle(shared=0, rows=tuple(range(len(prompts))))


def bundles(prompts: Sequence[Ids], *, least: int = LEAST) -> list[Bundle]:
    """The prompts in bundles: side by side in their order as sequences, as long as they share at least half of each of them.

    The last token of a prompt is never shared: it says what comes next. Prompts that share nothing come in one bundle, the last, as they are.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    found: list[Bundle] = []
    alone: list[int] = []
    start = 0
    while start < len(order):
        first = prompts[order[start]]
        end, shared, longest = start + 1, len(first) - 1, len(first)
        while end < len(order):
            common, longer = min(shared, _common(first, prompts[order[end]])), max(longest, len(prompts[order[end]]))
            if common < least or 2 * common < longer:
                break
            end, shared, longest = end + 1, common, longer
        if end - start > 1:
            found.append(Bundle(shared=shared, rows=tuple(order[start:end])))
        else:
            alone.append(order[start])
        start = end
    return [*found, Bundle(shared=0, rows=tuple(sorted(alone)))] if alone else found


def _common(one: Ids, other: Ids) -> int:
    """Tokens with which both begin, without the last of either."""
    low, high = 0, min(len(one), len(other)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
