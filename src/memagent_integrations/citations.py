"""The places in the documents that the statements of a memory rest on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memagent_integrations.documents import is_one_shot, pieces
from memagent_integrations.errors import UsageError
from memagent_integrations.lineage import Origin
from memagent_integrations.statements import Statement, rarity, sentences, statement, terms, total

if TYPE_CHECKING:
    from memagent_integrations.records import Span

_CERTAIN = 0.3
"""The share of a statement that a text has to hold for no other text of the same name to be looked at."""


@dataclass(frozen=True, kw_only=True)
class Citation:
    """A statement of the final memory (or of the answer, if it was looked up), and a place that it rests on.

    The place is the characters `start` to `end` of the document `document_id`.

    `page` is the page, if the document's metadata names one. `step` is the number of the step that read the place.
    """

    statement: str
    document_id: str
    start: int
    end: int
    page: str | None
    step: int

    def quote(self, document: Any) -> str:
        """Return the text of the place, from the document that was read (what `documents.pieces` takes).

        Raises:
            UsageError: the document has no such place, or can be read only once.
        """
        if is_one_shot(document):
            raise UsageError("a quote would use up this iterator; quote from what can be read again (str, Path, list)")
        found, most, known = None, -1.0, False
        parts: list[str] = []
        position = self.start
        for piece in pieces(document):
            if piece.document_id != self.document_id:
                continue
            known = True
            if piece.start <= self.start:
                parts, position = [], self.start
            if piece.start <= position < piece.start + len(piece.text):
                parts.append(piece.text[position - piece.start : self.end - piece.start])
                position += len(parts[-1])
            if parts and position == self.end:
                text = "".join(parts)
                held = _share_in(self.statement, text)
                if held >= _CERTAIN:
                    return text
                # documents that were cut from one, without `start_index`, have the same name and begin at 0 all
                found, most = (text, held) if held > most else (found, most)
        if found is None:
            problem = f"ends before character {self.end}" if known else "is not in it (of a file, pass the Path)"
            raise UsageError(f"this is not the document that was read: {self.document_id} {problem}")
        return found


def cite(
    origins: Mapping[str, tuple[Origin, ...]], spans: Mapping[int, Span], question: str, answer: str | None
) -> Iterator[Citation]:
    """Yield a citation for each place of each statement, those first that the answer rests on, then the question."""
    every = [statement(text) for text in origins]
    times = Counter(term for each in every for term in each.weights)
    weights: dict[str, float] = defaultdict(float)
    for text, share in ((answer or "", 2.0), (question, 1.0)):
        for start, end in sentences(text):
            for term, weight in statement(text[start:end]).weights.items():
                if term in times:
                    weights[term] += share * weight * rarity(times[term], len(every))

    def order(each: tuple[int, Statement, int, Origin]) -> tuple[float, int, int, int]:
        number, of, step, origin = each
        relevance = total(weights, origin.terms & of.weights.keys()) + 0.5 * total(weights, of.weights)
        return -round(relevance, 9), number, step, origin.start or 0

    placed = [
        (number, of, step, origin)
        for number, of in enumerate(every)
        for origin in origins[of.text]
        if (step := origin.step) is not None and step in spans
    ]
    known: set[tuple[str, str, int, int]] = set()
    for _, of, step, origin in sorted(placed, key=order):
        for citation in _citations(of.text, step, origin, spans[step]):
            key = (of.text, citation.document_id, citation.start, citation.end)
            if key not in known:
                known.add(key)
                yield citation


def _citations(text: str, step: int, origin: Origin, span: Span) -> Iterator[Citation]:
    """Yield the places of an origin, which a step found, in the documents that its chunk consists of."""
    for source in span.sources:
        size = source.end - source.start
        start = max((origin.start or 0) - source.offset, 0)
        end = size if origin.end is None else min(origin.end - source.offset, size)
        if start < end:
            yield Citation(
                statement=text,
                document_id=source.document_id,
                start=source.start + start,
                end=source.start + end,
                page=source.page,
                step=step,
            )


def _share_in(sentence: str, text: str) -> float:
    """Return the share of the weight of a statement that a text holds."""
    weights = statement(sentence).weights
    return total(weights, {term for term, *_ in terms(text)}) / max(total(weights, weights), 1e-9)
