"""What users of LangChain and LlamaIndex complain about in their trackers, and tests that this package does better.

The number of a test is that of the complaint, its docstring names the threads. Where users of both frameworks have the
complaint, the test runs with both.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict
from uuid import UUID

import pytest
from helpers.fake_llm import FakeLLM, FixedRetriever, fake, pieces_of
from helpers.instrumentation import EventLog, instrumented
from helpers.loopback import Loopback, Request, Response, chat, completion
from helpers.scripted_agent import THREAD, AgentModel, middleware, send, texts
from helpers.scripted_chat import ANSWER, DOCUMENT, SMALL, Model, count, say, total
from helpers.scripted_memory import DOWN, MemoryModel, user
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models.base import BaseChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from llama_index.core.async_utils import run_jobs
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.memory import Memory
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import Document, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index_instrumentation.span_handlers import SimpleSpanHandler
from pydantic import Field, PrivateAttr
from sqlalchemy.ext.asyncio import create_async_engine

from memagent_integrations import (
    Backend,
    BackendError,
    ContextOverflow,
    Limits,
    MemAgentQueryEngine,
    MemAgentReader,
    MemAgentSynthesizer,
    PromptSet,
    ScriptedBackend,
    UsageError,
    load_backend,
    save_trace,
)
from memagent_integrations.langchain import ChatModelBackend, MemAgentDocumentCompressor, MemAgentTool, build_graph
from memagent_integrations.llama_index import (
    LLMBackend,
    MemAgentAnswerEnd,
    MemAgentReview,
    MemAgentReviewed,
    MemAgentStepEvent,
    MemAgentWorkflow,
)
from memagent_integrations.records import Prompt

QUESTION = "Why?"
CHUNKS = 4  # of DOCUMENT
PATIENCE = 60  # seconds after which what waits for ever is given up
SPAN = len(DOCUMENT)

Script = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a user gets: the answer in pieces as they came, and the details of the reading."""

    pieces: list[str]
    memory: str
    outcomes: dict[str, int]
    usage: tuple[int | None, int | None]

    @property
    def answer(self) -> str:
        return "".join(self.pieces)


@dataclass
class LangChain:
    """Asks as a user of LangChain does."""

    script: Script = say
    model: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.model or Model(script=self.script)
        tokenizer = {} if isinstance(self.model, Backend) else {"tokenizer": count}
        self.reader = MemAgentReader(self.model, **(tokenizer | SMALL | self.settings))

    async def ask(self, way: str = "plain", document: Any = DOCUMENT, question: str = QUESTION) -> Result:
        documents = [LangChainDocument(text) for text in document] if isinstance(document, list) else document
        value: Any = {"question": question, "context": documents}
        if way in ("plain", "aplain"):
            messages: list[Any] = [self.reader.invoke(value) if way == "plain" else await self.reader.ainvoke(value)]
        elif way == "stream":
            messages = list(self.reader.stream(value))
        else:
            messages = [chunk async for chunk in self.reader.astream(value)]
        whole, usage = total(messages), messages[-1].usage_metadata
        details = whole.response_metadata["memagent"]
        return Result(
            pieces=[str(message.text) for message in messages if message.text],
            memory=details["memory"],
            outcomes=details["outcomes"],
            usage=(usage["input_tokens"], usage["output_tokens"]) if usage else (None, None),
        )

    @property
    def prompts(self) -> list[str]:
        return list(self.model.prompts)


@dataclass
class LlamaIndex:
    """Asks as a user of LlamaIndex does."""

    script: Script = say
    model: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.model or fake(self.script)
        tokenizer: Any = {} if isinstance(self.model, Backend) else {"tokenizer": count}
        self.settings = tokenizer | SMALL | self.settings

    def engine(self, document: Any = DOCUMENT, **more: Any) -> MemAgentQueryEngine:
        documents = [Document(text=text) for text in (document if isinstance(document, list) else [document])]
        return MemAgentQueryEngine.from_documents(documents, self.model, **(self.settings | more))

    async def ask(self, way: str = "plain", document: Any = DOCUMENT, question: str = QUESTION) -> Result:
        engine = self.engine(document, streaming=way.endswith("stream"))
        response: Any = await engine.aquery(question) if way.startswith("a") else engine.query(question)
        if way == "astream":
            pieces = await pieces_of(response)
        else:
            pieces = list(response.response_gen) if way == "stream" else [str(response)]
        details = response.metadata["memagent"]
        return Result(
            pieces=pieces,
            memory=details["memory"],
            outcomes=dict(Counter(step["outcome"] for step in details["steps"])),
            usage=(details["usage"]["prompt_tokens"], details["usage"]["completion_tokens"]),
        )

    @property
    def prompts(self) -> list[str]:
        return [str(messages[-1].content) for _, messages, _ in self.model.calls]


Door = type[LangChain] | type[LlamaIndex]
BOTH = pytest.mark.parametrize("door", [LangChain, LlamaIndex])
WAYS = ("plain", "aplain", "stream", "astream")
EACH_WAY = pytest.mark.parametrize("way", WAYS)
SYNC_AND_ASYNC = pytest.mark.parametrize("way", ["plain", "astream"])
# For claims about `Reader`: LlamaIndex's ways call each of its four methods, LangChain's only `stream` (plain, stream)
# and `astream` (aplain, astream).
EACH_READER_METHOD = pytest.mark.parametrize(
    ("door", "way"),
    [(LangChain, "plain"), (LangChain, "astream")] + [(LlamaIndex, way) for way in WAYS],
)
STREAMED = pytest.mark.parametrize("way", ["stream", "astream"])


class Events(BaseCallbackHandler):
    """LangChain's custom events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.events.append((name, data))


class State(TypedDict, total=False):
    """Of a graph with a reader in it."""

    question: str
    context: str
    answer: str


class PlainLLM(CustomLLM):
    """An LLM as LlamaIndex's guide has users write their own; it has nothing that changes while it is used."""

    _script: Script = PrivateAttr()

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=8192, model_name="plain")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self._script(prompt))

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Iterator[CompletionResponse]:
        text = self._script(prompt)
        yield CompletionResponse(text=text, delta=text)


@contextmanager
def server_of(door: Door, script: Script) -> Iterator[Any]:
    """Yield a model with a fixed identity: an endpoint for LangChain's ChatOpenAI, an LLM of LlamaIndex."""
    if door is LlamaIndex:
        yield PlainLLM(script)
        return
    with Loopback(chat(script)) as server:
        yield ChatOpenAI(model="m", base_url=server.url + "/v1", api_key="none", max_retries=0)


def is_update(text: str) -> bool:
    return "<section>" in text


def section_in(text: str) -> str:
    return text.partition("<section>\n")[2].partition("\n</section>")[0]


def memory_in(text: str) -> str:
    return text.partition("<memory>\n")[2].partition("\n</memory>")[0]


def noting(*notes: str, answer: Script | None = None) -> Script:
    """Writes these notes one after the other, then answers."""
    left = iter(notes)
    return lambda text: next(left) if is_update(text) else (answer(text) if answer else ANSWER)


