"""How nodes are read: in which order, with which metadata, and text that two of them share only once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import (
    BaseNode,
    Document,
    ImageNode,
    IndexNode,
    MediaResource,
    MetadataMode,
    NodeWithScore,
    TextNode,
)
from llama_index.core.storage.docstore import BaseDocumentStore

from memagent_integrations.documents import (
    SEPARATOR,
    Joiner,
    Piece,
    aflattened,
    apieces,
    file_paths,
    flattened,
    is_async,
    is_one_shot,
    page_of,
    pieces,
)
from memagent_integrations.errors import EmptyDocument, UsageError
from memagent_integrations.llama_index.overlap import ReadBefore
from memagent_integrations.places import Place, place_of

Order = Literal["document", "given"]

_HERE = "\0the text of the node\0"
_SHOWN = 5  # names in a message
_LONGEST_NAME = 100
_log = logging.getLogger(__name__)


class NodeOptions(TypedDict, total=False):
    """The arguments of `NodeSettings`."""

    order: Order
    trim_overlap: bool
    metadata_mode: MetadataMode | str
    docstore: BaseDocumentStore | None


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """How nodes are read.

    Args:
        order: "document": a list of nodes is read in the order of their text; "given": as it is, for a reranker's.
        trim_overlap: whether text that several nodes share is read once, where their offsets show that they do.
        metadata_mode: which metadata stands before a node's text, in LlamaIndex's own form; "none" for no metadata.
        docstore: has the parents of hierarchical nodes, whose offsets count from the parent's text.

    Raises:
        UsageError: a setting is wrong.
    """

    order: Order = "document"
    trim_overlap: bool = True
    metadata_mode: MetadataMode | str = MetadataMode.LLM
    docstore: BaseDocumentStore | None = None

    def __post_init__(self) -> None:
        if self.order not in ("document", "given"):
            raise UsageError(f'order has to be "document" or "given", not {self.order!r}')
        if self.metadata_mode not in set(MetadataMode):
            raise UsageError(f'metadata_mode has to be "all", "embed", "llm" or "none", not {self.metadata_mode!r}')
        if not isinstance(self.trim_overlap, bool):
            raise UsageError(f"trim_overlap has to be true or false, not {self.trim_overlap!r}")

    def find(self, node_id: str) -> BaseNode | None:
        """Return a node of the docstore; None if it is not there."""
        return self.docstore.get_document(node_id, raise_error=False) if self.docstore else None


class NodeLog:
    """Is told of what is read; this one takes no notice."""

    def begin(self) -> None:
        """Begin anew: the source is read from its beginning."""

    def node(self, item: NodeWithScore, place: Place) -> None:
        """Note the node that comes next."""

    def part(self, position: int, offset: int, length: int) -> None:
        """Note what is read of the node: `length` characters from `offset`, at `position` in the whole text."""

    def text(self, position: int, piece: Piece, *, keep: bool) -> None:
        """Note a piece that belongs to no node, and whether its text may be kept."""

    def unread(self, node_id: str, what: str) -> None:
        """Note what a node holds besides text."""


def as_read(source: Any, settings: NodeSettings, log: NodeLog | None = None) -> Any:
    """Return a source of nodes as a document for `Reader`, which is made while it is read.

    `source` is what `documents.pieces` or `documents.apieces` takes. It can be read as often as the source can.
    """
    if isinstance(source, (bytes, bytearray, Mapping)) or file_paths(source) or source is None:
        return source
    log = log or NodeLog()
    if is_async(source):
        return apieces(source, NodeJoiner(settings, log))
    return pieces(source, NodeJoiner(settings, log)) if is_one_shot(source) else _Readable(source, settings, log)


def nodes_of(source: Any) -> Iterator[NodeWithScore]:
    """Yield the nodes of a source, in the order in which it has them; a text or a file becomes a document."""
    for item in flattened(source, lambda items: items):
        yield from map(_scored, _with_object(item) if isinstance(item, (BaseNode, NodeWithScore)) else [item])


async def anodes_of(source: Any) -> list[NodeWithScore]:
    """Return the nodes of a source as `nodes_of` does, loaded in a thread; the source may be async."""
    if is_async(source):
        source = [item async for item in aflattened(source)]
    return await asyncio.to_thread(lambda: list(nodes_of(source)))


def docstore_of(retriever: BaseRetriever) -> BaseDocumentStore | None:
    """Return the docstore in which a retriever looks up parents; None if it has none."""
    storage = getattr(retriever, "_storage_context", None)  # an AutoMergingRetriever's
    docstore = getattr(storage, "docstore", None) or getattr(retriever, "_docstore", None)
    return docstore if isinstance(docstore, BaseDocumentStore) else None


@dataclass(frozen=True)
class _Readable:
    """A source that can be read again."""

    source: Any
    settings: NodeSettings
    log: NodeLog

    def __iter__(self) -> Iterator[Piece]:
        return pieces(self.source, NodeJoiner(self.settings, self.log))


class NodeJoiner(Joiner):
    """Turns nodes into pieces: metadata, then the text, without what was read before. Tells a log of them."""

    def __init__(self, settings: NodeSettings, log: NodeLog) -> None:
        super().__init__()
        self._settings, self._log = settings, log
        self._find_stored = cache(settings.find)
        self._read = ReadBefore()
        self._length = 0  # of the whole text so far
        self._ended: tuple[str, int] | None = None  # where the text that was read last ends in its document
        self._unread: list[str] = []
        self._has_text = False
        log.begin()

    def in_order(self, nodes: Sequence[Any]) -> Iterable[Any]:
        """Return nodes in the order that is set."""
        return nodes if self._settings.order == "given" else super().in_order(nodes)

    def find(self, node_id: str) -> Any:
        """Return the node with an id from the list or from the docstore; else None."""
        return super().find(node_id) or self._find_stored(node_id)

    def pieces_of_item(self, item: Any) -> Iterator[Piece]:
        """Yield the pieces of a node, or of anything else."""
        if isinstance(item, (BaseNode, NodeWithScore)):
            for each in _with_object(item):
                yield from self._pieces_of_node(_scored(each))
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

    def _pieces_of_node(self, item: NodeWithScore) -> Iterator[Piece]:
        node = item.node
        text, place = node.get_content(metadata_mode=MetadataMode.NONE), place_of(node, self.find)
        self._log.node(item, place)
        for what in unread_of(node):
            self._unread.append(f"{node.node_id} ({what})")
            self._log.unread(node.node_id, what)
        parts = self._read.rest(node, place, text) if self._settings.trim_overlap else [(0, text)]
        before, after = self._metadata(node, text)
        if not parts or not (text or before):
            return
        if before or not place.fits or self._ended != (place.document_id, place.start + parts[0][0]):
            yield from map(self._counted, self.next_document())
        for number, (offset, part) in enumerate(parts):
            yield self._counted(_unplaced(SEPARATOR if number else before))
            self._log.part(self._length, offset, len(part))
            start = place.start + offset
            piece = Piece(text=part, document_id=place.document_id, start=start, page=page_of(node.metadata))
            yield self._counted(piece)
        yield self._counted(_unplaced(after))
        may_go_on = place.fits and not after and self._settings.trim_overlap
        self._ended = (place.document_id, place.start + offset + len(part)) if may_go_on else None

    def _metadata(self, node: BaseNode, text: str) -> tuple[str, str]:
        """Return what LlamaIndex shows before and after the node's text."""
        mode = MetadataMode(self._settings.metadata_mode)
        if mode == MetadataMode.NONE or not node.get_metadata_str(mode).strip():
            return "", ""
        if not text:
            return node.get_content(metadata_mode=mode), ""
        probe = node.model_copy()
        probe.set_content(_HERE)
        before, found, after = probe.get_content(metadata_mode=mode).partition(_HERE)
        if not found:
            raise UsageError(f"the text_template of the node {node.node_id} does not show its {{content}}")
        return before, after

    def _counted(self, piece: Piece) -> Piece:
        self._length += len(piece.text)
        self._has_text = self._has_text or not (not piece.text or piece.text.isspace())
        return piece


