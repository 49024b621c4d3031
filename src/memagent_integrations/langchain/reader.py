"""A runnable that answers a question from a document.

`Reader` does the reading; this module turns its events into messages, chunks, runs and custom events.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableSerializable
from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs
from pydantic import ConfigDict, Field, PlainValidator, ValidationError, model_validator
from typing_extensions import TypedDict

from memagent_integrations import files
from memagent_integrations.backends import KINDS, Backend, ScriptedBackend
from memagent_integrations.calls import Limits
from memagent_integrations.checks import Number, check_names, drop_none
from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.journal import Journal
from memagent_integrations.langchain.backend import ChatModelBackend
from memagent_integrations.langchain.lazy import Lazy
from memagent_integrations.langchain.messages import (
    STEP,
    elided,
    merge_input,
    question_and_context,
    step_event,
    text_of,
    to_chunk,
    to_message,
)
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Budgets, Layout, Reading, Step
from memagent_integrations.tokens import Counter

_BUDGETS = tuple(field.name for field in fields(Budgets))


class ReaderInput(TypedDict):
    """The input of `MemAgentReader`: a question, and a document of any length to answer it from.

    `context` is what `documents.pieces` takes (text, a `Path`, `Document`s, a loader, an iterator, in async calls
    an async iterator), a `Blob`, or a retriever, which is invoked with the question.
    """

    question: str
    context: Any


def _checked_model(model: Any) -> Any:
    if not isinstance(model, (str, Backend, Runnable)):
        raise UsageError(f"model has to be a LangChain model, a Backend or a name, not {type(model).__name__}")
    return model


def _checked_journal(journal: Any) -> Journal | str | None:
    if not isinstance(journal, Journal | str | Path | None):
        raise UsageError(f"journal has to be a file or a Journal, not {type(journal).__name__}")
    return str(journal) if isinstance(journal, Path) else journal


_RUN = ConfigurableFieldSpec(
    id="memagent_run", annotation=str, name="Run", description="The name of the reading in the journal", default=None
)


class MemAgentReader(RunnableSerializable[ReaderInput, AIMessage]):
    """A runnable that reads a document of any length with a fixed window and answers a question from it.

    `model` is a LangChain model, wrapped or not, a `Backend`, or a name: one that `load_backend` knows ("smollm2",
    "openai:NAME", "policy:DIR", ...), or any other "provider:name" of LangChain's `init_chat_model`. A named model is
    loaded once, at the first use.

    `tokenizer` counts tokens, `limit_parameter` names the argument by which the model takes its output limit, where
    that is not known (see `ChatModelBackend` for both), `backend_options` are more arguments of a named backend
    (`base_url`, `temperature`, ...), the other settings are those of `Reader`. By default traces hold only the
    length of the document; with `trace_inputs="full"` they hold its text. With a `journal`, the config
    `{"configurable": {"memagent_run": NAME}}` names the reading in it.

    The answer is an `AIMessage`: `usage_metadata` sums all calls (None if a server did not report it), and
    `response_metadata["memagent"]` describes the reading. A stream yields the answer as it is written, then an
    empty chunk with these two. Each memory update is followed by the custom event "memagent_step", also in
    LangGraph's `stream_mode="custom"`. With `reader.bind(question=...)` the input is the context alone.

    Retry the model (`model.with_retry()`), not the reader: around the reader a retry reads the document from the start,
    unless there is a journal, and takes a LangGraph interrupt for a failure, unless it has
    `retry_if_exception_type=(BackendError,)`.

    Raises:
        UsageError: a setting or the input is wrong; `Reader.read` lists what else a call may raise.
        MissingExtra: the package of a named model is not installed.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: Annotated[LanguageModelLike | Backend | str, PlainValidator(_checked_model)]
    tokenizer: str | Counter | None = None
    limit_parameter: str | None = None
    chunk_tokens: Number[int | None] = None
    memory_tokens: Number[int | None] = None
    question_tokens: Number[int | None] = None
    output_tokens: Number[int | None] = None
    overlap_tokens: Number[int | None] = None
    layout: Layout | None = None
    prompts: PromptSet | None = None
    window: Number[int | None] = None
    journal: Annotated[Journal | str | None, PlainValidator(_checked_journal)] = None
    limits: Limits | None = None
    backend_options: dict[str, Any] | None = None
    trace_inputs: Literal["elided", "full"] = "elided"
    # a field, so that `configurable_fields` passes it on
    loaded: Lazy = Field(default_factory=Lazy, exclude=True, repr=False)

    def __init__(self, model: LanguageModelLike | Backend | str, **settings: Any) -> None:
        check_names(settings, type(self).model_fields)
        try:
            super().__init__(model=model, **settings)  # type: ignore[call-arg]
        except ValidationError as error:
            raise UsageError(files.first_error(error)) from error

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        is_policy = isinstance(self.model, str) and self.model.startswith("policy:")
        if not is_policy:  # a policy's budgets are known once it is loaded
            Reader(ScriptedBackend([]), **self._settings)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True: `dumpd` gives a constructor.

        `load` needs this class and the model's as `allowed_objects`, and the package's name in `valid_namespaces`.
        """
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the namespace in which `load` finds the class: the package, whatever file it is in."""
        return ["memagent_integrations", "langchain"]

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """The prompts and limits as dicts, which JSON can hold."""
        return {name: asdict(value) for name, value in (("prompts", self.prompts), ("limits", self.limits)) if value}

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The fields that a config can set: those of the model, and with a journal the name of the reading in it."""
        of_model = self.model.config_specs if isinstance(self.model, Runnable) else []
        return get_unique_config_specs([*of_model, *([_RUN] if self.journal else [])])

    def invoke(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """Read the document and return the answer."""

        def read(_: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> AIMessage:
            *_, reading = self._events(*question_and_context(input, kwargs), config, whole=True)
            return to_message(cast("Reading", reading))

        return self._call_with_config(read, self.traced(input), config)

    async def ainvoke(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """`invoke`, async."""

        async def read(_: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig) -> AIMessage:
            async with aclosing(self._aevents(*question_and_context(input, kwargs), config, whole=True)) as events:
                *_, reading = [event async for event in events]
            return to_message(cast("Reading", reading))

        return await self._acall_with_config(read, self.traced(input), config)

    def stream(
        self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Yield the answer in chunks as it is written; the last one is empty and holds usage and details."""

        def read(_: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> Iterator[AIMessage]:
            yield from map(to_chunk, self._events(*question_and_context(input, kwargs), config, whole=False))

        chunks = self._transform_stream_with_config(iter([self.traced(input)]), read, config)
        yield from cast("Iterator[AIMessageChunk]", chunks)

    async def astream(
        self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk]:
        """`stream`, async."""

        async def read(
            _: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
        ) -> AsyncGenerator[AIMessage]:
            async with aclosing(self._aevents(*question_and_context(input, kwargs), config, whole=False)) as events:
                async for event in events:
                    yield to_chunk(event)

        chunks = self._atransform_stream_with_config(_achain([self.traced(input)]), read, config)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk]", chunks)) as stream:
            async for chunk in stream:
                yield chunk

    def transform(
        self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """`stream` for an input that comes in pieces: dicts that together hold the question and the context.

        With `bind(question=...)` the pieces are the context, and are read as they arrive.
        """
        if not kwargs:
            value = merge_input(list(input))
        else:
            head = list(itertools.islice(input, 2))
            value = head[0] if len(head) == 1 else itertools.chain(head, input)
        yield from self.stream(value, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk]:
        """`transform`, async."""
        value: Any
        if not kwargs:
            value = merge_input([item async for item in input])
        else:
            head = []
            async for item in input:
                head.append(item)
                if len(head) == 2:
                    break
            value = head[0] if len(head) == 1 else _achain(head, input)
        async with aclosing(self.astream(value, config, **kwargs)) as stream:
            async for chunk in stream:
                yield chunk

    def as_node(
        self, *, question_key: str = "question", context_key: str = "context", answer_key: str = "answer"
    ) -> Runnable[Any, dict[str, str]]:
        """Return a LangGraph node that reads the state's question and context, and writes the text of the answer to it.

        Raises:
            UsageError: from a run: the state lacks one of the keys.
        """

        def task(state: Any) -> ReaderInput:
            return ReaderInput(question=_from_state(state, question_key), context=_from_state(state, context_key))

        def node(state: Any, config: RunnableConfig) -> dict[str, str]:
            return {answer_key: str(self.invoke(task(state), config).text)}

        async def anode(state: Any, config: RunnableConfig) -> dict[str, str]:
            return {answer_key: str((await self.ainvoke(task(state), config)).text)}

        return RunnableLambda(node, anode, name="memagent")

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_BUDGETS, "layout", "prompts", "window")}

    def _load(self) -> Reader:
        model = self.model
        if isinstance(model, str) and ":" in model and model.partition(":")[0] not in KINDS:
            model = _chat_model(model)
        if isinstance(model, Runnable):
            if self.backend_options:
                raise UsageError(
                    "backend_options are for a model that this package makes by its name; "
                    "give a LangChain model its own"
                )
            backend = ChatModelBackend(model, tokenizer=self.tokenizer, limit_parameter=self.limit_parameter)
            return Reader(backend, journal=self.journal, limits=self.limits)
        if self.limit_parameter and isinstance(model, Backend):
            raise UsageError("limit_parameter is for a LangChain model; a Backend has its own")
        own = drop_none(tokenizer=self.tokenizer, limit_parameter=self.limit_parameter)
        options = {**(self.backend_options or {}), **own}
        return Reader(model, journal=self.journal, limits=self.limits, backend_options=options)

    def under(self, config: RunnableConfig) -> Reader:
        """Return a `Reader` with these settings whose calls are children of the run of `config`.

        The model is loaded at the first call. Where a setting is None, the model's own prompts and budgets (a
        policy's) apply.
        """
        key = (self.model, self.tokenizer, self.limit_parameter, self.journal, self.limits, self.backend_options)
        reader: Reader = self.loaded.get(key, self._load)
        backend = reader.backend.under(config) if isinstance(reader.backend, ChatModelBackend) else None
        return reader.changed(backend=backend, **self._settings)

    def _events(self, question: str, context: Any, config: RunnableConfig, *, whole: bool) -> Iterator[str | Reading]:
        document = context.invoke(question, config) if isinstance(context, BaseRetriever) else context
        for event in self.under(config).stream(question, text_of(document), whole=whole, run=_run_of(config)):
            if not isinstance(event, Step):
                yield event
            elif event.phase == "memory":
                dispatch_custom_event(STEP, step_event(event), config=config)

    async def _aevents(
        self, question: str, context: Any, config: RunnableConfig, *, whole: bool
    ) -> AsyncGenerator[str | Reading]:
        document = await context.ainvoke(question, config) if isinstance(context, BaseRetriever) else context
        reader = await asyncio.to_thread(self.under, config)
        async with aclosing(reader.astream(question, text_of(document), whole=whole, run=_run_of(config))) as events:
            async for event in events:
                if not isinstance(event, Step):
                    yield event
                elif event.phase == "memory":
                    await adispatch_custom_event(STEP, step_event(event), config=config)

    def traced(self, value: Any) -> Any:
        """Return the input as traces show it."""
        if self.trace_inputs == "full":
            return value
        if not isinstance(value, Mapping):
            return elided(value)
        question = {"question": value["question"]} if "question" in value else {}
        return question | ({"context": elided(value["context"])} if "context" in value else {})


