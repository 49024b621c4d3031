"""Notes on a question, taken in a run of their own: shared by the compressor and the memory of an agent."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda

from memagent_integrations.langchain.messages import STEP, message_fields, step_event
from memagent_integrations.langchain.reader import MemAgentReader
from memagent_integrations.records import Reading, Step


class NoteTaking:
    """`Reader.memorize` as a run that returns the memory as a message. Traces show `traced` for the document."""

    def __init__(
        self,
        reader: MemAgentReader,
        question: str,
        document: Any,
        *,
        traced: Any,
        memory: str = "",
        strict: bool = False,
    ) -> None:
        self._reader, self._question, self._document = reader, question, document
        self._memory, self._strict = memory, strict
        self._input = reader.traced({"question": question, "context": traced})
        self._run = RunnableLambda(self._read, self._aread, name="memagent_notes")

    def take(self, config: RunnableConfig | None = None) -> AIMessage:
        """Return the notes, with usage and details as in the reader's message."""
        with self._reader.tracing(config) as config:
            return self._run.invoke(self._input, config)

    async def atake(self, config: RunnableConfig | None = None) -> AIMessage:
        """`take`, async."""
        with self._reader.tracing(config) as config:
            return await self._run.ainvoke(self._input, config)

    def _read(self, _: Any, config: RunnableConfig) -> AIMessage:
        def dispatch(step: Step) -> None:
            dispatch_custom_event(STEP, step_event(step), config=config)

        reader = self._reader.under(config)
        reading = reader.memorize(
            self._question, self._document, memory=self._memory, strict=self._strict, progress=dispatch
        )
        return _to_message(reading)

    async def _aread(self, _: Any, config: RunnableConfig) -> AIMessage:
        async def dispatch(step: Step) -> None:
            await adispatch_custom_event(STEP, step_event(step), config=config)

        reader = await asyncio.to_thread(self._reader.under, config)
        reading = await reader.amemorize(
            self._question, self._document, memory=self._memory, strict=self._strict, progress=dispatch
        )
        return _to_message(reading)


def _to_message(reading: Reading) -> AIMessage:
    return AIMessage(content=reading.memory, **message_fields(reading))
