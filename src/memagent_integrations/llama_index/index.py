"""All nodes of an index."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llama_index.core.data_structs.data_structs import KG, IndexDict, IndexGraph, IndexList, KeywordTable
from llama_index.core.data_structs.document_summary import IndexDocumentSummary
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, NodeWithScore

from memagent_integrations.errors import UsageError

_WAY_OUT = "read what a retriever finds: from_index(index, retriever=...)"


class WholeIndex:
    """Gives all nodes of an index, those that it has when it is asked.

    They come from its docstore, in the order in which they were added, or from a vector store that keeps their text.

    Raises:
        UsageError: it is no index.
    """

    def __init__(self, index: BaseIndex[Any]) -> None:
        if not isinstance(index, BaseIndex):
            raise UsageError(f"index has to be a LlamaIndex index, not {type(index).__name__}")
        self._index = index

    def nodes(self) -> list[NodeWithScore]:
        """Return the nodes.

        Raises:
            UsageError: the index does not give them all.
        """
        return [NodeWithScore(node=node) for node in self._found()]

    def _found(self) -> list[BaseNode]:
        docstore, ids = self._index.docstore, _node_ids(self._index.index_struct)
        if isinstance(ids, set):
            ids = [each for each in docstore.docs if each in ids]
        if ids:
            try:
                return docstore.get_nodes(ids)
            except ValueError as error:
                raise UsageError(f"the docstore lacks nodes of the index ({error}); {_WAY_OUT}") from error
        store = getattr(self._index, "vector_store", None)
        if ids is not None and not getattr(store, "stores_text", False):
            return []
        try:
            nodes: list[BaseNode] = store.get_nodes()  # type: ignore[union-attr]
        except (AttributeError, NotImplementedError) as error:
            raise UsageError(f"{type(store or self._index).__name__} does not list its nodes; {_WAY_OUT}") from error
        return nodes


def _node_ids(struct: Any) -> list[str] | set[str] | None:
    """Return the ids of the nodes that were put into an index, without summaries that it made of them.

    A set has no order. None: an index of this kind does not list them.
    """
    ids: Iterable[str]
    if isinstance(struct, IndexList):
        ids = struct.nodes
    elif isinstance(struct, IndexDict):
        ids = struct.nodes_dict.values()
    elif isinstance(struct, IndexGraph):
        ids = (each for each in struct.all_nodes.values() if not struct.node_id_to_children_ids.get(each))
    elif isinstance(struct, IndexDocumentSummary):
        ids = struct.node_id_to_summary_id
    elif isinstance(struct, KeywordTable | KG):
        return set(struct.node_ids)
    else:
        return None
    return list(dict.fromkeys(ids))
