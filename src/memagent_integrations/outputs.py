"""Structured answers: the JSON Schema that an answer has to fit, and the check that it does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import unquote

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


_OF_SCHEMAS = ("anyOf", "oneOf", "allOf")
_OF_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
_FORMS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(_OF_SCHEMAS, ((list,), "a list of schemas")),
    **dict.fromkeys(_OF_SCHEMAS_BY_NAME, ((dict,), "an object of schemas")),
    "required": ((list,), "a list of keys"),
    "enum": ((list,), "a list of values"),
    "items": ((dict, bool, list), "a schema"),
    "additionalProperties": ((dict, bool), "a schema"),
    "$ref": ((str,), "a text"),
}
"""What the keywords that are checked have for a value."""


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
        if not self._adapter:
            _check_schema(self.schema)

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
        return self._object_in(text) if self._adapter else self._value_in(text)

    def _object_in(self, text: str) -> Any:
        assert self._adapter
        try:
            if _MAY_BE_NO_NUMBER.search(text):  # pydantic takes NaN and its like for numbers
                json.loads(text, parse_constant=_refuse)
            return self._adapter.validate_json(text)
        except ValidationError as error:
            raise _unfit(files.first_error(error)) from error
        except (ValueError, RecursionError) as error:
            raise _unfit(f"it is not JSON ({error})") from error
        except Exception as error:  # a validator of the caller's class
            raise _unfit(f"{type(error).__name__}: {error}") from error

    def _value_in(self, text: str) -> Any:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise _unfit(f"it is not JSON ({error})") from error
        try:
            problem = _problem(value, self.schema, self.schema, "the answer")
        except RecursionError as error:
            raise _unfit("it is nested too deeply") from error
        if problem:
            raise _unfit(problem)
        return value


def _is_record(spec: Any) -> bool:
    is_class = isinstance(spec, type)
    return is_class and (issubclass(spec, BaseModel) or is_dataclass(spec) or hasattr(spec, "__required_keys__"))


_MAY_BE_NO_NUMBER = re.compile("NaN|Infinity")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _check_schema(root: Mapping[str, Any]) -> None:
    """Check those keywords of a schema by which answers are checked.

    Raises:
        UsageError: one has a value of another form, or a reference leads nowhere.
    """
    waiting: list[Any] = [root]
    while waiting:  # not by recursion: it may be nested deeply
        schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise UsageError(f"output is no JSON Schema: {_shown(schema)} stands where a schema has to")
        for name, (kinds, form) in _FORMS.items():
            if name in schema and not isinstance(schema[name], kinds):
                raise UsageError(f"output is no JSON Schema: {name!r} has to be {form}, not {_shown(schema[name])}")
        types = schema.get("type", [])
        if not all(kind in _TYPES for kind in map(str, types if isinstance(types, list) else [types])):
            raise UsageError(f"output is no JSON Schema: 'type' is one of {', '.join(_TYPES)}, not {_shown(types)}")
        if "$ref" in schema and _referred(schema["$ref"], root) is None:
            raise UsageError(f"output is no whole JSON Schema: {schema['$ref']!r} refers to what is not in it")
        waiting += [part for name in _OF_SCHEMAS for part in schema.get(name, ())]
        waiting += [part for name in _OF_SCHEMAS_BY_NAME for part in schema.get(name, {}).values()]
        waiting += [part for part in map(schema.get, ("items", "additionalProperties")) if isinstance(part, dict)]


def _unfit(problem: str) -> BackendError:
    return BackendError(f"the model's answer does not fit the schema of output: {problem}")


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a chain of references within `root` leads to; {} where it leads nowhere."""
    for _ in range(100):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = _referred(reference, root)
    return schema if isinstance(schema, Mapping) else {}


def _referred(reference: str, root: Any) -> Any:
    """Return what a reference leads to within `root`; None where it leads nowhere."""
    if reference[:2] not in ("#", "#/"):
        return None
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _problem(value: Any, schema: Any, root: Mapping[str, Any], where: str) -> str | None:
    """Return the first thing that is wrong with a value, None if it fits."""
    if schema is False:
        return f"{where} is not in the schema"
    schema = _resolved(schema, root)
    for name in ("anyOf", "oneOf"):
        if name in schema and all(_problem(value, option, root, where) for option in schema[name]):
            return f"{where} is none of what it may be"
    for part in schema.get("allOf", ()):
        if problem := _problem(value, part, root, where):
            return problem
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and not any(_is_same(value, one) for one in allowed):
        return f"{where} is none of {_shown(allowed)}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_of(value, kind) for kind in kinds):
        return f"{where} is no {' or '.join(kinds)}"
    if isinstance(value, dict):
        return _problem_of_object(value, schema, root, where)
    if isinstance(value, list):
        items = schema.get("items", {})
        problems = (_problem(item, items, root, f"{where}[{n}]") for n, item in enumerate(value))
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


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)  # to Python, True is 1


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # which Python takes for a number
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
