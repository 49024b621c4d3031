"""Answers of chat models that keep to a schema: through each provider's own machinery, however the model is wrapped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers.loopback import Loopback, Request, Response, chat
from helpers.providers import Provider
from helpers.scripted_chat import INPUT, WAYS, Model, call, count, reader
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from memagent_integrations import BackendError, UsageError
from memagent_integrations.langchain import ChatModelBackend
from memagent_integrations.records import Message, Prompt

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
USAGE: Any = {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}
PROMPT = Prompt(index=0, phase="answer", messages=(Message(role="user", content="?"),), max_tokens=9, schema=SCHEMA)


class Number(BaseModel):
    """A number."""

    number: int


class Calling(Provider):
    """A model that answers by a tool, if it has one."""

    max_tokens: int | None = None
    defaults: tuple[str, ...] = ("max_tokens",)
    takes: tuple[str, ...] = ("tools", "tool_choice", "ls_structured_output_format", "temperature")
    arguments: Any = Field(default_factory=lambda: {"number": 7})
    said: dict[str, Any] = Field(default_factory=dict)

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **options: Any) -> Any:
        return self.bind(tools=tools, tool_choice=tool_choice, **options)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> Any:
        tools = options.get("tools")
        result = super()._generate(messages, stop, run_manager, **options)
        name = None
        if tools:
            name = tools[0].get("title") if isinstance(tools[0], dict) else tools[0].__name__
        calls = [{"name": name, "args": self.arguments, "id": "1"}] if name and self.arguments is not None else []
        told = {"finish_reason": "stop", **self.said} if tools else {"finish_reason": "stop"}
        result.generations[0].message = AIMessage(
            "" if tools else "note", tool_calls=calls, usage_metadata=USAGE, response_metadata=told
        )
        return result


def broken() -> Any:
    def fail(_: str) -> str:
        raise ConnectionError("gone")

    return Calling(respond=fail)


ONE = ConfigurableField(id="which")
WRAPPED: dict[str, Callable[[Any], Any]] = {
    "bare": lambda model: model,
    "with_retry": lambda model: model.with_retry(),
    "bind": lambda model: model.bind(temperature=0.5),
    "with_config": lambda model: model.with_config(tags=["x"]),
    "with_fallbacks": lambda model: model.with_fallbacks([Calling()]),
    "the fallback": lambda model: broken().with_fallbacks([model]),
    "all of these": lambda model: broken().with_retry(stop_after_attempt=1).with_fallbacks([model.with_retry()]),
    "lambda | model": lambda model: RunnableLambda(lambda messages: messages) | model,
    "alternatives": lambda model: model.configurable_alternatives(ONE, other=Calling()),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("wrapping", WRAPPED)
async def test_an_answer_keeps_to_the_schema_through_every_wrapping(wrapping: str, how: str) -> None:
    model = Calling()
    message = await call(reader(WRAPPED[wrapping](model), output=Number, output_tokens=70), how)
    assert json.loads(message.text) == {"number": 7}
    assert message.usage_metadata["output_tokens"] == 10, "of five calls, the answer's too"
    assert message.response_metadata["memagent"]["finish_reason"] == "stop"
    assert [bool(sent.get("tools")) for sent in model.sent] == [False] * 4 + [True], "memories are free text"
    assert {sent["max_tokens"] for sent in model.sent} == {70}
    if wrapping == "bind":
        assert {sent["temperature"] for sent in model.sent} == {0.5}


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (Calling(arguments={"figure": 7}), "does not fit the schema"),
        (Calling(arguments=None), "does not fit the schema"),
        (Calling(arguments=None, said={"finish_reason": "length"}), "output_tokens"),
        (Calling(arguments=None, said={"stop_reason": "refusal"}), "content filter"),
    ],
    ids=["another object", "no object", "cut off", "refused"],
)
@pytest.mark.parametrize("how", WAYS)
async def test_an_answer_that_does_not_fit_is_an_error_that_says_why(model: Any, complaint: str, how: str) -> None:
    with pytest.raises(BackendError, match=complaint):
        await call(reader(model, output=Number), how)


@pytest.mark.parametrize(
    "model",
    [
        Model(),
        FakeListLLM(responses=["x"]),
        Calling() | StrOutputParser(),
        Calling().with_fallbacks([Model()]),
        RunnableLambda(lambda messages: "x"),
    ],
    ids=["no tools", "plain text", "a parser", "a fallback without", "a function"],
)
def test_a_model_that_knows_no_schemas_is_refused_before_a_call(model: Any) -> None:
    assert not ChatModelBackend(model, tokenizer=count).structured
    with pytest.raises(UsageError, match="output"):
        reader(model, output=Number).invoke(INPUT)


def test_a_schema_without_a_title_is_named() -> None:
    model = Calling()
    assert json.loads(ChatModelBackend(model, tokenizer=count).complete(PROMPT).text) == {"number": 7}
    assert model.sent[0]["tools"][0]["title"]


@pytest.mark.heavy
@pytest.mark.openai
async def test_openais_models_get_the_schema_and_their_limit() -> None:
    respond = chat(lambda prompt: "note" if "<section>" in prompt else '{"number": 7}')
    with Loopback(respond) as server:
        model = ChatOpenAI(model="gpt-4o", base_url=f"{server.url}/v1", api_key="sk-x", max_retries=0)
        for how in WAYS:
            subject = reader(model.with_retry(), output=Number, chunk_tokens=1000, output_tokens=70)
            message = await call(subject, how)
            assert json.loads(message.text) == {"number": 7}
            assert message.usage_metadata
        bodies = server.bodies("/v1/chat/completions")
    assert [body.get("response_format", {}).get("type") for body in bodies] == [None, "json_schema"] * 4
    assert {body["max_completion_tokens"] for body in bodies} == {70}


@pytest.mark.heavy
@pytest.mark.openai
def test_a_server_that_refuses_a_schema_is_told_apart_from_one_that_is_down() -> None:
    def respond(_: Request) -> Response:
        return Response(status=400, body={"error": {"message": "response_format json_schema is not supported"}})

    with Loopback(respond) as server:
        model = ChatOpenAI(model="gpt-4o", base_url=f"{server.url}/v1", api_key="sk-x", max_retries=0)
        with pytest.raises((BackendError, UsageError), match="json_schema"):
            ChatModelBackend(model, tokenizer=count).complete(PROMPT)
