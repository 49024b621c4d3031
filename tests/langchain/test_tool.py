from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import ToolCall, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool, ToolException
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_tests.integration_tests import RetrieversIntegrationTests, ToolsIntegrationTests
from langchain_tests.unit_tests import ToolsUnitTests

from memagent_integrations import BackendError, MemAgentReader, ScriptedBackend, UsageError
from memagent_integrations.langchain.compressor import MemAgentDocumentCompressor
from memagent_integrations.langchain.tool import MemAgentTool
from memagent_integrations.records import Prompt

DOCUMENT = "Some words of a long document. " * 100  # 700 of the scripted tokens: four chunks of 200
SMALL: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50, "question_tokens": 30}


def say(prompt: Prompt) -> str:
    return f"note {prompt.index}" if prompt.phase == "memory" else "the answer is seven"


def reader(script: Any = say, **settings: Any) -> MemAgentReader:
    return MemAgentReader(ScriptedBackend(script), **(SMALL | settings))


def shelf() -> MemAgentTool:
    return MemAgentTool(reader(), documents={"minutes": DOCUMENT, "log": Document("The tide was high.")})


def call(**arguments: str) -> ToolCall:
    return ToolCall(name="read_document", args=arguments, id="1", type="tool_call")


# ---- LangChain's own suites ------------------------------------------------------------------------------


class OneDocument:
    @property
    def tool_constructor(self) -> type[BaseTool]:
        return MemAgentTool

    @property
    def tool_constructor_params(self) -> dict[str, Any]:
        return {
            "reader": reader(),
            "context": DOCUMENT,
            "name": "minutes",
            "description": "Answers questions about the minutes.",
        }

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"question": "Why?"}


class ManyDocuments(OneDocument):
    @property
    def tool_constructor_params(self) -> dict[str, Any]:
        return {"reader": reader(), "documents": {"minutes": DOCUMENT, "log": "The tide was high."}}

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"question": "Why?", "document": "minutes"}


class TestOneUnit(OneDocument, ToolsUnitTests):
    pass


class TestOneIntegration(OneDocument, ToolsIntegrationTests):
    pass


class TestManyUnit(ManyDocuments, ToolsUnitTests):
    pass


class TestManyIntegration(ManyDocuments, ToolsIntegrationTests):
    pass


class Pages(BaseRetriever):
    """Gives three pages."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [
            Document(f"Page {number} on {query}.", metadata={"source": "book", "page": number}) for number in range(3)
        ]


class Compressing(BaseRetriever):
    """What `langchain_classic`'s `ContextualCompressionRetriever` does: the documents of a retriever, compressed."""

    base_compressor: MemAgentDocumentCompressor
    base_retriever: BaseRetriever

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        documents = self.base_retriever.invoke(query, {"callbacks": run_manager.get_child()})
        return self.base_compressor.compress_documents(documents, query, callbacks=run_manager.get_child())

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        documents = await self.base_retriever.ainvoke(query, {"callbacks": run_manager.get_child()})
        return await self.base_compressor.acompress_documents(documents, query, callbacks=run_manager.get_child())


class TestCompressing(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return Compressing

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"base_compressor": MemAgentDocumentCompressor(reader()), "base_retriever": Pages()}

    @property
    def retriever_query_example(self) -> str:
        return "the tide"

    @pytest.mark.xfail(reason="The documents become one, however many there are.")
    def test_k_constructor_param(self) -> None:
        raise NotImplementedError

    @pytest.mark.xfail(reason="The documents become one, however many there are.")
    def test_invoke_with_k_kwarg(self) -> None:
        raise NotImplementedError


# ---- the tool --------------------------------------------------------------------------------------------


async def test_the_answer_and_how_it_was_read() -> None:
    tool = MemAgentTool(reader(), context=DOCUMENT)
    message = tool.invoke(call(question="Why?"))
    assert await tool.ainvoke(call(question="Why?")) == message
    assert isinstance(message, ToolMessage)
    assert (message.text, message.status) == ("the answer is seven", "success")
    assert message.artifact["memory"] == "note 3"
    assert (message.artifact["chunks"], message.artifact["calls"]) == (4, 5)
    assert message.artifact["usage"]["output_tokens"] == 12
    assert (
        tool.invoke({"question": "Why?"}) == tool.invoke("Why?") == await tool.ainvoke("Why?") == "the answer is seven"
    )


