"""A streamed answer is asked for where it is consumed: in a tool, a thread, another event loop, a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_llm import ANSWER, SIZES, FakeLLM, documents, fake, one_note, pieces_of, scripted
from helpers.instrumentation import instrumented
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import ChatMessage, ChatResponse
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.tools import QueryEngineTool
from llama_index_instrumentation.span_handlers import SimpleSpanHandler
from pydantic import Field

from memagent_integrations import BackendError, MemAgentQueryEngine, MemAgentSynthesizer


class OneLoop(FakeLLM):
    """Like the clients of most SDKs: its async connections belong to the event loop that first used them."""

    loops: list[Any] = Field(default_factory=list)

    def check(self) -> None:
        self.loops.append(asyncio.get_running_loop())
        if self.loops[0] is not self.loops[-1]:
            raise RuntimeError("the connection is bound to a different event loop")

    @llm_chat_callback()
    async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        self.check()
        words, raw = self.respond("achat", messages, kwargs)
        return ChatResponse(message=ChatMessage(role="assistant", content="".join(words)), raw=raw)

    @llm_chat_callback()
    async def astream_chat(self, messages: Any, **kwargs: Any) -> AsyncIterator[ChatResponse]:
        self.check()
        return await FakeLLM.astream_chat(self, messages, **kwargs)  # type: ignore[no-any-return]


def engine(llm: Any = None, **options: Any) -> MemAgentQueryEngine:
    llm = llm or OneLoop(script=one_note)
    return MemAgentQueryEngine.from_documents(documents(), llm, streaming=True, **options, **SIZES)


def consumed(response: Any) -> str:
    return asyncio.run(_consumed(response))


async def _consumed(response: Any) -> str:
    return "".join(await pieces_of(response))


async def test_a_streaming_engine_is_a_tool_in_a_running_event_loop() -> None:
    for llm in (OneLoop(script=one_note), scripted()):
        tool = QueryEngineTool.from_defaults(engine(llm), name="log", description="Reads the log.")
        async with asyncio.timeout(30):
            for output in (tool.call("q"), tool(input="q"), await tool.acall("q"), await tool.acall(input="q")):
                assert output.content == ANSWER
        assert output.raw_output.metadata["memagent"]["steps"][-1]["phase"] == "answer"


def test_a_streaming_engine_is_a_tool_without_an_event_loop() -> None:
    tool = QueryEngineTool.from_defaults(engine(), name="log", description="Reads the log.")
    assert tool.call("q").content == ANSWER
    assert asyncio.run(tool.acall("q")).content == ANSWER
    assert asyncio.run(tool.acall("q")).content == ANSWER, "in a second event loop too"


@pytest.mark.parametrize("model", [lambda: OneLoop(script=one_note), scripted])
def test_a_stream_outlives_the_event_loop_in_which_it_was_made(model: Callable[[], Any]) -> None:
    subject = engine(model())
    response: Any = asyncio.run(subject.aquery("q"))
    assert isinstance(response, AsyncStreamingResponse)
    assert consumed(response) == ANSWER
    assert response.metadata["memagent"]["steps"][-1]["phase"] == "answer"
    assert str(asyncio.run(subject.aquery("q"))) == ANSWER, "str() of a response opens an event loop of its own"


async def test_a_stream_is_consumed_in_another_thread() -> None:
    subject = engine()
    response = await asyncio.to_thread(subject.query, "q")
    assert isinstance(response, StreamingResponse)
    assert str(response) == ANSWER
    later = await subject.aquery("q")
    assert await asyncio.to_thread(consumed, later) == ANSWER
    other: Any = await asyncio.to_thread(asyncio.run, subject.aquery("q"))
    assert "".join(await pieces_of(other)) == ANSWER


async def test_a_notebook_queries_in_its_running_event_loop() -> None:
    """A cell runs in the loop of the notebook: sync calls block it, async ones are awaited, both in any order."""
    subject = engine()
    for _ in range(2):
        assert str(subject.query("q")) == ANSWER
        assert "".join(subject.query("q").response_gen) == ANSWER  # type: ignore[union-attr, arg-type]
        assert str(await subject.aquery("q")) == ANSWER
        response: Any = await subject.aquery("q")
        assert "".join([text async for text in response.async_response_gen()]) == ANSWER
        assert (await response.get_response()).response == ANSWER


async def test_only_the_memory_is_made_by_the_query() -> None:
    llm = fake()
    for response in (engine(llm).query("q"), await engine(llm).aquery("q")):
        assert {name for name, *_ in llm.calls} <= {"chat", "achat"}
        assert all("<section>" in str(messages[-1].content) for _, messages, _ in llm.calls)
        assert response.metadata["memagent"]["memory"] == "one note"  # type: ignore[index]
        assert response.source_nodes
        llm.calls.clear()


async def test_an_answer_that_fails_fails_where_it_is_consumed() -> None:
    subject = engine(fake(lambda text: "note" if "<section>" in text else BackendError("the server is down")))
    response, later = subject.query("q"), await subject.aquery("q")
    with pytest.raises(BackendError, match="down") as caught:
        list(response.response_gen)  # type: ignore[union-attr, arg-type]
    assert caught.value.reading
    assert caught.value.reading.memory == "note"
    with pytest.raises(BackendError, match="down"):
        await pieces_of(later)


async def test_a_synthesizer_s_own_stream_is_consumed_anywhere() -> None:
    synthesizer = MemAgentSynthesizer(OneLoop(script=one_note), streaming=True, **SIZES)
    texts: Any = await asyncio.to_thread(lambda: synthesizer.get_response("q", ["first text"]))
    assert "".join(texts) == ANSWER
    later: Any = await asyncio.to_thread(lambda: asyncio.run(synthesizer.aget_response("q", ["first text"])))
    assert "".join([text async for text in later]) == ANSWER


async def test_the_spans_of_an_answer_belong_to_its_query_wherever_it_is_consumed() -> None:
    with instrumented(SimpleSpanHandler()) as spans:
        response = engine(fake()).query("q")
        later = await engine(fake()).aquery("q")
        await asyncio.to_thread(lambda: list(response.response_gen))  # type: ignore[union-attr, arg-type]
        await asyncio.create_task(_consumed(later), context=Context())
        kinds = {span.id_: span.id_.split("-")[0] for span in spans.completed_spans}
        parents = {kinds[span.id_]: kinds.get(span.parent_id or "") for span in spans.completed_spans}
    assert parents["FakeLLM.stream_chat"] == "MemAgentSynthesizer.synthesize"
    assert parents["FakeLLM.astream_chat"] == "MemAgentSynthesizer.asynthesize"


def test_legacy_callbacks_see_the_call_for_a_streamed_answer() -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    subject = engine(fake(), callback_manager=CallbackManager([debug]))
    response = subject.query("q")
    updates = len(debug.get_event_pairs(CBEventType.LLM))
    list(response.response_gen)  # type: ignore[union-attr, arg-type]
    assert len(debug.get_event_pairs(CBEventType.LLM)) == updates + 1


def test_a_streamed_answer_completes_its_run_in_the_journal(tmp_path: Path) -> None:
    model = scripted()
    subject = engine(model, journal=tmp_path / "runs.db")
    assert consumed(asyncio.run(subject.aquery("q"))) == ANSWER
    calls = len(model.prompts)
    assert str(subject.query("q")) == consumed(asyncio.run(subject.aquery("q"))) == ANSWER
    assert len(model.prompts) == calls, "a complete reading costs nothing"
