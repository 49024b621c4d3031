from __future__ import annotations

import asyncio
import json
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_chat import (
    ANSWER,
    DOCUMENT,
    INPUT,
    SMALL,
    WAYS,
    Loader,
    Model,
    Retriever,
    count,
    reader,
    say,
    total,
    traced,
)
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.documents import Document
from langchain_core.documents.base import Blob
from langchain_core.language_models import FakeListLLM, GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import ConfigurableField, RunnableGenerator, RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphBubbleUp

import memagent_integrations
from memagent_integrations import (
    BackendError,
    ContextOverflow,
    Journal,
    MemAgentReader,
    MissingExtra,
    PromptSet,
    Reader,
    ScriptedBackend,
    UsageError,
    policies,
)
from memagent_integrations.langchain import ChatModelBackend
from memagent_integrations.langchain.lazy import Lazy
from memagent_integrations.records import Message, Prompt, Usage

# ---- what comes out --------------------------------------------------------------------------------------


def test_the_reading_is_the_readers() -> None:
    model = Model()
    message = reader(model).invoke(INPUT)
    reading = Reader(ChatModelBackend(Model(), tokenizer=count), **SMALL).read("Why?", DOCUMENT)
    assert (message.text, message.response_metadata["memagent"]["memory"]) == (reading.answer, reading.memory)
    assert reading.memory.endswith("note note note note")
    assert "".join(text.partition("<section>\n")[2].partition("\n</section>")[0] for text in model.prompts) == DOCUMENT


def test_reasoning_is_told_apart() -> None:
    blocks = AIMessage(content=[{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "seven"}])
    reply = ChatModelBackend(Model(script=lambda _: blocks), tokenizer=count).complete(PROMPT)
    assert (reply.text, reply.reasoning) == ("seven", "Hm.")


def test_usage_without_a_cache_tells_none() -> None:
    message = AIMessage("x", usage_metadata={"input_tokens": 1, "output_tokens": 1, "total_tokens": 2})
    usage = reader(Model(script=lambda _: message)).invoke(INPUT).usage_metadata
    assert usage == {"input_tokens": 5, "output_tokens": 5, "total_tokens": 10}


# ---- what goes in ----------------------------------------------------------------------------------------


def test_a_trace_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text in a file", encoding="utf-8")
    for context in (tmp_path / "a.txt", Blob.from_path(tmp_path / "a.txt")):
        collector = RunCollectorCallbackHandler()
        reader().invoke({"question": "q", "context": context}, {"callbacks": [collector]})
        assert collector.traced_runs[0].inputs["context"] == str(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="reading the document failed"):
        reader().invoke({"question": "q", "context": Blob.from_path(tmp_path / "none.txt")})


@pytest.mark.parametrize(
    ("value", "options", "complaint"),
    [
        ("just text", {}, "dict with 'question' and 'context'"),
        ({"question": "q"}, {}, "dict with 'question' and 'context'"),
        ({"question": 7, "context": "x"}, {}, "has to be text, not int"),
        ({"question": "q", "context": "x"}, {"stop": ["."]}, "takes no stop"),
        ({"question": "q", "context": 7}, {}, "int is not a document"),
        ({"question": "q", "context": ""}, {}, "document is empty"),
    ],
)
async def test_bad_input(value: Any, options: dict[str, Any], complaint: str) -> None:
    subject = reader()
    with pytest.raises(UsageError, match=complaint):
        subject.invoke(value, **options)
    with pytest.raises(UsageError, match=complaint):
        list(subject.stream(value, **options))
    with pytest.raises(UsageError, match=complaint):
        await subject.ainvoke(value, **options)
    with pytest.raises(UsageError, match=complaint):
        [chunk async for chunk in subject.astream(value, **options)]


# ---- input that comes in pieces --------------------------------------------------------------------------


