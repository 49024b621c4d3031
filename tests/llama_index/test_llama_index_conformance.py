"""What LlamaIndex expects of a synthesizer, a query engine, a memory block and a workflow, convention by convention."""

from __future__ import annotations

import asyncio
import json
import threading
import tomllib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_llm import (
    ANSWER,
    SIZES,
    FixedRetriever,
    ServerError,
    documents,
    fake,
    pieces_of,
    prompt,
    scripted,
    text_read,
)
from helpers.instrumentation import EventLog, instrumented
from helpers.scripted_memory import MemoryModel, user
from helpers.scripted_workflow import QUESTION, TEXT, WorkflowModel, events_until, memory_in, restored
from helpers.scripted_workflow import SIZES as WORKFLOW_SIZES
from llama_index.core import SummaryIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.llms import LLM, ChatMessage, MockLLM
from llama_index.core.memory import BaseMemoryBlock, InsertMethod, Memory
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.readers.base import BaseReader
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import Document, MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.settings import Settings
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import Workflow
from llama_index_instrumentation.span_handlers import SimpleSpanHandler
from packaging.requirements import Requirement
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import create_async_engine

from memagent_integrations import (
    BackendError,
    MemAgentQueryEngine,
    MemAgentSynthesizer,
    Reader,
    ScriptedBackend,
    UsageError,
)
from memagent_integrations.llama_index import (
    LLMBackend,
    MemAgentAnswerEnd,
    MemAgentMemoryBlock,
    MemAgentReview,
    MemAgentReviewed,
    MemAgentStep,
    MemAgentStepEvent,
    MemAgentWorkflow,
)
from memagent_integrations.llama_index.workflow import MemAgentAnswer
from memagent_integrations.records import Prompt, Reply, Usage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def log() -> Iterator[EventLog]:
    with instrumented(EventLog()) as log:
        yield log


@pytest.fixture
def spans() -> Iterator[SimpleSpanHandler]:
    with instrumented(SimpleSpanHandler()) as spans:
        yield spans


@pytest.fixture
async def memory_with() -> AsyncIterator[Callable[..., Memory]]:
    """Makes a `Memory`, in a database that is closed at the end."""
    engine = create_async_engine("sqlite+aiosqlite:///:memory:")
    yield partial(Memory.from_defaults, async_engine=engine)
    await engine.dispose()


async def test_b_a_synthesizer_and_an_engine_that_is_no_custom_query_engine() -> None:
    assert issubclass(MemAgentSynthesizer, BaseSynthesizer)
    assert issubclass(MemAgentQueryEngine, BaseQueryEngine)
    assert not issubclass(MemAgentQueryEngine, CustomQueryEngine)
    llm = fake()
    engine = MemAgentQueryEngine.from_documents(documents(), llm, **SIZES)
    assert str(engine.query("q")) == str(await engine.aquery("q")) == ANSWER
    half = len(llm.calls) // 2
    assert [name for name, *_ in llm.calls] == ["chat"] * half + ["achat"] * half


async def test_b_get_response_reads_the_texts_as_separate_documents() -> None:
    backend = scripted()
    synthesizer = MemAgentSynthesizer(backend, **SIZES)
    assert synthesizer.get_response("q", ["first text", "second text"], unused="by our prompts") == ANSWER
    assert text_read(backend) == "first text\n\nsecond text"
    assert await synthesizer.aget_response("q", ["first text"]) == ANSWER
    streaming = MemAgentSynthesizer(backend, streaming=True, **SIZES)
    assert "".join(streaming.get_response("q", ["first text"])) == ANSWER  # type: ignore[arg-type]
    assert "".join([text async for text in await streaming.aget_response("q", ["first text"])]) == ANSWER  # type: ignore[union-attr]


@pytest.mark.parametrize("option", ["prompt_helper", "chat_prompt_helper", "multimodal"])
def test_b_options_of_the_base_class_without_a_meaning_here_are_refused(option: str) -> None:
    """Chunks are cut by token budgets; only text is read."""
    with pytest.raises(UsageError, match=option):
        MemAgentSynthesizer(scripted(), **{option: None})


class Code(BaseModel):
    gate: str
    number: int