def failing_at(call: int, error: BaseException, prompts: list[str]) -> Script:
    """Fails once, in this call (counted from 1); `asked` keeps the prompts."""

    def script(text: str) -> str:
        prompts.append(text)
        if len(prompts) == call:
            raise error
        return say(text)

    return script


class Peak:
    """Counts how many are inside at a time. The first two wait inside until `watch` has let in all that can come in."""

    def __init__(self) -> None:
        self.most = self.inside = 0
        self._lock, self._open, self._aopen = threading.Lock(), threading.Event(), asyncio.Event()

    def _count(self, by: int) -> None:
        with self._lock:
            self.inside += by
            self.most = max(self.most, self.inside)

    def pass_through(self) -> None:
        self._count(1)
        assert self._open.wait(PATIENCE)
        self._count(-1)

    async def apass_through(self) -> None:
        self._count(1)
        await self._aopen.wait()
        self._count(-1)

    async def watch(self, work: Awaitable[Any]) -> Any:
        """Return the result of the work."""
        async with asyncio.timeout(PATIENCE):
            task = asyncio.ensure_future(work)
            while self.inside < 2:
                await asyncio.to_thread(int)
            for _ in range(300):  # turns for those that should not come in; correct code passes with any number of them
                await asyncio.to_thread(int)
            self._open.set()
            self._aopen.set()
            return await task


# ---- 1 to 4: what becomes of the memory ------------------------------------------------------------------


@EACH_READER_METHOD
async def test_complaint_01_the_answer_is_never_a_remark_that_nothing_changed(door: Door, way: str) -> None:
    """langchain #2504, #8824, #1460; llama_index #700."""

    def answer(text: str) -> str:
        return "7319" if "7319" in text else "The original summary remains."

    subject = door(
        noting("The code is 7319.", "NO CHANGE", "", "NO CHANGE.", answer=answer),
        settings={
            "prompts": PromptSet.default(no_change=True),
            "on_lost_section": "skip",
            "limits": Limits(empty_retries=0),
        },
    )
    result = await subject.ask(way)
    assert (result.answer, result.memory) == ("7319", "The code is 7319.")
    assert result.outcomes == {"updated": 1, "unchanged": 2, "kept": 1, "answered": 1}, (
        "each remark is told as what it was"
    )
    *updates, last = subject.prompts
    assert [memory_in(text) for text in updates[1:]] == ["The code is 7319."] * 3
    assert not [text for text in updates if "Answer the question" in text], "an update is never asked for the answer"
    assert section_in(last) == "", "the answer comes from a call of its own, and from the memory alone"


@pytest.mark.parametrize(
    "remark",
    ["The original summary remains.", "No changes needed.", "No changes are needed: the original answer still stands."],
)
@pytest.mark.parametrize("no_change", [False, True])
async def test_complaint_01_a_remark_in_words_of_the_models_own_is_no_memory(remark: str, no_change: bool) -> None:
    """langchain #2504, llama_index #700: models make the remark unasked, and in many words."""
    script = noting("The code is 7319.", *[remark] * 3, answer=memory_in)
    subject = LlamaIndex(script, settings={"prompts": PromptSet.default(no_change=no_change)})
    assert (await subject.ask()).answer == "The code is 7319."


SIGNED = ["Ann, Bob, Cyd and Dan signed in Bern.", "Ann signed."]


async def test_complaint_02_a_memory_that_shrinks_is_seen_and_mended_langchain() -> None:
    """langchain #2504 (a comment: the model throws away half the summary in a middle step)."""
    events = Events()
    LangChain(noting(SIGNED[0], *SIGNED[1:] * 3)).reader.invoke(
        {"question": QUESTION, "context": DOCUMENT}, {"callbacks": [events]}
    )
    assert [data["memory"] for _, data in events.events] == [SIGNED[0], *SIGNED[1:] * 3], "every version is shown"

    model = Model(script=noting(SIGNED[0], SIGNED[1], SIGNED[0], SIGNED[0], answer=memory_in))
    graph = build_graph(
        MemAgentReader(model, tokenizer=count, **SMALL),
        load=lambda _: DOCUMENT,
        checkpointer=InMemorySaver(),
        interrupt_after="*",
    )
    known, mended = "", 0
    state = graph.invoke({"question": QUESTION, "source": "minutes"}, THREAD)
    while graph.get_state(THREAD).next:
        if len(state["memory"]) < len(known):
            mended += 1
            graph.update_state(THREAD, {"memory": f"{known} Edited."})
        known = state["memory"]
        state = graph.invoke(None, THREAD)
    assert mended == 1
    assert memory_in(model.prompts[2]) == f"{SIGNED[0]} Edited.", "the next chunk is read on from what the person wrote"
    assert state["answer"] == SIGNED[0]


async def test_complaint_02_a_memory_that_shrinks_is_seen_and_mended_llama_index() -> None:
    """langchain #2504, of LlamaIndex's refine: llama_index #700."""
    with instrumented(EventLog()) as log:
        await LlamaIndex(noting(SIGNED[0], *SIGNED[1:] * 3)).ask()
    lengths = [(len(step.memory_before), len(step.memory)) for step in log.steps]
    assert lengths == [(0, 37), (37, 11), (11, 11), (11, 11)], "every version is shown, beside the one before it"

    llm = fake(noting(SIGNED[0], SIGNED[1], SIGNED[0], SIGNED[0], answer=memory_in))
    workflow = MemAgentWorkflow(llm, load=lambda _: DOCUMENT, ask_every=1, tokenizer=count, **SMALL)
    handler = workflow.run(question=QUESTION, document="minutes")
    known, mended = "", 0
    async for event in handler.stream_events():
        if isinstance(event, MemAgentReview):
            shrunk = len(event.memory) < len(known)
            mended += shrunk
            handler.ctx.send_event(MemAgentReviewed(memory=f"{known} Edited." if shrunk else None, number=event.number))
            known = event.memory
    assert mended == 1
    assert memory_in(str(llm.calls[2][1][-1].content)) == f"{SIGNED[0]} Edited."
    assert str(await handler) == SIGNED[0]


@EACH_READER_METHOD
@pytest.mark.heavy
@pytest.mark.openai
async def test_complaint_03_a_crash_midway_loses_no_work(door: Door, way: str, tmp_path: Path) -> None:
    """langchain #6733; PageIndex #227."""
    prompts: list[str] = []
    with server_of(door, failing_at(3, ConnectionError("the server is gone"), prompts)) as model:
        with pytest.raises(BackendError) as caught:
            await door(model=model, settings={"journal": tmp_path / "runs.db"}).ask(way)
        assert caught.value.reading is not None
        assert [step.outcome for step in caught.value.reading.steps] == ["updated"] * 2, (
            "what was read is told with the error"
        )
        result = await door(model=model, settings={"journal": tmp_path / "runs.db"}).ask(way)
    assert result.answer == ANSWER
    sections = [section_in(text) for text in prompts if is_update(text)]
    assert sections[2] == sections[3]
    assert "".join([*sections[:3], *sections[4:]]) == DOCUMENT, "no chunk is read twice but the one that failed"
    assert len(prompts) == CHUNKS + 2


