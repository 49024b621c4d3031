"""The conversations of a batch, dealt into a fixed number of optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.prefixes import Bundle, bundles, whole


def deal(rows: Sequence[Sampled], parts: int, *, share: bool) -> list[list[Bundle]]:
    """The rows in `parts` parts of about as many tokens to compute, in bundles, however many rows there are.

    Each bundle goes where the least is, the largest first; one that is larger than a part is divided. A part may stay empty where there are fewer
    rows than parts.
    """
    found = bundles([row.prompt_ids for row in rows]) if share else [whole(rows)]
    lengths = [len(row.prompt_ids) + len(row.output_ids) for row in rows]

    def cost(bundle: Bundle) -> int:
        return bundle.shared + sum(lengths[number] - bundle.shared for number in bundle.rows)

    most = sum(map(cost, found)) / parts
    pieces = [piece for bundle in found for piece in _divided(bundle, lengths, most)]
    dealt: list[list[Bundle]] = [[] for _ in range(parts)]
    load = [0] * parts
    for piece in sorted(pieces, key=cost, reverse=True):
        least = load.index(min(load))
        dealt[least].append(piece)
        load[least] += cost(piece)
    return [_gathered(part) for part in dealt]


def _divided(bundle: Bundle, lengths: Sequence[int], most: float) -> list[Bundle]:
    """The bundle in pieces that cost about `most`; rows that share nothing may go anywhere."""
    if not bundle.shared:
        return [Bundle(shared=0, rows=(number,)) for number in bundle.rows]
    pieces: list[list[int]] = [[]]
    spent = bundle.shared
    for number in bundle.rows:
        more = lengths[number] - bundle.shared
        if pieces[-1] and spent + more > most:
            pieces.append([])
            spent = bundle.shared
        pieces[-1].append(number)
        spent += more
    return [Bundle(shared=bundle.shared if len(piece) > 1 else 0, rows=tuple(piece)) for piece in pieces]


def _gathered(pieces: Sequence[Bundle]) -> list[Bundle]:
    """The pieces, those that share nothing as one."""
    alone = tuple(number for piece in pieces if not piece.shared for number in piece.rows)
    shared = [piece for piece in pieces if piece.shared]
    return [*shared, Bundle(shared=0, rows=alone)] if alone else shared