def checked_reader(reader: Any) -> MemAgentReader:
    """Return `reader`.

    Raises:
        UsageError: it is not a `MemAgentReader`.
    """
    if not isinstance(reader, MemAgentReader):
        raise UsageError(f"reader has to be a MemAgentReader, not {type(reader).__name__}")
    return reader


def _run_of(config: RunnableConfig) -> str | None:
    """Return the name that the config gives the reading in the journal."""
    name: str | None = config.get("configurable", {}).get(_RUN.id)
    return name


def _from_state(state: Any, key: str) -> Any:
    try:
        return state[key] if isinstance(state, Mapping) else getattr(state, key)
    except (KeyError, AttributeError) as error:
        raise UsageError(
            f"the state has no {key!r}; name its keys: reader.as_node(question_key=..., context_key=...)"
        ) from error


def _chat_model(spec: str) -> Any:
    try:
        from langchain.chat_models import init_chat_model
    except ImportError as error:
        raise MissingExtra.extra("langchain", "langchain") from error
    try:
        return init_chat_model(spec)
    except ImportError as error:
        command = re.search(r"pip install (?:-U )?[\w.\[\]-]+", str(error))
        hint = command[0] if command else "see the message above"
        raise MissingExtra(f"the package of {spec}", command=hint) from error
    except Exception as error:  # an unknown provider, a missing key, or anything else that the model's class raises
        raise UsageError(f"LangChain cannot make the model {spec!r}: {error}") from error


async def _achain(head: list[Any], rest: AsyncIterator[Any] | None = None) -> AsyncGenerator[Any]:
    for item in head:
        yield item
    if rest:
        async for item in rest:
            yield item
