"""Inputs, messages and events as LangChain shows them."""

from __future__ import annotations

import sys
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.documents.base import Blob
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata

from memagent_integrations.errors import UsageError
from memagent_integrations.records import Reading, Step

STEP = "memagent_step"
"""Name of the custom event that follows each memory update."""


def question_and_context(value: Any, options: Mapping[str, Any]) -> tuple[str, Any]:
    """Question and context of an input."""
    if unknown := options.keys() - {"question"}:
        raise UsageError(f"the reader takes no {', '.join(sorted(unknown))}; bind arguments of the model to the model")
    question = options.get("question")
    if question is None:
        if not isinstance(value, Mapping) or not {"question", "context"} <= value.keys():
            raise UsageError(
                "the input has to be a dict with 'question' and 'context', or bind the question: reader.bind(question=...)"
            )
        question, value = value["question"], value["context"]
    if not isinstance(question, str):
        raise UsageError(f"the question has to be text, not {type(question).__name__}")
    return question, value


def text_of(document: Any) -> Any:
    """The document, a `Blob` as its text."""
    return map(Blob.as_string, [document]) if isinstance(document, Blob) else document  # read when it is asked for


def elided(value: Any) -> str:
    """What stands for a document in a trace."""
    if isinstance(value, str):
        return f"<{len(value):,} characters>"
    if isinstance(value, (Path, Blob)):
        return str(value if isinstance(value, Path) else value.source or "<Blob>")
    return f"<{type(value).__name__}" + (f" of {len(value):,}>" if isinstance(value, Sequence) else ">")


def step_event(step: Step) -> dict[str, Any]:
    """A step as the data of its custom event. A LangGraph node that this runs in gets it too."""
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
        except (RuntimeError, KeyError):  # there is no graph here, or it is not what called us
            return data
        write({STEP: data})
    return data


def message_fields(reading: Reading) -> dict[str, Any]:
    """Usage and metadata of the answer's message."""
    usage, steps = reading.new_usage, reading.steps
    metadata = {
        "model": reading.model,
        "chunks": sum(step.phase == "memory" for step in steps),
        "calls": sum(not step.reply.recorded for step in steps),
        "outcomes": dict(Tally(step.outcome for step in steps)),
        "cut": [step.index for step in steps if step.cut],
        "finish_reason": steps[-1].reply.finish_reason,
        "memory": reading.memory,
    }
    read, written = usage.prompt_tokens, usage.completion_tokens
    if read is None or written is None:
        return {"response_metadata": {"memagent": metadata}}
    total = UsageMetadata(input_tokens=read, output_tokens=written, total_tokens=read + written)
    if usage.cached_tokens is not None:
        total["input_token_details"] = {"cache_read": usage.cached_tokens}
    return {"response_metadata": {"memagent": metadata}, "usage_metadata": total}


def to_message(reading: Reading) -> AIMessage:
    """The answer as a message."""
    return AIMessage(content=reading.answer or "", **message_fields(reading))


def to_chunk(event: str | Reading) -> AIMessageChunk:
    """A piece of the answer, or its end, as a chunk of a message."""
    if isinstance(event, str):
        return AIMessageChunk(content=event)
    return AIMessageChunk(content="", chunk_position="last", **message_fields(event))


def merge_input(pieces: list[Any]) -> Any:
    """The input that a step before has streamed in pieces: text of the question joined, parts of the context in a row."""
    question, contexts = "", []
    for piece in pieces:
        if not isinstance(piece, Mapping) or not isinstance(piece.get("question", ""), str):
            raise UsageError(
                "a stream to read has to bring dicts with 'question' (text) and 'context'; or bind the question: reader.bind(question=...)"
            )
        whole = "context" in piece and "question" in piece
        if whole and question not in ("", piece["question"]):
            raise UsageError("the stream brings more than one question")
        question = piece["question"] if whole else question + piece.get("question", "")
        contexts += [piece["context"]] if "context" in piece else []
    if not contexts:
        raise UsageError("the stream brings no context to read")
    return {"question": question, "context": contexts[0] if len(contexts) == 1 else contexts}
