from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, model_validator
from typing_extensions import TypedDict

from memagent_integrations import BackendError, UsageError
from memagent_integrations.outputs import Output


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Rent(BaseModel):
    """When rent is due."""

    day: int = Field(ge=1, le=31)
    amount: float | None = None
    colour: Colour = Colour.RED
    notes: list[str] = []


class Node(BaseModel):
    name: str
    children: list[Node] = []


@dataclasses.dataclass
class Due:
    day: int


class DueDict(TypedDict):
    day: int


SCHEMA: dict[str, Any] = {
    "title": "Rent",
    "type": "object",
    "properties": {
        "day": {"type": "integer"},
        "colour": {"enum": ["red", "blue"]},
        "tenants": {"type": "array", "items": {"$ref": "#/$defs/Tenant"}},
        "note": {"type": ["string", "null"]},
        "paid": {"anyOf": [{"type": "boolean"}, {"const": "unknown"}]},
    },
    "required": ["day"],
    "additionalProperties": False,
    "$defs": {"Tenant": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}


def test_a_model_class_gives_its_schema_and_its_objects() -> None:
    output = Output(Rent)
    assert output.schema == Rent.model_json_schema()
    assert output.parse('{"day": 3, "colour": "blue"}') == Rent(day=3, colour=Colour.BLUE)


def test_a_class_that_refers_to_itself_has_a_schema() -> None:
    assert Output(Node).parse('{"name": "a", "children": [{"name": "b"}]}').children[0].name == "b"
    schema = Output(Node).schema
    assert Output(schema).parse('{"name": "a"}') == {"name": "a"}
    with pytest.raises(BackendError, match=r"children\[0\] lacks 'name'"):
        Output(schema).parse('{"name": "a", "children": [{}]}')


@pytest.mark.parametrize(("spec", "expected"), [(Due, Due(day=3)), (DueDict, {"day": 3})])
def test_a_dataclass_and_a_typed_dict_are_as_good_as_a_model(spec: Any, expected: Any) -> None:
    assert Output(spec).parse('{"day": 3}') == expected
    with pytest.raises(BackendError, match="day"):
        Output(spec).parse("{}")


@pytest.mark.parametrize(
    "text", ['{"day": 3}', ' {"day": 3.0}\n', '{"day": 3, "colour": "red", "tenants": [{"name": "Ann"}], "note": null}']
)
def test_a_schema_gives_the_dict_that_fits(text: str) -> None:
    assert Output(SCHEMA).parse(text)["day"] == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is not JSON"),
        ("on the 3rd", "it is not JSON"),
        ('{"day": 3', "it is not JSON"),
        ("[]", "the answer is no object"),
        ("{}", "the answer lacks 'day'"),
        ('{"day": "3"}', "the answer.day is no integer"),
        ('{"day": true}', "the answer.day is no integer"),
        ('{"day": 3.5}', "the answer.day is no integer"),
        ('{"day": 3, "colour": "green"}', "the answer.colour is none of"),
        ('{"day": 3, "tenants": [{"name": "Ann"}, {}]}', r"the answer.tenants\[1\] lacks 'name'"),
        ('{"day": 3, "note": 4}', "the answer.note is no string or null"),
        ('{"day": 3, "paid": "maybe"}', "the answer.paid is none of what it may be"),
        ('{"day": 3, "month": 5}', "the answer has 'month', which the schema does not"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_an_answer_that_does_not_fit_a_schema_is_a_backend_error_that_names_the_place(text: str, problem: str) -> None:
    with pytest.raises(BackendError, match=f"does not fit the schema of output: {problem}"):
        Output(SCHEMA).parse(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("x", "JSON"), ('{"day": 32}', "day: Input should be less than"), ("{}", "day: Field required")],
)
def test_an_answer_that_does_not_fit_a_class_is_a_backend_error(text: str, problem: str) -> None:
    with pytest.raises(BackendError, match=problem):
        Output(Rent).parse(text)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (int, "a pydantic model class or a JSON Schema"),
        (list[int], "a pydantic model class or a JSON Schema"),
        ("Rent", "a pydantic model class or a JSON Schema"),
        (Rent(day=3), "a pydantic model class or a JSON Schema"),
        ({}, "the schema of an object"),
        ({"type": "string"}, "the schema of an object"),
        ({"type": "array", "items": {}}, "the schema of an object"),
        ({"type": "object", "properties": ["day"]}, "the schema of an object"),
        ({"$ref": "#/$defs/Missing"}, "the schema of an object"),
        ({"$ref": "#"}, "the schema of an object"),
        ({"type": "object", "properties": {"x": {1, 2}}}, "output has no JSON Schema"),
    ],
)
def test_what_no_answer_can_be(spec: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Output(spec)


class Anything(BaseModel):
    kind: Literal["a", "b"]
    number: int
    share: float
    text: str | None
    flags: list[bool]
    by_name: dict[str, int]
    children: list[Anything]


VALUES = st.deferred(
    lambda: st.builds(
        Anything,
        kind=st.sampled_from(["a", "b"]),
        number=st.integers(),
        share=st.floats(allow_nan=False, allow_infinity=False),
        text=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
        flags=st.lists(st.booleans()),
        by_name=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers()),
        children=st.lists(VALUES, max_size=2),
    )
)


