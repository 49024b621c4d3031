"""How a list of nodes becomes a text: in which order, with what around each, and what they share only once."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from memagent_integrations.documents import (
    SEPARATOR,
    Joiner,
    Piece,
    apieces,
    file_paths,
    is_async,
    is_one_shot,
    page_of,
    pieces,
)
from memagent_integrations.errors import EmptyDocument, UsageError
from memagent_integrations.overlap import Part, ReadBefore
from memagent_integrations.places import Place, is_node, place_of, text_of

Order = Literal["document", "given"]

_SHOWN = 5  # names in a message
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeForm(ABC):
    """How nodes are read. A framework says in a subclass what its nodes are.

    Args:
        order: "document": a list of nodes is read in the order of their text; "given": as it is, for a reranker's.
        trim_overlap: whether text that several nodes share is read once, where their offsets show that they do.

    Raises:
        UsageError: a setting is wrong.
    """

    order: Order = "document"
    trim_overlap: bool = True

    def __post_init__(self) -> None:
        if self.order not in ("document", "given"):
            raise UsageError(f'order has to be "document" or "given", not {self.order!r}')
        if not isinstance(self.trim_overlap, bool):
            raise UsageError(f"trim_overlap has to be true or false, not {self.trim_overlap!r}")

    def find(self, node_id: str) -> Any:
        """Return the node with an id, from wherever nodes are kept; None if it is not there."""
        return None

    @abstractmethod
    def nodes(self, item: Any) -> Iterator[Any]:
        """Yield the nodes, with their scores, that are read for an item."""

    def around(self, node: Any, text: str) -> tuple[str, str]:
        """Return what stands before and after the text of a node."""
        return "", ""

    def held(self, node: Any) -> list[str]:
        """Return the names of what a node holds besides text."""
        return []


class NodeLog:
    """Is told of what is read; this one takes no notice."""

    def begin(self) -> None:
        """Begin anew: the source is read from its beginning."""

    def node(self, item: Any, place: Place) -> None:
        """Note the node, with its score, that comes next."""

    def part(self, position: int, offset: int, length: int) -> None:
        """Note what is read of the node: `length` characters from `offset`, at `position` in the whole text."""

    def text(self, position: int, piece: Piece, *, keep: bool) -> None:
        """Note a piece that belongs to no node, and whether its text may be kept."""

    def unread(self, node_id: str, what: str) -> None:
        """Note what a node holds besides text."""


def as_read(source: Any, form: NodeForm, log: NodeLog | None = None) -> Any:
    """Return a source of nodes as a document for `Reader`, which is made while it is read.

    `source` is what `documents.pieces` or `documents.apieces` takes. It can be read as often as the source can.
    """
    if isinstance(source, (bytes, bytearray, Mapping)) or file_paths(source) or source is None:
        return source
    log = log or NodeLog()
    if is_async(source):
        return apieces(source, NodeJoiner(form, log))
    return pieces(source, NodeJoiner(form, log)) if is_one_shot(source) else _Readable(source, form, log)


@dataclass(frozen=True)
class _Readable:
    """A source that can be read again."""

    source: Any
    form: NodeForm
    log: NodeLog

    def __iter__(self) -> Iterator[Piece]:
        return pieces(self.source, NodeJoiner(self.form, self.log))


class NodeJoiner(Joiner):
    """Turns nodes into pieces: metadata, then the text, without what was read before. Tells a log of them."""

    def __init__(self, form: NodeForm, log: NodeLog) -> None:
        super().__init__()
        self._form, self._log = form, log
        self._find_stored = cache(form.find)
        self._read = ReadBefore()
        self._length = 0  # of the whole text so far
        self._ended: tuple[str, int] | None = None  # where the text that was read last ends in its document
        self._unread: list[str] = []
        self._has_text = False
        log.begin()

    def in_order(self, nodes: Sequence[Any]) -> Iterable[Any]:
        """Return nodes in the order that is set."""
        return nodes if self._form.order == "given" else super().in_order(nodes)

    def find(self, node_id: str) -> Any:
        """Return the node with an id from the list or from the docstore; else None."""
        return super().find(node_id) or self._find_stored(node_id)

    def pieces_of_item(self, item: Any) -> Iterator[Piece]:
        """Yield the pieces of a node, or of anything else."""
        if is_node(item):
            for each in self._form.nodes(item):
                yield from self._pieces_of_node(each)
            return
        self._ended = None
        for piece in super().pieces_of_item(item):
            if piece.document_id is not None:
                self._log.text(self._length, piece, keep=not isinstance(item, Path))
            yield self._counted(piece)

    def end(self) -> None:
        """Warn of what was not read.

        Raises:
            EmptyDocument: there was nothing else.
        """
        if not self._unread:
            return
        shown, more = ", ".join(self._unread[:_SHOWN]), len(self._unread) - _SHOWN
        names = f"{shown} and {more} more" if more > 0 else shown
        if not self._has_text:
            raise EmptyDocument(f"there is no text to read, and only text is read: {names}")
        _log.warning("only the text of nodes is read, not what else they hold: %s", names)

    def _pieces_of_node(self, item: Any) -> Iterator[Piece]:
        node = item.node
        text, place = text_of(node), place_of(node, self.find)
        self._log.node(item, place)
        for what in self._form.held(node):
            self._unread.append(f"{node.node_id} ({what})")
            self._log.unread(node.node_id, what)
        parts = self._read.rest(node, place, text) if self._form.trim_overlap else [(0, text)]
        before, after = self._form.around(node, text)

        def goes_on(part: Part) -> bool:
            return not before and place.fits and self._ended == (place.document_id, place.start + part[0])

        # a rest of nothing but space is read where it goes on the text, else the separator stands for it
        parts = [part for part in parts if part[1] == text or not part[1].isspace() or goes_on(part)]
        if not parts or not (text or before):
            return
        if not goes_on(parts[0]):
            yield from map(self._counted, self.next_document())
        for number, (offset, part) in enumerate(parts):
            yield self._counted(_unplaced(SEPARATOR if number else before))
            self._log.part(self._length, offset, len(part))
            start = place.start + offset
            piece = Piece(text=part, document_id=place.document_id, start=start, page=page_of(node.metadata))
            yield self._counted(piece)
        yield self._counted(_unplaced(after))
        may_go_on = place.fits and not after and self._form.trim_overlap
        self._ended = (place.document_id, place.start + offset + len(part)) if may_go_on else None

    def _counted(self, piece: Piece) -> Piece:
        self._length += len(piece.text)
        self._has_text = self._has_text or not (not piece.text or piece.text.isspace())
        return piece


def _unplaced(text: str) -> Piece:
    return Piece(text=text, document_id=None, start=0)