@EACH_READER_METHOD
@pytest.mark.parametrize("call", [2, CHUNKS + 1], ids=["an update", "the answer"])
@pytest.mark.heavy
@pytest.mark.openai
async def test_complaint_03_a_step_is_tried_again_and_not_the_document(
    door: Door, way: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """langchain #6733."""
    prompts: list[str] = []
    with server_of(door, failing_at(call, ConnectionError("the server is gone"), prompts)) as model:
        result = await door(model=model, settings={"limits": Limits(max_retries=1)}).ask(way)
    assert result.answer == ANSWER
    assert len(prompts) == CHUNKS + 2


@EACH_READER_METHOD
@pytest.mark.heavy
@pytest.mark.openai
async def test_complaint_04_an_error_is_never_the_memory(door: Door, way: str, tmp_path: Path) -> None:
    """langchain #38867."""
    prompts: list[str] = []
    with server_of(door, failing_at(3, ConnectionError("Error generating summary"), prompts)) as model:
        with pytest.raises(BackendError) as caught:
            await door(model=model, settings={"journal": tmp_path / "runs.db"}).ask(way)
        kept = memory_in(prompts[2])
        assert caught.value.reading is not None
        assert caught.value.reading.memory == kept != ""
        result = await door(model=model, settings={"journal": tmp_path / "runs.db"}).ask(way)
    assert memory_in(prompts[3]) == kept, "the reading goes on from the memory before the error"
    assert "Error" not in result.memory + "".join(prompts)


@pytest.mark.parametrize("on_failure", ["raise", "later"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_complaint_04_an_error_never_replaces_a_history_langchain(on_failure: str, is_async: bool) -> None:
    """langchain #38867."""
    model = AgentModel()
    folding = middleware(
        ScriptedBackend([BackendError("Error generating summary", retryable=True), "They greet."]),
        on_failure=on_failure,
    )
    agent = create_agent(model, middleware=[folding], checkpointer=InMemorySaver())
    for text in ("one", "two", "three"):
        await send(agent, text, is_async=is_async)
    with pytest.raises(BackendError, match="Error generating summary") if on_failure == "raise" else nullcontext():
        await send(agent, "four", is_async=is_async)
    state = agent.get_state(THREAD).values
    assert texts(state["messages"])[:7] == [
        "one",
        "You said one.",
        "two",
        "You said two.",
        "three",
        "You said three.",
        "four",
    ]
    assert "memory" not in state
    state = await send(agent, "five", is_async=is_async)
    answered = [] if on_failure == "raise" else ["You said four."]
    assert (state["memory"], texts(state["messages"])) == ("They greet.", ["four", *answered, "five", "You said five."])
    assert not [text for messages in model.calls for text in texts(messages) if "Error" in text]


async def test_complaint_04_an_error_never_replaces_a_history_llama_index() -> None:
    """langchain #38867, of LlamaIndex's memory."""
    model, engine = MemoryModel(call_1=DOWN), create_async_engine("sqlite+aiosqlite:///:memory:")
    block = model.block()
    options: dict[str, Any] = {
        "token_limit": 60,
        "chat_history_token_ratio": 0.5,
        "token_flush_size": 20,
        "async_engine": engine,
    }
    memory = Memory.from_defaults(session_id="s", memory_blocks=[block], **options)
    messages = [f"My name for number {number} is Ann{number}, and I live in town {number}." for number in range(12)]
    for text in messages:
        await memory.aput(user(text))
        assert DOWN.args[0] not in str(await memory.aget()) + block.memory
    await engine.dispose()
    assert len(model.sections) > 2
    assert model.memories[1].startswith("(empty"), "the fold that failed left the memory as it was"
    folded = "".join(model.sections[1:])
    assert all(text in folded or text in block.pending for text in messages if text in model.sections[0]), (
        "and its messages are folded by the next one"
    )
    assert messages[0] in model.sections[1]


# ---- 5 to 7: sizes ---------------------------------------------------------------------------------------

WINDOW = 700  # of which the templates take some 250


def overflowing(text: str) -> str:
    """A model that fails beyond its window, and writes far too much."""
    if count(text) + 50 > WINDOW:
        raise RuntimeError(f"context_length_exceeded: this model's maximum context length is {WINDOW} tokens")
    return "fact " * 400 if is_update(text) else ANSWER


@EACH_READER_METHOD
async def test_complaint_05_no_call_overflows_the_window(door: Door, way: str) -> None:
    """langchain #13230, #6191, #5829, #9235, #1349."""
    subject = door(overflowing, settings={"window": WINDOW, "output_tokens": 50})
    documents = ["Short.", "Some words of one document that is far too long. " * 200, "!" * 900, "Short again."]
    result = await subject.ask(way, documents)
    assert result.answer == ANSWER
    assert "".join(section_in(text) for text in subject.prompts) == "\n\n".join(documents), (
        "documents are split, and nothing is left out"
    )
    assert max(count(section_in(text)) for text in subject.prompts) <= SMALL["chunk_tokens"]


@EACH_READER_METHOD
async def test_complaint_06_what_cannot_fit_is_said_before_the_first_call(door: Door, way: str) -> None:
    """llama_index #6465, #7607."""
    for wrong in ({"chunk_tokens": -36}, {"chunk_tokens": 0}, {"memory_tokens": -1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            await door(settings=wrong).ask(way)
    subject = door(settings={"window": 500, "output_tokens": 50})
    with pytest.raises(
        ContextOverflow,
        match=r"chunk 200 \+ memory 50 \+ output 50 .* the window holds 500; chunk_tokens=\d+ or less would fit",
    ):
        await subject.ask(way)
    assert subject.prompts == []


@EACH_READER_METHOD
async def test_complaint_06_a_long_memory_is_cut_and_no_chunk_is_skipped(door: Door, way: str) -> None:
    """llama_index #6465, #7607."""
    subject = door(overflowing)
    result = await subject.ask(way)
    assert result.outcomes == {"updated": CHUNKS, "answered": 1}
    assert [count(memory_in(text)) for text in subject.prompts[1:]] == [SMALL["memory_tokens"]] * CHUNKS
    assert "".join(section_in(text) for text in subject.prompts) == DOCUMENT


@BOTH
async def test_complaint_07_calls_depend_on_the_settings_and_not_on_a_window_looked_up(door: Door) -> None:
    """llama_index #10540."""
    windows = (
        (8192, 128_000, 1_000_000) if door is LangChain else (DEFAULT_CONTEXT_WINDOW, 8192, 1_000_000)
    )  # the default means: unknown
    sections = []
    for window in windows:
        model = Model(profile={"max_input_tokens": window}) if door is LangChain else fake(say, context=window)
        subject = door(model=model, settings={"chunk_tokens": 5000, "memory_tokens": 1024})
        await subject.ask(document=DOCUMENT * 20)
        sections.append([section_in(text) for text in subject.prompts])
    assert sections == [sections[0]] * 3
    assert len(sections[0]) == 4


@BOTH
async def test_complaint_07_the_calls_are_told_beforehand(door: Door) -> None:
    """llama_index #10540."""
    subject: Any = door()
    reader = (
        subject.reader.under({}) if door is LangChain else MemAgentSynthesizer(subject.model, **subject.settings).reader
    )
    for document in ("A short text.", DOCUMENT, DOCUMENT * 5):
        before = len(subject.prompts)
        plan = reader.plan(QUESTION, document)
        assert len(subject.prompts) == before, "a plan asks no model"
        result = await subject.ask(document=document)
        assert (plan.calls, plan.chunks) == (len(subject.prompts) - before, result.outcomes["updated"])


# ---- 8 to 10: streams ------------------------------------------------------------------------------------


class Telling(Model):
    """Notes each piece of a stream when it is taken."""

    sent: list[str] = Field(default_factory=list)

    def _stream(self, *args: Any, **options: Any) -> Iterator[ChatGenerationChunk]:
        for chunk in super()._stream(*args, **options):
            self.sent.append(str(chunk.text))
            yield chunk


class TellingLLM(FakeLLM):
    """The same for LlamaIndex."""

    sent: list[str] = Field(default_factory=list)

    @llm_chat_callback()
    def stream_chat(self, messages: Any, **kwargs: Any) -> Iterator[ChatResponse]:
        responses = super().stream_chat(messages, **kwargs)
        return (self._noted(response) for response in responses)

    @llm_chat_callback()
    async def astream_chat(self, messages: Any, **kwargs: Any) -> AsyncIterator[ChatResponse]:
        responses = await super().astream_chat(messages, **kwargs)

        async def noted() -> AsyncGenerator[ChatResponse]:
            async for response in responses:
                yield self._noted(response)

        return noted()

    def _noted(self, response: ChatResponse) -> ChatResponse:
        self.sent.append(response.delta or "")
        return response


LONG = "the answer is " + " ".join(f"word{number}" for number in range(30))


def long_answer(text: str) -> str:
    return "a secret note" if is_update(text) else LONG


@STREAMED
async def test_complaint_08_the_answer_is_streamed_as_it_is_written_langchain(way: str) -> None:
    """langchain #13644."""
    model, events = Telling(script=long_answer), Events()
    reader = MemAgentReader(model, tokenizer=count, **SMALL).with_config(callbacks=[events])
    value: Any = {"question": QUESTION, "context": DOCUMENT}
    chunks = [chunk async for chunk in reader.astream(value)] if way == "astream" else list(reader.stream(value))
    assert "".join(str(chunk.text) for chunk in chunks) == LONG
    events.events.clear()
    model.sent.clear()
    stream: Any = reader.astream(value) if way == "astream" else reader.stream(value)
    first = await anext(stream) if way == "astream" else next(stream)
    assert str(first.text) == "the"
    assert len(model.sent) < 5, "the model has not said the rest yet"
    assert [data["step"] for _, data in events.events] == list(range(CHUNKS)), (
        "and how the reading went was told before"
    )
    await stream.aclose() if way == "astream" else stream.close()


@STREAMED
async def test_complaint_08_the_answer_is_streamed_as_it_is_written_llama_index(way: str) -> None:
    """langchain #13644, of LlamaIndex's synthesizers."""
    llm = TellingLLM(script=long_answer)
    engine = LlamaIndex(model=llm).engine(streaming=True)
    with instrumented(EventLog()) as log:
        response: Any = await engine.aquery(QUESTION) if way == "astream" else engine.query(QUESTION)
        assert len(log.steps) == CHUNKS, "how the reading went was told before"
        first = await anext(response.response_gen) if way == "astream" else next(response.response_gen)
        assert first == "the"
        assert len(llm.sent) < 5, "the model has not said the rest yet"
        rest = [text async for text in response.response_gen] if way == "astream" else list(response.response_gen)
    assert first + "".join(rest) == LONG


def given_to_a_graph() -> Any:
    """A graph with a reader in it, and a question for it."""
    builder = StateGraph(State)
    builder.add_node("read", MemAgentReader(Model(script=long_answer), tokenizer=count, **SMALL).as_node())
    builder.add_edge(START, "read")
    builder.add_edge("read", END)
    return builder.compile()


INPUT: Any = {"question": QUESTION, "context": DOCUMENT}


async def test_complaint_09_tokens_of_the_memory_are_not_the_users_langchain() -> None:
    """langchainjs #2615; langchain #26486, #35276."""
    graph = given_to_a_graph()
    messages = [data[0] for data in graph.stream(INPUT, stream_mode="messages")]
    amessages = [data[0] async for data in graph.astream(INPUT, stream_mode="messages")]
    for streamed in (messages, amessages):
        assert "".join(str(message.text) for message in streamed) == LONG
        assert len(streamed) > 30
    reader = MemAgentReader(Model(script=long_answer), tokenizer=count, **SMALL)
    chain = reader | StrOutputParser()
    assert "".join(chain.stream(INPUT)) == "".join([text async for text in chain.astream(INPUT)]) == LONG
    events = [event async for event in chain.astream_events(INPUT, version="v2")]
    tokens = [event for event in events if event["event"] == "on_chat_model_stream"]
    ways: dict[str, Callable[[Any], bool]] = {
        "tag": lambda event: "nostream" in event["tags"],
        "name": lambda event: event["name"] != "memagent_answer",
        "phase": lambda event: event["metadata"]["memagent_phase"] != "answer",
    }
    for criterion, is_memory in ways.items():
        assert "".join(str(event["data"]["chunk"].text) for event in tokens if not is_memory(event)) == LONG, criterion


async def test_complaint_09_tokens_of_a_tool_are_not_the_agents_langchain() -> None:
    """langchain #26486, #35276."""

    def script(messages: list[BaseMessage]) -> AIMessage:
        call = {"name": "read_document", "args": {"question": QUESTION}, "id": "1"}
        return AIMessage("It is so.") if messages[-1].type == "tool" else AIMessage("", tool_calls=[call])  # type: ignore[list-item]

    reader = MemAgentReader(Model(script=long_answer), tokenizer=count, **SMALL)
    agent: Any = create_agent(AgentModel(script=script), tools=[MemAgentTool(reader, context=DOCUMENT)])
    question = {"messages": [("user", "What does it say?")]}
    streamed = [data[0] for data in agent.stream(question, stream_mode="messages")]
    streamed += [data[0] async for data in agent.astream(question, stream_mode="messages")]
    assert [str(message.text) for message in streamed if message.type != "tool" and message.text] == ["It is so."] * 2


@STREAMED
async def test_complaint_09_tokens_of_the_memory_are_not_the_users_llama_index(way: str) -> None:
    """langchain #26486, #35276, of LlamaIndex's streams and events."""
    subject = LlamaIndex(long_answer)
    with instrumented(EventLog()) as log:
        assert (await subject.ask(way)).answer == LONG
    answers = {"stream": "stream_chat", "astream": "astream_chat"}
    memories = {"stream": "chat", "astream": "achat"}
    assert [method for method, *_ in subject.model.calls] == [memories[way]] * CHUNKS + [answers[way]]
    tokens = [event.response.delta for event in log.events if event.class_name() == "LLMChatInProgressEvent"]
    assert "".join(tokens) == LONG


@BOTH
@STREAMED
async def test_complaint_10_a_stream_has_as_many_pieces_as_the_model_gave(door: Door, way: str) -> None:
    """llama_index #22831, #22836, #22183."""
    subject = door(model=Telling(script=long_answer) if door is LangChain else TellingLLM(script=long_answer))
    result = await subject.ask(way)
    assert result.pieces == [text for text in subject.model.sent if text]
    assert len(result.pieces) == len(LONG.split())


async def test_complaint_10_nor_do_others_engines_collapse_it() -> None:
    """llama_index #22831, #22183."""
    nodes = [NodeWithScore(node=TextNode(text=DOCUMENT), score=1.0)]
    synthesizer = MemAgentSynthesizer(fake(long_answer), streaming=True, tokenizer=count, **SMALL)
    engine = RetrieverQueryEngine(FixedRetriever(nodes), response_synthesizer=synthesizer)
    response: Any = engine.query(QUESTION)
    assert len(list(response.response_gen)) == len(await pieces_of(await engine.aquery(QUESTION))) == len(LONG.split())


# ---- 11 and 12: side by side -----------------------------------------------------------------------------


class OnlyAsync(Model):
    """Has no time for sync calls; its async ones wait for `arrive`."""

    arrive: Any = None

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        raise AssertionError("a sync call of an async method")

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **options: Any) -> ChatResult:
        await self.arrive()
        return super()._generate(messages, **options)

    async def _astream(
        self, messages: list[BaseMessage], *_: Any, **options: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        await self.arrive()
        for chunk in super()._stream(messages, **options):
            yield chunk

    def _stream(self, *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        raise AssertionError("a sync call of an async method")


class OnlyAsyncLLM(FakeLLM):
    """The same for LlamaIndex."""

    @llm_chat_callback()
    async def astream_chat(self, messages: Any, **kwargs: Any) -> AsyncIterator[ChatResponse]:
        await self.arrive()
        stream: AsyncIterator[ChatResponse] = await super().astream_chat(messages, **kwargs)
        return stream

    def chat(self, *_: Any, **__: Any) -> ChatResponse:
        raise AssertionError("a sync call of an async method")

    def stream_chat(self, *_: Any, **__: Any) -> Iterator[ChatResponse]:
        raise AssertionError("a sync call of an async method")


@BOTH
@pytest.mark.parametrize("way", ["aplain", "astream"])
async def test_complaint_11_async_readings_wait_for_their_models_together(door: Door, way: str) -> None:
    """llama_index #6463, #6591, #21159, #20763; langchain #8391."""
    together, loops = asyncio.Barrier(5), set()

    async def arrive() -> None:  # made in turn, the first call of the five readings would wait for ever
        loops.add(asyncio.get_running_loop())
        await together.wait()

    subject = door(model=OnlyAsync(arrive=arrive) if door is LangChain else OnlyAsyncLLM(script=say, arrive=arrive))
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*(subject.ask(way) for _ in range(5)))
    assert [result.answer for result in results] == [ANSWER] * 5
    assert loops == {asyncio.get_running_loop()}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_complaint_12_max_concurrency_holds_langchain(is_async: bool) -> None:
    """langchain #15767, #29425."""
    peak = Peak()

    class Slow(Model):
        def _generate(self, messages: list[BaseMessage], *_: Any, **options: Any) -> ChatResult:
            peak.pass_through()
            return super()._generate(messages, **options)

        async def _agenerate(self, messages: list[BaseMessage], *_: Any, **options: Any) -> ChatResult:
            await peak.apass_through()
            return super()._generate(messages, **options)

    reader, config = LangChain(model=Slow()).reader, {"max_concurrency": 2}
    inputs = [INPUT] * 6
    messages = await peak.watch(
        reader.abatch(inputs, config) if is_async else asyncio.to_thread(reader.batch, inputs, config)
    )
    assert [message.text for message in messages] == [ANSWER] * 6
    assert peak.most == 2


@pytest.mark.parametrize("how", ["workflow", "read_many", "run_jobs"])
async def test_complaint_12_documents_at_a_time_can_be_bounded_llama_index(how: str) -> None:
    """langchain #15767, #29425, for LlamaIndex: `num_concurrent_runs`, a backend's `concurrency`, and `run_jobs`."""
    peak = Peak()
    llm = fake(say, arrive=peak.apass_through)
    if how == "workflow":
        workflow = MemAgentWorkflow(llm, load=lambda _: DOCUMENT, num_concurrent_runs=2, tokenizer=count, **SMALL)
        results = await peak.watch(asyncio.gather(*(workflow.run(question=f"{n}?", document="text") for n in range(6))))
        answers = list(map(str, results))
    elif how == "read_many":
        reader = MemAgentSynthesizer(LLMBackend(llm, tokenizer=count, concurrency=2), **SMALL).reader
        answers = [
            reading.answer for reading in await peak.watch(reader.aread_many([(f"{n}?", DOCUMENT) for n in range(6)]))
        ]
    else:
        engine = LlamaIndex(model=llm).engine()
        answers = list(map(str, await peak.watch(run_jobs([engine.aquery(f"{n}?") for n in range(6)], workers=2))))
    assert answers == [ANSWER] * 6
    assert peak.most == 2


@BOTH
@pytest.mark.heavy
async def test_complaint_12_calls_of_an_endpoint_at_a_time_can_be_bounded(door: Door) -> None:
    """langchain #15767, #29425."""
    peak, answer = Peak(), chat(say)

    def respond(request: Request) -> Response:
        if request.path.endswith("/completions"):
            peak.pass_through()
        return answer(request)

    with Loopback(respond) as server:
        backend = load_backend("openai:m", base_url=server.url + "/v1", tokenizer=count, concurrency=2)
        subject: Any = door(model=backend)
        results = await peak.watch(asyncio.gather(*(subject.ask("aplain", "A short text.") for _ in range(6))))
        await backend.aclose()
    assert [result.answer for result in results] == [ANSWER] * 6
    assert peak.most == 2


# ---- 13 to 15: usage and traces --------------------------------------------------------------------------


@EACH_WAY
@pytest.mark.heavy
@pytest.mark.openai
async def test_complaint_13_usage_is_told_in_every_way_langchain(way: str) -> None:
    """langgraph #4848, #5878; langchain #35206."""
    with Loopback(chat(say)) as server, get_usage_metadata_callback() as counted:
        model = ChatOpenAI(model="m", base_url=server.url + "/v1", api_key="none", max_retries=0)
        result = await LangChain(model=model).ask(way)
        bodies = server.bodies("/v1/chat/completions")
    prompts = ["\n".join(message["content"] for message in body["messages"]) for body in bodies]
    done = [completion(say(prompt), prompt)["usage"] for prompt in prompts]
    sums = sum(each["prompt_tokens"] for each in done), sum(each["completion_tokens"] for each in done)
    assert len(done) == CHUNKS + 1
    assert result.usage == sums
    (usage,) = counted.usage_metadata.values()
    assert (usage["input_tokens"], usage["output_tokens"]) == sums, (
        "and LangChain's own count is the same: no call is missed, none counts twice"
    )


@EACH_WAY
async def test_complaint_13_usage_is_told_in_every_way_llama_index(way: str) -> None:
    """llama_index #19740, #18118, #7323."""
    subject = LlamaIndex()
    with instrumented(EventLog()) as log:
        result = await subject.ask(way)
    (end,) = [event for event in log.events if isinstance(event, MemAgentAnswerEnd)]
    assert result.usage == (end.reading.usage.prompt_tokens, end.reading.usage.completion_tokens)
    assert result.usage[1] == sum(len(say(text).split()) for text in subject.prompts)
    assert (result.usage[0] or 0) > count(DOCUMENT)


@EACH_WAY
async def test_complaint_13_usage_that_no_server_told_is_unknown_and_not_0(way: str) -> None:
    """langgraph #4848; llama_index #19740, #18118."""
    assert (await LlamaIndex(model=fake(say, raw={"usage": None})).ask(way)).usage == (None, None)


class Parents(BaseCallbackHandler):
    """Collects the parent of every run, the runs of models, and the runs that sent a custom event."""

    def __init__(self) -> None:
        self.of: dict[UUID, UUID | None] = {}
        self.models: list[UUID] = []
        self.with_events: list[UUID] = []

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **_: Any
    ) -> None:
        self.of[run_id] = parent_run_id

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **_: Any
    ) -> None:
        self.of[run_id] = parent_run_id
        self.models.append(run_id)

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **_: Any) -> None:
        self.with_events.append(run_id)


async def called(subject: Any, way: str, config: Any, value: Any = INPUT) -> None:
    """Call a runnable in one of the ways."""
    if way == "plain":
        subject.invoke(value, config)
    elif way == "aplain":
        await subject.ainvoke(value, config)
    elif way == "stream":
        list(subject.stream(value, config))
    else:
        async for _ in subject.astream(value, config):
            pass


@pytest.mark.parametrize(
    ("inside", "way"),
    [
        *((inside, way) for inside in ("in a chain", "with fallbacks", "over a model with fallbacks") for way in WAYS),
        ("in a graph", "stream"),
        ("in a graph", "astream"),
    ],
)
async def test_complaint_14_every_run_has_its_parent_langchain(way: str, inside: str) -> None:
    """langchain #36072, #36122."""
    broken = Model(script=failing_at(1, ConnectionError("gone"), []))
    reader = LangChain(
        model=broken.with_fallbacks([Model()]) if inside == "over a model with fallbacks" else Model()
    ).reader
    subject: Any = {
        "in a chain": RunnableLambda(lambda value: value) | reader | StrOutputParser(),
        "in a graph": given_to_a_graph(),
        "with fallbacks": LangChain(
            model=Model(script=failing_at(1, ConnectionError("gone"), []))
        ).reader.with_fallbacks([reader]),
    }.get(inside, reader)
    parents = Parents()
    await called(subject, way, {"callbacks": [parents]})
    roots = {run for run, parent in parents.of.items() if parent is None}
    assert len(roots) == 1 or inside == "with fallbacks", (
        "LangChain's fallbacks call what is in them without a parent: that is #36072"
    )
    assert set(parents.of.values()) - {None} <= set(parents.of), "no run has a parent that nobody knows"
    assert len(parents.models) == CHUNKS + 1 + (inside in ("with fallbacks", "over a model with fallbacks"))
    assert not roots & set(parents.models)
    assert len(parents.with_events) == CHUNKS
    assert set(parents.with_events) <= set(parents.of)


@EACH_WAY
async def test_complaint_14_every_span_has_its_parent_llama_index(way: str) -> None:
    """phoenix #1700; langchain #36072."""
    with instrumented(SimpleSpanHandler()) as spans, instrumented(EventLog()) as log:
        await LlamaIndex().ask(way)
    known = {span.id_: span.parent_id for span in spans.completed_spans}
    assert not spans.open_spans
    (root,) = [span for span, parent in known.items() if parent is None]
    assert root.startswith("MemAgentQueryEngine.")
    assert set(known.values()) - {None} <= set(known), "no span has a parent that nobody knows"
    assert sum(span.startswith("FakeLLM.") for span in known) == CHUNKS + 1
    assert {event.span_id for event in log.events} <= set(known)


@SYNC_AND_ASYNC
async def test_complaint_15_a_trace_does_not_hold_the_document_langchain(way: str) -> None:
    """langsmith-sdk #1506; langfuse #1676."""

    async def trace(trace_inputs: str) -> Any:
        collector = RunCollectorCallbackHandler()
        reader = MemAgentReader(Model(), tokenizer=count, trace_inputs=trace_inputs, **SMALL)
        await called(reader, way, {"callbacks": [collector]})
        (root,) = collector.traced_runs
        return root

    root = await trace("elided")
    shown = str((root.inputs, root.outputs, root.extra, root.events))
    assert "Some words" not in shown
    assert QUESTION in str(root.inputs)
    assert len(shown) < SPAN
    assert max(str(child.inputs).count("Some words") for child in root.child_runs) < 40, "a call shows its own chunk"
    assert (await trace("full")).inputs == INPUT


@SYNC_AND_ASYNC
async def test_complaint_15_a_chain_is_traced_without_the_document_when_it_is_given_a_file(
    way: str, tmp_path: Path
) -> None:
    """langsmith-sdk #1506."""
    (tmp_path / "text.txt").write_text(DOCUMENT)
    collector = RunCollectorCallbackHandler()
    chain = (
        RunnableLambda(lambda name: {"question": QUESTION, "context": tmp_path / name})
        | LangChain().reader
        | StrOutputParser()
    )
    await called(chain, way, {"callbacks": [collector]}, "text.txt")
    runs = [*collector.traced_runs]
    for run in runs:
        runs += run.child_runs
    assert sum(run.run_type == "llm" for run in runs) == CHUNKS + 1
    seen = [run.run_type for run in runs if "Some words" in str((run.inputs, run.outputs))]
    assert seen == ["llm"] * CHUNKS, "all that shows the text are the calls"


@EACH_WAY
async def test_complaint_15_a_trace_does_not_hold_the_document_llama_index(way: str) -> None:
    """langfuse #1676."""

    async def sent(include_text: bool) -> str:
        with instrumented(EventLog()) as log:
            await LlamaIndex(settings={"include_text": include_text}).ask(way)
        events = [event for event in log.events if not event.class_name().startswith("LLM")]
        assert events[-1].class_name() in ("QueryEndEvent", "MemAgentAnswerEnd")
        return json.dumps([event.model_dump(mode="json", fallback=str) for event in events]) + "".join(
            source.text
            for event in events
            if event.class_name() == "QueryEndEvent"
            for source in event.response.source_nodes
        )

    assert "Some words" not in await sent(include_text=False)
    if not way.endswith("stream"):
        assert "Some words" in await sent(include_text=True)


# ---- also ------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No connection to elsewhere can be made; what was tried."""
    tried: list[Any] = []

    def refuse(*address: Any, **_: Any) -> Any:
        tried.append(address)
        raise OSError("there is no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return tried


@BOTH
@pytest.mark.parametrize(
    "tokenizer", ["approximate", len, "tiktoken:o200k_base"], ids=["approximate", "own", "tiktoken"]
)
async def test_complaint_16_tokens_are_counted_without_a_network(
    door: Door, tokenizer: Any, offline: list[Any]
) -> None:
    """langchain #15347."""
    result = await door(settings={"tokenizer": tokenizer, "memory_tokens": 100}).ask()
    assert result.answer == ANSWER
    assert offline == []


async def test_complaint_16_no_tokenizer_is_guessed_or_fetched(offline: list[Any]) -> None:
    """langchain #15347: the tokens of an unknown model were counted with GPT-2's tokenizer, downloaded from a hub.

    They are estimated, with a warning. LlamaIndex has a tokenizer of its own, offline.
    """
    with pytest.warns(
        UserWarning, match=r"the tokens of langchain:Model are estimated.*pass tokenizer='hf:FOLDER_OR_NAME'"
    ) as warnings:
        assert (await LangChain(settings={"tokenizer": None}).ask()).answer == ANSWER
    assert len(warnings) == 1
    assert (await LlamaIndex(settings={"tokenizer": None}).ask()).answer == ANSWER
    assert offline == []


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@EACH_WAY
@pytest.mark.heavy
async def test_complaint_17_the_output_limit_has_the_name_that_the_server_knows(way: str, name: str) -> None:
    """langchain #29954."""
    with Loopback(chat(say)) as server:
        backend = load_backend("openai:m", base_url=server.url + "/v1", tokenizer=count, limit_parameter=name)
        await LlamaIndex(model=backend).ask(way)
        bodies = server.bodies("/v1/chat/completions")
        await backend.aclose()
    other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}[name]
    assert [body[name] for body in bodies] == [50] * CHUNKS + [1024]
    assert not [body for body in bodies if other in body]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ChatOpenAI, "max_completion_tokens"), (BaseChatOpenAI, "max_completion_tokens"), (BaseChatOpenAI, "max_tokens")],
)
@pytest.mark.heavy
@pytest.mark.openai
async def test_complaint_17_langchains_own_client_sends_it_by_that_name_too(kind: Any, name: str) -> None:
    """langchain #29954: vLLM knew only max_tokens. ChatOpenAI always renames it; its base class does not."""
    with Loopback(chat(say)) as server:
        model = kind(model="m", base_url=server.url + "/v1", api_key="none", max_retries=0)
        await LangChain(model=ChatModelBackend(model, tokenizer=count, limit_parameter=name)).ask()
        bodies = server.bodies("/v1/chat/completions")
    assert [body.get(name) for body in bodies] == [50] * CHUNKS + [1024]