async def test_documents_by_name() -> None:
    tool = shelf()
    message = await tool.ainvoke(call(question="How high?", document="log"))
    assert (message.text, message.artifact["chunks"], message.artifact["document"]) == ("the answer is seven", 1, "log")
    assert tool.invoke(call(question="How high?", document="minutes")).artifact["chunks"] == 4


def test_what_the_model_sees() -> None:
    seen = convert_to_openai_tool(shelf())["function"]
    assert (
        seen["description"]
        == "Reads one of these documents as a whole, however long, and answers a question about it: minutes, log."
    )
    assert (
        seen["parameters"]["properties"]["document"]["description"]
        == "The name of the document to read, one of: minutes, log."
    )
    assert seen["parameters"]["required"] == ["question", "document"]
    one = convert_to_openai_tool(
        MemAgentTool(reader(), context=DOCUMENT, name="ask", description="The minutes of 1912.")
    )["function"]
    assert (one["name"], one["description"], list(one["parameters"]["properties"])) == (
        "ask",
        "The minutes of 1912.",
        ["question"],
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"question": "Why?", "document": "logbook"}, "there is no document 'logbook'; there are: minutes, log"),
        ({"question": " ", "document": "log"}, "the question is empty"),
        ({"question": "why " * 40, "document": "log"}, "the question has 41 tokens, its budget is 30; shorten it"),
    ],
)
async def test_what_the_model_can_do_better_is_told_to_it(arguments: dict[str, str], told: str) -> None:
    for message in (shelf().invoke(call(**arguments)), await shelf().ainvoke(call(**arguments))):
        assert message.status == "error"
        assert told in message.text
    strict = MemAgentTool(reader(), documents={"log": DOCUMENT, "minutes": "x"}, handle_tool_error=False)
    with pytest.raises(ToolException):
        strict.invoke(arguments)