async def achunks_of(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


PIECES: list[tuple[list[Any], str]] = [
    ([{"question": "Why?", "context": "whole"}], "whole"),
    ([{"context": Document("d0")}, {"question": "Wh"}, {"context": Document("d1")}, {"question": "y?"}], "d0\n\nd1"),
    ([{"question": "Why?", "context": Document(f"d{n}")} for n in range(3)], "d0\n\nd1\n\nd2"),
    ([{"question": "Why?"}, {"context": "some "}, {"context": "text"}], "some text"),
    ([{"question": "Why?"}, {"context": Retriever()}], "what is said of Why?"),
]


@pytest.mark.parametrize(("pieces", "seen"), PIECES, ids=str)
async def test_pieces_are_put_together(pieces: list[Any], seen: str) -> None:
    model = Model()
    chunks = list(reader(model).transform(iter(pieces)))
    chunks += [chunk async for chunk in reader(model).atransform(achunks_of(pieces))]
    assert "".join(chunk.text for chunk in chunks) == ANSWER * 2
    for text in (model.prompts[0], model.prompts[2]):
        assert f"<section>\n{seen}\n</section>" in text
        assert "<question>\nWhy?\n</question>" in text


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([Document("d0"), Document("d1")], "bind the question"),
        (["some ", "text"], "bind the question"),
        ([{"question": 7}, {"question": 8}, {"context": "x"}], "2 values for the question"),
        ([{"question": "a", "context": "x"}, {"question": "b", "context": "y"}], "more than one question"),
        ([{"question": "a"}], "no context"),
        ([], "no context"),
    ],
    ids=str,
)
async def test_pieces_that_make_no_input(pieces: list[Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        list(reader().transform(iter(pieces)))
    with pytest.raises(UsageError, match=complaint):
        [chunk async for chunk in reader().atransform(achunks_of(pieces))]


async def test_a_bound_question_with_one_input() -> None:
    model = Model()
    chain = RunnableLambda(lambda text: text) | reader(model).bind(question="Why?")
    loader = RunnableLambda(lambda _: Loader(1)) | reader(model).bind(question="Why?")
    for answer in (
        chain.invoke("text"),
        total(list(chain.stream("text"))),
        total([chunk async for chunk in loader.astream("go")]),
    ):
        assert answer.text == ANSWER
    assert "Page 0" in model.prompts[-2]


# ---- runs, events ----------------------------------------------------------------------------------------


class AsyncEvents(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.loops.add(asyncio.get_running_loop())
        self.events.append((name, data))


async def test_what_stands_for_a_context_in_a_trace() -> None:
    async def elided(context: Any) -> Any:
        return (await traced(reader(), "invoke", {"question": "q", "context": context, "memory": "a b c"})).inputs

    rest = {"question": "q", "memory": "<5 characters>"}
    assert await elided([Document("a"), Document("b")]) == {"context": "<list of 2>"} | rest
    assert await elided(iter(["a"])) == {"context": "<list_iterator>"} | rest
    assert await elided(Blob.from_data("b")) == {"context": "<Blob>"} | rest
    assert (await traced(reader().bind(question="q"), "invoke", "text")).inputs == {"input": "<4 characters>"}


@pytest.mark.parametrize("how", WAYS)
async def test_a_failed_reading_is_a_failed_run(how: str) -> None:
    collector = RunCollectorCallbackHandler()
    subject = MemAgentReader(ScriptedBackend([BackendError("the server is gone")]), **SMALL).with_config(
        callbacks=[collector]
    )
    with pytest.raises(BackendError):
        await traced(subject, how)
    assert "the server is gone" in str(collector.traced_runs[0].error)


@pytest.mark.parametrize("how", ["ainvoke", "astream"])
async def test_async_handlers_get_the_events_in_their_loop(how: str) -> None:
    seen = AsyncEvents()
    await traced(reader().with_config(callbacks=[seen]), how)
    assert [data["step"] for _, data in seen.events] == [0, 1, 2, 3]
    assert seen.loops == {asyncio.get_running_loop()}


def test_a_retriever_is_part_of_the_trace() -> None:
    collector = RunCollectorCallbackHandler()
    reader().invoke({"question": "q", "context": Retriever()}, {"callbacks": [collector]})
    assert collector.traced_runs[0].child_runs[0].run_type == "retriever"


# ---- models ----------------------------------------------------------------------------------------------


PROMPT = Prompt(index=0, phase="answer", messages=(Message(role="user", content="Name it."),), max_tokens=9)


def test_a_chain_of_messages_ends() -> None:
    messages = iter([AIMessage("note"), AIMessage("seven")])
    assert reader(GenericFakeChatModel(messages=messages), chunk_tokens=1000).invoke(INPUT).text == "seven"


async def test_a_plain_llm_is_asked_in_plain_text() -> None:
    prompts: list[str] = []

    class LLM(FakeListLLM):
        def _call(self, prompt: str, *args: Any, **options: Any) -> str:
            prompts.append(prompt)
            return super()._call(prompt, *args, **options)

    message = reader(LLM(responses=["note", "seven"]), chunk_tokens=1000).invoke(INPUT)
    assert (message.text, message.usage_metadata) == ("seven", None)
    assert prompts[0].startswith("A long document")
    assert "Human:" not in prompts[0]


def test_no_option_is_sent_to_a_model_that_may_not_take_it() -> None:
    model = Model()
    reader(model).invoke(INPUT)
    assert model.options == [{}] * 5
    ChatModelBackend(model, tokenizer=count, limit_parameter="num_predict").complete(PROMPT)
    assert model.options[-1] == {"num_predict": 9}


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"finish_reason": "length"}, "length"),
        ({"stop_reason": "max_tokens"}, "length"),
        ({"stop_reason": "end_turn"}, "stop"),
        ({"finish_reason": "SAFETY"}, "content_filter"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"done_reason": "stop"}, "stop"),
        ({}, None),
    ],
    ids=str,
)
def test_why_a_reply_ended(told: dict[str, Any], reason: str | None) -> None:
    backend = ChatModelBackend(Model(script=lambda _: AIMessage("x", response_metadata=told)), tokenizer=count)
    assert backend.complete(PROMPT).finish_reason == reason
    *_, reply = backend.stream(PROMPT)
    assert reply.finish_reason == reason  # type: ignore[union-attr]


