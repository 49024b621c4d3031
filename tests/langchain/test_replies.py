"""What becomes of the messages that a model answers with, and of the errors that it raises."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from helpers.loopback import Loopback, Request, Response
from helpers.scripted_chat import INPUT, WAYS, Model, call, count, reader, say
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, ChatMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from pydantic import Field

from memagent_integrations import BackendError, MemAgentError, UsageError
from memagent_integrations.langchain import ChatModelBackend
from memagent_integrations.records import Message, Prompt

PROMPT = Prompt(index=0, phase="answer", messages=(Message(role="user", content="Name it."),), max_tokens=9)


def replying(message: AIMessage) -> ChatModelBackend:
    return ChatModelBackend(Model(script=lambda _: message), tokenizer=count)


# ---- what a provider's filter withholds ------------------------------------------------------------------

NO = "I cannot help with that."
REFUSALS: dict[str, AIMessage] = {
    "OpenAI": AIMessage("", additional_kwargs={"refusal": NO}, response_metadata={"finish_reason": "stop"}),
    "Responses": AIMessage([{"type": "refusal", "refusal": NO, "id": "msg_1"}], response_metadata={"status": "done"}),
    "Responses, after some text": AIMessage(
        [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": NO, "index": 1}],
        response_metadata={"model_provider": "openai"},
    ),
    "v1": AIMessage(
        [{"type": "non_standard", "value": {"type": "refusal", "refusal": NO}}],
        response_metadata={"output_version": "v1"},
    ),
    "v1, without a type": AIMessage(
        [{"type": "non_standard", "value": {"refusal": NO}}], response_metadata={"output_version": "v1"}
    ),
    "Responses, filtered": AIMessage(
        "", response_metadata={"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    ),
    "Anthropic": AIMessage("", response_metadata={"model_provider": "anthropic", "stop_reason": "refusal"}),
    "Bedrock Converse": AIMessage("Sorry.", response_metadata={"stopReason": "guardrail_intervened"}),
    "Bedrock Converse, in a list": AIMessage("Sorry.", response_metadata={"stopReason": ["guardrail_intervened"]}),
    "Bedrock Converse, filtered": AIMessage("", response_metadata={"stopReason": "content_filtered"}),
    "Bedrock": AIMessage("Sorry.", response_metadata={"amazon-bedrock-guardrailAction": "INTERVENED"}),
    "Gemini, a blocked prompt": AIMessage(
        "", response_metadata={"prompt_feedback": {"block_reason": 2, "safety_ratings": []}}
    ),
    "Gemini, a named reason": AIMessage("", response_metadata={"prompt_feedback": {"block_reason": "SAFETY"}}),
    "Vertex AI": AIMessage("", response_metadata={"is_blocked": True, "finish_reason": "STOP"}),
    "Cohere": AIMessage("", response_metadata={"finish_reason": "ERROR_TOXIC"}),
    "a chunk of text": AIMessage([{"type": "text", "text": ""}, {"type": "refusal", "text": NO}]),
} | {
    f"Gemini {reason}": AIMessage("", response_metadata={"finish_reason": reason})
    for reason in ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY", "MODEL_ARMOR")
}


@pytest.mark.parametrize("form", REFUSALS)
async def test_a_refusal_is_a_content_filter_in_every_form(form: str) -> None:
    backend = replying(REFUSALS[form])
    assert backend.complete(PROMPT).finish_reason == "content_filter"
    assert (await backend.acomplete(PROMPT)).finish_reason == "content_filter"
    parts = Parts(parts=[REFUSALS[form]])
    *_, reply = ChatModelBackend(parts, tokenizer=count).stream(PROMPT)
    assert reply.finish_reason == "content_filter"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "told",
    [
        {"prompt_feedback": {"block_reason": 0, "safety_ratings": []}, "finish_reason": "STOP"},
        {"prompt_feedback": {"block_reason": None}, "finish_reason": "STOP"},
        {"prompt_feedback": {"block_reason": "BLOCKED_REASON_UNSPECIFIED"}, "finish_reason": "STOP"},
        {"prompt_feedback": None, "finish_reason": "STOP"},
        {"is_blocked": False, "finish_reason": "STOP"},
        {"amazon-bedrock-guardrailAction": "NONE", "stop_reason": "end_turn"},
        {"stopReason": ["end_turn"]},
        {"incomplete_details": None, "status": "completed"},
        {"finish_reason": "COMPLETE"},
        {"finish_reason": "eos_token"},
    ],
    ids=str,
)
def test_what_is_not_withheld_has_just_stopped(told: dict[str, Any]) -> None:
    assert replying(AIMessage("seven", response_metadata=told)).complete(PROMPT).finish_reason == "stop"


@pytest.mark.parametrize(
    "told",
    [
        {"stop_reason": "model_context_window_exceeded"},
        {"stopReason": "max_tokens"},
        {"finish_reason": "MAX_TOKENS"},
        {"finish_reason": "token_limit"},
        {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
    ],
    ids=str,
)
def test_what_was_cut_off_has_met_its_length(told: dict[str, Any]) -> None:
    assert replying(AIMessage("sev", response_metadata=told)).complete(PROMPT).finish_reason == "length"


class Parts(Model):
    """A model that streams these parts."""

    parts: list[Any] = Field(default_factory=list)

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
        for part in self.parts or [self._answer(messages, options)]:
            fields = part.model_dump(include={"content", "additional_kwargs", "response_metadata"})
            yield ChatGenerationChunk(message=AIMessageChunk(**fields))


class Refused(Exception):
    """An error as the SDKs raise them."""

    def __init__(self, message: str, *, status: int | None = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status_code, self.code = status, code


class ContentPolicyViolationError(Refused):
    """As LiteLLM has it."""


class OpenAIRefusalError(Exception):
    """As LangChain raises it for a structured answer."""


class ModelRefusalError(Exception):
    """As newer versions of LangChain raise it."""


class BlockedPromptException(Exception):
    """As Google's SDK has it."""


