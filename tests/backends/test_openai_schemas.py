"""Schemas of answers on their way to an OpenAI-compatible endpoint, and what endpoints say to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
from helpers.contract import PLANET, ask
from helpers.endpoint import KEY, endpoint, problem
from helpers.loopback import Loopback, chat
from pydantic import BaseModel, ConfigDict, Field

from memagent_integrations import BackendError, Reader, UsageError
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.backends.schemas import strict_schema
from memagent_integrations.outputs import Output
from memagent_integrations.records import Message, Prompt

pytestmark = pytest.mark.heavy

REPLY = '{"name": "Jupiter", "gas": true}'


class Moon(BaseModel):
    name: str
    radius: float | None = None


class Planet(BaseModel):
    moons: list[Moon] = []
    largest: Moon | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Free(BaseModel):
    by_name: dict[str, Moon]


def with_schema(schema: Any = PLANET) -> Prompt:
    return replace(ask("Which planet is the largest?", 40), schema=schema)


def test_the_schema_is_sent_as_it_is_with_a_name_and_only_with_the_answer() -> None:
    server = Loopback(chat(["a note", REPLY]))
    with server, OpenAIBackend("m", base_url=f"{server.url}/v1") as backend:
        reading = Reader(backend, output=PLANET).read("Which?", "text")
    assert reading.answer == REPLY
    memory, answer = [request.body for request in server.requests if "messages" in request.body]
    assert "response_format" not in memory
    expected = {"type": "json_schema", "json_schema": {"name": "Planet", "schema": PLANET}}
    assert answer["response_format"] == expected


@pytest.mark.parametrize(("title", "name"), [(None, "answer"), ("Größe (m)", "Gr_e_m_"), ("x" * 80, "x" * 64)])
def test_the_name_of_a_schema_is_one_that_servers_take(title: str | None, name: str) -> None:
    server, backend = endpoint([REPLY])
    with server:
        backend.complete(with_schema({**PLANET, "title": title}))
    assert server.requests[0].body["response_format"]["json_schema"]["name"] == name


def test_openai_itself_gets_the_strict_form() -> None:
    backend = OpenAIBackend("gpt-5", api_key=KEY)
    sent = backend._body(with_schema(Planet.model_json_schema()))["response_format"]["json_schema"]
    assert sent["strict"] is True
    assert sent["schema"]["required"] == ["moons", "largest"]
    free = backend._body(with_schema(Free.model_json_schema()))["response_format"]["json_schema"]
    assert "strict" not in free
    assert free["schema"] == Free.model_json_schema()


def test_the_strict_form_of_a_schema() -> None:
    strict = strict_schema(Planet.model_json_schema())
    assert (strict["required"], strict["additionalProperties"]) == (["moons", "largest"], False)
    moon = strict["$defs"]["Moon"]
    assert (moon["required"], moon["additionalProperties"]) == (["name", "radius"], False)
    assert "default" not in strict["properties"]["largest"]
    assert strict["properties"]["moons"]["items"] == {"$ref": "#/$defs/Moon"}
    assert strict_schema(strict) == strict


@pytest.mark.parametrize(
    "schema",
    [
        Open.model_json_schema(),
        Free.model_json_schema(),
        {"type": "object"},
        {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "object"}}}},
        {"type": "object", "properties": {"x": {}}, "patternProperties": {"a": {}}},
        {"type": "object", "properties": {"x": {"anyOf": [{"type": "object"}, {"type": "null"}]}}},
    ],
)
def test_objects_of_any_keys_have_no_strict_form(schema: Any) -> None:
    assert strict_schema(schema) is None


def test_a_key_that_is_named_like_a_keyword_is_a_key() -> None:
    schema = {"type": "object", "properties": {"default": {"type": "string"}, "items": {"type": "integer"}}}
    assert strict_schema(schema)["properties"] == schema["properties"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "'response_format' of type 'json_schema' is not supported with this model"),
        (400, "Invalid schema for response_format 'Planet': schema must have a 'type' key"),
        (422, "json_schema: Extra inputs are not permitted"),
        (400, "Failed to parse grammar"),
        (500, "JSON schema conversion failed"),
        (501, "structured outputs are not implemented"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_server_that_refuses_the_schema_is_a_usage_error_that_says_what_to_do(
    status: int, message: str, is_stream: bool
) -> None:
    server, backend = endpoint(lambda request: problem(status, message))
    with server, pytest.raises(UsageError, match="simplify output, or pass an answer_model") as caught:
        list(backend.stream(with_schema())) if is_stream else backend.complete(with_schema())
    assert message in str(caught.value)
    assert len(server.requests) == 1


def test_a_server_that_does_not_heed_the_schema_gives_an_answer_that_does_not_fit() -> None:
    server = Loopback(chat(["a note", "It is Jupiter."]))
    with (
        server,
        OpenAIBackend("m", base_url=f"{server.url}/v1") as backend,
        pytest.raises(BackendError, match="does not fit the schema of output: it is not JSON"),
    ):
        Reader(backend, output=PLANET).read("Which?", "text")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "System role not supported"),
        (400, "Only user and assistant roles are supported!"),
        (500, "Conversation roles must alternate user/assistant/user/assistant/..."),
        (400, "After the optional system message, conversation roles must alternate user and assistant roles"),
        (400, "No user query found in messages."),
    ],
)
def test_a_chat_template_that_refuses_the_roles_is_a_usage_error(status: int, message: str) -> None:
    server, backend = endpoint(lambda request: problem(status, message))
    system = Message(role="system", content="Be short.")
    with server, pytest.raises(UsageError, match="use prompts of one text, or without that role"):
        backend.complete(replace(ask("hello"), messages=(system, *ask("hello").messages)))


@pytest.mark.parametrize(
    ("status", "message"),
    [(500, "CUDA out of memory"), (400, "invalid temperature"), (429, "too many for json_schema")],
)
def test_other_failures_are_not_taken_for_these(status: int, message: str) -> None:
    server, backend = endpoint(lambda request: problem(status, message))
    with server, pytest.raises(BackendError):
        backend.complete(with_schema())


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    first: Annotated[Cat, Field(description="The cat that came first.")]


class Tree(BaseModel):
    name: str
    branches: list[Tree] = []


class Pair(BaseModel):
    pair: tuple[int, str]


def test_the_strict_form_has_only_what_openai_takes() -> None:
    strict = strict_schema(Owner.model_json_schema())
    assert strict["properties"]["pet"] == {
        "anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "title": "Pet",
    }, "no oneOf, no discriminator"
    assert strict["properties"]["first"] == {
        "anyOf": [{"$ref": "#/$defs/Cat"}],
        "description": "The cat that came first.",
    }, "a reference stands alone"
    assert strict_schema(strict) == strict
    assert strict_schema(Pair.model_json_schema()) is None
    assert strict_schema({"type": "object", "properties": {"x": {"allOf": [{"type": "string"}]}}}) is None


def test_openai_gets_a_class_that_refers_to_itself_as_an_object() -> None:
    schema = Output(Tree).schema
    assert "type" not in schema, "it is a reference"
    sent = OpenAIBackend("gpt-5", api_key=KEY)._body(with_schema(schema))["response_format"]["json_schema"]
    assert (sent["strict"], sent["name"]) == (True, "Tree")
    assert (sent["schema"]["type"], sent["schema"]["required"]) == ("object", ["name", "branches"])
    assert sent["schema"]["properties"]["branches"]["items"] == {"$ref": "#/$defs/Tree"}
    assert sent["schema"]["$defs"]["Tree"]["additionalProperties"] is False
