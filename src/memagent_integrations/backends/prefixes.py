"""Group prompts by their common prefixes, so that each prefix is computed once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Ids: TypeAlias = "array[int]"
"""Token ids, in four bytes each."""

LEAST = 64
"""Tokens of the shortest prefix that is worth sharing."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Rows (their numbers) that begin with the same `shared` tokens; 0: each row is computed whole."""

    shared: int
    rows: tuple[int, ...]

    def saved(self) -> int:
        """Return the tokens that need not be computed."""
        return self.shared * (len(self.rows) - 1)


def whole(prompts: Sequence[object]) -> Bundle:
    """Return one bundle of all rows that shares nothing."""
    return Bundle(shared=0, rows=tuple(range(len(prompts))))


def bundles(prompts: Sequence[Ids], *, least: int = LEAST) -> list[Bundle]:
    """Return the prompts in bundles whose prefix is at least half of each of their prompts.

    Prompts are sorted, and neighbours are bundled. The last token of a prompt is never shared: its logits predict the
    first written token. Prompts that share nothing form one bundle, the last.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    sharing: list[Bundle] = []
    unshared: list[int] = []
    start = 0
    while start < len(order):
        first = prompts[order[start]]
        end, shared, longest = start + 1, len(first) - 1, len(first)
        while end < len(order):
            candidate = prompts[order[end]]
            common, longer = min(shared, _common(first, candidate)), max(longest, len(candidate))
            if common < least or 2 * common < longer:
                break
            end, shared, longest = end + 1, common, longer
        if end - start > 1:
            sharing.append(Bundle(shared=shared, rows=tuple(order[start:end])))
        else:
            unshared.append(order[start])
        start = end
    return [*sharing, Bundle(shared=0, rows=tuple(sorted(unshared)))] if unshared else sharing


def _common(first: Ids, second: Ids) -> int:
    """Return the length of the common prefix, without the last token of either."""
    low, high = 0, min(len(first), len(second)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
