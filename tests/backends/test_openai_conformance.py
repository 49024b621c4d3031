"""What OpenAI's protocol, its servers, and chat models on top of its SDK expect, convention by convention."""

from __future__ import annotations

import asyncio
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.contract import ask
from helpers.endpoint import KEY, endpoint, problem
from helpers.fake_llm import FakeLLM
from helpers.loopback import Loopback, Request, Respond, Response, chat, completion
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import LLMMetadata
from packaging.requirements import Requirement
from pydantic import SecretStr

from memagent_integrations import (
    BackendError,
    ContextOverflow,
    MemAgentQueryEngine,
    MemAgentReader,
    Reader,
    UsageError,
)
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.calls import Limits
from memagent_integrations.langchain import ChatModelBackend
from memagent_integrations.llama_index import LLMBackend
from memagent_integrations.records import Reply, Usage

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]
COMPLETIONS = "/v1/chat/completions"
SIZES: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50}
DOCUMENT = "Some words of a long document. " * 60


def reply_to(prompt: str) -> str:
    return "one note" if "<section>" in prompt else "the answer is seven"


def frugal(respond: Respond) -> Respond:
    """Return the endpoint, changed so that it sends the usage of a stream only on request."""

    def respond_frugally(request: Request) -> Response:
        response = respond(request)
        if isinstance(response.body, Iterator) and not request.body.get("stream_options", {}).get("include_usage"):
            return replace(response, body=(event for event in response.body if b'"usage"' not in event))
        return response

    return respond_frugally


def chat_model(server: Loopback, model: str = "local", **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key=SecretStr("k"), max_retries=0, **options)


