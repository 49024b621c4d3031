"""A response synthesizer that reads its nodes with a bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryType, TextNode
from llama_index.core.settings import Settings
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher

from memagent_integrations.backends import Backend
from memagent_integrations.documents import is_one_shot
from memagent_integrations.errors import EmptyDocument, UsageError
from memagent_integrations.joining import Order, as_read
from memagent_integrations.journal import NamedMemory
from memagent_integrations.llama_index.backend import LLMBackend
from memagent_integrations.llama_index.nodes import NodeOptions, NodeSettings
from memagent_integrations.llama_index.record import ResponseRecord
from memagent_integrations.llama_index.settings import Model, ReaderSettings, reader_over
from memagent_integrations.llama_index.streaming import AnswerTexts
from memagent_integrations.llama_index.templates import from_llama_index, to_llama_index
from memagent_integrations.records import Phase, Plan, Reading
from memagent_integrations.tokens import Counter

dispatcher = get_dispatcher(__name__)


class SynthesizerSettings(ReaderSettings, NodeOptions, total=False):
    """The arguments of `MemAgentSynthesizer` besides the model."""

    tokenizer: str | Counter | None
    streaming: bool
    include_text: bool | None
    empty_response: str | None
    callback_manager: CallbackManager | None
    memory: str | NamedMemory
    run: str | None


class MemAgentSynthesizer(BaseSynthesizer):
    """Answers from nodes that it reads chunk by chunk, in document order, with a memory of bounded size.

    Args:
        llm: a LlamaIndex LLM, a `Backend`, or a name that `load_backend` knows; default: `Settings.llm`, looked up for
            each reading.
        tokenizer: counts the tokens of a LlamaIndex LLM, see `LLMBackend`; a backend has its own.
        streaming: whether to stream the answer. The memory is made before the response is returned, the answer is asked
            for where it is consumed: in any thread or event loop.
        include_text: whether the source nodes are the nodes themselves; else they are copies without text. By default
            only the nodes of an iterator are, so that they are not kept.
        empty_response: the answer when there are no nodes.
        callback_manager: gets the events of this synthesizer and of (a copy of) the LLM.
        memory: the memory that every reading starts from: a text, such as `metadata["memagent"]["memory"]` of a
            response, or a `NamedMemory` of the journal, which every reading carries on.
        run: the name of the reading in the journal, as in `Reader.read`. It is one reading, of one question.
        order: whether nodes are read in the order of their text, or as they are; see `NodeSettings`.
        trim_overlap: whether text that several nodes share is read once.
        metadata_mode: which metadata stands before a node's text.
        docstore: has the parents of hierarchical nodes.
        settings: as in `Reader`; `answer_llm` is another model for the answer, and with `output_cls`, a pydantic model
            class, answers are `PydanticResponse`s.

    Nodes may be a list, an iterator, or an async iterator (for the async methods); iterators are read lazily. A
    response has the nodes as its source nodes, each once: those that the answer rests on first, then the others in the
    order in which they were read (with `order="given"`, all in that order). Its `metadata["memagent"]` has the model,
    the memory, the steps (each with the characters of each node that it read), the citations, the usage (None for
    numbers that the model did not report), in `not_read` what nodes held that is no text, and in `lost_sections` and
    `warnings` what was lost (see `Reading`). For a stream these are
    complete once it has been consumed.

    Raises:
        UsageError: a setting is wrong; also what `Reader.read` raises.
    """

    def __init__(
        self,
        llm: Model = None,
        *,
        tokenizer: str | Counter | None = None,
        streaming: bool = False,
        include_text: bool | None = None,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
        memory: str | NamedMemory = "",
        run: str | None = None,
        order: Order = "document",
        trim_overlap: bool = True,
        metadata_mode: MetadataMode | str = MetadataMode.LLM,
        docstore: BaseDocumentStore | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        # super().__init__() is not called: it would set the callback manager of the caller's LLM, and make Settings.llm
        self._output_cls = settings.get("output_cls")
        if streaming:
            _check_streams(llm, self._output_cls)
        self._streaming, self._include_text = streaming, include_text
        self._memory, self._run = memory, run
        self.node_settings = NodeSettings(
            order=order, trim_overlap=trim_overlap, metadata_mode=metadata_mode, docstore=docstore
        )
        self._multimodal = False
        self._empty_response = empty_response or "Empty Response"
        self._callback_manager = callback_manager or Settings.callback_manager
        self.reader = reader_over(llm, tokenizer, callback_manager, **settings)

    @property
    def _llm(self) -> Any:  # type: ignore[override]  # the base class looks here whether answers are objects
        backend = self.reader.answer_backend
        return backend.llm if isinstance(backend, LLMBackend) and not self._output_cls else None

    @property
    def memory(self) -> str:
        """The memory that the next reading starts from; a named one is what the last reading has left."""
        return self._memory.text if isinstance(self._memory, NamedMemory) else self._memory

    @property
    def callback_manager(self) -> CallbackManager:
        """The callback manager that gets the events of this synthesizer."""
        return self._callback_manager

    @callback_manager.setter
    def callback_manager(self, callback_manager: CallbackManager) -> None:
        self._callback_manager = callback_manager

    def _get_prompts(self) -> PromptDictType:
        prompts = self.reader.prompts
        return {"memory": to_llama_index(prompts.update), "answer": to_llama_index(prompts.answer)}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        unknown = [name for name in prompts if name not in ("memory", "answer")]
        if unknown:
            raise UsageError(f"there is no prompt {unknown[0]!r}; the prompts are memory and answer")
        models: dict[Phase, Backend] = {"memory": self.reader.backend, "answer": self.reader.answer_backend}
        new = {phase: from_llama_index(prompts[phase], phase, models[phase]) for phase in models if phase in prompts}
        changed = self.reader.prompts.changed(update=new.get("memory"), answer=new.get("answer"))
        self.reader = self.reader.changed(prompts=changed)  # readings under way keep the reader they began with

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Return the answer, or an iterator of its pieces when streaming.

        `response_kwargs` are for the templates of other synthesizers and ignored.
        """
        return self._read(query_str, _nodes(text_chunks), self._record())

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """`get_response`, async."""
        return await self._aread(query_str, _nodes(text_chunks), self._record())

    def reading(self, query: QueryType, nodes: Any, *, run: str | None = None) -> Reading:
        """Return the whole reading of these nodes: its answer, its memory, and every step.

        `run` names it in the journal, in place of this synthesizer's `run`.

        Raises:
            MemAgentError: as `Reader.read` raises it.
        """
        record = self._record()
        reading = self.reader.read(
            _text_of(query), record.watch(nodes, self.node_settings), **self._reading_settings(record, run)
        )
        record.end(reading)
        return reading

    async def areading(self, query: QueryType, nodes: Any, *, run: str | None = None) -> Reading:
        """`reading`, async."""
        record = self._record()
        reading = await self.reader.aread(
            _text_of(query), record.watch(nodes, self.node_settings), **self._reading_settings(record, run)
        )
        record.end(reading)
        return reading

    def readings(self, queries: Sequence[QueryType], nodes: Any) -> list[Reading]:
        """Return the readings of these nodes for many queries, in their order; the nodes are read once for all.

        A reading that failed has its `error`; the others go on. No events are sent.

        Raises:
            UsageError: the synthesizer has a `run`, which is one reading, or a named memory, for readings in a row.
        """
        return self.reader.read_many(self._jobs(queries, nodes))

    async def areadings(self, queries: Sequence[QueryType], nodes: Any) -> list[Reading]:
        """`readings`, async."""
        return await self.reader.aread_many(self._jobs(queries, nodes))

    def _jobs(self, queries: Sequence[QueryType], nodes: Any) -> list[tuple[str, Any, str | NamedMemory]]:
        if self._run is not None:
            raise UsageError("run names one reading in the journal; leave it out to read for many queries")
        document = as_read(nodes, self.node_settings)
        return [(_text_of(query), document, self._memory) for query in queries]

    def plan(self, query: QueryType, nodes: Any) -> Plan:
        """Return what a reading of these nodes would take, without calling the model.

        Raises:
            MemAgentError: as `Reader.plan` raises it.
        """
        return self.reader.plan(_text_of(query), nodes if is_one_shot(nodes) else as_read(nodes, self.node_settings))

    def synthesize(
        self,
        query: QueryType,
        nodes: Any,
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Return a `Response`, or a `StreamingResponse` when streaming."""
        with self._synthesis(query) as (question, finish):
            if isinstance(nodes, Sequence) and not nodes:
                return finish(self._empty())
            record = self._record()
            record.query(query)
            try:
                answer = self._read(question, record.watch(nodes, self.node_settings), record)
            except EmptyDocument:
                if not record.is_empty:
                    raise
                return finish(self._empty())
            return finish(self._respond(answer, record, additional_source_nodes))

    async def asynthesize(
        self,
        query: QueryType,
        nodes: Any,
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Return a `Response`, or an `AsyncStreamingResponse` when streaming."""
        with self._synthesis(query) as (question, finish):
            if isinstance(nodes, Sequence) and not nodes:
                return finish(self._aempty())
            record = self._record()
            record.query(query)
            try:
                answer = await self._aread(question, record.watch(nodes, self.node_settings), record)
            except EmptyDocument:
                if not record.is_empty:
                    raise
                return finish(self._aempty())
            return finish(self._respond(answer, record, additional_source_nodes))

    def _empty(self) -> RESPONSE_TYPE:
        """Return the response where there are no nodes."""
        if self._streaming:
            return StreamingResponse(self._empty_response_generator())
        return Response(self._empty_response)

    def _aempty(self) -> RESPONSE_TYPE:
        """`_empty` for the async methods."""
        return AsyncStreamingResponse(self._empty_response_agenerator()) if self._streaming else self._empty()

    @contextmanager
    def _synthesis(self, query: QueryType) -> Iterator[tuple[str, Callable[[RESPONSE_TYPE], RESPONSE_TYPE]]]:
        """Send the events around a synthesis, as the base class does.

        Yields the question, and a function that notes the response for the closing events and returns it.
        """
        response: RESPONSE_TYPE

        def finish(result: RESPONSE_TYPE) -> RESPONSE_TYPE:
            nonlocal response
            response = result
            return result

        dispatcher.event(SynthesizeStartEvent(query=query))
        question = _text_of(query)
        with self._callback_manager.event(CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: question}) as event:
            yield question, finish
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))

    def _record(self) -> ResponseRecord:
        return ResponseRecord(self.reader.backend.name, self._include_text)

    def _read(self, question: str, document: Any, record: ResponseRecord) -> RESPONSE_TEXT_TYPE:
        settings = self._reading_settings(record)
        if not self._streaming:
            return self._object(record.end(self.reader.read(question, document, **settings)))
        _check_streams(self._llm)
        return AnswerTexts(self.reader.begin(question, document, **settings), record).texts()

    async def _aread(self, question: str, document: Any, record: ResponseRecord) -> RESPONSE_TEXT_TYPE:
        settings = self._reading_settings(record)
        if not self._streaming:
            return self._object(record.end(await self.reader.aread(question, document, **settings)))
        _check_streams(self._llm)
        return AnswerTexts(await self.reader.abegin(question, document, **settings), record).atexts()

    def _reading_settings(self, record: ResponseRecord, run: str | None = None) -> dict[str, Any]:
        return {"memory": self._memory, "run": run or self._run, "progress": record.step}

    def _object(self, answer: str) -> RESPONSE_TEXT_TYPE:
        """Return the object that an answer is, or its text."""
        return self.reader.output.parse(answer) if self.reader.output else answer

    def _respond(
        self, answer: RESPONSE_TEXT_TYPE, record: ResponseRecord, additional: Sequence[NodeWithScore] | None
    ) -> RESPONSE_TYPE:
        response = self._prepare_response_output(answer, record.source_nodes(additional or ()))
        response.metadata = {**(response.metadata or {}), "memagent": record.summary}
        return response


def _text_of(query: QueryType) -> str:
    return query if isinstance(query, str) else query.query_str


def _nodes(texts: Sequence[str]) -> list[TextNode]:
    return [TextNode(text=text) for text in ([texts] if isinstance(texts, str) else texts)]


def _check_streams(llm: Any, output_cls: Any = None) -> None:
    """Refuse to stream the answer of a structured LLM."""
    if isinstance(llm, StructuredLLM) or output_cls:
        raise UsageError("a structured answer cannot be streamed; pass streaming=False")
