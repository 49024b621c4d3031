"""A query engine over documents, nodes, or a retriever."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self, Unpack

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import Document, NodeWithScore, QueryBundle

from memagent_integrations.documents import is_async, is_one_shot
from memagent_integrations.errors import UsageError
from memagent_integrations.llama_index.record import items_of
from memagent_integrations.llama_index.synthesizer import MemAgentSynthesizer, Model, SynthesizerSettings


class MemAgentQueryEngine(BaseQueryEngine):
    """Answers queries by reading all of its documents, its nodes, or what its retriever returns.

    `source` is a `BaseRetriever`, or what `documents.pieces` takes: LlamaIndex documents or nodes, a reader with
    `lazy_load_data`, an iterator (for one query), an async iterator (for one `aquery`). The synthesizer's settings
    decide whether the answer is streamed.
    """

    def __init__(
        self,
        source: Any,
        response_synthesizer: BaseSynthesizer | None = None,
        *,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._source: Any = [Document(text=source)] if isinstance(source, str) else source
        self._used = False
        self._response_synthesizer = response_synthesizer or MemAgentSynthesizer(callback_manager=callback_manager)
        super().__init__(callback_manager=callback_manager or self._response_synthesizer.callback_manager)

    @classmethod
    def from_documents(cls, documents: Any, model: Model = None, **settings: Unpack[SynthesizerSettings]) -> Self:
        """Return an engine over documents, with a `MemAgentSynthesizer` of this model and these settings."""
        return cls(documents, MemAgentSynthesizer(model=model, **settings))

    @classmethod
    def from_nodes(cls, nodes: Any, model: Model = None, **settings: Unpack[SynthesizerSettings]) -> Self:
        """`from_documents` for nodes; a list of scored nodes is put in document order."""
        return cls(nodes, MemAgentSynthesizer(model=model, **settings))

    @classmethod
    def from_retriever(
        cls, retriever: BaseRetriever, model: Model = None, **settings: Unpack[SynthesizerSettings]
    ) -> Self:
        """Return an engine that reads what the retriever returns, in document order.

        For node postprocessors use LlamaIndex's `RetrieverQueryEngine`.
        """
        return cls(retriever, MemAgentSynthesizer(model=model, **settings))

    def __getstate__(self) -> dict[str, Any]:
        if is_one_shot(self._source):
            raise UsageError(
                "an iterator cannot be copied; make the engine from a list or from a reader with lazy_load_data"
            )
        return self.__dict__

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"response_synthesizer": self._response_synthesizer}

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return all nodes that would be read for the query."""
        if isinstance(self._source, BaseRetriever):
            return self._source.retrieve(query_bundle)
        return list(map(_scored, items_of(self._take())))

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
            _check(query_bundle)
            is_retriever = isinstance(self._source, BaseRetriever)
            nodes = self._source.retrieve(query_bundle) if is_retriever else self._take()
            response = self.synthesize(query_bundle, nodes)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        payload: dict[str, Any] = {EventPayload.QUERY_STR: query_bundle.query_str}
        with self.callback_manager.event(CBEventType.QUERY, payload=payload) as event:
            _check(query_bundle)
            is_retriever = isinstance(self._source, BaseRetriever)
            nodes = await self._source.aretrieve(query_bundle) if is_retriever else self._take()
            response = await self.asynthesize(query_bundle, nodes)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    def _take(self) -> Any:
        """Return what is read for a query. An iterator is good for one query."""
        if not is_one_shot(self._source):
            return self._source
        return self._aitems() if is_async(self._source) else self._items()

    def _items(self) -> Iterator[Any]:
        self._use_up()
        yield from self._source

    async def _aitems(self) -> AsyncIterator[Any]:
        self._use_up()
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


def _check(query_bundle: QueryBundle) -> None:
    """Refuse an empty question, before a retriever gets it."""
    if not query_bundle.query_str.strip():
        raise UsageError("the question is empty")


def _scored(item: Any) -> NodeWithScore:
    node = Document(text=item) if isinstance(item, str) else item
    return node if isinstance(node, NodeWithScore) else NodeWithScore(node=node)
