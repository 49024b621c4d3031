"""Replies built from LangChain's messages, in the forms in which the providers' classes deliver them."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata, add_usage
from pydantic import BaseModel, ValidationError

from memagent_integrations.backends.failures import redacted
from memagent_integrations.backends.replies import (
    REASON_FIELDS,
    ReplyBuilder,
    finish_reason,
    is_blocked,
    refused_argument,
    unusable_answer,
)
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.records import Reply, Usage

_NAMES = ("model_name", "model", "model_id")
_ANSWER_CODE = re.compile(r"langchain_core\.(?:language_models|messages|outputs)\b|langchain_(?!core|classic|text_)\w+")
"""Modules that take a server's answer apart: a lookup that fails in one of them is about the answer."""
_ANSWER_PARTS = re.compile(r"(?:Message|Generation)(?:Chunk)?|(?:Chat|LLM)Result")


class MessageReply(ReplyBuilder):
    """A reply put together from messages, or from chunks of one; `message_id` is what LangChain calls the message."""

    def __init__(self, schema: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.message_id: str | None = None
        self._schema = schema
        self._usage_metadata: UsageMetadata | None = None
        self._tools: set[str] = set()

    @contextmanager
    def call(self, name: str, *, secrets: Iterable[str] = ()) -> Iterator[None]:
        """Make a call in the block; see `ReplyBuilder.call`. An answer that LangChain cannot read is a failure too."""
        with redacted(secrets):
            try:
                with super().call(name, secrets=secrets):
                    yield
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                if refusal := refused_argument(error, name):
                    raise refusal from error
                if _is_about_the_answer(error):
                    raise unusable_answer(error, name, secrets) from error
                raise

    def add(self, part: Any) -> str:
        """Add a message, a chunk of one, or a text; with a schema what a structured call gave. Return its text.

        Raises:
            UsageError: it is nothing of that.
            BackendError: it is a message that nothing can be read from.
        """
        is_structured = self._schema is not None and isinstance(part, Mapping)
        return self.note(*(self._read_structured(part) if is_structured else self._read(part)))

    def reply(self) -> Reply:
        """Return the whole reply.

        Raises:
            BackendError: no part was added, or the model wrote no text, but called tools.
        """
        reply = super().reply()
        if self._tools and not reply.text.strip() and reply.finish_reason != "content_filter":
            names = ", ".join(sorted(self._tools))
            raise BackendError(f"the model wrote nothing, but called a tool ({names}); pass a model without tools")
        return reply

    def _read(self, part: Any) -> tuple[str, str]:
        """Return the text and the reasoning of a part; note what else it tells."""
        if not isinstance(part, (str, BaseMessage)):
            raise UsageError(f"a model answers with a message or a text; this one gave {type(part).__name__}")
        if isinstance(part, str):
            return part, ""
        try:
            blocks = [block for block in part.content_blocks if isinstance(block, Mapping)]
            text = str(part.text) or "".join(str(block.get("text") or "") for block in blocks if _is(block, "text"))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"{type(part).__name__} with {type(part.content).__name__} as content"
            raise BackendError(f"the model answered with a {what}, which has no text", retryable=True) from error
        if isinstance(part, AIMessage):
            self._note_fields(part, blocks)
        return text, "".join(str(block.get("reasoning") or "") for block in blocks if _is(block, "reasoning"))

    def _read_structured(self, result: Mapping[str, Any]) -> tuple[str, str]:
        """Return the JSON of the object "parsed", or what the message "raw" says if there is none."""
        parsed = result.get("parsed")
        text, reasoning = self._read(result.get("raw"))
        self._tools.clear()  # the object may come as the arguments of a tool
        if parsed is not None:
            text = parsed.model_dump_json() if isinstance(parsed, BaseModel) else json.dumps(parsed, ensure_ascii=False)
        elif not text.strip() and self.finish_reason not in ("content_filter", "length"):
            reason = str(result.get("parsing_error") or "there is no object in it")[:300]
            raise BackendError(f"the model's answer does not fit the schema of output: {reason}")
        return text, reasoning

    def _note_fields(self, part: AIMessage, blocks: Sequence[Mapping[str, Any]]) -> None:
        self.message_id = part.id or self.message_id
        if part.usage_metadata:
            self._usage_metadata = add_usage(self._usage_metadata, part.usage_metadata)
        self.usage = _usage(self._usage_metadata)
        metadata = part.response_metadata or {}
        if part.additional_kwargs.get("refusal") or any(map(_is_refusal, blocks)) or _is_blocked(metadata):
            self.finish_reason = "content_filter"
        elif self.finish_reason != "content_filter":
            self.finish_reason = _finish_reason(metadata) or self.finish_reason
        self.model = next((name for key in _NAMES if isinstance(name := metadata.get(key), str) and name), self.model)
        calls = (*part.tool_calls, *part.invalid_tool_calls)
        self._tools |= {str(call["name"]) for call in calls if call.get("name")}


def _is(block: Mapping[str, Any], kind: str) -> bool:
    return bool(block.get("type") == kind)


def _is_refusal(block: Mapping[str, Any]) -> bool:
    """Return whether the block is a refusal, as OpenAI's Responses API has them, or one in LangChain's wrapping."""
    value = block.get("value")
    wrapped = isinstance(value, Mapping) and (_is(value, "refusal") or "refusal" in value)
    return _is(block, "refusal") or (_is(block, "non_standard") and wrapped)


def _is_blocked(metadata: Mapping[str, Any]) -> bool:
    """Return whether Gemini, Vertex AI or a guardrail of Bedrock blocked the prompt or the answer."""
    feedback = metadata.get("prompt_feedback")
    if isinstance(feedback, Mapping) and is_blocked(feedback.get("block_reason")):
        return True
    return metadata.get("is_blocked") is True or metadata.get("amazon-bedrock-guardrailAction") == "INTERVENED"


def _finish_reason(metadata: Mapping[str, Any]) -> str | None:
    details = metadata.get("incomplete_details")  # OpenAI's Responses API
    told = [metadata.get(name) for name in REASON_FIELDS] + [
        details.get("reason") if isinstance(details, Mapping) else None
    ]
    told.append("stop" if metadata.get("status") == "completed" else None)
    # a stream of ChatBedrockConverse has lists
    reasons = [finish_reason(reason[-1] if isinstance(reason, list) else reason) for reason in told if reason]
    return "content_filter" if "content_filter" in reasons else next(filter(None, reasons), None)


def _usage(metadata: UsageMetadata | None) -> Usage:
    if not metadata:
        return Usage()
    return Usage(
        prompt_tokens=metadata.get("input_tokens"),  # LangChain's cache tells a price alone
        completion_tokens=metadata.get("output_tokens"),
        cached_tokens=(metadata.get("input_token_details") or {}).get("cache_read"),
    )


def _is_about_the_answer(error: Exception) -> bool:
    """Return whether LangChain failed to read what the server sent; else somebody's code has a mistake."""
    if isinstance(error, ValidationError):
        return bool(_ANSWER_PARTS.search(error.title))
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return bool(_ANSWER_CODE.match(frame.f_globals.get("__name__", "")))
