"""A response synthesizer that reads its nodes with a bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryType, TextNode
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher

from memagent_integrations.backends import Backend
from memagent_integrations.calls import Limits
from memagent_integrations.checks import check_names
from memagent_integrations.errors import UsageError
from memagent_integrations.journal import Journal
from memagent_integrations.llama_index.backend import LLMBackend
from memagent_integrations.llama_index.record import ResponseRecord
from memagent_integrations.llama_index.streaming import AnswerTexts
from memagent_integrations.prompts import PromptSet, Template
from memagent_integrations.reader import Reader
from memagent_integrations.records import Layout, Message, Phase, Role
from memagent_integrations.tokens import Counter

dispatcher = get_dispatcher(__name__)

Model = LLM | Backend | str | None


class ReaderSettings(TypedDict, total=False):
    """The arguments of `Reader` besides the model."""

    prompts: PromptSet | None
    layout: Layout | None
    chunk_tokens: int | None
    memory_tokens: int | None
    question_tokens: int | None
    output_tokens: int | None
    overlap_tokens: int | None
    window: int | None
    journal: Journal | str | Path | None
    limits: Limits | None
    backend_options: Mapping[str, Any] | None


class SynthesizerSettings(ReaderSettings, total=False):
    """The arguments of `MemAgentSynthesizer` besides the model."""

    tokenizer: str | Counter | None
    streaming: bool
    include_text: bool
    empty_response: str | None
    callback_manager: CallbackManager | None


class MemAgentSynthesizer(BaseSynthesizer):
    """Answers from nodes that it reads chunk by chunk, in document order, with a memory of bounded size.

    Args:
        llm: a LlamaIndex LLM, a `Backend`, or a name that `load_backend` knows; default: `Settings.llm`, looked up at
            the first call.
        model: another name for `llm`.
        tokenizer: counts the tokens of a LlamaIndex LLM, see `LLMBackend`; a backend has its own.
        streaming: whether to stream the answer. The memory is made before the response is returned, the answer is asked
            for where it is consumed: in any thread or event loop.
        include_text: whether the source nodes hold their text.
        empty_response: the answer when there are no nodes.
        callback_manager: gets the events of this synthesizer and of (a copy of) the LLM.
        settings: as in `Reader`.

    Nodes may be a list, an iterator, or an async iterator (for the async methods); iterators are read lazily. A
    response has a source node for each part of a node that was in a chunk, with its position in the source document
    and the original's metadata and score, and `metadata["memagent"]`: model, memory, steps, and usage (None for
    numbers that the model did not report). For a stream these are complete once it has been consumed.

    Raises:
        UsageError: a setting is wrong; also what `Reader.read` raises.
    """

    def __init__(
        self,
        llm: Model = None,
        *,
        model: Model = None,
        tokenizer: str | Counter | None = None,
        streaming: bool = False,
        include_text: bool = False,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        # super().__init__() is not called: it would set the callback manager of the caller's LLM, and make Settings.llm
        chosen = chosen_model(llm, model)
        if streaming:
            _check_streams(chosen)
        self._streaming, self._include_text = streaming, include_text
        self._output_cls, self._multimodal = None, False
        self._empty_response = empty_response or "Empty Response"
        self._callback_manager = callback_manager or Settings.callback_manager
        self.reader = reader_over(chosen, tokenizer, callback_manager, **settings)

    @property
    def _llm(self) -> Any:  # type: ignore[override]  # the base class looks here whether answers are objects
        backend = self.reader.backend
        return backend.llm if isinstance(backend, LLMBackend) else None

    @property
    def callback_manager(self) -> CallbackManager:
        """The callback manager that gets the events of this synthesizer."""
        return self._callback_manager

    @callback_manager.setter
    def callback_manager(self, callback_manager: CallbackManager) -> None:
        self._callback_manager = callback_manager

    def _get_prompts(self) -> PromptDictType:
        return {
            "memory": _to_template(self.reader.prompts, "memory"),
            "answer": _to_template(self.reader.prompts, "answer"),
        }

    def _update_prompts(self, prompts: PromptDictType) -> None:
        unknown = [name for name in prompts if name not in ("memory", "answer")]
        if unknown:
            raise UsageError(f"there is no prompt {unknown[0]!r}; the prompts are memory and answer")
        new = {name: _template(prompts[name]) for name in prompts}
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

    def synthesize(
        self,
        query: QueryType,
        nodes: Any,
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Return a `Response`, or a `StreamingResponse` when streaming."""
        with self._synthesis(query) as (question, finish):
            if not _is_empty(nodes):
                record = self._record()
                answer = self._read(question, record.watch(nodes), record)
                return finish(self._respond(answer, record, additional_source_nodes))
            if self._streaming:
                return finish(StreamingResponse(self._empty_response_generator()))
            return finish(Response(self._empty_response))

    async def asynthesize(
        self,
        query: QueryType,
        nodes: Any,
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Return a `Response`, or an `AsyncStreamingResponse` when streaming."""
        with self._synthesis(query) as (question, finish):
            if not _is_empty(nodes):
                record = self._record()
                answer = await self._aread(question, record.watch(nodes), record)
                return finish(self._respond(answer, record, additional_source_nodes))
            if self._streaming:
                return finish(AsyncStreamingResponse(self._empty_response_agenerator()))
            return finish(Response(self._empty_response))

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
        question = query if isinstance(query, str) else query.query_str
        with self._callback_manager.event(CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: question}) as event:
            yield question, finish
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))

    def _record(self) -> ResponseRecord:
        return ResponseRecord(self.reader.backend.name, self._include_text)

    def _read(self, question: str, document: Any, record: ResponseRecord) -> RESPONSE_TEXT_TYPE:
        if not self._streaming:
            return record.end(self.reader.read(question, document, progress=record.step))
        _check_streams(self._llm)
        return AnswerTexts(self.reader.begin(question, document, progress=record.step), record).texts()

    async def _aread(self, question: str, document: Any, record: ResponseRecord) -> RESPONSE_TEXT_TYPE:
        if not self._streaming:
            return record.end(await self.reader.aread(question, document, progress=record.step))
        _check_streams(self._llm)
        return AnswerTexts(await self.reader.abegin(question, document, progress=record.step), record).atexts()

    def _respond(
        self, answer: RESPONSE_TEXT_TYPE, record: ResponseRecord, additional: Sequence[NodeWithScore] | None
    ) -> RESPONSE_TYPE:
        response = self._prepare_response_output(answer, [*record.source_nodes(), *(additional or ())])
        response.metadata = {**(response.metadata or {}), "memagent": record.summary}
        return response


def _nodes(texts: Sequence[str]) -> list[TextNode]:
    return [TextNode(text=text) for text in ([texts] if isinstance(texts, str) else texts)]


def _is_empty(nodes: Any) -> bool:
    return isinstance(nodes, Sequence) and not nodes


def _check_streams(llm: Any) -> None:
    """Refuse to stream the answer of a structured LLM."""
    if isinstance(llm, StructuredLLM):
        raise UsageError("a structured answer cannot be streamed; pass streaming=False")


def chosen_model(llm: Model, model: Model) -> Model:
    """Return the model that was passed, under either name."""
    if llm is not None and model is not None:
        raise UsageError("llm and model mean the same; pass one of them")
    return model if llm is None else llm


def reader_over(
    model: Model,
    tokenizer: str | Counter | None = None,
    callback_manager: CallbackManager | None = None,
    **settings: Unpack[ReaderSettings],
) -> Reader:
    """Return a reader over a LlamaIndex LLM, a `Backend`, or the name of one."""
    check_names(settings, ReaderSettings.__annotations__)
    if not isinstance(model, (str, Backend)):
        return Reader(LLMBackend(model, tokenizer=tokenizer, callback_manager=callback_manager), **settings)
    if tokenizer is not None:
        raise UsageError(
            "tokenizer goes with a LlamaIndex LLM; a backend counts by itself (load_backend may take a tokenizer)"
        )
    return Reader(model, **settings)


def _to_template(prompts: PromptSet, phase: Phase) -> BasePromptTemplate:
    """Return the template of a phase as LlamaIndex has it: of one text, or of several messages."""
    template = prompts.update if phase == "memory" else prompts.answer
    if isinstance(template, str):
        return PromptTemplate(template)
    messages = [ChatMessage(role=MessageRole(message.role), content=message.content) for message in template]
    return ChatPromptTemplate(message_templates=messages)


def _template(prompt: Any) -> Template:
    """Return a prompt template of LlamaIndex as ours, with its partial variables filled in and its mapped names."""
    blanks: dict[str, Any] = {name: f"{{{name}}}" for name in ("question", "memory", "section", "words")}
    if isinstance(prompt, PromptTemplate):
        return prompt.format(**blanks)
    if isinstance(prompt, ChatPromptTemplate):
        messages = prompt.format_messages(**blanks)
        return tuple(Message(role=cast(Role, each.role.value), content=each.content or "") for each in messages)
    raise UsageError(f"the prompts are PromptTemplates or ChatPromptTemplates, not {type(prompt).__name__}")
