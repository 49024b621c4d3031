"""The query engine: what it reads, what it gives besides the answer, and its settings."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_llm import ANSWER, SIZES, FakeLLM, FixedRetriever, documents, fake, pieces_of, scripted, text_read
from helpers.instrumentation import EventLog, instrumented
from llama_index.core import (
    DocumentSummaryIndex,
    MockEmbedding,
    PropertyGraphIndex,
    SimpleKeywordTableIndex,
    StorageContext,
    SummaryIndex,
    TreeIndex,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.postprocessor import LongContextReorder, SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.readers.base import BaseReader
from llama_index.core.response_synthesizers import Refine
from llama_index.core.schema import BaseNode, Document, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult
from pydantic import BaseModel, Field

from memagent_integrations import Journal, MemAgentQueryEngine, MemAgentSynthesizer, ScriptedBackend, UsageError
from memagent_integrations.errors import JournalMismatch
from memagent_integrations.llama_index import LLMBackend
from memagent_integrations.records import Plan, Prompt, Reading

TEXT = "\n\n".join(document.text for document in documents())


def engine(source: Any = None, backend: Any = None, **options: Any) -> MemAgentQueryEngine:
    return MemAgentQueryEngine.from_documents(source or documents(), backend or scripted(), **(SIZES | options))


def words_read(backend: ScriptedBackend) -> list[str]:
    return text_read(backend).split()


# The nodes of an index


class Listing(BasePydanticVectorStore):
    """Keeps the text of its nodes itself, as most vector stores do; it can list them, or not."""

    stores_text: bool = True
    flat_metadata: bool = False
    lists: bool = True
    kept: list[BaseNode] = Field(default_factory=list)

    @property
    def client(self) -> Any:
        return None

    def add(self, nodes: Any, **_: Any) -> list[str]:
        self.kept.extend(nodes)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        self.kept = [node for node in self.kept if node.ref_doc_id != ref_doc_id]

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        return VectorStoreQueryResult(nodes=self.kept[:1], similarities=[1.0], ids=[self.kept[0].node_id])

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[BaseNode]:
        if not self.lists:
            raise NotImplementedError("get_nodes not implemented")
        return self.kept


def embedding() -> MockEmbedding:
    return MockEmbedding(embed_dim=2)


def parts() -> list[BaseNode]:
    return TokenTextSplitter(chunk_size=60, chunk_overlap=0).get_nodes_from_documents(documents())


INDEXES: dict[str, Callable[[], Any]] = {
    "list": lambda: SummaryIndex(parts()),
    "vectors": lambda: VectorStoreIndex(parts(), embed_model=embedding()),
    "vectors with text": lambda: VectorStoreIndex(
        parts(), embed_model=embedding(), storage_context=StorageContext.from_defaults(vector_store=Listing())
    ),
    "tree": lambda: TreeIndex(parts(), llm=MockLLM(max_tokens=3)),
    "keywords": lambda: SimpleKeywordTableIndex(parts(), llm=MockLLM(max_tokens=3)),
    "summaries": lambda: DocumentSummaryIndex(
        parts(),
        llm=MockLLM(max_tokens=3),
        embed_model=embedding(),
        response_synthesizer=Refine(llm=MockLLM(max_tokens=3)),
    ),
}


@pytest.mark.parametrize("kind", INDEXES)
async def test_all_nodes_of_an_index_are_read_in_document_order(kind: str) -> None:
    index = INDEXES[kind]()
    for ask in ("query", "aquery"):
        backend = scripted()
        subject = MemAgentQueryEngine.from_index(index, backend, **SIZES)
        response = subject.query("q") if ask == "query" else await subject.aquery("q")
        assert str(response) == ANSWER
        assert words_read(backend) == TEXT.split()
        assert {source.node.ref_doc_id for source in response.source_nodes} == {"first", "second"}


def test_an_index_is_read_as_it_is_when_the_query_comes() -> None:
    index = SummaryIndex(parts())
    backend = scripted()
    subject = MemAgentQueryEngine.from_index(index, backend, **SIZES)
    index.insert(Document(text="The last page.", id_="third"))
    subject.query("q")
    assert text_read(backend).endswith("The last page.")
    index.delete_ref_doc("third")
    backend.prompts.clear()
    subject.query("q")
    assert words_read(backend) == TEXT.split()


def test_an_index_reads_its_own_nodes_of_a_docstore_that_others_share() -> None:
    storage = StorageContext.from_defaults()
    SummaryIndex([TextNode(text="Of another index.")], storage_context=storage)
    backend = scripted()
    MemAgentQueryEngine.from_index(SummaryIndex(parts(), storage_context=storage), backend, **SIZES).query("q")
    assert words_read(backend) == TEXT.split()


def test_nodes_that_say_the_same_are_all_read() -> None:
    """A retriever of LlamaIndex leaves out what is equal: a table with two equal rows would lose one."""
    backend = scripted()
    index = SummaryIndex([TextNode(text="A row of the table.") for _ in range(3)])
    MemAgentQueryEngine.from_index(index, backend, **SIZES).query("q")
    assert text_read(backend).count("A row of the table.") == 3


def test_an_index_that_was_loaded(tmp_path: Path) -> None:
    VectorStoreIndex(parts(), embed_model=embedding()).storage_context.persist(str(tmp_path))
    index = load_index_from_storage(StorageContext.from_defaults(persist_dir=str(tmp_path)), embed_model=embedding())
    backend = scripted()
    MemAgentQueryEngine.from_index(index, backend, **SIZES).query("q")
    assert words_read(backend) == TEXT.split()


async def test_a_part_of_an_index_is_found_by_a_retriever() -> None:
    index = VectorStoreIndex(parts(), embed_model=embedding())
    for options in ({"similarity_top_k": 3}, {"retriever": index.as_retriever(similarity_top_k=3)}):
        subject = MemAgentQueryEngine.from_index(index, scripted(), **options, **SIZES)
        assert len(subject.retrieve(QueryBundle("q"))) == len(await subject.aretrieve(QueryBundle("q"))) == 3
        assert str(subject.query("q")) == ANSWER


def test_an_index_that_cannot_be_read_whole() -> None:
    storage = StorageContext.from_defaults(vector_store=Listing(lists=False))
    silent = VectorStoreIndex(parts(), embed_model=embedding(), storage_context=storage)
    graph = PropertyGraphIndex(nodes=[], llm=MockLLM(), embed_model=embedding(), kg_extractors=[], use_async=False)
    for index in (silent, graph):
        with pytest.raises(UsageError, match="retriever="):
            MemAgentQueryEngine.from_index(index, scripted(), **SIZES).query("q")
    assert str(MemAgentQueryEngine.from_index(silent, scripted(), similarity_top_k=1, **SIZES).query("q")) == ANSWER
    lacking = SummaryIndex(parts())
    lacking.docstore.delete_document(lacking.index_struct.nodes[0])
    with pytest.raises(UsageError, match="docstore lacks"):
        MemAgentQueryEngine.from_index(lacking, scripted(), **SIZES).query("q")


def test_an_index_that_is_empty() -> None:
    for index in (SummaryIndex([]), VectorStoreIndex([], embed_model=embedding())):
        subject = MemAgentQueryEngine.from_index(index, scripted(), empty_response="Nothing there.", **SIZES)
        assert str(subject.query("q")) == "Nothing there."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MemAgentQueryEngine.from_index(documents(), scripted()), "not list"),
        (lambda: MemAgentQueryEngine.from_index(SummaryIndex([]), similarity_top_k=0), "similarity_top_k"),
        (
            lambda: MemAgentQueryEngine.from_index(
                SummaryIndex([]), similarity_top_k=2, retriever=SummaryIndex([]).as_retriever()
            ),
            "not both",
        ),
        (lambda: MemAgentQueryEngine.from_retriever(SummaryIndex([]), scripted()), "not SummaryIndex"),  # type: ignore[arg-type]
        (lambda: MemAgentQueryEngine.from_index(SummaryIndex([]), scripted(), chunk_size=100), "chunk_tokens"),
    ],
)
def test_wrong_settings_are_said_at_once(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# Postprocessors


class Noting(BaseNodePostprocessor):
    """Notes how it was asked, and keeps the nodes whose text holds a word."""

    word: str
    asked: list[str] = Field(default_factory=list)

    def _kept(self, nodes: list[NodeWithScore], query: QueryBundle | None, how: str) -> list[NodeWithScore]:
        self.asked.append(f"{how} {query.query_str if query else None}")
        return [node for node in nodes if self.word in node.node.get_content()]

    def _postprocess_nodes(self, nodes: Any, query_bundle: QueryBundle | None = None) -> list[NodeWithScore]:
        return self._kept(nodes, query_bundle, "sync")

    async def _apostprocess_nodes(self, nodes: Any, query_bundle: QueryBundle | None = None) -> list[NodeWithScore]:
        return self._kept(nodes, query_bundle, "async")


class Pages(BaseReader):
    def lazy_load_data(self, *_: Any, **__: Any) -> Iterator[Document]:
        yield from documents()


async def later() -> AsyncIterator[Document]:
    for document in documents():
        yield document


SOURCES: dict[str, Callable[[], Any]] = {
    "list": documents,
    "iterator": lambda: iter(documents()),
    "reader": Pages,
    "retriever": lambda: FixedRetriever([NodeWithScore(node=document, score=0.5) for document in documents()]),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("ask", ["query", "aquery"])
async def test_postprocessors_change_what_is_read(kind: str, ask: str) -> None:
    first, second = Noting(word="was"), Noting(word="Night")
    backend = scripted()
    subject = MemAgentQueryEngine(
        SOURCES[kind](), MemAgentSynthesizer(backend, **SIZES), node_postprocessors=[first, second]
    )
    response = subject.query("Why?") if ask == "query" else await subject.aquery("Why?")
    assert str(response) == ANSWER
    assert text_read(backend) == documents()[1].text
    how = "sync" if ask == "query" else "async"
    assert first.asked == second.asked == [f"{how} Why?"]


async def test_postprocessors_of_an_async_iterator() -> None:
    backend = scripted()
    subject = MemAgentQueryEngine.from_nodes(later(), backend, node_postprocessors=[Noting(word="Day")], **SIZES)
    assert str(await subject.aquery("q")) == ANSWER
    assert text_read(backend) == documents()[0].text


async def test_postprocessors_of_llama_index() -> None:
    retriever = FixedRetriever([NodeWithScore(node=node, score=number / 10) for number, node in enumerate(parts()[:9])])
    backend = scripted()
    subject = MemAgentQueryEngine.from_retriever(
        retriever,
        backend,
        node_postprocessors=[
            SimilarityPostprocessor(similarity_cutoff=0.35),
            LongContextReorder(),
        ],
        **SIZES,
    )
    expected = [node.node_id for node in parts()[4:9]]
    assert len(subject.retrieve(QueryBundle("q"))) == len(expected)
    assert str(subject.query("q")) == str(await subject.aquery("q")) == ANSWER
    nothing = MemAgentQueryEngine.from_retriever(
        retriever, scripted(), node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=2.0)], **SIZES
    )
    assert str(nothing.query("q")) == str(await nothing.aquery("q")) == "Empty Response"


def test_postprocessors_report_to_the_engine_s_callbacks() -> None:
    manager, postprocessor = CallbackManager([]), Noting(word="was")
    MemAgentQueryEngine(
        documents(), MemAgentSynthesizer(scripted()), node_postprocessors=[postprocessor], callback_manager=manager
    )
    assert postprocessor.callback_manager is manager


# Readings and plans


async def test_an_engine_gives_the_whole_reading() -> None:
    backend = scripted()
    for subject in (
        *(engine(make(), backend) for make in SOURCES.values()),
        MemAgentQueryEngine.from_index(SummaryIndex(documents()), backend, **SIZES),
    ):
        backend.prompts.clear()
        reading = subject.reading("Why?")
        assert isinstance(reading, Reading)
        assert (reading.answer, reading.question) == (ANSWER, "Why?")
        assert len(reading.steps) == len(backend.prompts)
    assert (await engine().areading(QueryBundle("Why?"))).answer == ANSWER
    assert (await engine(later()).areading("Why?")).answer == ANSWER
    assert engine(streaming=True).reading("q").answer == ANSWER


def test_a_reading_sends_the_events_of_its_steps() -> None:
    with instrumented(EventLog()) as log:
        engine([Document(text="short")], fake()).reading("q")
    assert [name for name in log.names if name.startswith("MemAgent")] == ["MemAgentStep", "MemAgentAnswerEnd"]


def test_a_plan_says_what_a_query_will_take() -> None:
    retriever = FixedRetriever([NodeWithScore(node=document, score=0.5) for document in documents()])
    for source in (documents(), Pages(), retriever, "one text " * 300):
        backend = scripted()
        subject = engine(source, backend) if not isinstance(source, str) else engine([source], backend)
        plan = subject.plan("Why?")
        assert isinstance(plan, Plan)
        assert backend.prompts == []
        subject.query("Why?")
        assert len(backend.prompts) == plan.calls
    subject = engine(iter(documents()))
    with pytest.raises(UsageError, match="use up"):
        subject.plan("Why?")
    assert str(subject.query("Why?")) == ANSWER, "the plan has not read from it"
    with pytest.raises(UsageError, match="empty"):
        engine().plan(" ")


def test_another_synthesizer_has_no_readings() -> None:
    subject = MemAgentQueryEngine(documents(), Refine(llm=MockLLM(max_tokens=3)))
    for ask in (subject.reading, subject.plan):
        with pytest.raises(UsageError, match="MemAgentSynthesizer"):
            ask("q")


# The journal


async def test_a_run_has_the_name_that_the_engine_was_given(tmp_path: Path) -> None:
    for streaming in (False, True):
        with Journal(tmp_path / f"{streaming}.db") as journal:
            subject = engine(journal=journal, run="the log", streaming=streaming)
            assert str(subject.query("Why?")) == ANSWER
            assert [(run.name, run.finished) for run in journal.runs()] == [("the log", True)]
            await subject.aquery("Why?")
            assert len(journal.runs()) == 1
            with pytest.raises(JournalMismatch, match="question"):
                subject.query("Who?")


async def test_a_reading_of_an_engine_has_a_name_of_its_own(tmp_path: Path) -> None:
    with Journal(tmp_path / "runs.db") as journal:
        subject = engine(journal=journal, run="the log")
        subject.reading("Why?", run="first")
        await subject.areading("Who?", run="second")
        assert sorted(run.name for run in journal.runs()) == ["first", "second"]
    with pytest.raises(UsageError, match="journal"):
        engine(run="the log").query("Why?")


# The memory that it starts from


def memory_shown(prompt: Prompt) -> str:
    return prompt.messages[0].content.partition("<memory>\n")[2].partition("\n</memory>")[0]


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_reading_starts_from_the_memory_that_another_has_left(streaming: bool) -> None:
    before = engine(documents()[:1], streaming=streaming).query("Why?")
    left = before.metadata["memagent"]["memory"]  # type: ignore[index]
    for ask in ("query", "aquery"):
        backend = scripted()
        subject = engine(documents()[1:], backend, memory=left, streaming=streaming)
        response = subject.query("Why?") if ask == "query" else await subject.aquery("Why?")
        assert memory_shown(backend.prompts[0]) == left
        assert response.metadata["memagent"]["memory"] != left  # type: ignore[index]


@pytest.mark.parametrize("streaming", [False, True])
async def test_readings_carry_a_named_memory_on(streaming: bool, tmp_path: Path) -> None:
    with Journal(tmp_path / "runs.db") as journal:
        memory = journal.memory("the logs")
        backend = scripted()
        pages = documents()
        for page in pages:
            subject = engine([page], backend, journal=journal, memory=memory, streaming=streaming)
            before = subject.memory
            backend.prompts.clear()
            response = subject.query("Why?") if page is pages[0] else await subject.aquery("Why?")
            assert await answer_of(response) == ANSWER
            assert memory_shown(backend.prompts[0]) == (before or "(empty: nothing noted yet)")
            assert response.metadata["memagent"]["memory"] == subject.memory == memory.text != before  # type: ignore[index]
        backend.prompts.clear()
        again = engine(pages[:1], backend, journal=journal, memory=memory, streaming=streaming)
        assert await answer_of(again.query("Why?")) == ANSWER
        assert backend.prompts == [], "what was read with it is not read again"
        copied = pickle.loads(pickle.dumps(engine(pages, MockLLM(max_tokens=3), journal=journal, memory=memory)))
        assert copied.memory == memory.text


async def answer_of(response: Any) -> str:
    return "".join(await pieces_of(response)) if isinstance(response, AsyncStreamingResponse) else str(response)


def test_a_memory_that_is_too_long_is_refused() -> None:
    with pytest.raises(UsageError, match="budget"):
        engine(memory="too long " * 100).query("Why?")


# Citations


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_response_says_what_the_memory_rests_on(streaming: bool) -> None:
    pages = [
        Document(text="The harbour was calm. " * 40 + "The gate code of the north tower is 7319.", id_="log"),
        Document(text="The market was loud. " * 40, id_="diary", metadata={"page_label": "4"}),
    ]

    def notes(prompt: Prompt) -> str:
        if prompt.phase == "answer":
            return "7319"
        old = memory_shown(prompt)
        known = "7319" in prompt.messages[0].content
        return "The gate code of the north tower is 7319." if known else old

    subject = engine(pages, ScriptedBackend(notes), streaming=streaming)
    for response in (subject.query("What is the code?"), await subject.aquery("What is the code?")):
        assert await answer_of(response) == "7319"
        assert response.metadata
        citations = response.metadata["memagent"]["citations"]
        assert json.loads(json.dumps(citations)) == citations
        (first, *_) = citations
        assert (first["document_id"], first["statement"]) == ("log", "The gate code of the north tower is 7319.")
        assert "7319" in pages[0].text[first["start"] : first["end"]]


# Two models, and objects


async def test_one_llm_takes_the_notes_and_another_answers() -> None:
    notes, answers = fake(lambda _: "one note"), fake(lambda _: "so it is")
    for other in (answers, LLMBackend(answers)):
        for streaming in (False, True):
            subject = engine(backend=notes, answer_llm=other, streaming=streaming)
            assert str(subject.query("q")) == str(await subject.aquery("q")) == "so it is"
    assert all("<section>" in str(messages[-1].content) for _, messages, _ in notes.calls)
    assert not any("<section>" in str(messages[-1].content) for _, messages, _ in answers.calls)
    assert len(answers.calls) == 8


class Code(BaseModel):
    gate: str
    number: int


def saying_code(**options: Any) -> FakeLLM:
    return fake(
        lambda text: "one note" if "<section>" in text else '{"gate": "north", "number": 7}',
        pydantic_program_mode="llm",
        **options,
    )


async def test_answers_are_objects_of_the_class() -> None:
    for subject in (
        engine(backend=saying_code(), output_cls=Code),
        engine(backend=fake(), answer_llm=saying_code(), output_cls=Code),
        MemAgentQueryEngine.from_index(SummaryIndex(documents()), saying_code(), output_cls=Code, **SIZES),
        SummaryIndex(documents()).as_query_engine(
            llm=MockLLM(), response_synthesizer=MemAgentSynthesizer(saying_code(), output_cls=Code, **SIZES)
        ),
    ):
        for response in (subject.query("q"), await subject.aquery("q")):
            assert isinstance(response, PydanticResponse)
            assert response.response == Code(gate="north", number=7)
            assert response.gate == "north"
            assert response.metadata
            assert response.metadata["memagent"]["memory"] == "one note"
            assert response.source_nodes
    assert MemAgentSynthesizer(saying_code(), output_cls=Code, **SIZES).get_response("q", ["text"]) == Code(
        gate="north", number=7
    )


@pytest.mark.parametrize("wrong", [{"type": "object"}, "Code", Code(gate="north", number=7), int])
def test_what_is_no_class_for_answers(wrong: Any) -> None:
    with pytest.raises(UsageError, match="output_cls"):
        engine(output_cls=wrong)


def test_objects_are_not_streamed() -> None:
    with pytest.raises(UsageError, match="streamed"):
        engine(backend=saying_code(), output_cls=Code, streaming=True)


def test_one_postprocessor_is_no_list_and_none_is_no_source() -> None:
    with pytest.raises(UsageError, match="node_postprocessors has to be a list of postprocessors"):
        MemAgentQueryEngine.from_documents(documents(), fake(), node_postprocessors=LongContextReorder())
    with pytest.raises(UsageError, match="there is nothing to read"):
        MemAgentQueryEngine(None)