ERRORS: dict[str, Exception] = {
    "Azure": Refused("The response was filtered due to the prompt triggering the policy", code="content_filter"),
    "Azure, in the text": Refused("Error code: 400 - {'error': {'code': 'content_filter', 'status': 400}}"),
    "OpenAI": Refused("Your request was rejected", code="content_policy_violation"),
    "LiteLLM": ContentPolicyViolationError("litellm: no"),
    "a structured answer": OpenAIRefusalError(NO),
    "a newer LangChain": ModelRefusalError(NO),
    "Google": BlockedPromptException("block_reason: SAFETY"),
    "DashScope": Refused("Input data may contain inappropriate content.", code="data_inspection_failed"),
    "DeepSeek": Refused("Content Exists Risk"),
    "Responses, in a stream": ValueError("content_filter: the response was filtered"),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ERRORS)
async def test_a_filter_that_raises_an_error_withholds_a_section(kind: str, how: str) -> None:
    """The memory stays as it is, and the reading goes on."""
    model = Model()

    def script(text: str) -> str:
        if len(model.prompts) == 2:
            raise ERRORS[kind]
        return say(text)

    model.script = script
    message = await call(reader(model, on_lost_section="skip"), how)
    assert message.text == "the answer is seven"
    assert message.response_metadata["memagent"]["outcomes"] == {"updated": 3, "kept": 1, "answered": 1}


@pytest.mark.parametrize("how", WAYS)
async def test_an_answer_that_is_withheld_says_so(how: str) -> None:
    model = Parts(script=lambda text: AIMessage(say(text)) if "<section>" in text else REFUSALS["Responses"])
    model_with_an_error = Model()

    def script(text: str) -> str:
        if "<section>" not in text:
            raise ERRORS["Azure"]
        return say(text)

    model_with_an_error.script = script
    for each in (model, model_with_an_error):
        with pytest.raises(BackendError, match="content filter withheld the answer"):
            await call(reader(each), how)


@pytest.mark.parametrize(
    "error",
    [Refused("no such model as content_filter", status=404), Refused("slow down", status=429), ConnectionError("gone")],
    ids=str,
)
async def test_other_errors_stay_errors(error: Exception) -> None:
    with pytest.raises(BackendError):
        reader(Model(failures=[error])).invoke(INPUT)