@pytest.mark.parametrize("inside", ["limits", "with_retry", "with_fallbacks"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_complaint_18_an_interrupt_is_swallowed_by_no_retry_and_no_fallback(inside: str, is_async: bool) -> None:
    """langchain #38837."""
    other = Model()
    model = Model(script=failing_at(2, ConnectionError("gone"), []) if inside != "limits" else say)
    wrapped: Any = {
        "limits": model,
        "with_retry": model.with_retry(stop_after_attempt=3, wait_exponential_jitter=False),
        "with_fallbacks": model.with_fallbacks([other]),
    }[inside]
    reader = MemAgentReader(wrapped, tokenizer=count, limits=Limits(max_retries=3), **SMALL)
    graph = build_graph(reader, load=lambda _: DOCUMENT, checkpointer=InMemorySaver(), interrupt_after=["read_chunk"])
    subject = graph.with_retry(stop_after_attempt=3).with_fallbacks([RunnableLambda(lambda _: {"answer": "swallowed"})])
    task: Any = {"question": QUESTION, "source": "text"}
    for number in range(1, CHUNKS + 1):
        state = await subject.ainvoke(task, THREAD) if is_async else subject.invoke(task, THREAD)
        assert (state["chunk"], state["answer"]) == (number, None), "it stops after each chunk"
        task = None
    state = await subject.ainvoke(None, THREAD) if is_async else subject.invoke(None, THREAD)
    assert state["answer"] == ANSWER
    assert len(model.prompts) + len(other.prompts) == CHUNKS + 1 + (inside != "limits")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_complaint_18_an_interrupt_from_within_a_model_is_no_failure_of_it(is_async: bool) -> None:
    """langchain #38837."""
    prompts: list[str] = []

    def script(text: str) -> str:
        prompts.append(text)
        return say(text) if is_update(text) else str(interrupt("May I answer?"))

    builder = StateGraph(State)
    builder.add_node("read", LangChain(script, settings={"limits": Limits(max_retries=3)}).reader.as_node())
    builder.add_edge(START, "read")
    builder.add_edge("read", END)
    graph: Any = builder.compile(InMemorySaver())
    state = await graph.ainvoke(INPUT, THREAD) if is_async else graph.invoke(INPUT, THREAD)
    assert [each.value for each in state["__interrupt__"]] == ["May I answer?"]
    assert len(prompts) == CHUNKS + 1, "and nothing is tried again"
    go = Command(resume="Yes.")
    assert (await graph.ainvoke(go, THREAD) if is_async else graph.invoke(go, THREAD))["answer"] == "Yes."


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_complaint_19_going_on_after_an_interrupt_repeats_no_call_langchain(is_async: bool) -> None:
    """langgraph #6208."""
    model, loaded = Model(), []
    reader = MemAgentReader(model, tokenizer=count, **SMALL)
    graph = build_graph(
        reader,
        load=lambda name: loaded.append(name) or DOCUMENT,
        checkpointer=InMemorySaver(),
        interrupt_after=["read_chunk"],
    )
    task: Any = {"question": QUESTION, "source": "text"}
    state: dict[str, Any] = {}
    for _ in range(CHUNKS + 1):
        state = await graph.ainvoke(task, THREAD) if is_async else graph.invoke(task, THREAD)
        task = None
    assert state["answer"] == ANSWER
    assert "".join(section_in(text) for text in model.prompts) == DOCUMENT
    assert (len(model.prompts), loaded) == (CHUNKS + 1, ["text"])


async def test_complaint_19_going_on_after_a_question_repeats_no_call_llama_index() -> None:
    """langgraph #6208, of LlamaIndex's workflows."""
    llm, loaded = fake(say), []
    workflow = MemAgentWorkflow(
        llm, load=lambda name: loaded.append(name) or DOCUMENT, ask_every=1, tokenizer=count, **SMALL
    )
    handler = workflow.run(question=QUESTION, document="text")
    reviews = 0
    async for event in handler.stream_events():
        if isinstance(event, MemAgentReview):
            reviews += 1
            handler.ctx.send_event(MemAgentReviewed())
    assert (str(await handler), reviews) == (ANSWER, CHUNKS)
    assert "".join(section_in(str(messages[-1].content)) for _, messages, _ in llm.calls) == DOCUMENT
    assert (len(llm.calls), loaded) == (CHUNKS + 1, ["text"])


PAGES = [f"This is what stands on page {number} of the book. " * 20 for number in range(1, 6)]


@SYNC_AND_ASYNC
async def test_complaint_20_sources_say_on_which_page_llama_index(way: str) -> None:
    """llama_index #1291, #10116."""
    book = RelatedNodeInfo(node_id="book")
    nodes, start = [], 0
    for label, text in enumerate(PAGES, 1):
        place = {
            "start_char_idx": start,
            "end_char_idx": start + len(text),
            "relationships": {NodeRelationship.SOURCE: book},
        }
        nodes.append(TextNode(text=text, metadata={"page_label": str(label), "file_name": "book.pdf"}, **place))
        start += len(text)
    engine = MemAgentQueryEngine.from_nodes(
        nodes, fake(say), tokenizer=count, streaming=way.endswith("stream"), include_text=True, **SMALL
    )
    response: Any = await engine.aquery(QUESTION) if way.startswith("a") else engine.query(QUESTION)
    if way.endswith("stream"):
        await pieces_of(response) if way == "astream" else list(response.response_gen)
    sources = [source.node for source in response.source_nodes]
    assert [label for label, _ in Counter(node.metadata["page_label"] for node in sources).items()] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]
    whole = "".join(PAGES)
    for node in sources:
        assert node.ref_doc_id == "book"
        assert node.text == whole[node.start_char_idx : node.end_char_idx]
        assert f"page {node.metadata['page_label']} " in node.text
    assert "".join(node.text for node in sources) == whole
    assert {metadata["page_label"] for name, metadata in response.metadata.items() if name != "memagent"} == {
        "1",
        "2",
        "3",
        "4",
        "5",
    }


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_complaint_20_sources_say_on_which_page_langchain(is_async: bool) -> None:
    """llama_index #1291, #10116, of LangChain: the notes say which pages they are from, each step says where it was."""
    pages = [
        LangChainDocument(text, metadata={"source": "book.pdf", "page": number}) for number, text in enumerate(PAGES, 1)
    ]
    subject = LangChain()
    compressor = MemAgentDocumentCompressor(subject.reader)
    (notes,) = (
        await compressor.acompress_documents(pages, QUESTION)
        if is_async
        else compressor.compress_documents(pages, QUESTION)
    )
    assert [source["page"] for source in notes.metadata["sources"]] == [1, 2, 3, 4, 5]
    events, value = Events(), {"question": QUESTION, "context": pages}
    config: Any = {"callbacks": [events]}
    await subject.reader.ainvoke(value, config) if is_async else subject.reader.invoke(value, config)  # type: ignore[arg-type]
    whole = "\n\n".join(PAGES)
    places = [data["chunk"] for _, data in events.events]
    read = [section_in(text) for text in subject.prompts[-len(places) - 1 : -1]]
    assert [whole[place["start"] : place["end"]] for place in places] == read


async def test_complaint_21_no_intermediate_summary_is_hidden_llama_index(tmp_path: Path) -> None:
    """llama_index #11941."""
    notes = ["alpha", "beta", "gamma", "delta"]
    with instrumented(EventLog()) as log:
        await LlamaIndex(noting(*notes)).ask("stream")
    assert [step.memory for step in log.steps] == notes
    (end,) = [event for event in log.events if isinstance(event, MemAgentAnswerEnd)]
    assert [step.memory for step in end.reading.steps[:-1]] == notes
    save_trace(end.reading, tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert all(note in page for note in notes)
    workflow = MemAgentWorkflow(fake(noting(*notes)), load=lambda _: DOCUMENT, tokenizer=count, **SMALL)
    handler = workflow.run(question=QUESTION, document="text")
    assert [
        event.memory
        async for event in handler.stream_events()
        if isinstance(event, MemAgentStepEvent) and event.start is not None
    ] == notes
    await handler


@SYNC_AND_ASYNC
async def test_complaint_21_no_intermediate_summary_is_hidden_langchain(way: str) -> None:
    """llama_index #11941, of LangChain."""
    notes = ["alpha", "beta", "gamma", "delta"]
    events = Events()
    await called(LangChain(noting(*notes)).reader, way, {"callbacks": [events]})
    assert [data["memory"] for _, data in events.events] == notes
    graph = build_graph(LangChain(noting(*notes)).reader, load=lambda _: DOCUMENT, checkpointer=InMemorySaver())
    graph.invoke({"question": QUESTION, "source": "text"}, THREAD)
    kept = [
        state.values["memory"]
        for state in graph.get_state_history(THREAD)
        if state.values.get("chunk") and not state.values.get("answer")
    ]
    assert kept[::-1] == notes


@EACH_READER_METHOD
async def test_complaint_22_small_documents_share_a_call(door: Door, way: str) -> None:
    """langchain #36098: refine makes a call for each document, however small, one after the other."""
    subject = door(settings={"chunk_tokens": 500})
    documents = [f"Note {number} is short." for number in range(40)]
    assert (await subject.ask(way, documents)).answer == ANSWER
    assert len(subject.prompts) == 2
    assert section_in(subject.prompts[0]) == "\n\n".join(documents)


@BOTH
async def test_complaint_22_larger_chunks_make_fewer_calls(door: Door) -> None:
    """langchain #36098."""
    calls = []
    for tokens in (200, 400, 800):
        subject = door(settings={"chunk_tokens": tokens})
        await subject.ask()
        calls.append(len(subject.prompts))
    assert calls == [5, 3, 2]


async def test_complaint_22_questions_are_read_for_side_by_side_also_without_async() -> None:
    """langchain #36098."""
    together = threading.Barrier(4)

    def script(prompt: Prompt) -> str:
        together.wait(PATIENCE)  # made in turn, the first call would wait in vain
        return "a note" if prompt.phase == "memory" else prompt.messages[0].content.partition("<question>\n")[2][:2]

    backend = ScriptedBackend(script, concurrency=4)
    questions = [f"{number}?" for number in range(4)]
    messages = await asyncio.to_thread(
        MemAgentReader(backend, **SMALL).batch,
        [{"question": question, "context": DOCUMENT} for question in questions],
        {"max_concurrency": 4},
    )
    assert [message.text for message in messages] == questions
    reader = MemAgentSynthesizer(backend, **SMALL).reader
    assert [
        reading.answer for reading in reader.read_many([(question, DOCUMENT) for question in questions])
    ] == questions
