"""A document compressor: reduces documents to one document of notes on a question."""

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
    """Reads documents in order and returns one: the notes that `reader` took on what helps to answer the query.

    For a `ContextualCompressionRetriever`, or after any retriever. The notes have at most the reader's
    `memory_tokens`, however long the documents are; each update of them is followed by the custom event
    "memagent_step". The model is not asked for an answer. The metadata of the document holds "sources" (the
    metadata of the documents read) and "memagent" (how they were read). Without text or without notes, no document
    is returned.

    Raises:
        UsageError: `reader` is not a `MemAgentReader`; the methods also raise what `Reader.read` raises.
    """

    reader: MemAgentReader

    def __init__(self, reader: MemAgentReader, **settings: Any) -> None:
        checked_reader(reader)
        super().__init__(reader=reader, **settings)  # type: ignore[call-arg]

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Return the notes on the query as one document."""
        pages = _checked(documents)
        try:
            notes = NoteTaking(self.reader, query, pages, traced=pages).take(RunnableConfig(callbacks=callbacks))
        except EmptyDocument:
            return []
        return _compressed(notes, pages)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """`compress_documents`, async."""
        pages = _checked(documents)
        try:
            notes = await NoteTaking(self.reader, query, pages, traced=pages).atake(RunnableConfig(callbacks=callbacks))
        except EmptyDocument:
            return []
        return _compressed(notes, pages)


def _checked(documents: Any) -> list[Document]:
    is_list = isinstance(documents, Iterable) and not isinstance(documents, BaseModel)
    pages = list(documents) if is_list else [documents]
    if wrong := next((type(page).__name__ for page in pages if not isinstance(page, Document)), None):
        raise UsageError(f"the documents have to be a list of Document, not of {wrong}")
    return pages


def _compressed(notes: AIMessage, documents: Sequence[Document]) -> list[Document]:
    if not notes.text:
        return []
    details = {name: value for name, value in notes.response_metadata["memagent"].items() if name != "memory"}
    sources = [document.metadata for document in documents]
    return [Document(str(notes.text), metadata={"sources": sources, "memagent": details})]
