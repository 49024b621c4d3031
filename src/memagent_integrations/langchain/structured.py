"""Structured answers as LangChain's chat models give them: the object, or a dict of message, object and error."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import reduce
from operator import add
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, message_chunk_to_message
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import ConfigurableFieldSpec
from langchain_core.tools import BaseTool

from memagent_integrations.errors import BackendError
from memagent_integrations.langchain.batches import BatchingReader, Pair
from memagent_integrations.langchain.inputs import ReaderInput
from memagent_integrations.langchain.messages import message_fields
from memagent_integrations.langchain.runless import shown
from memagent_integrations.langchain.tool_runs import tool_of


class ObjectReader(Runnable[ReaderInput, Any]):
    """What `MemAgentReader.with_structured_output` returns. Its runs are the reader's, with what these may show."""

    def __init__(self, reader: BatchingReader, *, include_raw: bool = False) -> None:
        self.reader, self._include_raw = reader, include_raw

    @property
    def InputType(self) -> Any:  # noqa: N802 (LangChain's name)
        """The reader's."""
        return self.reader.InputType

    @property
    def OutputType(self) -> Any:  # noqa: N802 (LangChain's name)
        """Whatever the schema describes."""
        return Any

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The reader's."""
        return self.reader.config_specs

    def invoke(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Read the document and return the object."""
        try:
            return self._object_in(self.reader.invoke(input, config, **kwargs))
        except BackendError as error:
            return self._unfit(error)

    async def ainvoke(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """`invoke`, async."""
        try:
            return self._object_in(await self.reader.ainvoke(input, config, **kwargs))
        except BackendError as error:
            return self._unfit(error)

    def transform(self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Read what comes in pieces and yield the object; see `MemAgentReader.transform`."""
        try:
            chunks = list(self.reader.transform(input, config, **kwargs))
        except BackendError as error:
            yield self._unfit(error)
            return
        yield self._object_in(message_chunk_to_message(reduce(add, chunks)))

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any]:
        """`transform`, async."""
        try:
            chunks = [chunk async for chunk in self.reader.atransform(input, config, **kwargs)]
        except BackendError as error:
            yield self._unfit(error)
            return
        yield self._object_in(message_chunk_to_message(reduce(add, chunks)))

    def batch(
        self, inputs: list[ReaderInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Return the objects for many inputs, which are read as `MemAgentReader.batch` reads them."""
        tolerant = return_exceptions or self._include_raw
        outcomes = self.reader.batch(inputs, config, return_exceptions=tolerant, **kwargs)
        return [self._outcome(outcome, return_exceptions=return_exceptions) for outcome in outcomes]

    async def abatch(
        self, inputs: list[ReaderInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """`batch`, async."""
        tolerant = return_exceptions or self._include_raw
        outcomes = await self.reader.abatch(inputs, config, return_exceptions=tolerant, **kwargs)
        return [self._outcome(outcome, return_exceptions=return_exceptions) for outcome in outcomes]

    def batch_as_completed(
        self, inputs: Sequence[ReaderInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> Iterator[Pair]:
        """`batch`, as an iterator over pairs of number and object, as they are completed."""
        tolerant = return_exceptions or self._include_raw
        for number, outcome in self.reader.batch_as_completed(inputs, config, return_exceptions=tolerant, **kwargs):
            yield number, self._outcome(outcome, return_exceptions=return_exceptions)

    async def abatch_as_completed(
        self, inputs: Sequence[ReaderInput], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> AsyncGenerator[Pair]:
        """`batch_as_completed`, async."""
        tolerant = return_exceptions or self._include_raw
        pairs = self.reader.abatch_as_completed(inputs, config, return_exceptions=tolerant, **kwargs)
        async with aclosing(pairs) as completed:
            async for number, outcome in completed:
                yield number, self._outcome(outcome, return_exceptions=return_exceptions)

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Stream the events of the reading as the reader shows them; the last one has the object, if traces have it."""
        events = super().astream_events(input, config, **kwargs)
        if kwargs.get("version") == "v3":
            return events
        return shown(events, lambda event: self._shown_event(event, input, kwargs))

    def as_tool(self, args_schema: Any = None, **settings: Any) -> BaseTool:
        """Return a tool of LangChain's that gives the object, as `MemAgentReader.as_tool` does."""
        return tool_of(self, self.reader, args_schema, settings)

    def _shown_event(self, event: Any, input: Any, bound: Mapping[str, Any]) -> Any:
        event = self.reader.shown_event(event, input, bound)
        output = event["data"].get("output")
        if self.reader.trace_inputs == "none" or not isinstance(output, AIMessage):
            return event
        return {**event, "data": {**event["data"], "output": self._object_in(output)}}

    def _outcome(self, outcome: AIMessage | Exception, *, return_exceptions: bool) -> Any:
        """Return what a batch gives for the outcome of one of its readings."""
        if isinstance(outcome, AIMessage):
            return self._object_in(outcome)
        try:
            if not isinstance(outcome, BackendError):
                raise outcome
            return self._unfit(outcome)
        except Exception as error:
            if return_exceptions:
                return error
            raise

    def _object_in(self, message: BaseMessage) -> Any:
        parsed = message.additional_kwargs["parsed"]
        return {"raw": message, "parsed": parsed, "parsing_error": None} if self._include_raw else parsed

    def _unfit(self, error: BackendError) -> dict[str, Any]:
        """Return the answer that does not fit, with its error; raise the error of a reading that came to no answer."""
        reading = error.reading
        if not self._include_raw or reading is None or not reading.steps or reading.steps[-1].phase != "answer":
            raise error
        raw = AIMessage(content=reading.steps[-1].reply.text, **message_fields(reading))
        return {"raw": raw, "parsed": None, "parsing_error": error}
