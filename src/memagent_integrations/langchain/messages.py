"""Conversions between the package's records and LangChain's inputs, messages and events."""

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
    """Return the question and the context of an input.

    Raises:
        UsageError: the input lacks one of them, or there are other options than the question.
    """
    if unknown := options.keys() - {"question"}:
        raise UsageError(f"the reader takes no {', '.join(sorted(unknown))}; bind arguments of the model to the model")
    question = options.get("question")
    if question is None:
        if not isinstance(value, Mapping) or not {"question", "context"} <= value.keys():
            raise UsageError(
                "the input has to be a dict with 'question' and 'context', "
                "or bind the question: reader.bind(question=...)"
            )
        question, value = value["question"], value["context"]
    if not isinstance(question, str):
        raise UsageError(f"the question has to be text, not {type(question).__name__}")
    return question, value


def text_of(document: Any) -> Any:
    """Return the document; for a `Blob` an iterator of its text, which is read only when it is needed."""
    return map(Blob.as_string, [document]) if isinstance(document, Blob) else document


def elided(value: Any) -> str:
    """Return a short description that stands for a document in traces."""
    if isinstance(value, str):
        return f"<{len(value):,} characters>"
    if isinstance(value, (Path, Blob)):
        return str(value if isinstance(value, Path) else value.source or "<Blob>")
    return f"<{type(value).__name__}" + (f" of {len(value):,}>" if isinstance(value, Sequence) else ">")


def step_event(step: Step) -> dict[str, Any]:
    """Return the data of a step's custom event; inside a LangGraph node, also write it to the node's stream."""
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


def message_fields(reading: Reading) -> dict[str, Any]:
    """Return the usage and the metadata of a message about this reading."""
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
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    if prompt is None or completion is None:
        return {"response_metadata": {"memagent": metadata}}
    total = UsageMetadata(input_tokens=prompt, output_tokens=completion, total_tokens=prompt + completion)
    if usage.cached_tokens is not None:
        total["input_token_details"] = {"cache_read": usage.cached_tokens}
    return {"response_metadata": {"memagent": metadata}, "usage_metadata": total}


def to_message(reading: Reading) -> AIMessage:
    """Return the answer as a message."""
    return AIMessage(content=reading.answer or "", **message_fields(reading))


def to_chunk(event: str | Reading) -> AIMessageChunk:
    """Return a piece of the answer as a message chunk; for the reading, the empty last chunk with usage and details."""
    if isinstance(event, str):
        return AIMessageChunk(content=event)
    return AIMessageChunk(content="", chunk_position="last", **message_fields(event))


def merge_input(pieces: list[Any]) -> Any:
    """Return the input that the preceding runnable streamed: the question's texts joined, the context's parts listed.

    Raises:
        UsageError: the pieces are not such dicts, hold more than one question, or no context.
    """
    question, contexts = "", []
    for piece in pieces:
        if not isinstance(piece, Mapping) or not isinstance(piece.get("question", ""), str):
            raise UsageError(
                "a stream to read has to bring dicts with 'question' (text) and 'context'; "
                "or bind the question: reader.bind(question=...)"
            )
        is_whole = "context" in piece and "question" in piece
        if is_whole and question not in ("", piece["question"]):
            raise UsageError("the stream brings more than one question")
        question = piece["question"] if is_whole else question + piece.get("question", "")
        if "context" in piece:
            contexts.append(piece["context"])
    if not contexts:
        raise UsageError("the stream brings no context to read")
    return {"question": question, "context": contexts[0] if len(contexts) == 1 else contexts}
