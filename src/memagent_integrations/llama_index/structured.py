"""Structured answers by LlamaIndex's own machinery: function calls, JSON modes, or its text completion program."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from typing import Any

from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from pydantic import BaseModel, ConfigDict, create_model

from memagent_integrations.llama_index.llms import changed
from memagent_integrations.llama_index.replies import LLMReply
from memagent_integrations.records import Prompt


def output_of(llm: LLM, prompt: Prompt) -> type[BaseModel] | None:
    """Return the class of the object that the reply to a prompt has to be, None if that is a text.

    It is the class of a schema that the prompt has, else for an answer that of a structured LLM.
    """
    if prompt.schema is not None:
        return _class_of(json.dumps(prompt.schema))
    return llm.output_cls if isinstance(llm, StructuredLLM) and prompt.phase == "answer" else None


def writing(llm: LLM, output: type[BaseModel], reply: LLMReply) -> LLM:
    """Return the LLM as one whose answers are such objects; the usage of its calls is noted in the reply."""
    callbacks = copy(llm.callback_manager)
    callbacks.set_handlers([*callbacks.handlers, _Usage(reply)])
    return StructuredLLM(llm=changed(llm, callback_manager=callbacks), output_cls=output)


class _Usage(BaseCallbackHandler):
    """Notes the responses behind an object: a `StructuredLLM` returns the object alone."""

    def __init__(self, reply: LLMReply) -> None:
        super().__init__([], [])
        self._reply = reply

    def on_event_start(
        self, event_type: CBEventType, payload: Any = None, event_id: str = "", parent_id: str = "", **_: Any
    ) -> str:
        """Do nothing."""
        return event_id

    def on_event_end(self, event_type: CBEventType, payload: Any = None, event_id: str = "", **_: Any) -> None:
        """Note the response of a call."""
        response = (payload or {}).get(EventPayload.RESPONSE) or (payload or {}).get(EventPayload.COMPLETION)
        if event_type == CBEventType.LLM and response is not None:
            self._reply.add_details(response)

    def start_trace(self, trace_id: str | None = None) -> None:
        """Do nothing."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Do nothing."""


class _Object(BaseModel):
    """Any object: whether it fits its schema is checked where the answer is used."""

    model_config = ConfigDict(extra="allow")


@lru_cache(maxsize=64)
def _class_of(schema: str) -> type[BaseModel]:
    """Return a class with this JSON Schema, for LlamaIndex, which asks the class for it."""
    fields: Mapping[str, Any] = json.loads(schema)
    title = re.sub(r"\W+", "_", str(fields.get("title") or "Answer"))[:64]  # it becomes the name of a function

    def model_json_schema(cls: type[BaseModel], *_: Any, **__: Any) -> dict[str, Any]:
        return {**json.loads(schema), "title": title}

    output = create_model(title, __base__=_Object, __doc__=str(fields.get("description") or ""))
    output.model_json_schema = classmethod(model_json_schema)  # type: ignore[method-assign, assignment]
    return output