def test_a_refusal_is_a_content_filter() -> None:
    backend = ChatModelBackend(
        Model(script=lambda _: AIMessage("no", additional_kwargs={"refusal": "I cannot"})), tokenizer=count
    )
    assert backend.complete(PROMPT).finish_reason == "content_filter"


def test_roles_and_usage() -> None:
    messages = (
        Message(role="system", content="s"),
        Message(role="user", content="u"),
        Message(role="assistant", content="a"),
    )
    seen: list[list[str]] = []

    class Roles(Model):
        def _generate(
            self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
        ) -> ChatResult:
            seen.append([message.type for message in messages])
            return super()._generate(messages, stop, run_manager, **options)

    reply = ChatModelBackend(Roles(), tokenizer=count).complete(
        Prompt(index=0, phase="answer", messages=messages, max_tokens=5)
    )
    assert seen == [["system", "human", "ai"]]
    assert reply.usage == Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=4)
    assert reply.seconds > 0


def test_what_answers_neither_message_nor_text_is_no_model() -> None:
    with pytest.raises(UsageError, match="this one gave dict"):
        reader(Model() | (lambda message: {"text": message})).invoke(INPUT)
    for wrong in (7, None):
        with pytest.raises(UsageError, match="has to be a LangChain model"):
            MemAgentReader(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="has to be a LangChain model"):
            ChatModelBackend(wrong)  # type: ignore[arg-type]


# ---- errors ----------------------------------------------------------------------------------------------


class Status(Exception):  # as the errors of most SDKs
    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


async def raised(error: BaseException, how: str) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        await traced(reader(Model(failures=[error])), how)
    return caught.value


