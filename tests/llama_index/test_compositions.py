"""The query engine and the synthesizer inside LlamaIndex's other engines, chats, evaluators and indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.fake_llm import ANSWER, SIZES, FakeLLM, documents, fake, one_note, pieces_of, scripted
from helpers.instrumentation import EventLog, instrumented
from llama_index.core import SummaryIndex, VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.evaluation import (
    CorrectnessEvaluator,
    FaithfulnessEvaluator,
    GuidelineEvaluator,
    RelevancyEvaluator,
)
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import (
    CitationQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryGuidelineQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.flare.base import FLAREInstructQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.schema import QueryBundle
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.settings import Settings
from llama_index.core.tools import QueryEngineTool
from llama_index_instrumentation.span_handlers import SimpleSpanHandler

from memagent_integrations import MemAgentQueryEngine, MemAgentSynthesizer


def engine(backend: Any = None, **options: Any) -> MemAgentQueryEngine:
    return MemAgentQueryEngine.from_documents(documents(), backend or scripted(), **(SIZES | options))


def tool(name: str, **options: Any) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(engine(**options), name=name, description=f"Answers from the {name}.")


async def text_of(response: Any) -> str:
    return "".join(await pieces_of(response)) if isinstance(response, AsyncStreamingResponse) else str(response)


STREAMING = pytest.mark.parametrize("streaming", [False, True])


@pytest.fixture
def settings_llm() -> Iterator[None]:
    """What LlamaIndex's own parts ask for where nothing was given to them."""
    before, Settings._llm = Settings._llm, MockLLM()
    yield
    Settings._llm = before


# Engines over engines


@STREAMING
async def test_sub_questions_are_answered_by_streaming_engines_too(streaming: bool) -> None:
    questions = '[{"sub_question": "What does the log say?", "tool_name": "log"}]'
    subject = SubQuestionQueryEngine.from_defaults(
        [tool("log", streaming=streaming)],
        llm=MockLLM(),
        question_gen=LLMQuestionGenerator.from_defaults(llm=fake(lambda _: f"```json\n{questions}\n```")),
        response_synthesizer=MemAgentSynthesizer(scripted(), streaming=streaming, **SIZES),
        verbose=False,
        use_async=True,
    )
    assert await text_of(await subject.aquery("Which?")) == ANSWER
    (sub_question, *_) = (await subject.aquery("Which?")).source_nodes
    assert sub_question is not None


@STREAMING
async def test_a_router_puts_answers_together(streaming: bool) -> None:
    picks = '[{"choice": 1, "reason": "so"}, {"choice": 2, "reason": "so"}]'
    for ask in ("query", "aquery"):
        backend = scripted()
        subject = RouterQueryEngine(
            LLMMultiSelector.from_defaults(llm=fake(lambda _: picks)),
            [tool("log", streaming=streaming), tool("diary", streaming=streaming)],
            llm=MockLLM(),
            summarizer=MemAgentSynthesizer(backend, **SIZES),
        )
        response = subject.query("Which?") if ask == "query" else await subject.aquery("Which?")
        assert str(response) == ANSWER
        assert backend.prompts[0].messages[0].content.count(ANSWER) == 2


@STREAMING
async def test_a_router_hands_an_async_stream_on(streaming: bool) -> None:
    subject = RouterQueryEngine(
        LLMSingleSelector.from_defaults(llm=fake(lambda _: '[{"choice": 1, "reason": "so"}]')),
        [tool("log", streaming=streaming)],
        llm=MockLLM(),
    )
    response = await subject.aquery("Which?")
    assert await text_of(response) == ANSWER
    assert response.metadata
    assert response.metadata["memagent"]["steps"][-1]["phase"] == "answer"


@STREAMING
async def test_a_query_is_asked_again_until_it_passes(streaming: bool, settings_llm: None) -> None:
    verdicts = iter(["NO", "YES", "NO", "YES"])
    evaluator = RelevancyEvaluator(llm=fake(lambda _: next(verdicts)))
    backend = scripted()
    subject = RetryQueryEngine(engine(backend, streaming=streaming, include_text=True), evaluator)
    for response in (subject.query("Why?"), await subject.aquery("Why?")):
        assert str(response) == ANSWER
    assert sum(prompt.phase == "answer" for prompt in backend.prompts) == 4