def responses(output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a response as OpenAI's Responses API sends it."""
    usage = {
        "input_tokens": 10,
        "output_tokens": 2,
        "total_tokens": 12,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    whole = {"id": "resp_1", "object": "response", "created_at": 1, "model": "gpt-4o", "status": "completed"}
    options = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**whole, **options, "output": output, "usage": usage, **more}


def said(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": list(content)}]


@pytest.mark.heavy
@pytest.mark.openai
@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
def test_openais_responses_refuse_in_all_versions_of_langchains_output(version: str) -> None:
    refusal = {"type": "refusal", "refusal": NO}
    text = {"type": "output_text", "text": "note", "annotations": []}

    def respond(request: Request) -> Response:
        is_second = len(server.requests) == 2
        return Response(body=responses(said(refusal if is_second else text)))

    with Loopback(respond) as server:
        model = ChatOpenAI(
            model="gpt-4o", base_url=f"{server.url}/v1", api_key="sk-x", use_responses_api=True, output_version=version
        )
        message = reader(model, on_lost_section="skip").invoke(INPUT)
    assert message.response_metadata["memagent"]["outcomes"] == {"updated": 3, "kept": 1, "answered": 1}
    assert message.response_metadata["memagent"]["finish_reason"] == "stop"
    assert message.text == "note"


@pytest.mark.heavy
@pytest.mark.openai
def test_azures_filter_answers_with_an_error() -> None:
    body = {"error": {"message": "The response was filtered", "code": "content_filter", "status": 400}}
    with Loopback(lambda _: Response(status=400, body=body)) as server:
        model = ChatOpenAI(model="gpt-4o", base_url=f"{server.url}/v1", api_key="sk-x", max_retries=0)
        assert ChatModelBackend(model, tokenizer=count).complete(PROMPT).finish_reason == "content_filter"


# ---- what cannot be read ---------------------------------------------------------------------------------


class Answering(Model):
    """A model whose class hands on this as the server's answer."""

    answer: Any = None

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        return self.answer()  # type: ignore[no-any-return]

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        return self.answer()  # type: ignore[no-any-return]

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
        for generation in self.answer().generations:
            yield ChatGenerationChunk(message=AIMessageChunk(**generation.message.__dict__))


def result(message: Any) -> ChatResult:
    return ChatResult.model_construct(generations=[ChatGeneration.model_construct(message=message)], llm_output=None)


ODD: dict[str, Any] = {
    "no generations": lambda: ChatResult(generations=[]),
    "None as content": lambda: result(AIMessage.model_construct(content=None, response_metadata={}, type="ai")),
    "None as content, checked": lambda: result(AIMessage(content=None)),  # type: ignore[arg-type]
    "numbers as content": lambda: result(AIMessage.model_construct(content=[3], response_metadata={}, type="ai")),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ODD)
async def test_an_answer_that_cannot_be_read_is_a_failure_of_the_server(kind: str, how: str) -> None:
    with pytest.raises(BackendError):
        await call(reader(Answering(answer=ODD[kind])), how)


@pytest.mark.parametrize(
    "answer",
    [
        lambda key: AIMessage.model_validate({"content": "seven", "tool_calls": key}),
        lambda key: (_ for _ in ()).throw(TypeError(f"got an unexpected keyword argument {key!r}")),
    ],
    ids=["an odd message", "an argument"],
)
def test_a_key_never_shows_in_what_cannot_be_read(answer: Callable[[str], Any]) -> None:
    class Keyed(Answering):
        api_key: str = "sword" + "fish-0123456789"

    model = Keyed()
    model.answer = lambda: answer(model.api_key)
    with pytest.raises(MemAgentError) as caught:
        ChatModelBackend(model, tokenizer=count).complete(PROMPT)
    assert "swordfish-" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("content", ["", [], [{"type": "tool_use", "id": "1", "name": "search", "input": {}}]], ids=str)
async def test_a_model_that_only_calls_tools_is_an_error_that_names_them(content: Any, how: str) -> None:
    tools = [{"name": "search", "args": {"q": "x"}, "id": "1"}]
    model = Parts(script=lambda _: AIMessage(content, tool_calls=tools))
    with pytest.raises(BackendError, match=r"called a tool \(search\)"):
        await call(reader(model), how)


def test_a_tool_call_beside_a_text_does_no_harm() -> None:
    message = AIMessage("seven", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    assert replying(message).complete(PROMPT).text == "seven"


@pytest.mark.parametrize("message", [HumanMessage("seven"), ChatMessage(content="seven", role="bot"), "seven"], ids=str)
def test_a_message_of_another_kind_is_read_by_its_text(message: Any) -> None:
    model: Any = RunnableLambda(lambda _: message)
    assert ChatModelBackend(model, tokenizer=count).complete(PROMPT).text == "seven"


def test_a_block_without_a_type_has_text() -> None:
    assert replying(AIMessage([{"text": "seven"}])).complete(PROMPT).text == "seven"


@pytest.mark.parametrize("how", WAYS)
async def test_a_mistake_in_the_callers_chain_stays_what_it_is(how: str) -> None:
    def bug(_: Any) -> Any:
        return {}["key"]

    for chain in (
        RunnableLambda(bug) | Model(),
        ChatPromptTemplate.from_messages([("human", "{one} {two}")]) | Model(),
    ):
        with pytest.raises((KeyError, TypeError)):
            await call(reader(chain), how)


def test_an_argument_that_the_model_does_not_take_is_told() -> None:
    class Strict(Model):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None) -> ChatResult:
            return super()._generate(messages)

    with pytest.raises(UsageError, match="limit_parameter"):
        ChatModelBackend(Strict(), tokenizer=count, limit_parameter="max_new").complete(PROMPT)


def completion(**changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "note"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices} | changes


@pytest.mark.heavy
@pytest.mark.openai
@pytest.mark.parametrize(
    "body",
    [
        completion(choices=[]),
        completion(choices=None),
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m"},
        completion(choices=[{"index": 0, "message": None, "finish_reason": "stop"}]),
        completion(error={"message": "no capacity", "code": 503}, choices=None),
        [],
        "no",
        None,
    ],
    ids=str,
)
def test_what_a_server_sends_in_place_of_a_completion_is_a_failure_of_it(body: Any) -> None:
    with Loopback(lambda _: Response(body=body)) as server:
        model = ChatOpenAI(model="gpt-4o", base_url=f"{server.url}/v1", api_key="sk-x", max_retries=0)
        with pytest.raises(BackendError):
            ChatModelBackend(model, tokenizer=count).complete(PROMPT)


@pytest.mark.heavy
@pytest.mark.openai
def test_an_error_says_things_once() -> None:
    with Loopback(lambda _: Response(status=400, body={"error": {"message": "no such thing"}})) as server:
        model = ChatOpenAI(model="gpt-4o", base_url=f"{server.url}/v1", api_key="sk-x", max_retries=0)
        with pytest.raises(BackendError) as caught:
            ChatModelBackend(model, tokenizer=count).complete(PROMPT)
    assert str(caught.value).count("no such thing") == 1
    model = ChatOpenAI(model="gpt-4o", base_url=f"{server.url}/v1", api_key="sk-x", max_retries=0)
    with pytest.raises(BackendError) as caught:
        ChatModelBackend(model, tokenizer=count).complete(PROMPT)
    assert str(caught.value).count("Connection error") == 1


@pytest.mark.parametrize("how", WAYS)
async def test_a_model_that_stops_an_iteration_has_failed(how: str) -> None:
    with pytest.raises(BackendError, match="langchain:GenericFakeChatModel failed"):
        await call(reader(GenericFakeChatModel(messages=iter([AIMessage("the only reply")]))), how)


def test_a_message_can_be_written_as_json_whatever_the_model_writes() -> None:
    message = reader(Model(script=lambda _: "half a \ud83d")).invoke(INPUT)
    assert AIMessage.model_validate_json(message.model_dump_json()).text == "half a \ufffd"
