"""Responses of LlamaIndex's LLMs in the forms of the integrations: refusals, finish reasons, usage, and odd answers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_llm import SIZES, documents, prompt
from helpers.integrations import Chatting, Completing, OpenAI
from helpers.loopback import Loopback, Response, chat, completion
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse

from memagent_integrations import BackendError, MemAgentError, MemAgentQueryEngine, Reader, UsageError
from memagent_integrations.llama_index import LLMBackend
from memagent_integrations.records import Reply, Usage


def said(
    content: str | None = "", *, delta: str | None = None, raw: Any = None, message: Any = None, **more: Any
) -> Any:
    """Return a response; `message` are the additional fields of its message, `more` its own."""
    answer = ChatMessage(role="assistant", content=content, additional_kwargs=message or {})
    return ChatResponse(message=answer, delta=delta, raw=raw, additional_kwargs=more)


def replies(answer: Callable[[], Any]) -> tuple[Reply, Reply]:
    """Return the reply to a call, and to a stream of parts: `answer` as both."""
    backend = LLMBackend(Chatting(answer=answer))
    *_, streamed = backend.stream(prompt())
    assert isinstance(streamed, Reply)
    return backend.complete(prompt()), streamed


NOTHING: Any = None
REFUSALS: dict[str, Any] = {
    "OpenAI": {"raw": {"choices": [{"finish_reason": "stop", "message": {"content": None, "refusal": "I cannot."}}]}},
    "OpenAI's object": {
        "raw": SimpleNamespace(
            choices=[SimpleNamespace(finish_reason="stop", message=SimpleNamespace(content=None, refusal="I cannot."))]
        )
    },
    "OpenAI, streamed": {"raw": {"choices": [{"delta": {"refusal": "I can"}}]}, "delta": ""},
    "Responses": {"refusal": "I cannot."},
    "Responses, its blocks": {"raw": {"output": [{"content": [{"type": "refusal", "refusal": "I cannot."}]}]}},
    "Responses, streamed": {"raw": SimpleNamespace(type="response.refusal.delta", delta="I can"), "delta": ""},
    "Responses, the last event": {
        "raw": {"response": {"output": [{"content": [{"type": "refusal"}]}], "status": "completed"}},
        "delta": "",
    },
    "Responses, filtered": {"raw": {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}},
    "Anthropic": {"raw": {"stop_reason": "refusal"}},
    "Anthropic, streamed": {"raw": {"type": "message_delta", "delta": SimpleNamespace(stop_reason="refusal")}},
    "Anthropic's message": {"message": {"stop_reason": "refusal"}, "raw": {"type": "content_block_stop"}},
    "Bedrock": {"raw": {"stopReason": "guardrail_intervened"}},
    "Bedrock, streamed": {"raw": {"messageStop": {"stopReason": "content_filtered"}}},
    "Gemini": {"raw": {"finish_reason": "SAFETY"}},
    "Gemini's prompt": {"raw": {"block_reason": "PROHIBITED_CONTENT"}},
    "Gemini's candidates": {"raw": {"candidates": [{"finishReason": "SAFETY"}]}},
    "Azure": {"raw": {"choices": [{"finish_reason": "content_filter"}]}},
}


@pytest.mark.parametrize("form", REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_is_a_content_filter(form: dict[str, Any]) -> None:
    for reply in replies(lambda: said(**form)):
        assert (reply.finish_reason, reply.text) == ("content_filter", "")


def test_a_refusal_stays_one_when_the_stream_ends_as_usual() -> None:
    def parts() -> Iterator[ChatResponse]:
        yield said(raw={"choices": [{"delta": {"refusal": "I cannot."}}]}, delta="")
        yield said(raw={"choices": [{"delta": {}, "finish_reason": "stop"}]}, delta="")

    *_, reply = LLMBackend(Chatting(answer=parts)).stream(prompt())
    assert isinstance(reply, Reply)
    assert reply.finish_reason == "content_filter"


class Blocked(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Response was terminated early: SAFETY [HARM_CATEGORY_HARASSMENT]"), "content_filter"),
        (RuntimeError("Response was terminated early: PROHIBITED_CONTENT"), "content_filter"),
        (RuntimeError("Response was terminated early: MAX_TOKENS"), "length"),
        (type("ResponseBlockedError", (Exception,), {})("The response was blocked."), "content_filter"),
    ],
)
def test_an_answer_that_ended_early_keeps_what_was_streamed(error: Exception, reason: str) -> None:
    def whole() -> Any:
        raise error

    def parts() -> Iterator[ChatResponse]:
        yield said("so", delta="so")
        raise error

    reply = LLMBackend(Chatting(answer=whole)).complete(prompt())
    assert (reply.text, reply.finish_reason) == ("", reason)
    *_, streamed = LLMBackend(Chatting(answer=parts)).stream(prompt())
    assert isinstance(streamed, Reply)
    assert (streamed.text, streamed.finish_reason) == ("so", reason)


def test_a_section_that_is_refused_keeps_the_memory_and_an_answer_says_why() -> None:
    def answer() -> ChatResponse:
        said_so_far.append("refused" if len(said_so_far) == 1 else "noted")
        return said(raw={"stop_reason": "refusal"}) if said_so_far[-1] == "refused" else said("one note")

    said_so_far: list[str] = []
    backend = LLMBackend(Chatting(answer=answer))
    reading = Reader(backend, **SIZES, on_lost_section="skip").memorize("q", documents()[0].text)
    assert [step.outcome for step in reading.steps][:3] == ["updated", "kept", "updated"]
    refusing = Chatting(answer=lambda: said(raw={"stop_reason": "refusal"}))
    with pytest.raises(BackendError, match="content filter"):
        MemAgentQueryEngine.from_documents("text", refusing, **SIZES).query("q")


@pytest.mark.heavy
@pytest.mark.openai
@pytest.mark.parametrize("choices", [[], None])
async def test_an_answer_without_choices_is_a_failure_of_the_server(choices: Any) -> None:
    body = completion("x") | {"choices": choices}
    with Loopback(chat([Response(body=body)])) as server:
        backend = LLMBackend(OpenAI(api_base=f"{server.url}/v1"))
        with pytest.raises(BackendError, match="no usable answer") as caught:
            backend.complete(prompt())
        assert caught.value.retryable
        with pytest.raises(BackendError, match="no usable answer"):
            await backend.acomplete(prompt())


@pytest.mark.heavy
@pytest.mark.openai
async def test_a_stream_without_choices_is_a_failure_of_the_server() -> None:
    event = b'data: {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}\n\n'

    def respond(_: Any) -> Response:
        return Response(body=iter([event, b"data: [DONE]\n\n"]), headers={"Content-Type": "text/event-stream"})

    with Loopback(respond) as server:
        backend = LLMBackend(OpenAI(api_base=f"{server.url}/v1"))
        with pytest.raises(BackendError, match="without choices") as caught:
            list(backend.stream(prompt()))
        assert caught.value.retryable
        with pytest.raises(BackendError, match="without choices"):
            [each async for each in backend.astream(prompt())]


@pytest.mark.parametrize(
    "answer",
    [
        lambda: {"choices": []}["choices"][0],
        lambda: {}["message"],
        lambda: NOTHING["content"],
        lambda: NOTHING.message,
        lambda: said(raw={"choices": []}),
        lambda: {"content": "a dict"},
        lambda: ChatResponse.model_validate({"message": {"role": "nobody"}}),
        lambda: (_ for _ in ()).throw(ValueError("Response has no candidates")),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_failure_of_the_model(answer: Callable[[], Any]) -> None:
    with pytest.raises(BackendError):
        Reader(LLMBackend(Chatting(answer=answer)), **SIZES).read("q", "text")
    with pytest.raises(BackendError):
        list(LLMBackend(Chatting(answer=answer)).stream(prompt()))


@pytest.mark.parametrize(
    "answer",
    [
        lambda key: {}[key],
        lambda key: {}[f"{'x' * 290}{key}"],
        lambda key: ChatResponse.model_validate({"message": {"role": key}}),
        lambda key: (_ for _ in ()).throw(ValueError(f"Response has no candidates, but {key}")),
        lambda key: (_ for _ in ()).throw(TypeError(f"got an unexpected keyword argument {key!r}")),
    ],
)
def test_a_key_never_shows_in_what_cannot_be_read(answer: Callable[[str], Any]) -> None:
    class Keyed(Chatting):
        api_key: str = "sword" + "fish-0123456789"

    llm = Keyed()
    llm.answer = lambda: answer(llm.api_key)
    with pytest.raises(MemAgentError) as caught:
        LLMBackend(llm).complete(prompt())
    assert "swordfish-" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("raw", [None, {"choices": [{}]}, {"choices": "none"}, {"usage": 7}, "text", 7, object()])
def test_a_reply_without_content_is_empty_whatever_is_in_its_raw_form(raw: Any) -> None:
    for reply in replies(lambda: said(None, raw=raw)):
        assert (reply.text, reply.reasoning, reply.finish_reason, reply.usage) == ("", "", None, Usage())


def test_a_keyword_argument_that_the_llm_does_not_take_is_named() -> None:
    class Strict(Completing):
        def complete(self, prompt: str, formatted: bool = False) -> CompletionResponse:  # type: ignore[override]
            return CompletionResponse(text="x")

    with pytest.raises(UsageError, match="limit_parameter"):
        LLMBackend(Strict(), limit_parameter="max_tokens").complete(prompt())


@pytest.mark.parametrize(
    "form",
    [
        {"raw": {"usage": {"inputTokens": 5, "outputTokens": 2, "cacheReadInputTokens": 1}}},
        {"raw": {"metadata": {"usage": {"inputTokens": 5, "outputTokens": 2, "cacheReadInputTokens": 1}}}},
        {"usage": SimpleNamespace(input_tokens=5, output_tokens=2, input_tokens_details={"cached_tokens": 1})},
        {"message": {"usage": {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 1}}},
        {"raw": {"usage": None}, "prompt_tokens": 5, "completion_tokens": 2, "cache_read_input_tokens": 1},
        {"raw": {"usage_metadata": {
            "prompt_token_count": 5, "candidates_token_count": 2, "cached_content_token_count": 1}}},
    ],
)  # fmt: skip
def test_the_usage_is_found_in_every_form(form: dict[str, Any]) -> None:
    for reply in replies(lambda: said("yes", **form)):
        assert reply.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1)


def test_thinking_in_the_message_s_own_fields_stays_apart() -> None:
    def parts() -> Iterator[ChatResponse]:
        yield said("", delta="", message={"thinking_delta": "hm"})
        yield said("yes", delta="yes")

    *_, reply = LLMBackend(Chatting(answer=parts)).stream(prompt())
    assert isinstance(reply, Reply)
    assert (reply.text, reply.reasoning) == ("yes", "hm")
