"""Replies from chat completions as OpenAI's protocol has them, streamed or not; any field may be missing or odd."""

from __future__ import annotations

from typing import Any

from memagent_integrations.backends.replies import ReplyBuilder, finish_reason
from memagent_integrations.checks import MOST
from memagent_integrations.errors import BackendError
from memagent_integrations.records import Reply, Usage


class CompletionBuilder(ReplyBuilder):
    """Builds a reply from a completion."""

    def take(self, completion: Any) -> None:
        """Take a completion that is not streamed.

        Raises:
            ValueError: it has no choices; `failures.from_exception` knows this form.
        """
        choices = getattr(completion, "choices", None)
        if not choices or not isinstance(choices, list):
            error = getattr(completion, "error", None)
            code = error.get("code") if isinstance(error, dict) else None
            raise ValueError({"message": f"the answer has no choices{f': {error}' if error else ''}", "code": code})
        self.usage = _usage(getattr(completion, "usage", None))
        self._add(choices[0], getattr(choices[0], "message", None))

    def _add(self, choice: Any, message: Any) -> str:
        reason = finish_reason(getattr(choice, "finish_reason", None))
        self.finish_reason = "content_filter" if getattr(message, "refusal", None) else self.finish_reason or reason
        extra = getattr(message, "model_extra", None) or {}
        reasoning = _text(extra.get("reasoning_content")) or _text(extra.get("reasoning"))
        return self.note(_text(getattr(message, "content", None)), reasoning)


class StreamBuilder(CompletionBuilder):
    """Builds a reply from a streamed completion. Of several choices it takes the one that comes first."""

    _choice: Any = None

    def add(self, event: Any) -> str:
        """Take one event; return its text."""
        if usage := getattr(event, "usage", None):
            self.usage = _usage(usage)
        choices = getattr(event, "choices", None)
        own = filter(self._is_own, choices if isinstance(choices, list) else ())
        return "".join([self._add(choice, getattr(choice, "delta", None)) for choice in own])

    def _is_own(self, choice: Any) -> bool:
        index = getattr(choice, "index", None) or 0
        if self._choice is None:
            self._choice = index
        return bool(index == self._choice)

    def reply(self) -> Reply:
        """Return the whole reply.

        Raises:
            BackendError: the stream was cut off.
        """
        if self.finish_reason is None:
            raise BackendError("the stream broke off before the reply was complete", retryable=True)
        return super().reply()


def _text(content: Any) -> str:
    """Return the text of a message's content, which may be a string or a list of parts, some of them text."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _usage(usage: Any) -> Usage:
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=int_or_none(getattr(usage, "prompt_tokens", None)),
        completion_tokens=int_or_none(getattr(usage, "completion_tokens", None)),
        cached_tokens=int_or_none(getattr(details, "cached_tokens", None)),
    )


def int_or_none(value: Any) -> int | None:
    """Return a number of tokens that a server sent, None for anything that is none."""
    return value if type(value) is int and 0 <= value <= MOST else None
