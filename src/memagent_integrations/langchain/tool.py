"""A tool that lets an agent ask a question about a long document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForToolRun, CallbackManagerForToolRun
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs, patch_config
from langchain_core.tools import ToolException
from pydantic import BaseModel, Field, create_model

from memagent_integrations.documents import is_one_shot
from memagent_integrations.errors import QuestionError, UsageError
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader
from memagent_integrations.langchain.tool_runs import ToolOfReader

_QUESTION = "The question, complete in itself: whoever reads the document sees nothing of this conversation."
_ONE = "Reads a whole document, however long, and answers a question about it."
_MANY = "Reads one of these documents as a whole, however long, and answers a question about it: {names}."


class DocumentQuestion(BaseModel):
    """The arguments that the model passes to a `MemAgentTool` over one document."""

    question: str = Field(description=_QUESTION)


class MemAgentTool(ToolOfReader):
    """A tool that reads a document with `reader` for the model's question and returns the text of the answer.

    `context` is the document, in any form that `MemAgentReader` takes; the model passes "question". Alternatively
    `documents` are several by name, and the model passes "question" and "document". The model sees the tool's
    `name` and `description`; write a description that says what is in the document.

    The artifact of the `ToolMessage` is a dict: the reader's `response_metadata["memagent"]`, and "usage"; of a reader
    with an `output` also "parsed", the object. Mistakes that the model can correct (an empty or too long question, an
    unknown name) raise a `ToolException`, which it sees as the tool's message; any other error is raised. The calls
    carry the tag "nostream": the stream mode "messages" shows the agent's own tokens only.

    Raises:
        UsageError: not exactly one of `context` and `documents` was passed, or one of them can be read only once.
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
        by_name = _by_name(context, documents)
        settings.setdefault("description", _MANY.format(names=", ".join(by_name)) if by_name else _ONE)
        settings.setdefault("handle_tool_error", True)
        settings.setdefault("args_schema", _arguments(by_name) if by_name else DocumentQuestion)
        super().__init__(reader=reader, context=context, documents=by_name, **settings)

    def _run(
        self,
        question: str,
        document: str | None = None,
        *,
        config: RunnableConfig,
        run_manager: CallbackManagerForToolRun,
    ) -> tuple[str, dict[str, Any]]:
        context = self._context(document)
        try:
            message = self.reader.invoke({"question": question, "context": context}, _child(config, run_manager))
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
        context = self._context(document)
        try:
            message = await self.reader.ainvoke({"question": question, "context": context}, _child(config, run_manager))
        except QuestionError as error:
            raise ToolException(str(error)) from error
        return _content_and_artifact(message, document)

    def _context(self, document: str | None) -> Any:
        if self.documents is None:
            return self.context
        if document not in self.documents:
            raise ToolException(f"there is no document {document!r}; there are: {', '.join(self.documents)}")
        return self.documents[document]


def _by_name(context: Any, documents: Any) -> dict[str, Any] | None:
    """Check the arguments; return the documents by name, or None for a single one without a name."""
    if (context is None) == (documents is None):
        raise UsageError("pass one of context (the document) and documents (several, by name)")
    if documents is None:
        by_name = None
    elif isinstance(documents, Mapping) and documents and all(isinstance(name, str) for name in documents):
        by_name = dict(documents)
    else:
        raise UsageError(
            "documents has to be a dict with at least one document, by name: {'minutes': Path('minutes.txt')}; "
            "pass a single one as context="
        )
    if any(is_one_shot(document) for document in ([context] if by_name is None else by_name.values())):
        raise UsageError(
            "an iterator is used up by the first question; "
            "give the tool a document that can be read again (str, Path, list, loader)"
        )
    return by_name


def _arguments(names: Iterable[str]) -> type[BaseModel]:
    """Return the arguments of a tool over several documents; the tool itself refuses an unknown name."""
    document = Field(description=f"The name of the document to read, one of: {', '.join(names)}.")
    return create_model("NamedDocumentQuestion", __base__=DocumentQuestion, document=(str, document))


def _child(
    config: RunnableConfig, run_manager: CallbackManagerForToolRun | AsyncCallbackManagerForToolRun
) -> RunnableConfig:
    return merge_configs(patch_config(config, callbacks=run_manager.get_child()), {"tags": ["nostream"]})


def _content_and_artifact(message: AIMessage, document: str | None) -> tuple[str, dict[str, Any]]:
    details = {**message.response_metadata["memagent"], "usage": message.usage_metadata, **message.additional_kwargs}
    return str(message.text), details | ({"document": document} if document else {})
