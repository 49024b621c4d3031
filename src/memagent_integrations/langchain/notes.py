"""Notes on a question, taken in a run of their own: for the compressor, and for the memory of an agent."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda

from memagent_integrations.langchain.messages import STEP, message_fields, step_event
from memagent_integrations.langchain.reader import MemAgentReader
from memagent_integrations.reader import Reader
from memagent_integrations.reader.folding import PassedOver, afold, fold
from memagent_integrations.reader.running import AsyncProgress, Progress
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
    ) -> None:
        self._reader, self._question, self._document, self._memory = reader, question, document, memory
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

    def memorize(self, reader: Reader, progress: Progress) -> AIMessage:
        """Return the notes that the reader takes."""
        return _message(reader.memorize(self._question, self._document, memory=self._memory, progress=progress))

    async def amemorize(self, reader: Reader, progress: AsyncProgress) -> AIMessage:
        """`memorize`, async."""
        return _message(await reader.amemorize(self._question, self._document, memory=self._memory, progress=progress))

    def _read(self, _: Any, config: RunnableConfig) -> AIMessage:
        def dispatch(step: Step) -> None:
            dispatch_custom_event(STEP, step_event(step), config=config)

        return self.memorize(self._reader.under(config), dispatch)

    async def _aread(self, _: Any, config: RunnableConfig) -> AIMessage:
        async def dispatch(step: Step) -> None:
            await adispatch_custom_event(STEP, step_event(step), config=config)

        return await self.amemorize(await asyncio.to_thread(self._reader.under, config), dispatch)


class Folding(NoteTaking):
    """`NoteTaking` for a text that is thrown away: what is not in the notes is afterwards in `passed_over`."""

    passed_over: tuple[PassedOver, ...] = ()  # not in the message, which traces show

    def memorize(self, reader: Reader, progress: Progress) -> AIMessage:
        """Return the notes."""
        folded = fold(reader, self._question, self._document, memory=self._memory, progress=progress)
        self.passed_over = folded.passed_over
        return _message(folded.reading)

    async def amemorize(self, reader: Reader, progress: AsyncProgress) -> AIMessage:
        """`memorize`, async."""
        folded = await afold(reader, self._question, self._document, memory=self._memory, progress=progress)
        self.passed_over = folded.passed_over
        return _message(folded.reading)


def _message(reading: Reading) -> AIMessage:
    """Return the memory of a reading as a message."""
    return AIMessage(content=reading.memory, **message_fields(reading))
