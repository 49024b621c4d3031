"""Structured answers: the JSON Schema that an answer has to fit, and the check that it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from memagent_integrations import files
from memagent_integrations.errors import BackendError, UsageError

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class Output:
    """What an answer has to be: an instance of a pydantic model class, or an object of a JSON Schema.

    A dataclass or a `TypedDict` is as good as a model class. Answers are checked by the class. Without one, a schema's
    types, required keys, allowed values and references are checked, and no other keyword.

    Raises:
        UsageError: it is neither such a class nor a schema of an object.
    """

    spec: type[Any] | Mapping[str, Any]

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec}  # a type adapter cannot be pickled

    def __post_init__(self) -> None:
        if not isinstance(self.spec, Mapping) and not _is_record(self.spec):
            raise UsageError(
                f"output has to be a pydantic model class or a JSON Schema (a dict), not {_shown(self.spec)}; "
                "put a single value into a field of a model"
            )
        root = _resolved(self.schema, self.schema)
        if root.get("type") != "object" or not isinstance(root.get("properties", {}), Mapping):
            raise UsageError(
                f"output has to be the schema of an object, with 'type': 'object' and 'properties', not {_shown(root)}"
            )

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema."""
        try:
            if self._adapter:
                return self._adapter.json_schema()
            schema: dict[str, Any] = json.loads(json.dumps(self.spec, allow_nan=False))
            return schema
        except (PydanticUserError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"output has no JSON Schema: {error}") from error

    @cached_property
    def _adapter(self) -> TypeAdapter[Any] | None:
        return None if isinstance(self.spec, Mapping) else TypeAdapter(self.spec)

    def parse(self, text: str) -> Any:
        """Return the object that an answer is: an instance of the class, or a dict for a JSON Schema.

        Raises:
            BackendError: the answer does not fit.
        """
        try:
            if self._adapter:
                return self._adapter.validate_json(text)
            value = json.loads(text)
        except ValidationError as error:
            raise _unfit(files.first_error(error)) from error
        except (ValueError, RecursionError) as error:
            raise _unfit(f"it is not JSON ({error})") from error
        if problem := _problem(value, self.schema, self.schema, "the answer"):
            raise _unfit(problem)
        return value


def _is_record(spec: Any) -> bool:
    is_class = isinstance(spec, type)
    return is_class and (issubclass(spec, BaseModel) or is_dataclass(spec) or hasattr(spec, "__required_keys__"))


def _unfit(problem: str) -> BackendError:
    return BackendError(f"the model's answer does not fit the schema of output: {problem}")


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a chain of references within `root` leads to; {} where it leads nowhere."""
    for _ in range(100):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for name in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(name.replace("~1", "/").replace("~0", "~"), {}) if isinstance(schema, Mapping) else {}
    return schema if isinstance(schema, Mapping) else {}


def _problem(value: Any, schema: Any, root: Mapping[str, Any], where: str) -> str | None:
    """Return the first thing that is wrong with a value, None if it fits."""
    schema = _resolved(schema, root)
    for name in ("anyOf", "oneOf"):
        if name in schema and all(_problem(value, option, root, where) for option in schema[name]):
            return f"{where} is none of what it may be"
    for part in schema.get("allOf", ()):
        if problem := _problem(value, part, root, where):
            return problem
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and value not in allowed:
        return f"{where} is none of {_shown(allowed)}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_of(value, kind) for kind in kinds):
        return f"{where} is no {' or '.join(kinds)}"
    if isinstance(value, dict):
        return _problem_of_object(value, schema, root, where)
    if isinstance(value, list):
        problems = (_problem(item, schema.get("items", {}), root, f"{where}[{n}]") for n, item in enumerate(value))
        return next(filter(None, problems), None)
    return None


def _problem_of_object(
    value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], where: str
) -> str | None:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            return f"{where} lacks {name!r}"
    for name, item in value.items():
        if name not in properties and others is False and "patternProperties" not in schema:
            return f"{where} has {name!r}, which the schema does not"
        if problem := _problem(item, properties.get(name, others), root, f"{where}.{name}"):
            return problem
    return None


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # which Python takes for a number
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