@pytest.mark.parametrize("value", [lambda: KEY, 5])
def test_c_a_key_is_a_text_and_is_asked_for_at_construction(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that returns keys, which the SDK takes, is refused: only what is known is kept out of messages."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match="set OPENAI_API_KEY"):
        OpenAIBackend("m")
    for options in ({"api_key": value}, {"api_key": KEY, "base_url": value}):
        with pytest.raises(UsageError, match="has to be a text") as caught:
            OpenAIBackend("m", **options)
        assert KEY not in str(caught.value)


def test_c_a_user_s_openai_sdk_may_have_any_version() -> None:
    """LlamaIndex's own OpenAI package wants openai<3, so no extra requires it; LangChain's brings the SDK it wants."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    assert {"openai", "llama-index-llms-openai"}.isdisjoint(Requirement(line).name for line in lines)


def test_c_a_timeout_is_a_number() -> None:
    with pytest.raises(UsageError, match="timeout has to be a number"):
        OpenAIBackend("m", api_key=KEY, timeout=httpx.Timeout(5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "sent", "kind"),
    [
        (problem(429), 2, BackendError),
        (problem(500), 2, BackendError),
        (None, 2, BackendError),
        (problem(400), 1, BackendError),
        (problem(400, code="context_length_exceeded"), 1, ContextOverflow),
    ],
)
def test_c_a_failed_call_is_sent_again_by_the_reader_alone(
    failure: Response | None, sent: int, kind: type[Exception]
) -> None:
    """`failure` None: the server does not answer in time."""
    done = threading.Event()

    def respond(request: Request) -> Response:
        if failure is None:
            done.wait(20)
        return failure or problem(500)

    server, backend = endpoint(respond, tokenizer="approximate", timeout=0.2 if failure is None else 5.0)
    with server, Reader(backend, limits=Limits(max_retries=1), **SIZES) as reader:
        with pytest.raises(kind):
            reader.read("Why?", DOCUMENT)
        done.set()
    assert len(server.bodies(COMPLETIONS)) == sent


async def test_c_usage_of_a_stream_is_in_an_event_without_choices() -> None:
    server, backend = endpoint(frugal(chat([completion("ten is it", "a prompt", reasoning="five and five")])))
    with server:
        *texts, reply = backend.stream(ask("hello"))
        *atexts, areply = [piece async for piece in backend.astream(ask("hello"))]
        await backend.aclose()
    assert texts == atexts == ["ten", " is", " it"]
    for received in (reply, areply):
        assert isinstance(received, Reply)
        assert (received.text, received.reasoning, received.finish_reason) == ("ten is it", "five and five", "stop")
        assert received.usage == Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=0)


def test_c_the_output_limit_goes_by_the_name_that_the_server_knows() -> None:
    assert OpenAIBackend("gpt-5-mini", api_key=KEY)._limit == "max_completion_tokens"
    for options, sent in [
        ({}, {"max_tokens": 12}),
        ({"limit_parameter": "max_completion_tokens"}, {"max_completion_tokens": 12}),
        ({"extra_body": {"max_tokens": 5}}, {"max_tokens": 5}),  # merged into the body last
    ]:
        server, backend = endpoint(["fine"], **options)  # type: ignore[arg-type]
        with server:
            backend.complete(ask("hello"))
        (body,) = server.bodies(COMPLETIONS)
        assert {name: value for name, value in body.items() if name.startswith("max_")} == sent


@pytest.mark.openai
def test_c_the_output_limit_of_a_chat_openai_is_the_reader_s() -> None:
    """`ChatOpenAI(max_tokens=7)` sends `max_completion_tokens`."""
    with Loopback(chat(reply_to)) as server:
        reader = MemAgentReader(chat_model(server, max_tokens=7), output_tokens=60, **SIZES)
        reader.invoke({"question": "Why?", "context": DOCUMENT})
    assert {body.get("max_completion_tokens") for body in server.bodies(COMPLETIONS)} == {60}
    assert not any("max_tokens" in body for body in server.bodies(COMPLETIONS))


@pytest.mark.parametrize("stream", [False, True])
def test_c_extra_body_is_sent_and_reasoning_stays_out_of_the_memory(stream: bool) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 20}
    thinking = chat(lambda prompt: completion(reply_to(prompt), prompt, reasoning="let me think"))
    server, backend = endpoint(thinking, extra_body=extra)
    with server, Reader(backend, **SIZES) as reader:
        reading: Any = list(reader.stream("Why?", DOCUMENT))[-1] if stream else reader.read("Why?", DOCUMENT)
    assert (reading.memory, reading.answer) == ("one note", "the answer is seven")
    assert {step.reply.reasoning for step in reading.steps} == {"let me think"}
    bodies = server.bodies(COMPLETIONS)
    assert all({name: body[name] for name in extra} == extra for body in bodies)
    assert not any("let me think" in body["messages"][0]["content"] for body in bodies)


@pytest.mark.openai
async def test_c_a_chat_openai_tells_the_same_usage_streamed_or_not() -> None:
    """With a `base_url` it requests no usage for a stream; our reader does."""
    question: Any = {"question": "Why?", "context": DOCUMENT}
    with Loopback(frugal(chat(reply_to))) as server:
        reader = MemAgentReader(chat_model(server), **SIZES)
        plain = reader.invoke(question)
        streamed = reduce(add, reader.stream(question))
        later = reduce(add, [part async for part in reader.astream(question)])
    assert isinstance(plain, AIMessage)
    assert plain.usage_metadata is not None
    assert plain.usage_metadata["output_tokens"] > 0
    assert plain.usage_metadata == streamed.usage_metadata == later.usage_metadata


def test_c_what_an_openai_like_does_not_know_or_tell_is_unknown() -> None:
    """It reports a window of 3,900 and no usage in streams; its own three retries are the only ones."""

    class OpenAI(FakeLLM):
        @property
        def metadata(self) -> LLMMetadata:
            return LLMMetadata(context_window=3900, is_chat_model=True, model_name="local")

    class OpenAILike(OpenAI):
        pass

    llm = OpenAILike(script=reply_to, raw={"usage": None})
    assert (LLMBackend(llm).window, LLMBackend(llm).max_retries) == (None, 0)
    engine = MemAgentQueryEngine.from_documents(DOCUMENT, llm, streaming=True, output_tokens=60, **SIZES)
    response: Any = engine.query("Why?")
    assert "".join(response.response_gen) == "the answer is seven"
    assert set(response.metadata["memagent"]["usage"].values()) == {None}
    *updates, answer = [options for *_, options in llm.calls]
    assert updates == [{"max_tokens": 60}] * len(updates)
    assert answer == {"max_tokens": 60, "stream_options": {"include_usage": True}}


@pytest.mark.openai
def test_c_tokens_are_counted_without_a_download() -> None:
    """Where nothing counts, the error names the ways out; llama-index-core ships the vocabularies (see conftest.py)."""

    class Chat(ChatOpenAI):
        def get_num_tokens(self, text: str) -> int:
            raise AssertionError("it would fetch a vocabulary for a model that it does not know")

    server = Loopback(lambda request: problem(404))
    with server:
        backend = OpenAIBackend("gpt-4o", base_url=f"{server.url}/v1")
        assert backend.count("hello") == 1
        assert backend.window is None
        assert len(server.requests) == 1, "one request to /tokenize"
        unknown: list[Any] = [
            OpenAIBackend("mine", base_url=f"{server.url}/v1"),
            ChatModelBackend(Chat(model="mine", base_url=f"{server.url}/v1", api_key=SecretStr("k"))),
        ]
        for backend in unknown:
            with pytest.warns(UserWarning, match="the tokens of mine are estimated.*pass tokenizer='hf:"):
                assert backend.count("hello") == 2
            assert backend.count("hello") == 2, "it warns once"
    assert OpenAIBackend("gpt-4o", api_key=KEY).count("hello") == 1
    for encoding in ("cl100k_base", "o200k_base"):
        assert ChatModelBackend(chat_model(server), tokenizer=f"tiktoken:{encoding}").count("hello") == 1


@pytest.mark.openai
def test_c_the_window_is_that_of_the_model_s_profile() -> None:
    known, unknown = (ChatOpenAI(model=name, api_key=SecretStr("k")) for name in ("gpt-5", "mine"))
    window = ChatModelBackend(known, tokenizer="approximate").window
    assert known.profile
    assert window == known.profile["max_input_tokens"]
    assert ChatModelBackend(unknown, tokenizer="approximate").window is None


async def test_c_async_calls_fly_together_and_the_connections_are_closed_at_the_end() -> None:
    together = threading.Barrier(4)

    def reply(prompt: str) -> str:
        together.wait(20)  # one after the other, they would never meet
        return "fine"

    server, backend = endpoint(chat(reply), timeout=30.0)
    with server:
        replies = await asyncio.gather(*(backend.acomplete(ask("hello")) for _ in range(4)))
        assert [reply.text for reply in replies] == ["fine"] * 4
        client, _ = await backend._async_client()
        assert not client.is_closed
        await backend.aclose()
        assert client.is_closed


def test_c_stream_options_are_sent_with_streams_only() -> None:
    server, backend = endpoint(["fine"], temperature=0.5, seed=3, extra_body={"top_k": 5}, api_key=KEY)
    with server:
        backend.complete(ask("hello", max_tokens=9))
        list(backend.stream(ask("hello", max_tokens=9)))
    sent = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
        "top_k": 5,
    }
    assert server.bodies(COMPLETIONS) == [sent, sent | {"stream": True, "stream_options": {"include_usage": True}}]
    assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"