async def test_b_each_kind_of_answer_has_its_class_of_response(settings_llm: Callable[[LLM | None], None]) -> None:
    for llm in (fake(), scripted()):
        plain = MemAgentQueryEngine.from_documents(documents(), llm, **SIZES)
        streaming = MemAgentQueryEngine.from_documents(documents(), llm, streaming=True, **SIZES)
        response, streamed, later = plain.query("q"), streaming.query("q"), await streaming.aquery("q")
        assert [type(each) for each in (response, streamed, later)] == [
            Response,
            StreamingResponse,
            AsyncStreamingResponse,
        ]
        assert str(response) == str(await plain.aquery("q")) == str(streaming.query("q")) == ANSWER
        assert list(streamed.response_gen) == await pieces_of(later) == ["the", " code", " is", " seven"], (
            "as many pieces as the model sent"
        )  # type: ignore[union-attr, arg-type]
    code = fake(
        lambda text: '{"gate": "north", "number": 7}' if "JSON" in text else "one note", pydantic_program_mode="llm"
    ).as_structured_llm(Code)
    settings_llm(code)
    for source in (code, None):
        engine = MemAgentQueryEngine.from_documents(documents(), source, **SIZES)
        for structured in (engine.query("q"), await engine.aquery("q")):
            assert isinstance(structured, PydanticResponse)
            assert structured.response == Code(gate="north", number=7)
    streaming = MemAgentQueryEngine.from_documents(documents(), streaming=True, **SIZES)
    with pytest.raises(UsageError, match="streamed"):
        streaming.query("q")
    with pytest.raises(UsageError, match="streamed"):
        await streaming.aquery("q")


@pytest.mark.parametrize("how", ["iterator, sync", "iterator, async", "async iterator, async"])
async def test_b_a_lazy_stream_of_nodes_is_never_materialised(how: str, log: EventLog) -> None:
    made: list[int] = []
    gone: list[int] = []
    alive: list[int] = []

    def stream() -> Iterator[TextNode]:
        for number in range(50):
            node = TextNode(text=f"Line {number} of the log. " * 20)
            weakref.finalize(node, gone.append, number)
            made.append(number)
            yield node

    async def astream() -> AsyncIterator[TextNode]:
        for node in stream():
            yield node

    def script(prompt: Prompt) -> str:
        alive.append(len(made) - len(gone))
        return "note"

    debug = LlamaDebugHandler(print_trace_on_end=False)
    synthesizer = MemAgentSynthesizer(ScriptedBackend(script), callback_manager=CallbackManager([debug]), **SIZES)
    if how == "iterator, sync":
        response = synthesizer.synthesize("q", stream())
    else:
        response = await synthesizer.asynthesize("q", stream() if how == "iterator, async" else astream())
    assert made == list(range(50))
    assert max(alive) < 10
    assert len(response.source_nodes) >= 50
    assert [log.names[0], log.names[-1]] == ["SynthesizeStartEvent", "SynthesizeEndEvent"]
    assert len(debug.get_event_pairs(CBEventType.SYNTHESIZE)) == 1


async def test_b_an_iterator_is_good_for_one_query() -> None:
    engine = MemAgentQueryEngine.from_nodes(
        (TextNode(text=f"Line {number}.") for number in range(3)), scripted(), **SIZES
    )
    assert str(engine.query("q")) == ANSWER
    with pytest.raises(UsageError, match="earlier query"):
        await engine.aquery("q")


async def test_b_our_streaming_rules_in_a_retriever_query_engine() -> None:
    retriever = FixedRetriever([NodeWithScore(node=document, score=0.5) for document in documents()])
    for streaming in (False, True):
        synthesizer = MemAgentSynthesizer(scripted(), streaming=streaming, **SIZES)
        engine = RetrieverQueryEngine.from_args(
            retriever, llm=MockLLM(), response_synthesizer=synthesizer, streaming=not streaming
        )
        assert isinstance(engine.query("q"), StreamingResponse if streaming else Response)
        assert str(engine.query("q")) == ANSWER
        response = await engine.aquery("q")
        assert (await pieces_of(response) if streaming else [str(response)])[-1].endswith("seven")
        assert set(engine.get_prompts()) == {"response_synthesizer:memory", "response_synthesizer:answer"}


