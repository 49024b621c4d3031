"""Replies built from the responses of LlamaIndex's LLMs, in the forms in which the integrations deliver them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, ThinkingBlock
from pydantic import BaseModel, ValidationError

from memagent_integrations.backends.replies import (
    REASON_FIELDS,
    ReplyBuilder,
    finish_reason,
    is_blocked,
    refused_argument,
    unusable_answer,
)
from memagent_integrations.errors import BackendError
from memagent_integrations.records import Reply, Usage

_EARLY = re.compile(r"terminated early: (\w+)")
"""What the classes for Gemini raise, in place of the text until then."""


class UnfitAnswer(Exception):
    """The LLM answered with something unusable. It reaches callers as the cause of a `BackendError`."""


class LLMReply(ReplyBuilder):
    """A reply put together from chat or completion responses. `output` is the class of a structured answer."""

    def __init__(self, output: type[BaseModel] | None = None) -> None:
        super().__init__()
        self._output = output
        self._text_so_far = ""
        self._has_choices: bool | None = None

    @contextmanager
    def call(self, name: str, *, secrets: Iterable[str] = ()) -> Iterator[None]:
        """Make a call in the block; see `ReplyBuilder.call`. An answer that cannot be read is a failure too."""
        with super().call(name, secrets=secrets):
            try:
                yield
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                if self._output and self.finish_reason in ("length", "content_filter"):
                    self.note("")  # what was cut, or withheld, is no object
                elif failure := self._failure(error, name, secrets):
                    raise failure from error
                else:
                    raise
            except RuntimeError as error:
                early = _EARLY.search(str(error))
                reason = finish_reason(early[1]) if early else None
                if reason not in ("length", "content_filter"):
                    raise
                self.finish_reason = reason
                self.note("")

    def _failure(self, error: Exception, name: str, secrets: Iterable[str]) -> Exception | None:
        """Return the failure that the error stands for if it is about the answer; else somebody's code has a mistake.

        An empty list of choices is an IndexError in most integrations, an absent field a KeyError or about None.
        """
        if isinstance(error, ValidationError):  # of a structured answer, or of LlamaIndex's own events
            reasons = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
            return UnfitAnswer(f"what it said is no {error.title}: {'; '.join(reasons)}")
        if refusal := refused_argument(error, name):
            return refusal
        if isinstance(error, LookupError) or "NoneType" in str(error) or "no candidates" in str(error):
            return unusable_answer(error, name, secrets)
        # LlamaIndex raises such a ValueError when there was no JSON, or no tool call
        if self._output and (type(error) is ValueError or str(error).startswith("StructuredLLM expected")):
            return UnfitAnswer(f"what it said is no {self._output.__name__}: {error}")
        return None

    def add_whole(self, response: ChatResponse | CompletionResponse) -> None:
        """Add a response that is not streamed."""
        if self._output:  # its raw response is the object, not what the server sent
            self.note(_content(response))
            return
        self.add_details(response)
        self.note(_content(response), _reasoning(response))

    def add(self, response: ChatResponse | CompletionResponse) -> str:
        """Add one part of a stream; return its text. Without a delta the part holds the whole text so far."""
        self.add_details(response)
        text = response.delta if response.delta is not None else _content(response).removeprefix(self._text_so_far)
        self._text_so_far += text
        return self.note(text, str(_first(_extras(response), "thinking_delta") or ""))

    def reply(self) -> Reply:
        """Return the whole reply.

        Raises:
            BackendError: no part was added, or the server sent no choices.
        """
        reply = super().reply()
        if self._has_choices is False and not (reply.text or reply.reasoning or reply.finish_reason):
            raise BackendError("the server sent an answer without choices", retryable=True)
        return reply

    def add_details(self, response: ChatResponse | CompletionResponse) -> None:
        """Note usage and finish reason of a response, and what else is not its text."""
        if not isinstance(response, (ChatResponse, CompletionResponse)):
            raise UnfitAnswer(f"an LLM answers with its responses; this one gave {type(response).__name__}")
        usages = (usage for usage in map(_usage, _usage_holders(response)) if usage != Usage())
        self.usage = next(usages, self.usage)
        choices = field(response.raw, "choices")
        if isinstance(choices, Sequence):
            self._has_choices = self._has_choices or bool(choices)
        if _is_refused(response):
            self.finish_reason = "content_filter"
        elif self.finish_reason != "content_filter":
            self.finish_reason = _finish_reason(response) or self.finish_reason


def closable(responses: Any) -> Any:
    """Return the stream of an LLM as an iterator that can be closed."""
    if not isinstance(responses, Iterable):
        raise UnfitAnswer(f"an LLM streams an iterator of responses; this one gave {type(responses).__name__}")
    return responses if hasattr(responses, "close") else (response for response in responses)


def aclosable(responses: Any) -> Any:
    """`closable`, async."""
    if not isinstance(responses, AsyncIterable):
        raise UnfitAnswer(f"an LLM streams an async iterator of responses; this one gave {type(responses).__name__}")
    return responses if hasattr(responses, "aclose") else (response async for response in responses)


def field(holder: Any, *names: str) -> Any:
    """Return the first of these fields of an object or mapping that is there and not None, else None."""
    values = (holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _first(holders: Iterable[Any], *names: str) -> Any:
    return next((value for holder in holders if (value := field(holder, *names)) is not None), None)


def _content(response: ChatResponse | CompletionResponse) -> str:
    return (response.text if isinstance(response, CompletionResponse) else response.message.content) or ""


def _extras(response: ChatResponse | CompletionResponse) -> list[Any]:
    """Return the additional fields of a response: of OpenAI's classes, and, on the message, of Anthropic's."""
    message = [] if isinstance(response, CompletionResponse) else [response.message.additional_kwargs]
    return [response.additional_kwargs, *message]


def _usage_holders(response: ChatResponse | CompletionResponse) -> list[Any]:
    """Return what may hold a usage; the last are those of Ollama, and of classes that put the numbers beside."""
    raw, extras = response.raw, _extras(response)
    nested = (field(holder, "usage", "usage_metadata") for holder in (raw, field(raw, "response", "metadata"), *extras))
    return [*nested, raw, *extras]


def _usage(holder: Any) -> Usage:
    cached = field(field(holder, "prompt_tokens_details", "input_tokens_details"), "cached_tokens")
    if cached is None:
        cached = field(holder, "cache_read_input_tokens", "cached_content_token_count", "cacheReadInputTokens")
    return Usage(
        prompt_tokens=field(holder, "prompt_tokens", "input_tokens", "prompt_token_count", "inputTokens"),
        completion_tokens=field(holder, "completion_tokens", "output_tokens", "candidates_token_count", "outputTokens"),
        cached_tokens=cached,
    )


def _choice(raw: Any) -> Any:
    choices = field(raw, "choices", "candidates")
    return choices[0] if isinstance(choices, Sequence) and choices and not isinstance(choices, str) else None


def _finish_reason(response: ChatResponse | CompletionResponse) -> str | None:
    raw = response.raw
    whole = field(raw, "response")  # of the last event of OpenAI's Responses API
    holders = (_choice(raw), raw, field(raw, "delta", "messageStop"), whole, *_extras(response))
    reason = _first(holders, *REASON_FIELDS)
    return finish_reason(reason or _first((field(each, "incomplete_details") for each in (raw, whole)), "reason"))


def _is_refused(response: ChatResponse | CompletionResponse) -> bool:
    """Return whether the model refused, in OpenAI's ways, or Gemini's server blocked the prompt."""
    raw, choice = response.raw, _choice(response.raw)
    if _first((*_extras(response), field(choice, "message"), field(choice, "delta"), raw), "refusal"):
        return True
    if str(field(raw, "type") or "").startswith("response.refusal"):
        return True
    items = field(raw, "output") or field(field(raw, "response"), "output") or ()
    parts = (part for item in items if not isinstance(items, str) for part in field(item, "content") or ())
    if any(field(part, "type") == "refusal" for part in parts):
        return True
    return is_blocked(_first((raw, field(raw, "prompt_feedback", "promptFeedback")), "block_reason", "blockReason"))


def _reasoning(response: ChatResponse | CompletionResponse) -> str:
    if isinstance(response, CompletionResponse):
        return ""
    blocks = [block.content or "" for block in response.message.blocks if isinstance(block, ThinkingBlock)]
    return "".join(blocks) or str(_first(_extras(response), "reasoning_content", "thinking") or "")
