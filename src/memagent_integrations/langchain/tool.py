"""A tool with which an agent has a document read for a question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForToolRun, CallbackManagerForToolRun
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs, patch_config
from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field, create_model

from memagent_integrations.documents import is_one_shot
from memagent_integrations.errors import QuestionError, UsageError
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader

_QUESTION = "The question, complete in itself: whoever reads the document sees nothing of this conversation."
_ONE = "Reads a whole document, however long, and answers a question about it."
_MANY = "Reads one of these documents as a whole, however long, and answers a question about it: {names}."


class DocumentQuestion(BaseModel):
    """What the model passes to a `MemAgentTool` of one document."""

    question: str = Field(description=_QUESTION)


class MemAgentTool(BaseTool):
    """A tool that has `reader` read a document for the question of a model, and gives the answer's text.

    `context` is the document, whatever `MemAgentReader` takes as one; the model passes the question. Or `documents` are several by name, and it
    passes "question" and "document". `name` and `description` are what the model sees of the tool; write a description that says what is in
    the document.

    The artifact of the `ToolMessage` is a dict of how it was read: the reader's `response_metadata["memagent"]`, and "usage". What the model
    can do better (an empty question, one that is too long, an unknown name) is a `ToolException`, which it gets to see as the tool's message;
    any other error is raised. Its calls carry the tag "nostream", so that the stream mode "messages" shows the agent's own tokens only.

    Raises:
        UsageError: there is not one of `context` and `documents`, or they can be read only once.
    """

    name: str = "read_document"
    description: str = ""
    reader: MemAgentReader
    context: Any = Field(default=None, repr=False)
    documents: dict[str, Any] | None = Field(default=None, repr=False)
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"

    def __init__(
        self,
        reader: MemAgentReader,
        *,
        context: Any = None,
        documents: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        checked_reader(reader)
        named = _named(context, documents)
        settings.setdefault("description", _MANY.format(names=", ".join(named)) if named else _ONE)
        settings.setdefault("handle_tool_error", True)
        settings.setdefault("args_schema", _arguments(named) if named else DocumentQuestion)
        super().__init__(reader=reader, context=context, documents=named, **settings)

    def _run(
        self,
        question: str,
        document: str | None = None,
        *,
        config: RunnableConfig,
        run_manager: CallbackManagerForToolRun,
    ) -> tuple[str, dict[str, Any]]:
        child = merge_configs(patch_config(config, callbacks=run_manager.get_child()), {"tags": ["nostream"]})
        context = self._context(document)
        try:
            message = self.reader.invoke({"question": question, "context": context}, child)
        except QuestionError as error:
            raise ToolException(str(error)) from error
        return _content_and_artifact(message, document)

    async def _arun(
        self,
        question: str,
        document: str | None = None,
        *,
        config: RunnableConfig,
        run_manager: AsyncCallbackManagerForToolRun,
    ) -> tuple[str, dict[str, Any]]:
        child = merge_configs(patch_config(config, callbacks=run_manager.get_child()), {"tags": ["nostream"]})
        context = self._context(document)
        try:
            message = await self.reader.ainvoke({"question": question, "context": context}, child)
        except QuestionError as error:
            raise ToolException(str(error)) from error
        return _content_and_artifact(message, document)

    def _context(self, document: str | None) -> Any:
        if self.documents is None:
            return self.context
        if document not in self.documents:
            raise ToolException(f"there is no document {document!r}; there are: {', '.join(self.documents)}")
        return self.documents[document]


def _named(context: Any, documents: Any) -> dict[str, Any] | None:
    """The documents by name, or None for one without; checked."""
    if (context is None) == (documents is None):
        raise UsageError("pass one of context (the document) and documents (several, by name)")
    if documents is not None and not (
        isinstance(documents, Mapping) and documents and all(isinstance(name, str) for name in documents)
    ):
        raise UsageError(
            "documents has to be a dict with at least one document, by name: {'minutes': Path('minutes.txt')}; one alone is context="
        )
    named = None if documents is None else dict(documents)
    if any(is_one_shot(document) for document in ([context] if named is None else named.values())):
        raise UsageError(
            "an iterator is used up by the first question; give the tool a document that can be read again (str, Path, list, loader)"
        )
    return named


def _arguments(named: Mapping[str, Any]) -> type[BaseModel]:
    """What the model passes to choose one of several documents. A wrong name is left to the tool: its message tells the right ones."""
    document = Field(description=f"The name of the document to read, one of: {', '.join(named)}.")
    return create_model("NamedDocumentQuestion", __base__=DocumentQuestion, document=(str, document))


def _content_and_artifact(message: AIMessage, document: str | None) -> tuple[str, dict[str, Any]]:
    told = {**message.response_metadata["memagent"], "usage": message.usage_metadata}
    return str(message.text), told | ({"document": document} if document else {})