@pytest.mark.fuzz
@given(VALUES)
def test_whatever_fits_a_class_fits_its_schema(value: Anything) -> None:
    assert Output(Anything.model_json_schema()).parse(value.model_dump_json()) == value.model_dump()


NESTED = {"type": "object", "properties": {"next": {"$ref": "#"}, "any": {}}}


@pytest.mark.parametrize("depth", [100, 900])
@pytest.mark.parametrize("way", ['{"next": %s}', '{"any": [%s]}'])
def test_an_answer_that_is_nested_deeply_fits_or_is_a_backend_error(depth: int, way: str) -> None:
    opening, closing = way.split("%s")
    text = opening * depth + "{}" + closing * depth
    if depth == 100:
        assert Output(NESTED).parse(text)
        return
    with pytest.raises(BackendError, match=r"nested too deeply|recursion depth"):
        Output(NESTED).parse(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_of_json_is_refused_by_schemas_and_classes(number: str) -> None:
    class Share(BaseModel):
        share: float

    for spec in (Share, Share.model_json_schema()):
        with pytest.raises(BackendError, match="is no number of JSON"):
            Output(spec).parse(f'{{"share": {number}}}')
        with pytest.raises(BackendError, match="share"):
            Output(spec).parse(f'{{"share": "{number} apples"}}')


def test_an_answer_on_which_a_validator_fails_is_a_backend_error() -> None:
    class Broken(BaseModel):
        day: int

        @model_validator(mode="before")
        @classmethod
        def look(cls, values: Any) -> Any:
            return {"day": values["month"]}

    assert Output(Broken).parse('{"month": 3}') == Broken.model_construct(day=3)
    with pytest.raises(BackendError, match="does not fit the schema of output: KeyError: 'month'"):
        Output(Broken).parse('{"day": 3}')


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"enum": 5}, "'enum' has to be a list of values"),
        ({"type": "date"}, "'type' is one of object, array"),
        ({"type": [{}]}, "'type' is one of object, array"),
        ({"anyOf": {}}, "'anyOf' has to be a list of schemas"),
        ({"allOf": [3]}, "3 stands where a schema has to"),
        ({"required": "day"}, "'required' has to be a list of keys"),
        ({"type": "object", "properties": []}, "'properties' has to be an object of schemas"),
        ({"type": "object", "properties": {"y": {"items": {"enum": 5}}}}, "'enum' has to be a list"),
        ({"items": 5}, "'items' has to be a schema"),
        ({"$ref": "#/$defs/Missing"}, "'#/\\$defs/Missing' refers to what is not in it"),
        ({"$ref": "https://example.org/day.json"}, "refers to what is not in it"),
        (None, "None stands where a schema has to"),
    ],
)
def test_a_schema_by_which_no_answer_can_be_checked_is_refused_at_once(part: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Output({"type": "object", "properties": {"x": part}})


@pytest.mark.parametrize(
    ("part", "fits", "not_fitting"),
    [
        ({"enum": [1]}, "1", "true"),
        ({"const": False}, "false", "0"),
        ({"$ref": "#/$defs/A%20B"}, "1", '"a"'),
        ({"$ref": "#/$defs/A~1B/anyOf/1"}, "null", "1"),
        ({"type": "integer", "minimum": 5, "unheard": {"of": "it"}}, "4", "4.5"),
    ],
)
def test_values_and_references_are_those_of_json(part: Any, fits: str, not_fitting: str) -> None:
    definitions = {"A B": {"type": "integer"}, "A/B": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    output = Output({"type": "object", "properties": {"x": part}, "$defs": definitions})
    assert "x" in output.parse(f'{{"x": {fits}}}')
    with pytest.raises(BackendError, match=r"the answer\.x"):
        output.parse(f'{{"x": {not_fitting}}}')


def test_a_key_that_a_schema_rules_out_is_refused() -> None:
    with pytest.raises(BackendError, match=r"the answer\.x is not in the schema"):
        Output({"type": "object", "properties": {"x": False}}).parse('{"x": 1}')
