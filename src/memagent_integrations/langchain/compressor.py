"""A document compressor: what documents say on a question, as one document of notes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks, adispatch_custom_event, dispatch_custom_event
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda

from memagent_integrations.langchain.messages import STEP, elided, message_fields, step_event
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader
from memagent_integrations.records import Reading, Step


class MemAgentDocumentCompressor(BaseDocumentCompressor):
    """Reads documents in order for a query and gives one back: the notes that `reader` took, which hold what helps to answer the query.

    For a `ContextualCompressionRetriever`, or after any retriever. However much text the documents hold, the notes have at most the reader's
    `memory_tokens`; each update of them is followed by the custom event "memagent_step". No answer is asked for. The metadata of the document
    has "sources", the metadata of the documents read, and "memagent", how they were read. No text, or no notes, gives no document.

    Raises:
        UsageError: `reader` is none; as `Reader.read` for the calls.
    """

    reader: MemAgentReader

    def __init__(self, reader: MemAgentReader, **settings: Any) -> None:
        checked_reader(reader)
        super().__init__(reader=reader, **settings)  # type: ignore[call-arg]

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None) -> list[Document]:
        """The notes on the query as one document."""
        if not any(document.page_content.strip() for document in documents):
            return []
        notes = note_taking(self.reader, query, list(documents)).invoke(_traced(query, documents), RunnableConfig(callbacks=callbacks))
        return _compressed(notes, documents)

    async def acompress_documents(self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None) -> list[Document]:
        """`compress_documents`, async."""
        if not any(document.page_content.strip() for document in documents):
            return []
        notes = await note_taking(self.reader, query, list(documents)).ainvoke(_traced(query, documents), RunnableConfig(callbacks=callbacks))
        return _compressed(notes, documents)


def note_taking(reader: MemAgentReader, question: str, document: Any, memory: str = "") -> RunnableLambda[Any, AIMessage]:
    """`Reader.memorize` as a run, which gives the memory as a message; what it is invoked with is only what traces show."""

    def read(_: Any, config: RunnableConfig) -> AIMessage:
        def tell(step: Step) -> None:
            dispatch_custom_event(STEP, step_event(step), config=config)

        return _to_message(reader.under(config).memorize(question, document, memory=memory, progress=tell))

    async def aread(_: Any, config: RunnableConfig) -> AIMessage:
        telling: list[asyncio.Task[None]] = []

        def tell(step: Step) -> None:
            telling.append(asyncio.create_task(adispatch_custom_event(STEP, step_event(step), config=config)))

        own = await asyncio.to_thread(reader.under, config)
        try:
            return _to_message(await own.amemorize(question, document, memory=memory, progress=tell))
        finally:
            await asyncio.gather(*telling)

    return RunnableLambda(read, aread, name="memagent_notes")


def _to_message(reading: Reading) -> AIMessage:
    return AIMessage(content=reading.memory, **message_fields(reading))


def _traced(query: str, documents: Sequence[Document]) -> dict[str, str]:
    return {"question": query, "context": elided(documents)}


def _compressed(notes: AIMessage, documents: Sequence[Document]) -> list[Document]:
    if not notes.text:
        return []
    told = {name: value for name, value in notes.response_metadata["memagent"].items() if name != "memory"}
    return [Document(str(notes.text), metadata={"sources": [document.metadata for document in documents], "memagent": told})]