async def test_b_an_engine_retrieves_and_synthesizes_in_two_steps_too() -> None:
    """As SubQuestionQueryEngine and RouterQueryEngine do (see test_agents.py)."""
    engine = MemAgentQueryEngine.from_documents(documents(), scripted(), **SIZES)
    assert set(engine.get_prompts()) == {"response_synthesizer:memory", "response_synthesizer:answer"}
    more = NodeWithScore(node=TextNode(text="seen elsewhere", id_="more"))
    nodes = engine.retrieve(QueryBundle("q"))
    assert [item.node.node_id for item in nodes] == ["first", "second"]
    for response in (
        engine.synthesize(QueryBundle("q"), nodes, [more]),
        await engine.asynthesize(QueryBundle("q"), nodes, [more]),
    ):
        assert str(response) == ANSWER
        assert response.source_nodes[-1] is more
        assert "more" in (response.metadata or {})


def test_b_it_goes_in_as_the_synthesizer_where_no_mode_can_name_it() -> None:
    backend = scripted()
    engine = SummaryIndex(documents()).as_query_engine(
        llm=MockLLM(), response_synthesizer=MemAgentSynthesizer(backend, **SIZES)
    )
    assert str(engine.query("q")) == ANSWER
    assert text_read(backend) == "\n\n".join(document.text for document in documents())


async def test_b_events_come_in_order_and_the_end_when_the_stream_is_exhausted(log: EventLog) -> None:
    engine = MemAgentQueryEngine.from_documents([Document(text="short")], fake(), **SIZES)
    streaming = MemAgentQueryEngine.from_documents([Document(text="short")], fake(), streaming=True, **SIZES)
    call = ["LLMChatStartEvent", "LLMChatEndEvent"]
    opening = ["QueryStartEvent", "SynthesizeStartEvent", *call, "MemAgentStep"]
    closing = ["SynthesizeEndEvent", "QueryEndEvent"]
    engine.query("q")
    assert log.names == [*opening, *call, "MemAgentAnswerEnd", *closing]
    log.events.clear()
    await engine.aquery("q")
    assert log.names == [*opening, *call, "MemAgentAnswerEnd", *closing]
    for consume in (streaming.query, streaming.aquery):
        log.events.clear()
        response: Any = consume("q") if consume == streaming.query else await streaming.aquery("q")
        assert log.names == [*opening, *closing]
        log.events.clear()
        assert len(await pieces_of(response) if consume == streaming.aquery else list(response.response_gen)) == 4
        assert log.names == [*call, "MemAgentAnswerEnd"]
    engine.query("q")
    step = next(event.step for event in log.events if isinstance(event, MemAgentStep))
    reading = next(event.reading for event in log.events if isinstance(event, MemAgentAnswerEnd))
    assert (step.memory, step.phase) == ("one note", "memory")
    assert (reading.answer, reading.memory) == (ANSWER, "one note")


def test_b_a_stream_that_is_left_has_no_end(log: EventLog) -> None:
    response: Any = MemAgentQueryEngine.from_documents([Document(text="short")], fake(), streaming=True, **SIZES).query(
        "q"
    )
    assert next(response.response_gen) == "the"
    response.response_gen.close()
    assert "MemAgentAnswerEnd" not in log.names
    assert log.names[-1] == "ExceptionEvent", "the model's stream was closed with ours"


