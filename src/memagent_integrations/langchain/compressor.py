"""A document compressor: what documents say on a question, as one document of notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from pydantic import BaseModel

from memagent_integrations.errors import EmptyDocument, UsageError
from memagent_integrations.langchain.notes import NoteTaking
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader


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

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """The notes on the query as one document."""
        listed = _checked(documents)
        try:
            notes = NoteTaking(self.reader, query, listed, listed).take(RunnableConfig(callbacks=callbacks))
        except EmptyDocument:
            return []
        return _compressed(notes, listed)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """`compress_documents`, async."""
        listed = _checked(documents)
        try:
            notes = await NoteTaking(self.reader, query, listed, listed).atake(RunnableConfig(callbacks=callbacks))
        except EmptyDocument:
            return []
        return _compressed(notes, listed)


def _checked(documents: Any) -> list[Document]:
    listed = (
        list(documents) if isinstance(documents, Iterable) and not isinstance(documents, BaseModel) else [documents]
    )
    if wrong := next((type(item).__name__ for item in listed if not isinstance(item, Document)), None):
        raise UsageError(f"the documents have to be a list of Document, not of {wrong}")
    return listed


def _compressed(notes: AIMessage, documents: Sequence[Document]) -> list[Document]:
    if not notes.text:
        return []
    told = {name: value for name, value in notes.response_metadata["memagent"].items() if name != "memory"}
    return [
        Document(str(notes.text), metadata={"sources": [document.metadata for document in documents], "memagent": told})
    ]