def unread_of(node: BaseNode) -> list[str]:
    """Return what a node holds besides text: images, sound, video, objects; each with its name."""
    found: list[str] = []
    if isinstance(node, ImageNode) and (node.image or node.image_path or node.image_url):
        found.append(f"image {node.image_path or node.image_url or 'in the node'}")
    for kind in ("image", "audio", "video", "text"):
        resource = getattr(node, f"{kind}_resource", None)
        if isinstance(resource, MediaResource) and (resource.data or resource.path or resource.url):
            found.append(f"{kind} {resource.path or resource.url or resource.mimetype or 'in the node'}")
    if isinstance(node, IndexNode) and node.obj is not None and not isinstance(node.obj, (BaseNode, str)):
        found.append(type(node.obj).__name__)
    return [what[:_LONGEST_NAME] for what in found]


def _with_object(item: BaseNode | NodeWithScore) -> Iterator[BaseNode | NodeWithScore]:
    """Yield a node, and the one that it stands for if it is an `IndexNode`: its text may be no more than a summary."""
    node, score = (item.node, item.score) if isinstance(item, NodeWithScore) else (item, None)
    stands_for = node.obj if isinstance(node, IndexNode) else None
    if isinstance(stands_for, str):
        stands_for = TextNode(text=stands_for, id_=f"{node.node_id}:object")
    if not isinstance(stands_for, BaseNode) or node.get_content(metadata_mode=MetadataMode.NONE):
        yield item
    if isinstance(stands_for, BaseNode):
        yield NodeWithScore(node=stands_for, score=score)


class _Whole(NodeWithScore):
    """A node that was given without a score. `text` is that of a `Document` too."""

    @property
    def text(self) -> str:
        """The text of the node."""
        return self.node.get_content(metadata_mode=MetadataMode.NONE)

    def get_text(self) -> str:
        """Return the text of the node."""
        return self.text


def _scored(item: Any) -> NodeWithScore:
    if isinstance(item, NodeWithScore):
        return item
    if isinstance(item, BaseNode):
        return _Whole(node=item)
    if hasattr(item, "page_content"):
        return _Whole(node=Document.from_langchain_format(item))
    name = {"id_": str(item)} if isinstance(item, Path) else {}
    return _Whole(node=Document(text="".join(piece.text for piece in pieces([item])), **name))


def _unplaced(text: str) -> Piece:
    return Piece(text=text, document_id=None, start=0)
