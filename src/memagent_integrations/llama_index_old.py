"""The door to LlamaIndex: a backend over any of its LLMs, a response synthesizer, and a query engine.

The reading itself is `Reader`; here its events become LlamaIndex's responses, source nodes, callbacks and instrumentation events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypedDict, Unpack

from memagent_integrations.backends import Backend
from memagent_integrations.backends.failures import translated
from memagent_integrations.documents import is_one_shot
from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import NO_USAGE, Layout, Phase, Prompt, Reading, Reply, Source, Step, Usage
from memagent_integrations.tokens import Counter, load_counter

try:
    from llama_index.core.base.base_query_engine import BaseQueryEngine
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, MessageRole, ThinkingBlock
    from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, Response, StreamingResponse
    from llama_index.core.callbacks.base import CallbackManager
    from llama_index.core.callbacks.schema import CBEventType, EventPayload
    from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.events import BaseEvent
    from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
    from llama_index.core.instrumentation.span import active_span_id
    from llama_index.core.llms import LLM, CustomLLM
    from llama_index.core.llms.structured_llm import StructuredLLM
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.prompts.mixin import PromptDictType, PromptMixinType
    from llama_index.core.response_synthesizers import BaseSynthesizer
    from llama_index.core.schema import BaseNode, Document, NodeRelationship, NodeWithScore, QueryBundle, QueryType, RelatedNodeInfo, TextNode
    from llama_index.core.settings import Settings
    from llama_index.core.types import RESPONSE_TEXT_TYPE
except ImportError as error:
    raise MissingExtra.extra("llama-index-core", "llama-index") from error

dispatcher = get_dispatcher(__name__)

_LIMITS = dict.fromkeys(("OpenAI", "Anthropic", "BedrockConverse", "Cohere", "LiteLLM", "LlamaCPP", "MistralAI"), "max_tokens")
_LIMITS["OpenAIResponses"] = "max_output_tokens"
_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "model_length": "length", "refusal": "content_filter"}


class LLMBackend(Backend):
    """A backend that calls a LlamaIndex LLM; without one, `Settings.llm`, looked up at the first call.

    The LLM itself is never changed: with `callback_manager` a copy of it is called. Its `system_prompt` opens every prompt. The output limit
    is passed to the LLM classes known to take one; for others give the name of the keyword argument as `limit_parameter`.

    Tokens are counted by `tokenizer`, a counter or a name that `load_counter` knows; the default is LlamaIndex's global tokenizer
    (`Settings.tokenizer`; unless set, GPT-3.5's, which comes with llama-index-core). Choose the model's own where chunks have to be exact.
    `window` defaults to the LLM's `metadata.context_window`, but for 3,900, which LlamaIndex puts there when it does not know.

    Raises:
        UsageError: there is no LLM, or it does not know its model; at the first call.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        tokenizer: str | Counter | None = None,
        window: int | None = None,
        limit_parameter: str | None = None,
        callback_manager: CallbackManager | None = None,
        concurrency: int = 8,
    ) -> None:
        if not isinstance(llm, LLM | None):
            raise UsageError(f"llm has to be a LlamaIndex LLM, not {type(llm).__name__}")
        self._given, self._window, self._limit, self._callbacks = llm, window, limit_parameter, callback_manager
        self._count = _counter(tokenizer)
        self.concurrency = concurrency

    @cached_property
    def llm(self) -> LLM:
        """The LLM that is called."""
        try:
            llm = self._given or Settings.llm
        except (ValueError, ImportError) as error:
            raise UsageError(f"no model was given, and Settings.llm cannot be made; pass model=... or set Settings.llm ({error})") from error
        return llm if self._callbacks is None else llm.model_copy(update={"callback_manager": self._callbacks})

    @property
    def name(self) -> str:  # type: ignore[override]
        """The class of the LLM and its model."""
        model = self._metadata.model_name
        return f"llama-index:{self.llm.class_name()}" + ("" if model == "unknown" else f":{model}")

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """Context window as given, or as the LLM's metadata tells it."""
        told = self._metadata.context_window
        return self._window or (told if told > 0 and told != DEFAULT_CONTEXT_WINDOW else None)

    @property
    def template_tokens(self) -> int:  # type: ignore[override]
        """Tokens that the chat template and the LLM's system prompt add to a prompt."""
        return Backend.template_tokens + self.count(self.llm.system_prompt or "")

    def count(self, text: str) -> int:
        """Tokens of the text by the tokenizer."""
        return self._count(text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """One chat call."""
        received, llm = _Received(), self._llm_for(prompt.phase)
        with translated(self.name):
            received.whole(llm.chat(self._messages(prompt), **self._options(llm, prompt)))
        return received.reply()

    async def acomplete(self, prompt: Prompt) -> Reply:
        """One chat call, async; in a thread if the LLM is only synchronous."""
        received, llm = _Received(), self._llm_for(prompt.phase)
        if _is_sync(llm):
            return await super().acomplete(prompt)
        with translated(self.name):
            received.whole(await llm.achat(self._messages(prompt), **self._options(llm, prompt)))
        return received.reply()

    def stream(self, prompt: Prompt) -> Iterator[str | Reply]:
        """One chat call, streamed."""
        received, llm = _Received(), self._llm_for(prompt.phase)
        with translated(self.name), closing(llm.stream_chat(self._messages(prompt), **self._options(llm, prompt))) as responses:
            for response in responses:
                if text := received.add(response):
                    yield text
        yield received.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """One chat call, streamed, async; in threads if the LLM is only synchronous."""
        received, llm = _Received(), self._llm_for(prompt.phase)
        if _is_sync(llm):
            async for piece in super().astream(prompt):
                yield piece
            return
        with translated(self.name):
            async with aclosing(await llm.astream_chat(self._messages(prompt), **self._options(llm, prompt))) as responses:
                async for response in responses:
                    if text := received.add(response):
                        yield text
        yield received.reply()

    @property
    def _metadata(self) -> LLMMetadata:
        try:
            return self.llm.metadata
        except ValueError as error:  # OpenAI's class, for a model it has not heard of
            raise UsageError(f"{self.llm.class_name()} has no metadata of its model; use OpenAILike for such a model ({error})") from error

    def _llm_for(self, phase: Phase) -> LLM:
        return self.llm.llm if phase == "memory" and isinstance(self.llm, StructuredLLM) else self.llm

    def _messages(self, prompt: Prompt) -> list[ChatMessage]:
        system = [ChatMessage(role=MessageRole.SYSTEM, content=self.llm.system_prompt)] if self.llm.system_prompt else []
        return [*system, *(ChatMessage(role=MessageRole(message.role), content=message.content) for message in prompt.messages)]

    def _options(self, llm: LLM, prompt: Prompt) -> dict[str, Any]:
        known = (_LIMITS[kind.__name__] for kind in type(llm).__mro__ if kind.__name__ in _LIMITS)
        limit = self._limit or next(known, None)
        return {limit: prompt.max_tokens} if limit else {}


class _Received:
    """One reply, put together from what the LLM gives."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._text = self._reasoning = ""
        self._finish: str | None = None
        self._usage = Usage()

    def whole(self, response: ChatResponse) -> None:
        self._note(response)
        self._text, self._reasoning = response.message.content or "", _reasoning(response)

    def add(self, response: ChatResponse) -> str:
        """Take one part of a stream; return its text. An LLM that fills in no deltas says all that it has so far."""
        self._note(response)
        so_far = response.message.content or ""
        text = so_far.removeprefix(self._text) if response.delta is None else response.delta
        self._text += text
        self._reasoning += _field(response.additional_kwargs, "thinking_delta") or ""
        return text

    def reply(self) -> Reply:
        seconds = time.perf_counter() - self._started
        return Reply(text=self._text, reasoning=self._reasoning, usage=self._usage, finish_reason=self._finish, seconds=seconds)

    def _note(self, response: ChatResponse) -> None:
        usage = _usage(response)
        self._usage = self._usage if usage == Usage() else usage
        self._finish = _finish_reason(response.raw) or self._finish


class MemAgentStep(BaseEvent):
    """The memory was updated (or kept, see `step.outcome`)."""

    step: Step

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "MemAgentStep"


class MemAgentAnswerEnd(BaseEvent):
    """The answer is complete: of a streamed one, the last piece has been taken."""

    reading: Reading

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "MemAgentAnswerEnd"


class ReaderSettings(TypedDict, total=False):
    """What `Reader` takes besides the model."""

    prompts: PromptSet | None
    layout: Layout | None
    chunk_tokens: int | None
    memory_tokens: int | None
    question_tokens: int | None
    output_tokens: int | None
    overlap_tokens: int | None
    window: int | None


class SynthesizerSettings(ReaderSettings, total=False):
    """What `MemAgentSynthesizer` takes besides the model."""

    tokenizer: str | Counter | None
    streaming: bool
    include_text: bool
    empty_response: str | None
    callback_manager: CallbackManager | None


class MemAgentSynthesizer(BaseSynthesizer):
    """Answers from nodes that are read one chunk after the other, in document order, with a memory of bounded size.

    Args:
        llm: a LlamaIndex LLM, a `Backend`, or a name that `load_backend` knows; default: `Settings.llm`, looked up when it is needed.
        model: another name for `llm`.
        tokenizer: of a LlamaIndex LLM, see `LLMBackend`; a backend has its own.
        streaming: answer as a stream. The memory updates are made before the response is returned, the answer comes as the model writes it.
        include_text: give the source nodes their text.
        empty_response: the answer when there are no nodes.
        callback_manager: gets the events of this synthesizer and of (a copy of) the LLM.
        settings: as in `Reader`.

    Nodes may be a list, an iterator, or an async iterator (for the async methods); iterators are read lazily. A response has a source node
    for each part of a node that stood in a chunk, with its place in the source document and the original's metadata and score, and
    `metadata["memagent"]`: model, memory, steps, and usage (None for numbers that the model did not tell). Of a stream these are complete
    when it has been exhausted.

    Raises:
        UsageError: a setting is wrong; also what `Reader.read` raises.
    """

    def __init__(
        self,
        llm: LLM | Backend | str | None = None,
        *,
        model: LLM | Backend | str | None = None,
        tokenizer: str | Counter | None = None,
        streaming: bool = False,
        include_text: bool = False,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
        **settings: Unpack[ReaderSettings],
    ) -> None:
        # The base class would set llm.callback_manager on the caller's object, and ask Settings for an LLM: it is left out.
        if llm is not None and model is not None:
            raise UsageError("llm and model mean the same; pass one of them")
        chosen = model if llm is None else llm
        if streaming and isinstance(chosen, StructuredLLM):
            raise UsageError("a structured answer cannot be streamed; pass streaming=False")
        self._llm: Any = chosen
        self._streaming, self._include_text = streaming, include_text
        self._output_cls, self._multimodal = None, False
        self._empty_response = empty_response or "Empty Response"
        self._callback_manager = callback_manager or Settings.callback_manager
        self.reader = Reader(_model(chosen, tokenizer, callback_manager), **settings)

    @property
    def callback_manager(self) -> CallbackManager:
        """Gets the events of this synthesizer."""
        return self._callback_manager

    @callback_manager.setter
    def callback_manager(self, callback_manager: CallbackManager) -> None:
        self._callback_manager = callback_manager

    def _get_prompts(self) -> PromptDictType:
        return {"memory": PromptTemplate(self.reader.prompts.update), "answer": PromptTemplate(self.reader.prompts.answer)}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        unknown = [name for name in prompts if name not in ("memory", "answer")]
        if unknown:
            raise UsageError(f"there is no prompt {unknown[0]!r}; the prompts are memory and answer")
        old = self.reader.prompts
        update = _template(prompts["memory"]) if "memory" in prompts else old.update
        answer = _template(prompts["answer"]) if "answer" in prompts else old.answer
        no_change = old.no_change if old.no_change and old.no_change in update else None
        self.reader = copy(self.reader)  # readings under way go on with the prompts they began with
        self.reader.prompts = replace(
            old,
            update=update,
            answer=answer,
            name="custom",
            no_change=no_change,
            answer_format="boxed" if "\\boxed" in answer else "text",
        )

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """The answer, or its pieces when streaming. `response_kwargs`, variables of other synthesizers' templates, have no use here."""
        return self._read(query_str, (TextNode(text=text) for text in text_chunks), _Record(self._include_text))

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """`get_response`, async."""
        return await self._aread(query_str, (TextNode(text=text) for text in text_chunks), _Record(self._include_text))

    def synthesize(
        self, query: QueryType, nodes: Any, additional_source_nodes: Sequence[NodeWithScore] | None = None, **response_kwargs: Any
    ) -> RESPONSE_TYPE:
        """A `Response`, or a `StreamingResponse` when streaming."""
        with self._synthesis(query) as (question, end):
            if isinstance(nodes, Sequence) and not nodes:
                return end(StreamingResponse(self._empty_response_generator()) if self._streaming else Response(self._empty_response))
            record = _Record(self._include_text)
            answer = self._read(question, record.watch(nodes), record)
            return end(self._respond(answer, record, additional_source_nodes))

    async def asynthesize(
        self, query: QueryType, nodes: Any, additional_source_nodes: Sequence[NodeWithScore] | None = None, **response_kwargs: Any
    ) -> RESPONSE_TYPE:
        """A `Response`, or an `AsyncStreamingResponse` when streaming."""
        with self._synthesis(query) as (question, end):
            if isinstance(nodes, Sequence) and not nodes:
                return end(AsyncStreamingResponse(self._empty_response_agenerator()) if self._streaming else Response(self._empty_response))
            record = _Record(self._include_text)
            answer = await self._aread(question, record.watch(nodes), record)
            return end(self._respond(answer, record, additional_source_nodes))

    @contextmanager
    def _synthesis(self, query: QueryType) -> Iterator[tuple[str, Callable[[RESPONSE_TYPE], RESPONSE_TYPE]]]:
        """The events around a synthesis, as the base class sends them; yields the question, and a function to pass the response through."""
        responses: list[RESPONSE_TYPE] = []

        def end(response: RESPONSE_TYPE) -> RESPONSE_TYPE:
            responses.append(response)
            return response

        dispatcher.event(SynthesizeStartEvent(query=query))
        question = query if isinstance(query, str) else query.query_str
        with self._callback_manager.event(CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: question}) as event:
            yield question, end
            event.on_end(payload={EventPayload.RESPONSE: responses[-1]})
        dispatcher.event(SynthesizeEndEvent(query=query, response=responses[-1]))

    def _read(self, question: str, document: Any, record: _Record) -> RESPONSE_TEXT_TYPE:
        if not self._streaming:
            return record.end(self.reader.read(question, document, progress=record.step))
        texts = record.texts(self.reader.stream(question, document))
        first = next(texts)  # the memory updates are made here, in the span of the caller
        return _resumed(first, texts)

    async def _aread(self, question: str, document: Any, record: _Record) -> RESPONSE_TEXT_TYPE:
        if not self._streaming:
            return record.end(await self.reader.aread(question, document, progress=record.step))
        texts = record.atexts(self.reader.astream(question, document))
        first = await anext(texts)
        return _aresumed(first, texts)

    def _respond(self, answer: RESPONSE_TEXT_TYPE, record: _Record, additional: Sequence[NodeWithScore] | None) -> RESPONSE_TYPE:
        response = self._prepare_response_output(answer, [*record.source_nodes(), *(additional or ())])
        response.metadata = {**(response.metadata or {}), "memagent": record.summary}
        return response
