"""What an LLM of LlamaIndex is: the settings that decide its replies, and the secrets that nobody may see."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from pydantic import BaseModel

from memagent_integrations.redaction import is_secret, secrets_in

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_NO_SETTINGS = ("callback_manager", "callbacks", "tokenizer", "rate_limiter", "verbose")


def settings_of(llm: LLM) -> dict[str, Any]:
    """Return what decides the LLM's replies, as JSON: its plain settings and its templates, without secrets.

    Objects are left out (counters, callbacks, tokenizers, clients): they have no value that another process would
    find again. A setting that is empty is left out too.
    """
    names = (name for name, field in type(llm).model_fields.items() if not field.exclude and name not in _NO_SETTINGS)
    fields = {name: getattr(llm, name) for name in names}
    settings: dict[str, Any] = _plain(fields) or {}
    for name in ("messages_to_prompt", "completion_to_prompt"):
        template = getattr(llm, name)
        if qualified := getattr(template, "__qualname__", ""):
            settings[name] = f"{getattr(template, '__module__', '')}.{qualified}"
    if wrapper := llm.query_wrapper_prompt:
        settings["query_wrapper_prompt"] = wrapper.get_template()
    if isinstance(llm, StructuredLLM):
        settings["output"] = llm.output_cls.model_json_schema()
    return settings | {"class": llm.class_name()}


def secrets_of(llm: LLM) -> list[str]:
    """Return the keys and passwords that the LLM holds."""
    if isinstance(llm, StructuredLLM):
        return secrets_of(llm.llm)
    return secrets_in({name: getattr(llm, name) for name in type(llm).model_fields})


def _plain(value: Any) -> Any:
    """Return the value as JSON, None if it is not plain; of a mapping and of an object with fields what is plain."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, LLM):
        return settings_of(value)
    if isinstance(value, BaseModel):
        return _plain({name: getattr(value, name) for name in type(value).model_fields})
    if isinstance(value, Mapping):
        named = {str(name): _plain(item) for name, item in value.items() if not is_secret(str(name))}
        return {name: item for name, item in named.items() if item not in _EMPTY} or None
    if isinstance(value, (list, tuple)):  # messages in a list are a history
        items = [None if isinstance(item, BaseModel) else _plain(item) for item in value]
        return None if None in items else items
    return value if isinstance(value, (str, int, float)) else None
