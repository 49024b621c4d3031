"""JSON Schemas as the protocol of OpenAI carries them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memagent_integrations.checks import drop_none

_SCHEMAS = ("items", "anyOf", "allOf", "oneOf")  # keywords of JSON Schema whose values are schemas
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")


def response_format(schema: Mapping[str, Any], *, hosted: bool) -> dict[str, Any]:
    """Return the parameter that makes a server keep its reply to a schema.

    `hosted` says that the server is OpenAI's, which does that surely for schemas in its strict form alone. Other
    servers keep to any.
    """
    strict = strict_schema(schema) if hosted else None
    name = re.sub(r"[^a-zA-Z0-9_-]+", "_", str(schema.get("title") or "answer"))[:64]
    return {
        "type": "json_schema",
        "json_schema": drop_none(name=name, schema=strict or dict(schema), strict=True if strict else None),
    }


def strict_schema(schema: Any) -> Any:
    """Return a JSON Schema in OpenAI's strict form: every object has all of its keys and no others.

    None: it has no such form, because an object of it may have any keys.
    """
    if isinstance(schema, list):
        items = [strict_schema(item) for item in schema]
        return None if any(item is None for item in items) else items
    if not isinstance(schema, Mapping):
        return schema
    if "patternProperties" in schema or schema.get("additionalProperties") not in (None, False):
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
        if name != "default":  # a key that is always there needs none, and OpenAI refuses it
            strict[name] = value
    if properties:
        strict |= {"required": list(properties), "additionalProperties": False}
    return strict