async def test_b_our_events_and_spans_have_their_parents(log: EventLog, spans: SimpleSpanHandler) -> None:
    for streaming in (False, True):
        engine = MemAgentQueryEngine.from_documents([Document(text="short")], fake(), streaming=streaming, **SIZES)
        response, later = engine.query("q"), await engine.aquery("q")
        if streaming:
            list(response.response_gen)  # type: ignore[union-attr, arg-type]
            await pieces_of(later)
        kinds = {span.id_: span.id_.split("-")[0] for span in spans.completed_spans}
        parents = {(kinds[span.id_], kinds.get(span.parent_id or "")) for span in spans.completed_spans}
        answer = "stream_chat" if streaming else "chat"
        assert parents == {
            ("MemAgentQueryEngine.query", None),
            ("MemAgentQueryEngine._query", "MemAgentQueryEngine.query"),
            ("MemAgentSynthesizer.synthesize", "MemAgentQueryEngine._query"),
            ("FakeLLM.chat", "MemAgentSynthesizer.synthesize"),
            (f"FakeLLM.{answer}", "MemAgentSynthesizer.synthesize"),
            ("MemAgentQueryEngine.aquery", None),
            ("MemAgentQueryEngine._aquery", "MemAgentQueryEngine.aquery"),
            ("MemAgentSynthesizer.asynthesize", "MemAgentQueryEngine._aquery"),
            ("FakeLLM.achat", "MemAgentSynthesizer.asynthesize"),
            (f"FakeLLM.a{answer}", "MemAgentSynthesizer.asynthesize"),
        }
        of_ours = [
            kinds[event.span_id or ""] for event in log.events if isinstance(event, (MemAgentStep, MemAgentAnswerEnd))
        ]
        assert sorted(of_ours) == ["MemAgentSynthesizer.asynthesize"] * 2 + ["MemAgentSynthesizer.synthesize"] * 2
        spans.completed_spans.clear()
        log.events.clear()


def test_b_legacy_callbacks_see_the_query_the_synthesis_and_each_call() -> None:
    """There is no CHUNKING event: chunks are cut while they are read."""
    debug = LlamaDebugHandler(print_trace_on_end=False)
    engine = MemAgentQueryEngine.from_documents(documents(), fake(), callback_manager=CallbackManager([debug]), **SIZES)
    response = engine.query("q")
    (query,), (synthesis,) = debug.get_event_pairs(CBEventType.QUERY), debug.get_event_pairs(CBEventType.SYNTHESIZE)
    assert str(query[1].payload["response"]) == str(synthesis[1].payload["response"]) == ANSWER  # type: ignore[index]
    assert len(debug.get_event_pairs(CBEventType.LLM)) == len(response.metadata["memagent"]["steps"]) > 2  # type: ignore[index]
    assert debug.get_event_pairs(CBEventType.CHUNKING) == []
    engine = MemAgentQueryEngine.from_documents(
        documents(), fake(lambda _: ServerError(500)), callback_manager=CallbackManager([debug]), **SIZES
    )
    debug.flush_event_logs()
    with pytest.raises(BackendError):
        engine.query("q")
    assert isinstance(debug.get_event_pairs(CBEventType.SYNTHESIZE)[0][1].payload["exception"], BackendError)  # type: ignore[index]


def test_b_tokens_are_counted_and_the_caller_s_llm_is_left_as_it_was(
    settings_llm: Callable[[LLM | None], None],
) -> None:
    llm, other = fake(), fake()
    settings_llm(other)
    before = llm.callback_manager, other.callback_manager
    counting = TokenCountingHandler()
    synthesizer = MemAgentSynthesizer(llm, callback_manager=CallbackManager([counting]), **SIZES)
    response = synthesizer.synthesize("q", [NodeWithScore(node=documents()[1])])
    assert (llm.callback_manager, other.callback_manager) == before
    assert other.calls == []
    assert len(llm.calls) == len(counting.llm_token_counts) > 1
    usage = response.metadata["memagent"]["usage"]  # type: ignore[index]
    assert (counting.prompt_llm_token_count, counting.completion_llm_token_count) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    renewed = CallbackManager([])
    synthesizer.callback_manager = renewed
    assert synthesizer.callback_manager is renewed
    assert llm.callback_manager is before[0]