def test_a_query_is_asked_again_with_guidelines(settings_llm: None) -> None:
    said = '{"passing": true, "feedback": "good"}'
    evaluator = GuidelineEvaluator(llm=fake(lambda _: said), guidelines="Be brief.")
    subject = RetryGuidelineQueryEngine(engine(), evaluator, resynthesize_query=False)
    assert str(subject.query("Why?")) == ANSWER


@STREAMING
async def test_a_query_is_transformed_first(streaming: bool) -> None:
    backend = scripted()
    transform = HyDEQueryTransform(llm=fake(lambda _: "It may be seven."), include_original=True)
    subject = TransformQueryEngine(engine(backend, streaming=streaming), transform)
    assert await text_of(subject.query("Why?")) == await text_of(await subject.aquery("Why?")) == ANSWER
    assert "Why?" in backend.prompts[0].messages[0].content
    nodes = subject.retrieve(QueryBundle("Why?"))
    assert await text_of(subject.synthesize(QueryBundle("Why?"), nodes)) == ANSWER
    assert await text_of(await subject.asynthesize(QueryBundle("Why?"), nodes)) == ANSWER


@STREAMING
async def test_a_query_is_answered_in_steps(streaming: bool) -> None:
    subject = MultiStepQueryEngine(
        engine(streaming=streaming),
        StepDecomposeQueryTransform(llm=fake(lambda _: "What does the log say?")),
        MemAgentSynthesizer(scripted(), streaming=streaming, **SIZES),
        num_steps=2,
        early_stopping=False,
    )
    assert await text_of(subject.query("Why?")) == await text_of(await subject.aquery("Why?")) == ANSWER


def test_flare_asks_the_engine() -> None:
    said = iter(["The code is [Search(What is the code?)]", f"The code is {ANSWER}", "done"])
    backend = scripted()
    subject = FLAREInstructQueryEngine(engine(backend), llm=fake(lambda _: next(said)), max_iterations=2)
    assert str(subject.query("Why?")).startswith(f"The code is {ANSWER}")
    assert "What is the code?" in backend.prompts[0].messages[0].content


@STREAMING
async def test_citations_by_llama_index_s_engine(streaming: bool) -> None:
    backend = scripted()
    index = VectorStoreIndex.from_documents(documents(), embed_model=MockEmbedding(embed_dim=2))
    subject = CitationQueryEngine.from_args(
        index,
        llm=MockLLM(),
        similarity_top_k=2,
        response_synthesizer=MemAgentSynthesizer(backend, streaming=streaming, include_text=True, **SIZES),
    )
    for response in (subject.query("Why?"), await subject.aquery("Why?")):
        assert await text_of(response) == ANSWER
        assert response.source_nodes
    assert "Source 1:" in backend.prompts[0].messages[0].content


# Chats


@STREAMING
async def test_a_chat_condenses_its_questions_for_the_engine(streaming: bool) -> None:
    backend = scripted()
    chat = CondenseQuestionChatEngine.from_defaults(
        query_engine=engine(backend, streaming=streaming),
        llm=fake(lambda _: "What is the code of the gate?"),
        memory=ChatMemoryBuffer.from_defaults(),
    )
    assert str(chat.chat("What is the code?")) == str(await chat.achat("And now?")) == ANSWER
    assert "What is the code of the gate?" in backend.prompts[-1].messages[0].content
    if streaming:
        response = chat.stream_chat("And now?")
        assert "".join(response.response_gen) == ANSWER
        later = await chat.astream_chat("And now?")
        assert "".join([text async for text in later.async_response_gen()]) == ANSWER
    assert [message.content for message in chat.chat_history][-1] == ANSWER
    (source,) = chat.chat("Once more?").sources
    assert source.raw_output.metadata["memagent"]["memory"]