@pytest.mark.parametrize("how", WAYS)
async def test_failures_of_the_model(how: str) -> None:
    for cause, retryable in (
        (Status(429, "slow down"), True),
        (Status(503, "later"), True),
        (Status(401, "no"), False),
        (ConnectionError("gone"), True),
        (TimeoutError("slow"), True),
    ):
        error = await raised(cause, how)
        assert isinstance(error, BackendError), error
        assert (error.retryable, error.__cause__) == (retryable, cause)
    assert isinstance(await raised(Status(400, "maximum context length is 8192"), how), ContextOverflow)


@pytest.mark.parametrize("how", WAYS)
async def test_what_is_not_the_models_failure_passes(how: str) -> None:
    for error in (TypeError("a bug"), KeyError("a bug"), GraphBubbleUp("pause")):
        assert await raised(error, how) is error


def test_an_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        reader(Model(failures=[KeyboardInterrupt()])).invoke(INPUT)


def test_a_stream_without_a_reply() -> None:
    def nothing(_: Any) -> Iterator[str]:
        yield from ()

    empty = RunnableGenerator(nothing)
    with pytest.raises(BackendError, match="without a reply"):
        list(ChatModelBackend(empty, tokenizer=count).stream(PROMPT))  # type: ignore[arg-type]


def test_an_error_holds_what_was_read() -> None:
    calls: list[str] = []

    def script(text: str) -> str:
        calls.append(text)
        if len(calls) == 3:
            raise Status(500, "down")
        return say(text)

    with pytest.raises(BackendError) as caught:
        reader(Model(script=script)).invoke(INPUT)
    assert caught.value.reading is not None
    assert len(caught.value.reading.steps) == 2


# ---- settings --------------------------------------------------------------------------------------------