def test_b_settings_are_asked_late_and_only_without_a_model(
    settings_llm: Callable[[LLM | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    settings_llm(None)
    engine = MemAgentQueryEngine.from_documents(documents(), **SIZES)
    assert "response_synthesizer:memory" in engine.get_prompts()
    with pytest.raises(UsageError, match=r"Settings\.llm"):
        engine.query("q")
    assert str(MemAgentQueryEngine.from_documents(documents(), scripted(), **SIZES).query("q")) == ANSWER
    assert Settings._llm is None, "a model was given"
    llm = fake()
    settings_llm(llm)
    assert str(engine.query("q")) == ANSWER
    assert len(llm.calls) > 2


@pytest.mark.parametrize("method", ["chat", "achat", "stream_chat", "astream_chat"])
async def test_b_models_are_asked_to_chat_which_tells_the_usage(method: str) -> None:
    """`predict` would lose it. The LLM's own system prompt is put before ours, as `predict` does."""
    llm = fake(lambda _: "so it is", system_prompt="Be brief.")
    backend = LLMBackend(llm)
    if method == "chat":
        reply: Any = backend.complete(prompt("why?"))
    elif method == "achat":
        reply = await backend.acomplete(prompt("why?"))
    elif method == "stream_chat":
        *texts, reply = backend.stream(prompt("why?"))
        assert texts == ["so", " it", " is"]
    else:
        *texts, reply = [piece async for piece in backend.astream(prompt("why?"))]
        assert texts == ["so", " it", " is"]
    assert isinstance(reply, Reply)
    assert (reply.text, reply.finish_reason, reply.reasoning) == ("so it is", "stop", "")
    assert reply.usage == Usage(prompt_tokens=2 + backend.count("Be brief."), completion_tokens=3, cached_tokens=3)
    assert [(name, [each.content for each in messages], options) for name, messages, options in llm.calls] == [
        (method, ["Be brief.", "why?"], {})
    ]
    assert backend.name == "llama-index:FakeLLM:fake"
    backend.close()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("include_text", [False, True])
def test_b_source_nodes_are_the_nodes_and_each_step_says_what_it_read(streaming: bool, include_text: bool) -> None:
    engine = MemAgentQueryEngine.from_documents(
        documents(), scripted(), include_text=include_text, streaming=streaming, **SIZES
    )
    response = engine.query("q")
    texts = {document.id_: document.text for document in documents()}
    assert {source.node.node_id: source.node.get_content() for source in response.source_nodes} == (
        texts if include_text else dict.fromkeys(texts, "")
    )
    assert [source.node.metadata["file"] for source in response.source_nodes] == ["a.txt", "b.txt"]
    assert response.metadata is not None
    assert {name: value for name, value in response.metadata.items() if name != "memagent"} == {
        source.node.node_id: source.node.metadata for source in response.source_nodes
    }
    details = response.metadata["memagent"]
    read_of = dict.fromkeys(texts, "")
    for step in details["steps"]:
        for part in step["nodes"]:
            read_of[part["node_id"]] += texts[part["node_id"]][part["start"] : part["end"]]
    assert read_of == texts
    assert details["memory"].startswith("note")


def test_b_metadata_stands_in_a_prompt_as_in_other_synthesizers() -> None:
    node = TextNode(text="It was fair.", metadata={"ship": "Alma"})
    for settings, shown in (({}, node.get_content(MetadataMode.LLM)), ({"metadata_mode": "none"}, "It was fair.")):
        backend = scripted()
        MemAgentSynthesizer(backend, **settings, **SIZES).synthesize("q", [node])  # type: ignore[arg-type]
        assert text_read(backend) == shown


@pytest.mark.parametrize("insert_method", [InsertMethod.SYSTEM, InsertMethod.USER])
async def test_b_a_memory_block_gets_what_leaves_the_chat_and_is_shown_in_the_prompt(
    insert_method: InsertMethod, memory_with: Callable[..., Memory]
) -> None:
    assert issubclass(MemAgentMemoryBlock, BaseMemoryBlock)
    model = MemoryModel()
    memory = memory_with(
        session_id="s",
        token_limit=60,
        chat_history_token_ratio=0.5,
        token_flush_size=10,
        memory_blocks=[model.block()],
        insert_method=insert_method,
    )
    for number in range(6):
        await memory.aput(user(f"Question {number} about the harbour?"))
        await memory.aput(ChatMessage(role="assistant", content=f"Answer {number} about the harbour."))
    shown = await memory.aget()
    left = " ".join(message.content or "" for message in shown)
    assert f"<overwrite_memory>\nnote {len(model.sections)}\n</overwrite_memory>" in left
    folded = "".join(model.sections)
    for number in range(6):
        assert (f"Question {number} " in folded) != (f"Question {number} " in left)
        assert (f"Answer {number} " in folded) != (f"Answer {number} " in left)


async def test_b_a_memory_block_with_priority_0_is_never_truncated(memory_with: Callable[..., Memory]) -> None:
    words = " ".join(f"word{number}" for number in range(20))
    for priority, expected in [(0, words), (1, "word0 word1")]:
        block = MemoryModel().block(memory=words, priority=priority)
        memory = memory_with(token_limit=45, chat_history_token_ratio=0.9, memory_blocks=[block])
        await memory.aput(user("a b c d e f g h i j"))
        system = (await memory.aget())[0].content or ""
        assert "<overwrite_memory>" in system
        assert expected in system
        assert (words in system) == (priority == 0)
        assert block.memory == words, "only what is shown is truncated"


async def test_b_memory_blocks_of_one_chat_do_not_wait_for_each_other(memory_with: Callable[..., Memory]) -> None:
    together = asyncio.Barrier(2)

    class Meeting(ScriptedBackend):
        async def acomplete(self, prompt: Prompt) -> Reply:
            async with asyncio.timeout(30):  # one after the other, they would never meet
                await together.wait()
            return self.complete(prompt)

    blocks = [
        MemAgentMemoryBlock(Meeting(lambda prompt: "so"), name=name, chunk_tokens=200, memory_tokens=30)
        for name in ("facts", "wishes")
    ]
    memory = memory_with(token_limit=60, chat_history_token_ratio=0.5, token_flush_size=10, memory_blocks=blocks)
    for number in range(6):
        await memory.aput(user(f"Question {number} about the harbour?"))
    assert [block.memory for block in blocks] == ["so", "so"]


async def test_b_a_memory_block_is_kept_by_its_model_dump() -> None:
    model = MemoryModel(call_2=BackendError("the server is down", retryable=True))
    block = model.block(priority=2, description="what was said", question="Who is who?")
    await block.aput([user("one")])
    await block.aput([user("two")])
    saved = json.loads(json.dumps(block.model_dump()))
    assert saved == {
        "name": "overwrite_memory",
        "description": "what was said",
        "priority": 2,
        "accept_short_term_memory": True,
        "question": "Who is who?",
        "memory": "note 1",
        "pending": "user:\n  two\n\n",
    }
    assert "scripted" not in repr(block)
    sizes = {"chunk_tokens": 200, "memory_tokens": 30}
    for resumed in (
        model.block(**saved),
        MemAgentMemoryBlock.model_validate({"llm": model.backend, **sizes, **saved}),
    ):
        assert resumed.model_dump() == saved
    await resumed.afold()
    assert resumed.pending == ""


async def test_b_a_workflow_reads_one_chunk_a_step_as_the_reader_does() -> None:
    assert issubclass(MemAgentWorkflow, Workflow)
    model, other = WorkflowModel(), WorkflowModel()
    handler = model.workflow().run(question=QUESTION, document="log")
    events = [event async for event in handler.stream_events()]
    result = await handler
    reading = Reader(other.backend, **WORKFLOW_SIZES).read(QUESTION, TEXT)
    assert [prompt.messages for prompt in model.calls] == [prompt.messages for prompt in other.calls]
    assert isinstance(result, MemAgentAnswer)
    assert (str(result), result.answer, result.memory, result.model) == ("fair", "fair", reading.memory, "scripted")
    assert result.usage["prompt_tokens"] == reading.usage.prompt_tokens
    *steps, stop = events
    assert stop is result
    step_events = [event for event in steps if isinstance(event, MemAgentStepEvent)]
    assert [(event.number, event.memory) for event in step_events] == [
        *((n, f"note {n}") for n in range(1, 7)),
        (6, "note 6"),
    ]
    assert [event.step for event in step_events] == result.steps
    assert [event.step["outcome"] for event in step_events] == ["updated"] * 6 + ["answered"]
    assert "".join(TEXT[event.start : event.end] for event in step_events[:-1]) == TEXT
    assert (step_events[-1].start, step_events[-1].end) == (None, None)


async def test_b_a_workflow_asks_a_person_and_goes_on_from_a_saved_context() -> None:
    model = WorkflowModel()
    handler = model.workflow(ask_every=4).run(question=QUESTION, document="log")
    await events_until(handler, lambda event: isinstance(event, MemAgentReview))
    elsewhere = model.workflow(ask_every=4)
    context = restored(elsewhere, handler.ctx)
    assert (await context.store.get_state()).waiting
    resumed = elsewhere.run(ctx=context)
    resumed.ctx.send_event(MemAgentReviewed(memory="a week later"))
    assert str(await resumed) == "fair"
    assert memory_in(model.calls[4]) == "a week later"
    assert len(model.calls) == 7
    await handler.cancel_run()


async def test_b_a_workflow_has_no_timeout_unless_one_is_set() -> None:
    assert WorkflowModel().workflow()._timeout is None
    assert WorkflowModel().workflow(timeout=5.0)._timeout == 5.0


@pytest.mark.parametrize("streaming", [False, True])
async def test_b_a_tool_gives_the_whole_answer_of_a_stream_too(streaming: bool) -> None:
    engine = MemAgentQueryEngine.from_documents(documents(), scripted(), streaming=streaming, **SIZES)
    tool = QueryEngineTool.from_defaults(engine, name="logbook", description="Reads the log.")
    assert tool.call("q").content == (await tool.acall("q")).content == ANSWER


class Lazy(BaseReader):
    """Notes the threads that load from it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def pages(self) -> Iterator[Document]:
        for document in documents():
            self.threads.append(threading.current_thread())
            yield document

    def lazy_load_data(self, *_: Any, **__: Any) -> Iterator[Document]:
        return self.pages()


class Eager(Lazy):
    """Has no lazy method, as SimpleDirectoryReader."""

    lazy_load_data = BaseReader.lazy_load_data  # type: ignore[assignment]

    def load_data(self, *_: Any, **__: Any) -> list[Document]:
        return list(self.pages())


@pytest.mark.parametrize("kind", [Lazy, Eager])
async def test_b_a_reader_is_loaded_anew_for_each_query_and_off_the_event_loop(kind: type[Lazy]) -> None:
    source, backend = kind(), scripted()
    engine = MemAgentQueryEngine.from_documents(source, backend, **SIZES)
    for number in (1, 2):
        assert str(engine.query("q")) == ANSWER
        assert len(source.threads) == len(documents()) * number
    source.threads.clear()
    backend.prompts.clear()
    assert str(await engine.aquery("q")) == ANSWER
    assert text_read(backend) == "\n\n".join(document.text for document in documents())
    assert threading.main_thread() not in source.threads


def test_b_llama_index_is_an_extra_of_a_plain_package() -> None:
    """A LlamaHub package would have to live in the namespace `llama_index` and in LlamaIndex's own repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (core,) = map(Requirement, project["optional-dependencies"]["llama-index"])
    assert core.name == "llama-index-core"
    assert [core.specifier.contains(version) for version in ("0.13.9", "0.14.25", "0.15.0")] == [False, True, False]
    always = " ".join(project["dependencies"])
    assert "llama" not in always
    assert "lang" not in always
    assert "langchain" in project["optional-dependencies"]
    assert not (ROOT / "src" / "llama_index").exists()


def test_b_order_is_kept_and_the_memory_bounded_and_the_number_of_calls_is_the_plan_s() -> None:
    """`Refine` splits its texts again when its answer grows: it reads the parts in reverse, and makes more calls."""
    pages = [
        Document(text="".join(f"W{number} " for number in range(first, first + 500)), id_=str(first))
        for first in range(0, 2000, 500)
    ]
    backend = ScriptedBackend(lambda prompt: "word " * 40 * (prompt.index + 1))
    synthesizer = MemAgentSynthesizer(backend, **SIZES)
    plan = synthesizer.reader.plan("q", pages)
    response = synthesizer.synthesize("q", pages)
    assert len(backend.prompts) == plan.calls == plan.chunks + 1 > 10
    assert text_read(backend) == "\n\n".join(page.text for page in pages)
    assert all(backend.count(memory_in(prompt)) <= SIZES["memory_tokens"] for prompt in backend.prompts)
    usage = response.metadata["memagent"]["usage"]  # type: ignore[index]
    assert usage["prompt_tokens"] <= plan.prompt_tokens
    assert usage["completion_tokens"] <= plan.completion_tokens
