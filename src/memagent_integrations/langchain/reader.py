"""A runnable that answers a question from a document.

`Reader` does the reading; this module turns its events into messages, chunks, runs and custom events.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import Any, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool

from memagent_integrations.errors import UsageError
from memagent_integrations.langchain.backend import ChatModelBackend
from memagent_integrations.langchain.batches import BatchingReader
from memagent_integrations.langchain.inputs import ReaderInput, Task, merged, task_of
from memagent_integrations.langchain.messages import STEP, Answered, step_event
from memagent_integrations.langchain.node import reader_node
from memagent_integrations.langchain.runless import shown
from memagent_integrations.langchain.settings import MEMORY, RUN
from memagent_integrations.langchain.structured import ObjectReader
from memagent_integrations.langchain.tool_runs import tool_of
from memagent_integrations.reader import Reader
from memagent_integrations.records import Plan, Reading
from memagent_integrations.sanitize import encodable


class MemAgentReader(BatchingReader):
    """A runnable that reads a document of any length with a fixed window and answers a question from it.

    `model` is a LangChain model, wrapped or not, a `Backend`, or a name: one that `load_backend` knows ("smollm2",
    "openai:NAME", "policy:DIR", ...), or any other "provider:name" of LangChain's `init_chat_model`. A named model is
    loaded once, at the first use. The calls of each are runs of a chat model: traced, counted by usage handlers, and
    cached by `set_llm_cache`.

    The settings are those of `Reader` (`answer_model` and `output` too), and these:

    - `tokenizer` counts tokens, `limit_parameter` names the argument by which the model takes its output limit, where
      that is not known (see `ChatModelBackend` for both).
    - `backend_options` and `answer_options` are more arguments of a named model (`base_url`, `temperature`, ...).
    - `update_prompt` and `answer_prompt` are templates, texts or prompt templates of LangChain, in place of those of
      `prompts`; they have the placeholders of `PromptSet`.
    - `trace_inputs`: what the runs of a reading hold. "elided" (default): its own run the question, and the length of
      the document; the runs of the calls their prompts, and so the sections. "full": its own run the document too.
      "none": no text at all, neither question nor answer, only numbers and names.

    With a `journal`, the config `{"configurable": {"memagent_run": NAME}}` names the reading in it, and
    `"memagent_memory"` a memory that the reading carries on.

    The answer is an `AIMessage`: `usage_metadata` sums all calls (None if a server did not report it), and
    `response_metadata["memagent"]` describes the reading. With an `output`, `additional_kwargs["parsed"]` is the
    object. A stream yields the answer as it is written, then an empty chunk with these. Each memory update is followed
    by the custom event "memagent_step", also in LangGraph's `stream_mode="custom"`. With `reader.bind(question=...)`
    the input is the context alone, with `reader.bind(context=...)` the question.

    Retry the model (`model.with_retry()`), not the reader: around the reader a retry reads the document from the start,
    unless there is a journal, and takes a LangGraph interrupt for a failure, unless it has
    `retry_if_exception_type=(BackendError,)`.

    Raises:
        UsageError: a setting or the input is wrong; `Reader.read` lists what else a call may raise.
        MissingExtra: the package of a named model is not installed.
    """

    def invoke(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """Read the document and return the answer."""
        return self._read(input, config, **kwargs).message

    async def ainvoke(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """`invoke`, async."""
        return (await self._aread(input, config, **kwargs)).message

    def reading(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> Reading:
        """Do what `invoke` does, with the same runs, and return the whole `Reading`: answer, memory, steps."""
        return self._read(input, config, **kwargs).reading

    async def areading(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> Reading:
        """`reading`, async."""
        return (await self._aread(input, config, **kwargs)).reading

    def plan(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> Plan:
        """Return what reading this input takes, without calling the model; see `Reader.plan`."""
        task = self._task(input, kwargs)
        with self.tracing(config) as config:
            return self.under(config).plan(task.question, task.document(config))

    def stream(
        self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Yield the answer in chunks as it is written; the last one is empty and holds usage and details."""

        def read(_: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> Iterator[AIMessage]:
            for event in self._events(self._task(input, kwargs), config, whole=False):
                yield _chunk(event)

        with self.tracing(config) as config:
            chunks = self._transform_stream_with_config(iter([self.traced(input, kwargs)]), read, config)
            first = next(chunks, None)
        yield from _after(first, cast("Generator[Any]", chunks))

    async def astream(
        self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk]:
        """`stream`, async."""

        async def read(
            _: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
        ) -> AsyncGenerator[AIMessage]:
            async with aclosing(self._aevents(self._task(input, kwargs), config, whole=False)) as events:
                async for event in events:
                    yield _chunk(event)

        with self.tracing(config) as config:
            chunks = self._atransform_stream_with_config(_achain([self.traced(input, kwargs)]), read, config)
            first = await anext(chunks, None)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk]", chunks)) as stream:
            if first is not None:
                yield cast("AIMessageChunk", first)
            async for chunk in stream:
                yield chunk

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Stream the events of the reading; those of its own run show input and output as traces do."""
        if kwargs.get("version") == "v3":
            return super().astream_events(input, config, **kwargs)
        events = super().astream_events(input, config, **kwargs)
        return shown(events, lambda event: self.shown_event(event, input, kwargs))

    def transform(
        self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """`stream` for an input that comes in pieces: dicts that together hold the question and the context.

        With `bind(question=...)` the pieces are the context, and are read as they arrive.
        """
        if "question" not in kwargs:
            value = merged(list(input))
        else:
            head = list(itertools.islice(input, 2))
            value = head[0] if len(head) == 1 else itertools.chain(head, input)
        yield from self.stream(value, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[AIMessageChunk]:
        """`transform`, async."""
        value: Any
        if "question" not in kwargs:
            value = merged([item async for item in input])
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

    def with_structured_output(self, schema: Any, *, include_raw: bool = False) -> Runnable[Any, Any]:
        """Return a runnable that gives the answer as an object of `schema`, as chat models do.

        It is that of `output=schema`: an instance of the class, or a dict for a JSON Schema. With `include_raw` it is a
        dict of "raw" (the message), "parsed" and "parsing_error"; an answer that does not fit is then no error.

        Raises:
            UsageError: it is no such schema.
        """
        settings = {name: getattr(self, name) for name in self.model_fields_set - {"loaded"}}
        return ObjectReader(type(self)(**(settings | {"output": schema})), include_raw=include_raw)

    def as_tool(self, args_schema: Any = None, **settings: Any) -> BaseTool:
        """Return a tool of LangChain's whose arguments are the question and the context; see also `MemAgentTool`."""
        return tool_of(self, self, args_schema, settings)

    def as_node(
        self,
        *,
        question_key: str = "question",
        context_key: str = "context",
        memory_key: str | None = None,
        answer_key: str = "answer",
        parts: Mapping[str, str] | None = None,
    ) -> Runnable[Any, dict[str, Any]]:
        """Return a LangGraph node that reads the state's question and context, and writes the answer to it.

        `answer_key` gets the text of the answer; if it is "messages", the `AIMessage`. `parts` writes more or something
        else: it maps keys of the state to parts of the reading, which are "answer" (text), "message", "messages" (a
        list of the one message), "memory", "usage", "parsed", "citations" and "reading" (the `Reading`). With a
        `memory_key`, the reading starts from the memory in the state.

        Raises:
            UsageError: there is no such part; from a run: the state lacks one of the keys.
        """
        return reader_node(
            self._read,
            self._aread,
            question_key=question_key,
            context_key=context_key,
            memory_key=memory_key,
            answer_key=answer_key,
            parts=parts,
        )

    def _read(self, input: Any, config: RunnableConfig | None = None, **bound: Any) -> Answered:
        """Read in a run whose output is the message; return what the message was made of."""
        results: list[Answered] = []

        def read(_: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> AIMessage:
            *_, answered = self._events(self._task(input, bound), config, whole=True)
            results.append(answered)
            return results[0].message

        with self.tracing(config) as config:
            self._call_with_config(read, self.traced(input, bound), config)
        return results[0]

    async def _aread(self, input: Any, config: RunnableConfig | None = None, **bound: Any) -> Answered:
        """`_read`, async."""
        results: list[Answered] = []

        async def read(_: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig) -> AIMessage:
            async with aclosing(self._aevents(self._task(input, bound), config, whole=True)) as events:
                *_, answered = [event async for event in events]
            results.append(answered)
            return results[0].message

        with self.tracing(config) as config:
            await self._acall_with_config(read, self.traced(input, bound), config)
        return results[0]

    def _task(self, input: Any, bound: Mapping[str, Any]) -> Task:
        return task_of(input, bound, self.names())

    def _events(self, task: Task, config: RunnableConfig, *, whole: bool) -> Iterator[Any]:
        """Yield the answer in pieces of text, and `Answered` last; dispatch each memory update as a custom event."""
        document = task.document(config)
        reader = self.under(config)
        with self.lent(task.context, document, config) as lent:
            for event in reader.stream(task.question, lent, whole=whole, **_beginning(reader, task, config)):
                if isinstance(event, Reading):
                    yield _answered(reader, event)
                elif isinstance(event, str):
                    yield event
                elif event.phase == "memory":
                    dispatch_custom_event(STEP, step_event(event), config=config)

    async def _aevents(self, task: Task, config: RunnableConfig, *, whole: bool) -> AsyncGenerator[Any]:
        """`_events`, async."""
        document = await task.adocument(config)
        reader = await asyncio.to_thread(self.under, config)
        beginning = await asyncio.to_thread(_beginning, reader, task, config)
        with self.lent(task.context, document, config) as lent:
            async with aclosing(reader.astream(task.question, lent, whole=whole, **beginning)) as events:
                async for event in events:
                    if isinstance(event, Reading):
                        yield _answered(reader, event)
                    elif isinstance(event, str):
                        yield event
                    elif event.phase == "memory":
                        await adispatch_custom_event(STEP, step_event(event), config=config)


def checked_reader(reader: Any) -> MemAgentReader:
    """Return `reader`.

    Raises:
        UsageError: it is not a `MemAgentReader`.
    """
    if not isinstance(reader, MemAgentReader):
        raise UsageError(f"reader has to be a MemAgentReader, not {type(reader).__name__}")
    return reader


def _answered(reader: Reader, reading: Reading) -> Answered:
    backend, parsed = reader.answer_backend, reader.output.parse(reading.answer or "") if reader.output else None
    reported = reading.steps[-1].reply.model if reading.steps else None
    if not isinstance(backend, ChatModelBackend):
        return Answered(reading=reading, model=backend.name, parsed=parsed)
    return Answered(reading=reading, model=backend.name_of(reported), parsed=parsed, message_id=backend.answer_id)


def _beginning(reader: Reader, task: Task, config: RunnableConfig) -> dict[str, Any]:
    """Return how a reading begins: its name in the journal, and the memory to start from.

    Raises:
        UsageError: the config names a memory, and the input has one too, or there is no journal.
    """
    names = config.get("configurable", {})
    run, name = names.get(RUN.id), names.get(MEMORY.id)
    if name is None:
        return {"run": run, "memory": task.memory}
    if task.memory:
        raise UsageError(f"the input has a memory, and the config names another one ({MEMORY.id}); give one of them")
    if reader.journal is None:
        raise UsageError(f"{MEMORY.id} names a memory in a journal; give the reader one (journal=...)")
    return {"run": run, "memory": reader.journal.memory(name)}


def _chunk(event: str | Answered) -> AIMessageChunk:
    return AIMessageChunk(content=encodable(event)) if isinstance(event, str) else event.last_chunk


def _after(first: Any, rest: Generator[Any]) -> Iterator[Any]:
    with closing(rest):
        if first is not None:
            yield first
        yield from rest


async def _achain(head: list[Any], rest: AsyncIterator[Any] | None = None) -> AsyncGenerator[Any]:
    for item in head:
        yield item
    if rest:
        async for item in rest:
            yield item