async def test_a_chat_toggles_the_streaming_of_our_synthesizer() -> None:
    """It does so in a `RetrieverQueryEngine`, whatever the setting is."""
    subject = RetrieverQueryEngine(
        SummaryIndex(documents()).as_retriever(), MemAgentSynthesizer(scripted(), streaming=False, **SIZES)
    )
    chat = CondenseQuestionChatEngine.from_defaults(
        query_engine=subject, llm=fake(), memory=ChatMemoryBuffer.from_defaults()
    )
    assert "".join(chat.stream_chat("What is the code?").response_gen) == ANSWER
    later = await chat.astream_chat("What is the code?")
    assert "".join([text async for text in later.async_response_gen()]) == ANSWER
    assert str(chat.chat("What is the code?")) == ANSWER


@pytest.mark.parametrize("mode", ["condense_question"])
async def test_an_index_chats_with_our_synthesizer(mode: Any) -> None:
    chat = SummaryIndex(documents()).as_chat_engine(
        chat_mode=mode,
        llm=fake(),
        memory=ChatMemoryBuffer.from_defaults(),
        response_synthesizer=MemAgentSynthesizer(scripted(), **SIZES),
    )
    assert str(chat.chat("What is the code?")) == str(await chat.achat("What is the code?")) == ANSWER


# Evaluators


@STREAMING
async def test_evaluators_judge_a_response(streaming: bool) -> None:
    judge = fake(lambda _: "YES")
    subject = engine(streaming=streaming, include_text=True)
    for evaluator in (FaithfulnessEvaluator(llm=judge), RelevancyEvaluator(llm=judge)):
        response = subject.query("Why?")
        plain = response if isinstance(response, Response) else response.get_response()  # type: ignore[union-attr]
        assert isinstance(plain, Response)
        assert evaluator.evaluate_response("Why?", plain).passing
        assert (await evaluator.aevaluate_response("Why?", plain)).passing
    assert any("Day 0 was fair" in str(messages) for _, messages, _ in judge.calls), "it sees the sources"
    scores = CorrectnessEvaluator(llm=fake(lambda _: "4.0\nIt is so."))
    assert scores.evaluate("Why?", str(subject.query("Why?")), reference=ANSWER).score == 4.0


# What watches


@STREAMING
def test_one_trace_holds_a_composition(streaming: bool) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([debug])
    with instrumented(EventLog()) as log, instrumented(SimpleSpanHandler()) as spans:
        subject = RouterQueryEngine(
            LLMSingleSelector.from_defaults(llm=fake(lambda _: '[{"choice": 1, "reason": "so"}]')),
            [tool("log", backend=FakeLLM(script=one_note), streaming=streaming, callback_manager=manager)],
            llm=MockLLM(),
        )
        assert str(subject.query("Which?")) == ANSWER
    kinds = {span.id_: span.id_.split("-")[0] for span in spans.completed_spans}
    parents = {kinds[span.id_]: kinds.get(span.parent_id or "") for span in spans.completed_spans}
    assert parents["MemAgentQueryEngine.query"] == "RouterQueryEngine._query"
    assert parents["FakeLLM.stream_chat" if streaming else "FakeLLM.chat"] == "MemAgentSynthesizer.synthesize"
    assert log.names.count("MemAgentAnswerEnd") == 1
    assert len(debug.get_event_pairs(CBEventType.SYNTHESIZE)) == 1
    assert len(debug.get_event_pairs(CBEventType.LLM)) == log.names.count("MemAgentStep") + 1


# In place of LlamaIndex's synthesizers


@pytest.mark.parametrize("answering", ["query", "aquery"])
async def test_an_index_answers_with_our_synthesizer(answering: str) -> None:
    for index in (
        SummaryIndex(documents()),
        VectorStoreIndex.from_documents(documents(), embed_model=MockEmbedding(embed_dim=2)),
    ):
        for streaming in (False, True):
            subject = index.as_query_engine(
                llm=MockLLM(),
                streaming=streaming,
                response_synthesizer=MemAgentSynthesizer(scripted(), streaming=streaming, **SIZES),
            )
            response = subject.query("q") if answering == "query" else await subject.aquery("q")
            assert await text_of(response) == ANSWER
            assert {source.node.ref_doc_id or source.node.node_id for source in response.source_nodes} == {
                document.id_ for document in documents()
            }
