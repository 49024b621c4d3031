"""What LlamaIndex's nodes are to a reading: their metadata, parents, images, and what they stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

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

from memagent_integrations.documents import aflattened, flattened, is_async, pieces
from memagent_integrations.errors import UsageError
from memagent_integrations.joining import NodeForm, Order

_HERE = "\0the text of the node\0"
_LONGEST_NAME = 100
_REPORT = "memagent"
"""What a response's metadata call the report of its reading."""


class NodeOptions(TypedDict, total=False):
    """The arguments of `NodeSettings`."""

    order: Order
    trim_overlap: bool
    metadata_mode: MetadataMode | str
    docstore: BaseDocumentStore | None


@dataclass(frozen=True, kw_only=True)
class NodeSettings(NodeForm):
    """How nodes are read.

    Args:
        order: "document": a list of nodes is read in the order of their text; "given": as it is, for a reranker's.
        trim_overlap: whether text that several nodes share is read once, where their offsets show that they do.
        metadata_mode: which metadata stands before a node's text, in LlamaIndex's own form; "none" for no metadata.
        docstore: has the parents of hierarchical nodes, whose offsets count from the parent's text.

    Raises:
        UsageError: a setting is wrong.
    """

    metadata_mode: MetadataMode | str = MetadataMode.LLM
    docstore: BaseDocumentStore | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metadata_mode not in set(MetadataMode):
            raise UsageError(f'metadata_mode has to be "all", "embed", "llm" or "none", not {self.metadata_mode!r}')

    def find(self, node_id: str) -> BaseNode | None:
        """Return a node of the docstore; None if it is not there."""
        return self.docstore.get_document(node_id, raise_error=False) if self.docstore else None

    def nodes(self, item: Any) -> Iterator[NodeWithScore]:
        """Yield a node, and those that it stands for if it is an `IndexNode`."""
        return map(_scored, _with_object(item))

    def around(self, node: BaseNode, text: str) -> tuple[str, str]:
        """Return what LlamaIndex shows before and after the node's text."""
        mode = MetadataMode(self.metadata_mode)
        if _REPORT in node.metadata:  # LlamaIndex made the node of an engine's response
            others = {name: value for name, value in node.metadata.items() if name != _REPORT}
            node = node.model_copy(update={"metadata": others})
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

    def held(self, node: BaseNode) -> list[str]:
        """Return what a node holds besides text: images, sound, video, objects; each with its name."""
        found: list[str] = []
        if isinstance(node, ImageNode) and (node.image or node.image_path or node.image_url):
            found.append(f"image {node.image_path or node.image_url or 'in the node'}")
        for kind in ("image", "audio", "video", "text"):
            resource = getattr(node, f"{kind}_resource", None)
            if isinstance(resource, MediaResource) and (resource.data or resource.path or resource.url):
                found.append(f"{kind} {resource.path or resource.url or resource.mimetype or 'in the node'}")
        if isinstance(node, IndexNode) and node.obj is not None and _object_of(node) is None:
            found.append(type(node.obj).__name__)
        return [what[:_LONGEST_NAME] for what in found]


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


def _with_object(item: BaseNode | NodeWithScore) -> Iterator[BaseNode | NodeWithScore]:
    """Yield a node, and those that it stands for if it is an `IndexNode`: its text may be no more than a summary."""
    node: BaseNode | None
    node, score = (item.node, item.score) if isinstance(item, NodeWithScore) else (item, None)
    seen: list[BaseNode] = []
    while node is not None and all(node is not each for each in seen):
        stands_for = _object_of(node)
        if stands_for is None or node.get_content(metadata_mode=MetadataMode.NONE):
            yield NodeWithScore(node=node, score=score) if seen else item
        seen.append(node)
        node = stands_for


def _object_of(node: BaseNode) -> BaseNode | None:
    """Return the node that a node stands for."""
    stands_for = node.obj if isinstance(node, IndexNode) else None
    if isinstance(stands_for, str):
        return TextNode(text=stands_for, id_=f"{node.node_id}:object")
    if isinstance(stands_for, NodeWithScore):
        return stands_for.node
    return stands_for if isinstance(stands_for, BaseNode) else None


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
