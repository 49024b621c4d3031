"""Output limits arrive where LlamaIndex's integrations read them; windows are read where they know them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from helpers.fake_llm import SIZES, documents, fake, prompt
from helpers.integrations import (
    Anthropic,
    Bedrock,
    Completing,
    GoogleGenAI,
    HuggingFaceLLM,
    LlamaCPP,
    Ollama,
    OpenAI,
)
from helpers.loopback import Loopback, chat
from llama_index.core.llms import LLM, MockLLM

from memagent_integrations import BackendError, MemAgentQueryEngine, Reader
from memagent_integrations.llama_index import LLMBackend

LOGGER = "memagent_integrations.llama_index.backend"


@pytest.mark.parametrize(
    ("llm", "sent"),
    [
        (LlamaCPP(), {"max_tokens": 12, "stream": False}),
        (LlamaCPP(generate_kwargs={"top_k": 3}), {"max_tokens": 12, "top_k": 3, "stream": False}),
        (HuggingFaceLLM(), {"max_new_tokens": 12}),
        (HuggingFaceLLM(generate_kwargs={"max_new_tokens": 900}), {"max_new_tokens": 12}),
        (Ollama(context_window=4096), {"num_ctx": 4096, "num_predict": 12}),
        (Ollama(context_window=4096, additional_kwargs={"num_predict": 900, "seed": 1}),
         {"num_ctx": 4096, "num_predict": 12, "seed": 1}),
        (GoogleGenAI(), {"temperature": 0.1, "max_output_tokens": 12}),
        (Anthropic(), {"max_tokens": 12}),
        (Anthropic(additional_kwargs={"max_tokens": 900}), {"max_tokens": 12}),
        (Bedrock(), {"maxTokens": 12}),
        (Bedrock(max_tokens=12), {"maxTokens": 12}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
async def test_the_limit_arrives(llm: Any, sent: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    before = llm.model_dump(exclude={"sent", "shows"})
    backend = LLMBackend(llm)
    backend.complete(prompt())
    await backend.acomplete(prompt())
    list(backend.stream(prompt()))
    [each async for each in backend.astream(prompt())]
    for each in llm.sent:
        each.pop("prompt", None)
    assert llm.sent == [sent] * 4
    assert "limit" not in caplog.text
    assert llm.model_dump(exclude={"sent", "shows"}) == before, "the caller's LLM is left as it was"


@pytest.mark.heavy
@pytest.mark.openai
@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, {"max_tokens": 12}),
        ({"max_tokens": 900}, {"max_tokens": 12}),
        ({"max_tokens": 12}, {"max_tokens": 12}),
        ({"additional_kwargs": {"max_completion_tokens": 900}}, {"max_completion_tokens": 12}),
        ({"additional_kwargs": {"seed": 1}}, {"max_tokens": 12, "seed": 1}),
    ],
)
async def test_the_limit_arrives_at_an_openai_server(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    with Loopback(chat(["so it is"])) as server:
        backend = LLMBackend(OpenAI(api_base=f"{server.url}/v1", **fields))
        backend.complete(prompt())
        list(backend.stream(prompt()))
        [each async for each in backend.astream(prompt())]
        for body in server.bodies("/v1/chat/completions"):
            extra = {"stream": True, "stream_options": {"include_usage": True}} if "stream" in body else {}
            assert {name: body[name] for name in body.keys() - {"messages", "model"}} == sent | extra
    assert len(server.requests) == 3


@pytest.mark.heavy
@pytest.mark.openai
async def test_streams_of_openai_like_servers_are_asked_for_their_usage() -> None:
    with Loopback(chat(["so it is"])) as server:
        backend = LLMBackend(OpenAI(api_base=f"{server.url}/v1"))
        whole = backend.complete(prompt())
        *_, streamed = backend.stream(prompt())
        *_, later = [each async for each in backend.astream(prompt())]
        assert whole.usage == streamed.usage == later.usage  # type: ignore[union-attr]
        assert whole.usage.completion_tokens == 3
        kept = OpenAI(api_base=f"{server.url}/v1", additional_kwargs={"stream_options": {"include_usage": False}})
        list(LLMBackend(kept).stream(prompt()))
        options = [body.get("stream_options") for body in server.bodies("/v1/chat/completions")]
    assert options == [None, {"include_usage": True}, {"include_usage": True}, {"include_usage": False}]


def test_a_client_that_is_made_for_a_call_is_kept() -> None:
    """Copies of the LLM share its private state: else each call would open connections of its own."""
    llm = OpenAI(api_base="http://127.0.0.1:9/v1", max_tokens=900)
    backend = LLMBackend(llm)
    with pytest.raises(BackendError):
        backend.complete(prompt())
    client = llm._client
    assert client is not None
    with pytest.raises(BackendError):
        backend.complete(prompt())
    assert llm._client is client


def test_an_llm_that_gets_no_limit_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for llm in (fake(), MockLLM(), Completing()):
        caplog.clear()
        with caplog.at_level(logging.WARNING, LOGGER):
            backend = LLMBackend(llm, window=8192)
            for _ in range(3):
                backend.complete(prompt("hello"))
        (record,) = caplog.records
        assert "limit_parameter" in record.getMessage()
    caplog.clear()
    LLMBackend(fake(), limit_parameter="max_tokens").complete(prompt())
    assert not caplog.records


@pytest.mark.parametrize(
    ("llm", "window"),
    [
        (LlamaCPP(), 3900),
        (LlamaCPP(n_ctx=4096), 4096),
        (LlamaCPP(n_ctx=0), None),
        (Ollama(shown=40960), 40960),
        (Ollama(), 3900),
        (Ollama(context_window=2048), 2048),
        (Ollama(context_window=2048, additional_kwargs={"num_ctx": 1024}), 1024),
        (HuggingFaceLLM(), None),
        (HuggingFaceLLM(positions=2048), 2048),
        (HuggingFaceLLM(context_window=4096, positions=32768), 4096),
        (MockLLM(), None),
        (fake(context=3900), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_window_is_the_one_that_the_model_has(llm: LLM, window: int | None) -> None:
    assert LLMBackend(llm).window == window
    assert LLMBackend(llm, window=512).window == 512


def test_a_window_of_3900_that_was_set_is_a_window() -> None:
    class OpenAILike(OpenAI):
        context_window: int = 3900

        @property
        def metadata(self) -> Any:
            return super().metadata.model_copy(update={"context_window": self.context_window})

    assert LLMBackend(OpenAILike()).window is None
    assert LLMBackend(OpenAILike(context_window=3900)).window == 3900


def test_the_server_is_asked_for_a_window_once() -> None:
    llm = Ollama(shown=8192)
    MemAgentQueryEngine.from_documents(documents(), llm, **SIZES).query("q")
    assert llm.shows == 1


def test_a_server_that_cannot_be_asked_is_a_failure_of_the_model() -> None:
    with pytest.raises(BackendError, match="no server at localhost") as caught:
        Reader(LLMBackend(Ollama(shown=0)), **SIZES).read("q", "text")
    assert caught.value.retryable