@pytest.mark.parametrize(("context", "error"), [("", UsageError), (7, UsageError), (DOCUMENT, BackendError)])
async def test_other_errors_are_raised(context: Any, error: type[Exception]) -> None:
    tool = MemAgentTool(reader([]), context=context)
    with pytest.raises(error):
        tool.invoke(call(question="Why?"))
    with pytest.raises(error):
        await tool.ainvoke(call(question="Why?"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "one of context"),
        ({"context": "x", "documents": {"a": "x"}}, "one of context"),
        ({"documents": {}}, "at least one document"),
        ({"documents": ["x"]}, "at least one document"),
        ({"documents": {1: "x"}}, "at least one document"),
        ({"context": iter(["x"])}, "used up by the first question"),
        ({"documents": {"a": iter(["x"])}}, "used up by the first question"),
        ({"reader": "smollm2", "context": "x"}, "has to be a MemAgentReader, not str"),
    ],
)
def test_bad_settings(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        MemAgentTool(**({"reader": reader()} | settings))


async def test_a_retriever_is_asked_the_question() -> None:
    backend = ScriptedBackend(say)
    tool = MemAgentTool(MemAgentReader(backend, **SMALL), context=Pages())
    assert (await tool.ainvoke(call(question="tides"))).artifact["chunks"] == 1
    assert "Page 2 on tides." in backend.prompts[0].messages[0].content


async def test_the_readers_run_is_below_the_tools() -> None:
    for is_async in (False, True):
        collector = RunCollectorCallbackHandler()
        tool = MemAgentTool(reader(), context=DOCUMENT)
        config: Any = {"callbacks": [collector], "tags": ["mine"]}
        await tool.ainvoke(call(question="Why?"), config) if is_async else tool.invoke(call(question="Why?"), config)
        (run,) = collector.traced_runs
        assert (run.name, run.run_type, [child.name for child in run.child_runs]) == (
            "read_document",
            "tool",
            ["MemAgentReader"],
        )
        assert {"mine", "nostream"} <= set(run.child_runs[0].tags or [])
        assert "Some words" not in str(run.inputs)


def test_a_copy_of_a_tool_reads() -> None:
    tool = MemAgentTool(MemAgentReader("smollm2"), context=DOCUMENT)
    assert pickle.loads(pickle.dumps(tool)).context == DOCUMENT
    assert (
        shelf().model_copy(update={"name": "books"}).invoke(call(question="Why?", document="log")).text
        == "the answer is seven"
    )


# ---- the compressor --------------------------------------------------------------------------------------

PAGES = [Document(f"Page {number} tells of the tide.", metadata={"page": number}) for number in range(3)]


async def test_one_document_of_notes() -> None:
    backend = ScriptedBackend(say)
    compressor = MemAgentDocumentCompressor(MemAgentReader(backend, chunk_tokens=64, memory_tokens=50))
    (notes,) = compressor.compress_documents(PAGES, "the tide?")
    assert await compressor.acompress_documents(PAGES, "the tide?") == [notes]
    assert notes.page_content == "note 0"
    assert notes.metadata["sources"] == [{"page": 0}, {"page": 1}, {"page": 2}]
    assert (notes.metadata["memagent"]["chunks"], notes.metadata["memagent"]["outcomes"]) == (1, {"updated": 1})
    assert {prompt.phase for prompt in backend.prompts} == {"memory"}
    prompts = backend.prompts[0].messages[0].content
    assert prompts.index("Page 0") < prompts.index("Page 1") < prompts.index("Page 2")
    assert "the tide?" in prompts


@pytest.mark.parametrize("documents", [[], [Document("")], [Document(" "), Document("\n")]])
async def test_no_text_costs_nothing(documents: Sequence[Document]) -> None:
    compressor = MemAgentDocumentCompressor(reader([]))
    assert compressor.compress_documents(documents, "q") == await compressor.acompress_documents(documents, "q") == []


async def test_no_notes_give_no_document() -> None:
    compressor = MemAgentDocumentCompressor(reader(lambda _: "NO CHANGE"))
    assert compressor.compress_documents(PAGES, "q") == await compressor.acompress_documents(PAGES, "q") == []


async def test_its_errors_are_raised() -> None:
    compressor = MemAgentDocumentCompressor(reader([]))
    with pytest.raises(BackendError):
        compressor.compress_documents(PAGES, "q")
    with pytest.raises(BackendError):
        await compressor.acompress_documents(PAGES, "q")
    with pytest.raises(UsageError, match="question is empty"):
        compressor.compress_documents(PAGES, "")
    with pytest.raises(UsageError, match="has to be a MemAgentReader"):
        MemAgentDocumentCompressor("smollm2")  # type: ignore[arg-type]


class Steps(BaseCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.seen.append(data["memory"])


class AsyncSteps(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append(data["memory"])


async def test_its_run_and_events() -> None:
    for is_async in (False, True):
        collector, steps = RunCollectorCallbackHandler(), AsyncSteps() if is_async else Steps()
        subject = Compressing(
            base_compressor=MemAgentDocumentCompressor(reader()), base_retriever=Documents(found=[Document(DOCUMENT)])
        )
        config: Any = {"callbacks": [collector, steps]}
        (notes,) = await subject.ainvoke("Why?", config) if is_async else subject.invoke("Why?", config)
        assert notes.page_content == "note 3"
        assert steps.seen == ["note 0", "note 1", "note 2", "note 3"]
        (run,) = collector.traced_runs
        assert [child.name for child in run.child_runs] == ["Documents", "memagent_notes"]
        assert run.child_runs[1].inputs == {"question": "Why?", "context": "<list of 1>"}


class Documents(BaseRetriever):
    found: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return self.found


async def test_in_langchains_own_retriever() -> None:
    classic = pytest.importorskip("langchain_classic.retrievers.contextual_compression")
    subject = classic.ContextualCompressionRetriever(
        base_compressor=MemAgentDocumentCompressor(reader()), base_retriever=Pages()
    )
    assert [document.page_content for document in subject.invoke("tides")] == ["note 0"]
    assert await subject.ainvoke("tides") == subject.invoke("tides")


@pytest.mark.parametrize("documents", [None, "a text", ["a text"], [None]])
async def test_what_is_no_document_is_not_compressed(documents: Any) -> None:
    compressor = MemAgentDocumentCompressor(MemAgentReader(ScriptedBackend([])))
    with pytest.raises(UsageError, match="the documents have to be a list of Document"):
        compressor.compress_documents(documents, "Why?")
    with pytest.raises(UsageError, match="the documents have to be a list of Document"):
        await compressor.acompress_documents(documents, "Why?")


async def test_an_iterator_of_documents_is_compressed_as_a_whole() -> None:
    backend = ScriptedBackend(lambda prompt: "a note")
    compressor = MemAgentDocumentCompressor(MemAgentReader(backend))
    pages = [Document(f"page {number}", metadata={"page": number}) for number in range(3)]
    for compressed in (
        compressor.compress_documents(iter(pages), "Why?"),
        await compressor.acompress_documents(iter(pages), "Why?"),
    ):  # type: ignore[arg-type]
        assert compressed[0].metadata["sources"] == [{"page": 0}, {"page": 1}, {"page": 2}]
    assert all("page 0" in prompt.messages[-1].content for prompt in backend.prompts)
