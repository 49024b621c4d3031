"""JSON Schemas as the protocol of OpenAI carries them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memagent_integrations.checks import drop_none

_SCHEMAS = ("items", "anyOf", "allOf", "oneOf")  # keywords of JSON Schema whose values are schemas
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
_NEVER_STRICT = {  # OpenAI refuses schemas with these in the strict form
    "allOf", "not", "if", "then", "else", "prefixItems", "contains", "patternProperties", "dependentRequired",
    "dependentSchemas",
}  # fmt: skip
_DROPPED = ("default", "discriminator")  # a key that is always there needs no default; OpenAI refuses both


def response_format(schema: Mapping[str, Any], *, hosted: bool) -> dict[str, Any]:
    """Return the parameter that makes a server keep its reply to a schema.

    `hosted` says that the server is OpenAI's, which does that surely for schemas in its strict form alone. Other
    servers keep to any.
    """
    whole = _with_its_object(schema)
    strict = strict_schema(whole) if hosted else None
    name = re.sub(r"[^a-zA-Z0-9_-]+", "_", str(whole.get("title") or "answer"))[:64]
    return {
        "type": "json_schema",
        "json_schema": drop_none(name=name, schema=strict or dict(schema), strict=True if strict else None),
    }


def strict_schema(schema: Any) -> Any:
    """Return a JSON Schema in OpenAI's strict form: every object has all of its keys and no others.

    None: it has no such form, because an object of it may have any keys, or for a keyword that OpenAI does not take.
    """
    if isinstance(schema, list):
        items = [strict_schema(item) for item in schema]
        return None if any(item is None for item in items) else items
    if not isinstance(schema, Mapping):
        return schema
    if schema.keys() & _NEVER_STRICT or schema.get("additionalProperties") not in (None, False):
        return None
    properties = schema.get("properties")
    if schema.get("type") == "object" and not properties:
        return None
    strict: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            value = {key: strict_schema(part) for key, part in value.items()}
            if any(part is None for part in value.values()):
                return None
        elif name in _SCHEMAS:
            value = strict_schema(value)
            if value is None:
                return None
        if name not in _DROPPED:
            strict["anyOf" if name == "oneOf" else name] = value
    if "$ref" in strict and len(strict) > 1:  # which OpenAI takes only alone
        if "anyOf" in strict:
            return None
        strict["anyOf"] = [{"$ref": strict.pop("$ref")}]
    if properties:
        strict |= {"required": list(properties), "additionalProperties": False}
    return strict


def _with_its_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that is a reference to one of its definitions, as a class that refers to itself has, as that."""
    place, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
    target = schema.get(place, {}).get(name) if place in _SCHEMAS_BY_NAME else None
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}} if target else schema