def test_settings_reach_the_reader() -> None:
    model = Model()
    reader(model, layout="section-shared").invoke(INPUT)
    assert model.prompts[0].index("<section>") < model.prompts[0].index("<question>")
    with pytest.raises(ContextOverflow, match="500"):
        reader(window=500, chunk_tokens=400).invoke(INPUT)
    with pytest.raises(UsageError, match="its budget is 5"):
        reader(question_tokens=5).invoke({"question": "one two three four five six?", "context": "x"})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": "many"}, "chunk_tokens"),
        ({"overlap_tokens": 190}, "overlap_tokens"),
        ({"layout": "upside-down"}, "layout"),
        ({"layout": "memory-first", "prompts": PromptSet.default()}, "not both"),
        ({"chunk_token": 5}, "chunk_token"),
        ({"trace_inputs": "some"}, "trace_inputs"),
        ({"tokenizer": 7}, "tokenizer"),
    ],
    ids=str,
)
def test_wrong_settings_are_told_at_once(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        reader(**settings)


# ---- counting tokens -------------------------------------------------------------------------------------


class Endpoint(BaseHTTPRequestHandler):
    """Speaks the protocol of OpenAI, counts words, and says what is in the server's `failure`."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers["Authorization"]))
        if self.path.endswith("/tokenize"):
            return self._send(200, {"tokens": [1] * count(body["prompt"]), "max_model_len": 4096})
        if self.server.failure:
            return self._send(*self.server.failure)
        text = say(body["messages"][-1]["content"])
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return self._send(200, head | {"choices": [choice], "usage": usage})
        events = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]}]
        events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
        events += [{"choices": [], "usage": usage}] if body.get("stream_options", {}).get("include_usage") else []
        lines = [json.dumps(head | {"object": "chat.completion.chunk"} | event) for event in events]
        return self._send(200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream")

    def _send(self, status: int, answer: Any, kind: str = "application/json") -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Endpoint)
        self.requests: list[tuple[str, dict[str, Any], str]] = []
        self.failure: tuple[int, Any] | None = None

    @property
    def model(self) -> ChatOpenAI:
        return ChatOpenAI(
            model="local", base_url=f"http://127.0.0.1:{self.server_port}/v1", api_key="key-of-mine", max_retries=0
        )

    def bodies(self) -> list[dict[str, Any]]:
        return [body for path, body, _ in self.requests if path.endswith("/completions")]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.heavy
@pytest.mark.openai
def test_an_endpoint_counts_bounds_and_tells(server: Server) -> None:
    subject = MemAgentReader(server.model, output_tokens=60, **SMALL)
    message = subject.invoke(INPUT)
    assert message.text == ANSWER
    assert message.response_metadata["memagent"]["chunks"] == 4
    assert message.response_metadata["memagent"]["model"] == "langchain:ChatOpenAI:local"
    assert {body["max_completion_tokens"] for body in server.bodies()} == {60}
    assert {key for _, _, key in server.requests} == {"Bearer key-of-mine"}
    whole = total(list(subject.stream(INPUT)))
    assert whole.usage_metadata == message.usage_metadata
    assert message.usage_metadata == {
        "input_tokens": 50,
        "output_tokens": 10,
        "total_tokens": 60,
        "input_token_details": {"cache_read": 20},
    }
    assert (
        sum(body.get("prompt") == "a" for _, body, _ in server.requests) == 1
    )  # one request to find out whether the server counts
    assert ChatModelBackend(server.model).window == 4096


@pytest.mark.heavy
@pytest.mark.openai
async def test_an_endpoint_async(server: Server) -> None:
    subject = MemAgentReader(server.model.with_retry(), **SMALL)
    assert (await subject.ainvoke(INPUT)).text == ANSWER
    assert total([chunk async for chunk in subject.astream(INPUT)]).usage_metadata is not None
    assert "stream_options" in server.bodies()[-1]


@pytest.mark.heavy
@pytest.mark.openai
def test_each_model_is_sent_what_it_takes(server: Server) -> None:
    ChatModelBackend(server.model.with_fallbacks([server.model])).complete(PROMPT)
    ChatModelBackend(server.model.with_fallbacks([Model()])).complete(PROMPT)
    assert [body.get("max_completion_tokens") for body in server.bodies()] == [9, 9]


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (429, {"error": {"message": "slow down"}}, BackendError, True),
        (500, {"error": {"message": "down"}}, BackendError, True),
        (401, {"error": {"message": "bad key"}}, BackendError, False),
        (404, {"error": {"message": "no such model"}}, BackendError, False),
        (400, {"error": {"message": "This model's maximum context length is 4096 tokens"}}, ContextOverflow, None),
        (400, {"error": {"message": "bad", "code": "context_length_exceeded"}}, ContextOverflow, None),
        (200, {"error": {"message": "out of credit"}}, BackendError, True),
        (200, {"error": {"message": "out of credit", "code": 402}}, BackendError, False),
    ],
    ids=str,
)
@pytest.mark.heavy
@pytest.mark.openai
def test_an_endpoint_fails(
    server: Server, status: int, body: Any, kind: type[Exception], retryable: bool | None
) -> None:
    server.failure = status, body
    with pytest.raises(kind) as caught:
        ChatModelBackend(server.model).complete(PROMPT)
    assert getattr(caught.value, "retryable", None) is retryable
    assert caught.value.__cause__ is not None


@pytest.mark.heavy
@pytest.mark.openai
def test_an_endpoint_is_gone(server: Server) -> None:
    model = server.model
    server.server_close()
    with pytest.raises(BackendError) as caught:
        ChatModelBackend(model, tokenizer=count).complete(PROMPT)
    assert caught.value.retryable


@pytest.mark.openai
def test_tiktoken_counts_for_openais_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_BASE", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    backend = ChatModelBackend(ChatOpenAI(model="gpt-4o", api_key="none").bind(stop=["x"]))
    assert backend.count("hello world") == 2
    assert backend.count("") == 0
    assert backend.window is not None
    assert backend.window > 100_000  # from the model's profile
    assert ChatModelBackend(Model(), tokenizer=count, window=99).window == 99


def test_a_tokenizer_by_name_or_none_at_all() -> None:
    assert ChatModelBackend(Model(), tokenizer="approximate").count("hello") == 2
    with pytest.warns(UserWarning, match="estimated, rather too high"):
        assert MemAgentReader(Model()).invoke(INPUT).text == ANSWER
    with pytest.raises(UsageError, match="unknown tokenizer"):
        MemAgentReader(Model(), tokenizer="nonsense").invoke(INPUT)
    with pytest.raises(UsageError, match="backend"):
        MemAgentReader(ScriptedBackend([]), tokenizer="approximate").invoke(INPUT)


# ---- models by name --------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_named_backend_is_loaded_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    subject = MemAgentReader("openai:local", **SMALL)
    configurable = subject.configurable_fields(memory_tokens=ConfigurableField(id="memory"))
    for message in (*subject.batch([INPUT] * 3), configurable.invoke(INPUT, {"configurable": {"memory": 40}})):
        assert message.text == ANSWER
        assert message.response_metadata["memagent"]["model"] == "openai:local"
    assert sum(body.get("prompt") == "a" for _, body, _ in server.requests) == 1
    before = len(server.requests)
    subject.tokenizer = "approximate"  # another counter is another backend
    assert subject.invoke(INPUT).text == ANSWER
    assert not [path for path, _, _ in server.requests[before:] if path.endswith("/tokenize")]


@pytest.mark.heavy
def test_a_policy_brings_its_prompts_and_budgets(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    prompts = PromptSet(
        update="UPDATE {question} {memory} <section>{section}", answer="ANSWER {question} {memory}", name="trained"
    )
    budgets = Reader(ScriptedBackend([]), chunk_tokens=300, memory_tokens=30).budgets
    policies.save(policies.Policy(model="openai:local", prompts=prompts, budgets=budgets), tmp_path)
    message = MemAgentReader(f"policy:{tmp_path}").invoke(INPUT)
    assert message.response_metadata["memagent"]["chunks"] == 3
    assert server.bodies()[0]["messages"][0]["content"].startswith("UPDATE Why?")
    assert (
        MemAgentReader(f"policy:{tmp_path}", chunk_tokens=1000).invoke(INPUT).response_metadata["memagent"]["chunks"]
        == 1
    )
    with pytest.raises(UsageError, match="like that of a policy"):
        MemAgentReader(f"policy:{tmp_path}", layout="memory-first").invoke(INPUT)


@pytest.mark.heavy
def test_an_answer_that_is_not_streamed_comes_from_a_call_like_the_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    MemAgentReader("openai:local", **SMALL).invoke(INPUT)
    assert not any(body.get("stream") for body in server.bodies())
    list(MemAgentReader("openai:local", **SMALL).stream(INPUT))
    assert [bool(body.get("stream")) for body in server.bodies()[-2:]] == [False, True]


def test_a_provider_whose_package_is_missing() -> None:
    with pytest.raises(MissingExtra) as caught:
        MemAgentReader("deepseek:x").invoke(INPUT)
    assert re.fullmatch(r"pip install (-U )?langchain-deepseek", caught.value.command)


@pytest.mark.heavy
def test_what_is_missing_is_told() -> None:
    script = """
import sys
sys.modules["langchain_core"] = None
import memagent_integrations
for statement in ("import memagent_integrations.langchain", "from memagent_integrations import MemAgentReader"):
    try:
        exec(statement)
    except memagent_integrations.MissingExtra as error:
        print(error.command)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    commands = done.stdout.splitlines()
    assert [command.endswith("[langchain]'") for command in commands] == [True, True], done.stderr


def test_a_model_s_name_wants_langchain_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("langchain", "langchain.chat_models"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra) as caught:
        MemAgentReader("ollama:x").invoke({"question": "q", "context": "x"})
    assert caught.value.command.endswith("[langchain]'")


def test_the_door_leads_here() -> None:
    assert memagent_integrations.MemAgentReader is MemAgentReader


# ---- copies ----------------------------------------------------------------------------------------------


def test_a_copy_is_equal_whether_or_not_its_model_is_loaded() -> None:
    subject = MemAgentReader(ScriptedBackend(["note", "answer"]))
    other = subject.model_copy(update={"loaded": Lazy()})
    subject.invoke({"question": "Why?", "context": "A text."})
    assert subject == other
    assert pickle.loads(pickle.dumps(MemAgentReader("smollm2"))) == MemAgentReader("smollm2")
    assert MemAgentReader("smollm2") != MemAgentReader("smollm2", chunk_tokens=100)


@pytest.mark.heavy
def test_it_can_be_pickled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    subject = MemAgentReader("openai:local", **SMALL)
    assert subject.invoke(INPUT).text == ANSWER  # it holds a client now, and a lock
    for copy in (pickle.loads(pickle.dumps(subject)), subject.model_copy(deep=True)):
        assert (copy.model, copy.chunk_tokens) == ("openai:local", 200)
        assert copy.invoke(INPUT).text == ANSWER
    assert sum(body.get("prompt") == "a" for _, body, _ in server.requests) == 3


@pytest.mark.parametrize("kind", [str, Path, Journal])
async def test_a_journal(kind: Any, tmp_path: Path) -> None:
    journal = kind(tmp_path / "runs.db")
    script = ["one", BackendError("the server went away")]
    with pytest.raises(BackendError):
        MemAgentReader(ScriptedBackend(script), **SMALL, journal=journal).invoke(INPUT)
    backend = ScriptedBackend(lambda prompt: f"note {prompt.index}")
    subject = MemAgentReader(backend, **SMALL, journal=journal)
    first = subject.invoke(INPUT)
    assert backend.prompts[0].index == 1, "the first step is there already"
    calls = len(backend.prompts)
    assert (await subject.ainvoke(INPUT)).text == first.text
    assert "".join(chunk.text for chunk in subject.stream(INPUT)) == first.text
    assert len(backend.prompts) == calls, "a complete reading costs nothing"
    assert pickle.loads(pickle.dumps(MemAgentReader("smollm2", journal=journal))).journal is not None
    with pytest.raises(UsageError, match="journal has to be a file or a Journal, not int"):
        MemAgentReader("smollm2", journal=5)


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
async def test_a_reading_has_a_name_in_the_journal(how: str, tmp_path: Path) -> None:
    subject = MemAgentReader(ScriptedBackend(lambda prompt: "a note"), journal=tmp_path / "runs.db", **SMALL)
    config: Any = {"configurable": {"memagent_run": "lease"}}
    if how == "stream":
        list(subject.stream(INPUT, config))
    elif how == "astream":
        assert [chunk async for chunk in subject.astream(INPUT, config)]
    else:
        assert (
            await subject.ainvoke(INPUT, config) if how == "ainvoke" else subject.invoke(INPUT, config)
        ).text == "a note"
    with Journal(tmp_path / "runs.db") as journal:
        assert [run.name for run in journal.runs()] == ["lease"]
    assert [spec.id for spec in subject.config_specs] == ["memagent_memory", "memagent_run"]
    assert MemAgentReader(ScriptedBackend([]), **SMALL).config_specs == []


def test_a_setting_that_there_is_not_names_the_one_that_was_meant() -> None:
    for wrong, meant in [
        ("chunk_size", "chunk_tokens"),
        ("memory_token", "memory_tokens"),
        ("max_tokens", "output_tokens"),
    ]:
        with pytest.raises(UsageError, match=f"there is no setting '{wrong}'; did you mean {meant}"):
            MemAgentReader("smollm2", **{wrong: 3})


@pytest.mark.heavy
def test_a_named_backend_gets_its_options(server: Server) -> None:
    options = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "temperature": 0.5}
    assert MemAgentReader("openai:local", backend_options=options, **SMALL).invoke(INPUT).text == ANSWER
    assert all(body["temperature"] == 0.5 for body in server.bodies())
    with pytest.raises(UsageError, match="give a LangChain model its own"):
        reader(backend_options=options).invoke(INPUT)
