"""Which nodes were read, and which characters of each in which step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

from llama_index.core.schema import MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from memagent_integrations.citations import Citation
from memagent_integrations.documents import Piece
from memagent_integrations.joining import NodeLog
from memagent_integrations.places import Place
from memagent_integrations.records import Source, Span


@dataclass(slots=True)
class _Light:
    """A node without its text, or (`grows`) a document that was no node; `texts` are the document's, if kept."""

    node_id: str
    document_id: str
    start: int
    end: int
    metadata: dict[str, Any] = field(default_factory=dict)
    score: float | None = None
    grows: bool = False
    texts: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return self.end - self.start

    def goes_on(self, document_id: str, start: int) -> bool:
        """Return whether this is a document that goes on at `start`."""
        return self.grows and self.document_id == document_id and self.start <= start <= self.end

    def node(self) -> NodeWithScore:
        """Return the source node."""
        node = TextNode(
            id_=self.node_id,
            text="".join(self.texts),
            metadata=self.metadata,
            start_char_idx=self.start,
            end_char_idx=self.end,
            relationships={NodeRelationship.SOURCE: _document(self.document_id)},
        )
        return NodeWithScore(node=node, score=self.score)


@lru_cache
def _document(document_id: str) -> RelatedNodeInfo:
    """Return the relation to a document, one for all its nodes."""
    return RelatedNodeInfo(node_id=document_id)


class SourceNodes(NodeLog):
    """Collects the nodes that are read, once each: as they are, or without their text."""

    def __init__(self, *, include_text: bool) -> None:
        self._include_text = include_text
        self.begin()

    def begin(self) -> None:
        """Forget what was read."""
        self._not_read: dict[tuple[str, str], None] = {}
        self._nodes: list[NodeWithScore | _Light] = []
        self._numbers: dict[tuple[str, Place, int], int] = {}  # by id, place and text: nodes may share an id
        self._places: list[tuple[str, int]] = []  # of each node: its document, and its start there
        self._are_numbered = True
        self._parts: list[tuple[int, int, int, int]] = []  # position in the whole text, length, node, start in the node
        self._current = 0

    def node(self, item: NodeWithScore, place: Place) -> None:
        """Note the node that comes next."""
        text = item.node.get_content(metadata_mode=MetadataMode.NONE)
        key = (item.node.node_id, place, hash(text))
        self._current = self._numbers.setdefault(key, len(self._nodes))
        if self._current < len(self._nodes):
            return
        self._places.append((place.document_id, place.start))
        self._are_numbered = self._are_numbered and text.startswith(f"Source {len(self._places)}:")
        if self._include_text:
            self._nodes.append(item)
            return
        end = place.start + len(text)
        light = _Light(item.node.node_id, place.document_id, place.start, end, item.node.metadata, item.score)
        self._nodes.append(light)

    def part(self, position: int, offset: int, length: int) -> None:
        """Note what is read of the node."""
        if self._parts:
            last, size, node, start = self._parts[-1]
            if (node, start + size, last + size) == (self._current, offset, position):
                self._parts[-1] = (last, size + length, node, start)
                return
        self._parts.append((position, length, self._current, offset))

    def text(self, position: int, piece: Piece, *, keep: bool) -> None:
        """Note a piece that belongs to no node."""
        kept = piece.text if keep and self._include_text else ""
        document = self._document(piece.document_id or "", piece.start, piece.start + len(piece.text), kept)
        self.part(position, piece.start - document.start, len(piece.text))

    def unread(self, node_id: str, what: str) -> None:
        """Note what a node holds besides text."""
        self._not_read[node_id, what] = None

    def read_in(self, span: Span) -> list[dict[str, Any]]:
        """Return which characters of which nodes' texts a chunk holds."""
        if not self._parts:  # a file, which is read without this log
            return [self._read_of(source) for source in span.sources]
        found, number = [], max(bisect_right(self._parts, span.start, key=itemgetter(0)) - 1, 0)
        while number < len(self._parts) and (part := self._parts[number])[0] < span.end:
            position, length, node, offset = part
            first, last = max(position, span.start), min(position + length, span.end)
            if first < last:
                found.append(_line(self._nodes[node].node_id, first - position + offset, last - position + offset))
            number += 1
        return found

    def not_read(self) -> list[dict[str, str]]:
        """Return what nodes held besides text."""
        return [{"node_id": node_id, "holds": what} for node_id, what in self._not_read]

    def node_ids(self, numbers: Iterable[int]) -> list[str]:
        """Return the ids of the nodes with these numbers."""
        return [self._nodes[number].node_id for number in numbers]

    def scored(self) -> list[NodeWithScore]:
        """Return the nodes in the order in which they were read."""
        return [node.node() if isinstance(node, _Light) else node for node in self._nodes]

    @property
    def are_numbered(self) -> bool:
        """Whether the nodes number themselves, as those of a `CitationQueryEngine`: "Source 1:", "Source 2:", ..."""
        return self._are_numbered

    def cited(self, citations: Sequence[Citation]) -> list[list[int]]:
        """Return the numbers of the nodes that each citation points into."""
        by_document: dict[str, list[tuple[int, Citation]]] = {}
        for number, citation in enumerate(citations):
            by_document.setdefault(citation.document_id, []).append((number, citation))
        found: list[list[int]] = [[] for _ in citations]
        for node, first, length in self._places_read():
            document_id, start = self._places[node]
            for number, citation in by_document.get(document_id, ()):
                begins = start + first
                if citation.start < begins + length and begins < citation.end and node not in found[number]:
                    found[number].append(node)
        return found

    def _places_read(self) -> Iterator[tuple[int, int, int]]:
        """Yield what was read: a node's number, the first character of its text, and the number of characters."""
        if self._parts:
            yield from ((node, offset, length) for _, length, node, offset in self._parts)
        else:
            yield from ((number, 0, len(node)) for number, node in enumerate(self._nodes) if isinstance(node, _Light))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was given to read."""
        return not self._nodes

    def _read_of(self, source: Source) -> dict[str, Any]:
        document = self._document(source.document_id, source.start, source.end)
        return _line(document.node_id, source.start - document.start, source.end - document.start)

    def _document(self, document_id: str, start: int, end: int, text: str = "") -> _Light:
        """Return the light node for a part of a document: the last one, if the part continues it."""
        last = self._nodes[-1] if self._nodes else None
        if isinstance(last, _Light) and last.goes_on(document_id, start):
            last.end = max(last.end, end)
        else:
            name = f"{document_id}:{start}" if start else document_id
            last = _Light(name, document_id, start, end, grows=True)
            self._nodes.append(last)
            self._places.append((document_id, start))
            self._are_numbered = False
        if text:
            last.texts.append(text)
        self._current = len(self._nodes) - 1
        return last


def _line(node_id: str, start: int, end: int) -> dict[str, Any]:
    return {"node_id": node_id, "start": start, "end": end}
