"""Conversions from the package's records to LangChain's messages and events."""

from __future__ import annotations

import sys
from collections import Counter as Tally
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata

from memagent_integrations.records import Reading, Step, Usage
from memagent_integrations.sanitize import encodable

STEP = "memagent_step"
"""Name of the custom event that follows each memory update."""


def step_event(step: Step) -> dict[str, Any]:
    """Return the data of a step's custom event; inside a LangGraph node, also write it to the node's stream.

    That stream is output which the caller asks for. The event is seen by tracers, whose handlers are told what
    `trace_inputs` allows.
    """
    span = step.span
    data = {
        "step": step.index,
        "memory": step.memory,
        "outcome": step.outcome,
        "cut": step.cut,
        "seconds": step.reply.seconds,
        "chunk": {"start": span.start, "end": span.end, "tokens": span.tokens} if span else None,
    }
    if langgraph := sys.modules.get("langgraph.config"):
        try:
            write = langgraph.get_stream_writer()
        except (RuntimeError, KeyError):  # not called from within a graph
            return data
        write({STEP: data})
    return data


def usage_metadata(usage: Usage) -> UsageMetadata | None:
    """Return the tokens as LangChain has them; None if they are not known."""
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    if prompt is None or completion is None:
        return None
    total = UsageMetadata(input_tokens=prompt, output_tokens=completion, total_tokens=prompt + completion)
    if usage.cached_tokens is not None:
        total["input_token_details"] = {"cache_read": usage.cached_tokens}
    return total


def message_fields(reading: Reading, model: str | None = None) -> dict[str, Any]:
    """Return the usage and the metadata of a message about this reading; `model` is the name of the one that answered.

    The model's own name is that which its server says, else the one in the name of the backend.
    """
    steps = reading.steps
    name = model or reading.answer_model or reading.model
    metadata = {
        "model": name,
        "chunks": reading.sections,
        "calls": sum(step.reply.tries for step in steps if not step.reply.recorded),
        "outcomes": dict(Tally(step.outcome for step in steps)),
        "cut": [step.index for step in steps if step.cut],
        "finish_reason": steps[-1].reply.finish_reason if steps else None,
        "memory": reading.memory,
        "lost_sections": [asdict(span) for span in reading.lost_sections],
        "warnings": list(reading.warnings),
        "citations": [asdict(citation) for citation in reading.citations],
    }
    if reading.answer_model:
        metadata["memory_model"] = reading.model
    if answered := Tally(step.reply.model for step in steps if step.reply.model):
        metadata["models"] = dict(answered)  # by the names that their servers give them
    own = (steps[-1].reply.model if steps else None) or _own_name(name)
    names = {"model_name": own} if own else {}
    return {"response_metadata": names | {"memagent": metadata}, "usage_metadata": usage_metadata(reading.new_usage)}


def _own_name(backend: str) -> str | None:
    """Return the model's own name in a backend's: "KIND:NAME", or of a LangChain model "langchain:CLASS:NAME"."""
    parts = backend.split(":", 2 if backend.startswith("langchain:") else 1)
    return parts[-1] if len(parts) == (3 if parts[0] == "langchain" else 2) else None


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A reading, the name of the model that answered, and the object that a structured answer is.

    `message_id` is that of the model's own message, if a call made it: who has seen that one knows this one by it.
    """

    reading: Reading
    model: str
    parsed: Any = None
    message_id: str | None = None

    @cached_property
    def message(self) -> AIMessage:
        """The answer as a message, which can be written as JSON."""
        return AIMessage(content=encodable(self.reading.answer or ""), **self._fields)

    @property
    def last_chunk(self) -> AIMessageChunk:
        """The empty chunk that ends a stream of the answer: usage and details."""
        return AIMessageChunk(content="", chunk_position="last", **self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        additional = {} if self.parsed is None else {"additional_kwargs": {"parsed": self.parsed}}
        fields: dict[str, Any] = encodable(message_fields(self.reading, self.model))
        return {"id": self.message_id} | additional | fields
