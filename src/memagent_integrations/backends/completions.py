"""Replies from chat completions as OpenAI's protocol has them, streamed or not; any field may be missing or odd."""

from __future__ import annotations

from typing import Any

from memagent_integrations.backends.replies import ReplyBuilder, finish_reason
from memagent_integrations.checks import MOST
from memagent_integrations.errors import BackendError
from memagent_integrations.records import Reply, Usage


class CompletionBuilder(ReplyBuilder):
    """Builds a reply from a completion."""

    def take(self, completion: Any) -> str:
        """Take a completion that is not streamed, decoded JSON; return its text.

        Raises:
            ValueError: it has no choices; `failures.from_exception` knows this form.
        """
        choices = _field(completion, "choices")
        if not choices or not isinstance(choices, list):
            error = _field(completion, "error")
            message = f"the answer has no choices{f': {error}' if error else ''}"
            raise ValueError({"message": message, "code": _field(error, "code")})
        self.usage = _usage(_field(completion, "usage"))
        return self._add(choices[0], _field(choices[0], "message"))

    def _add(self, choice: Any, message: Any) -> str:
        reason = finish_reason(_field(choice, "finish_reason"))
        self.finish_reason = "content_filter" if _field(message, "refusal") else self.finish_reason or reason
        reasoning = _text(_field(message, "reasoning_content")) or _text(_field(message, "reasoning"))
        return self.note(_text(_field(message, "content")), reasoning)


class StreamBuilder(CompletionBuilder):
    """Builds a reply from a streamed completion. Of several choices it takes the one that comes first."""

    _choice: Any = None

    def add(self, event: Any) -> str:
        """Take one event, decoded JSON; return its text."""
        if usage := _field(event, "usage"):
            self.usage = _usage(usage)
        choices = _field(event, "choices")
        own = filter(self._is_own, choices if isinstance(choices, list) else ())
        return "".join([self._add(choice, _field(choice, "delta")) for choice in own])

    def _is_own(self, choice: Any) -> bool:
        index = _field(choice, "index") or 0
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


def _field(value: Any, name: str) -> Any:
    """Return a field of a JSON object; None if it has none of this name, or is no object."""
    return value.get(name) if isinstance(value, dict) else None


def _text(content: Any) -> str:
    """Return the text of a message's content, which may be a string or a list of parts, some of them text."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _usage(usage: Any) -> Usage:
    return Usage(
        prompt_tokens=int_or_none(_field(usage, "prompt_tokens")),
        completion_tokens=int_or_none(_field(usage, "completion_tokens")),
        cached_tokens=int_or_none(_field(_field(usage, "prompt_tokens_details"), "cached_tokens")),
    )


def int_or_none(value: Any) -> int | None:
    """Return a number of tokens that a server sent, None for anything that is none."""
    return value if type(value) is int and 0 <= value <= MOST else None
