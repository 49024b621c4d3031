"""Deal the conversations of a batch into a fixed number of optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

from memagent_integrations.backends.prefixes import Bundle, bundles, whole
from memagent_integrations.training.conversations import Sampled


def deal(rows: Sequence[Sampled], parts: int, *, share: bool) -> list[list[Bundle]]:
    """Return `parts` lists of bundles with about equally many tokens to compute, however many rows there are.

    With `share`, rows with a common prefix are bundled. The largest bundles are dealt first, each to the part with the
    least load; a bundle larger than a part is divided. With fewer rows than parts some parts are empty.
    """
    undivided = bundles([row.prompt_ids for row in rows]) if share else [whole(rows)]
    lengths = [len(row.prompt_ids) + len(row.output_ids) for row in rows]

    def cost(bundle: Bundle) -> int:
        return bundle.shared + sum(lengths[number] - bundle.shared for number in bundle.rows)

    budget = sum(map(cost, undivided)) / parts
    pieces = [piece for bundle in undivided for piece in _divide(bundle, lengths, budget)]
    dealt: list[list[Bundle]] = [[] for _ in range(parts)]
    load = [0] * parts
    for piece in sorted(pieces, key=cost, reverse=True):
        least = load.index(min(load))
        dealt[least].append(piece)
        load[least] += cost(piece)
    return [_merge_unshared(part) for part in dealt]


def _divide(bundle: Bundle, lengths: Sequence[int], budget: float) -> list[Bundle]:
    """Split a bundle into pieces of about `budget` tokens; rows that share nothing become one piece each."""
    if not bundle.shared:
        return [Bundle(shared=0, rows=(number,)) for number in bundle.rows]
    pieces: list[list[int]] = [[]]
    spent = bundle.shared
    for number in bundle.rows:
        more = lengths[number] - bundle.shared
        if pieces[-1] and spent + more > budget:
            pieces.append([])
            spent = bundle.shared
        pieces[-1].append(number)
        spent += more
    return [Bundle(shared=bundle.shared if len(piece) > 1 else 0, rows=tuple(piece)) for piece in pieces]


def _merge_unshared(pieces: Sequence[Bundle]) -> list[Bundle]:
    """Join the pieces that share nothing into one bundle, which comes last."""
    unshared = tuple(number for piece in pieces if not piece.shared for number in piece.rows)
    shared = [piece for piece in pieces if piece.shared]
    return [*shared, Bundle(shared=0, rows=unshared)] if unshared else shared
