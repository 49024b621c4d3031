"""A query engine over documents, nodes, an index, or a retriever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, Self, Unpack

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.indices.base import BaseIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptDictType, PromptMixinType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import Document, NodeWithScore, QueryBundle, QueryType

from memagent_integrations.checks import check_int, check_question
from memagent_integrations.documents import is_async, is_one_shot
from memagent_integrations.errors import UsageError
from memagent_integrations.llama_index.index import WholeIndex
from memagent_integrations.llama_index.nodes import anodes_of, docstore_of, nodes_of
from memagent_integrations.llama_index.settings import Model
from memagent_integrations.llama_index.synthesizer import MemAgentSynthesizer, SynthesizerSettings
from memagent_integrations.records import Plan, Reading

Postprocessors = Sequence[BaseNodePostprocessor] | None


class MemAgentQueryEngine(BaseQueryEngine):
    """Answers queries by reading all of its documents, its nodes, or what its retriever returns.

    Args:
        source: a `BaseRetriever`, or what `documents.pieces` takes: LlamaIndex documents or nodes, a reader with
            `lazy_load_data`, an iterator (for one query), an async iterator (for one `aquery`).
        response_synthesizer: answers from the nodes; default: a `MemAgentSynthesizer`. Its settings decide whether the
            answer is streamed.
        node_postprocessors: change the nodes before they are read, one after the other. An iterator is then read whole
            first.
        callback_manager: gets the events; default: that of the synthesizer.

    Raises:
        UsageError: the source cannot be read, or the synthesizer is none.
    """

    def __init__(
        self,
        source: Any,
        response_synthesizer: BaseSynthesizer | None = None,
        *,
        node_postprocessors: Postprocessors = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not isinstance(response_synthesizer, BaseSynthesizer | None):
            kind = type(response_synthesizer).__name__
            raise UsageError(
                f"response_synthesizer has to be a synthesizer of LlamaIndex, not {kind}; "
                "an LLM goes to from_documents(documents, llm)"
            )
        if source is None:
            raise UsageError("there is nothing to read: the source is None")
        if isinstance(node_postprocessors, BaseNodePostprocessor):
            raise UsageError("node_postprocessors has to be a list of postprocessors, not one of them")
        self._source: Any = [Document(text=source)] if isinstance(source, str) else source
        self._used = False
        self._response_synthesizer = response_synthesizer or MemAgentSynthesizer(callback_manager=callback_manager)
        super().__init__(callback_manager=callback_manager or self._response_synthesizer.callback_manager)
        self._node_postprocessors = list(node_postprocessors or ())
        for postprocessor in self._node_postprocessors:
            postprocessor.callback_manager = self.callback_manager

    @classmethod
    def from_documents(
        cls,
        documents: Any,
        llm: Model = None,
        *,
        node_postprocessors: Postprocessors = None,
        **settings: Unpack[SynthesizerSettings],
    ) -> Self:
        """Return an engine over documents, with a `MemAgentSynthesizer` of this LLM and these settings."""
        return cls(documents, MemAgentSynthesizer(llm, **settings), node_postprocessors=node_postprocessors)

    @classmethod
    def from_nodes(
        cls,
        nodes: Any,
        llm: Model = None,
        *,
        node_postprocessors: Postprocessors = None,
        **settings: Unpack[SynthesizerSettings],
    ) -> Self:
        """`from_documents` for nodes; a list of nodes is read in document order, unless `order` says otherwise."""
        return cls(nodes, MemAgentSynthesizer(llm, **settings), node_postprocessors=node_postprocessors)

    @classmethod
    def from_retriever(
        cls,
        retriever: BaseRetriever,
        llm: Model = None,
        *,
        node_postprocessors: Postprocessors = None,
        **settings: Unpack[SynthesizerSettings],
    ) -> Self:
        """Return an engine that reads what the retriever returns, in document order."""
        if not isinstance(retriever, BaseRetriever):
            raise UsageError(f"retriever has to be a LlamaIndex retriever, not {type(retriever).__name__}")
        settings.setdefault("docstore", docstore_of(retriever))
        return cls(retriever, MemAgentSynthesizer(llm, **settings), node_postprocessors=node_postprocessors)

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        llm: Model = None,
        *,
        retriever: BaseRetriever | None = None,
        similarity_top_k: int | None = None,
        node_postprocessors: Postprocessors = None,
        **settings: Unpack[SynthesizerSettings],
    ) -> Self:
        """Return an engine that reads all nodes of an index, those that it has when the query comes.

        With `similarity_top_k` it reads that many nodes, which the index finds for the query; with a `retriever`, such
        as `index.as_retriever(...)`, what that returns. Nodes are read in document order.

        Raises:
            UsageError: both are given, or a setting is wrong; from a query: the index does not list its nodes.
        """
        if retriever is not None and similarity_top_k is not None:
            raise UsageError("similarity_top_k is for the index's own retriever; pass it or a retriever, not both")
        whole = WholeIndex(index)
        if similarity_top_k is not None:
            check_int(similarity_top_k=similarity_top_k)
            retriever = index.as_retriever(similarity_top_k=similarity_top_k)
        source = whole if retriever is None else retriever
        settings.setdefault("docstore", index.docstore if retriever is None else docstore_of(retriever))
        return cls(source, MemAgentSynthesizer(llm, **settings), node_postprocessors=node_postprocessors)

    def __getstate__(self) -> dict[str, Any]:
        if is_one_shot(self._source):
            raise UsageError(
                "an iterator cannot be copied; make the engine from a list or from a reader with lazy_load_data"
            )
        return self.__dict__

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"response_synthesizer": self._response_synthesizer}

    def update_prompts(self, prompts_dict: PromptDictType) -> None:
        """Change the prompts with these names, of those that `get_prompts` shows.

        Raises:
            UsageError: there is no such prompt, or a template cannot be used; then none is changed.
        """
        known = self.get_prompts()
        unknown = [name for name in prompts_dict if name not in known]
        if unknown:
            raise UsageError(f"there is no prompt {unknown[0]!r}; the prompts are {', '.join(known)}")
        super().update_prompts(prompts_dict)

    @property
    def memory(self) -> str:
        """The memory that the next reading starts from; a named one is what the last reading has left."""
        return self._synthesizer.memory

    def reading(self, query: QueryType, *, run: str | None = None) -> Reading:
        """Return the reading for a query: its answer, its memory, and every step.

        `run` names it in the journal, in place of the setting `run`.

        Raises:
            MemAgentError: as `Reader.read` raises it.
        """
        bundle = _bundle(query)
        return self._synthesizer.reading(bundle, self._nodes(bundle), run=run)

    async def areading(self, query: QueryType, *, run: str | None = None) -> Reading:
        """`reading`, async."""
        bundle = _bundle(query)
        return await self._synthesizer.areading(bundle, await self._anodes(bundle), run=run)

    def readings(self, queries: Sequence[QueryType]) -> list[Reading]:
        """Return the readings for many queries, in their order; the documents are read once for all of them.

        A reading that failed has its `error`; the others go on. No events are sent.

        Raises:
            UsageError: the nodes depend on the query (a retriever, postprocessors); see also `reading`.
        """
        return self._synthesizer.readings(queries, self._nodes_of_all(queries))

    async def areadings(self, queries: Sequence[QueryType]) -> list[Reading]:
        """`readings`, async."""
        return await self._synthesizer.areadings(queries, await asyncio.to_thread(self._nodes_of_all, queries))

    def plan(self, query: QueryType) -> Plan:
        """Return what a query would take, without calling the model; a retriever is asked.

        Raises:
            MemAgentError: as `Reader.plan` raises it.
        """
        bundle = _bundle(query)
        if is_one_shot(self._source):
            raise UsageError("a plan would use up this iterator; make the engine from a list or from a reader")
        return self._synthesizer.plan(bundle, self._nodes(bundle))

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return all nodes that would be read for the query."""
        return list(nodes_of(self._nodes(query_bundle)))

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """`retrieve`, async."""
        return await anodes_of(await self._anodes(query_bundle))

    def synthesize(
        self, query_bundle: QueryBundle, nodes: Any, additional_source_nodes: Sequence[NodeWithScore] | None = None
    ) -> RESPONSE_TYPE:
        """Return the answer to the query from these nodes."""
        return self._response_synthesizer.synthesize(query_bundle, nodes, additional_source_nodes)

    async def asynthesize(
        self, query_bundle: QueryBundle, nodes: Any, additional_source_nodes: Sequence[NodeWithScore] | None = None
    ) -> RESPONSE_TYPE:
        """`synthesize`, async."""
        return await self._response_synthesizer.asynthesize(query_bundle, nodes, additional_source_nodes)

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        payload: dict[str, Any] = {EventPayload.QUERY_STR: query_bundle.query_str}
        with self.callback_manager.event(CBEventType.QUERY, payload=payload) as event:
            response = self.synthesize(query_bundle, self._nodes(_bundle(query_bundle)))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        payload: dict[str, Any] = {EventPayload.QUERY_STR: query_bundle.query_str}
        with self.callback_manager.event(CBEventType.QUERY, payload=payload) as event:
            response = await self.asynthesize(query_bundle, await self._anodes(_bundle(query_bundle)))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    @property
    def _synthesizer(self) -> MemAgentSynthesizer:
        """The synthesizer, if it is one of ours."""
        if not isinstance(self._response_synthesizer, MemAgentSynthesizer):
            raise UsageError(
                f"a {type(self._response_synthesizer).__name__} has no readings; "
                "this needs a MemAgentSynthesizer as response_synthesizer"
            )
        return self._response_synthesizer

    def _nodes(self, query_bundle: QueryBundle) -> Any:
        """Return what is read for a query."""
        if isinstance(self._source, BaseRetriever):
            nodes: Any = self._source.retrieve(query_bundle)
        else:
            nodes = self._source.nodes() if isinstance(self._source, WholeIndex) else self._take()
        if self._node_postprocessors:
            nodes = list(nodes_of(nodes))
        for postprocessor in self._node_postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    async def _anodes(self, query_bundle: QueryBundle) -> Any:
        """`_nodes`, async."""
        if isinstance(self._source, BaseRetriever):
            nodes: Any = await self._source.aretrieve(query_bundle)
        elif isinstance(self._source, WholeIndex):
            nodes = await asyncio.to_thread(self._source.nodes)
        else:
            nodes = self._take()
        if self._node_postprocessors:
            nodes = await anodes_of(nodes)
        for postprocessor in self._node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    def _nodes_of_all(self, queries: Any) -> Any:
        """Return what is read for all queries alike."""
        if isinstance(queries, str | QueryBundle) or not isinstance(queries, Sequence):
            raise UsageError(f"queries has to be a list of queries, not {type(queries).__name__}")
        if isinstance(self._source, BaseRetriever) or self._node_postprocessors:
            raise UsageError(
                "a retriever and postprocessors choose other nodes for each query, which share no reading; "
                "query one after the other, or with asyncio.gather(*map(engine.aquery, queries))"
            )
        return self._source.nodes() if isinstance(self._source, WholeIndex) else self._take()

    def _take(self) -> Any:
        """Return the source for a query. An iterator is good for one query."""
        if not is_one_shot(self._source):
            return self._source
        return self._aitems() if is_async(self._source) else self._items()

    def _items(self) -> Iterator[Any]:
        self._use_up()
        yield from self._source

    async def _aitems(self) -> AsyncIterator[Any]:
        self._use_up()
        if isinstance(self._source, Awaitable):
            yield self._source
            return
        async for item in self._source:
            yield item

    def _use_up(self) -> None:
        # runs with the first item: a query that is refused before that uses up nothing
        if self._used:
            raise UsageError(
                "this iterator has been read by an earlier query; "
                "make the engine from a list or from a reader with lazy_load_data"
            )
        self._used = True


def _bundle(query: QueryType) -> QueryBundle:
    """Return the query, unless it is empty: a retriever does not get such a one."""
    bundle = QueryBundle(query) if isinstance(query, str) else query
    check_question(bundle.query_str)
    return bundle
