"""Replies built from the pieces that a client delivers: the part that all clients have in common."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from memagent_integrations.backends.failures import is_withheld, translated
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.records import Reply, Usage
from memagent_integrations.redaction import without_secrets

_FINISH_REASONS = {
    name: reason
    for reason, names in {
        "stop": ("end_turn", "stop_sequence", "complete", "eos", "eos_token"),
        "length": (
            "max_tokens",
            "max_output_tokens",
            "model_length",
            "token_limit",
            "model_context_window_exceeded",
        ),
        "content_filter": (
            "refusal",
            "safety",
            "recitation",
            "blocklist",
            "prohibited_content",
            "spii",
            "image_safety",
            "model_armor",
            "content_filtered",
            "guardrail_intervened",
            "error_toxic",
        ),
    }.items()
    for name in names
}

REASON_FIELDS = ("finish_reason", "stop_reason", "done_reason", "stopReason", "finishReason")
"""The fields in which servers say why a model stopped."""


class ReplyBuilder:
    """Builds one reply, piece by piece. Callers add the pieces, and set `usage`, `finish_reason` and `model`."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.finish_reason: str | None = None
        self.model: str | None = None
        self._started = time.perf_counter()
        self._pieces = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []

    @contextmanager
    def call(self, name: str, *, secrets: Iterable[str] = ()) -> Iterator[None]:
        """Make a call of the model `name` in the block, whose errors are raised as `failures.translated` has them.

        An error by which the provider says that its filter withheld the answer is part of the reply instead.
        """
        with translated(name, secrets=secrets):
            try:
                yield
            except Exception as error:
                if not is_withheld(error):
                    raise
                self.finish_reason = "content_filter"
                self.note("")

    def note(self, text: str, reasoning: str = "") -> str:
        """Append a piece and return its text."""
        self._pieces += 1
        self._text.append(text)
        self._reasoning.append(reasoning)
        return text

    def reply(self) -> Reply:
        """Return the whole reply.

        Raises:
            BackendError: no piece was added.
        """
        if not self._pieces:
            raise BackendError("the model ended without a reply", retryable=True)
        return Reply(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            usage=self.usage,
            finish_reason=self.finish_reason,
            seconds=time.perf_counter() - self._started,
            model=self.model,
        )


def finish_reason(value: Any) -> str | None:
    """Return why a model stopped, by its name in OpenAI's protocol; `value` is the client's name, a text or an enum."""
    if value is None or value == "":
        return None
    name = str(getattr(value, "value", value)).lower()[:64]
    return _FINISH_REASONS.get(name, name)


def is_blocked(block_reason: Any) -> bool:
    """Return whether Gemini's or Vertex AI's server blocked a prompt: an enum, its name or its number says why."""
    name = str(getattr(block_reason, "name", block_reason) or "")
    return bool(name) and not name.endswith("UNSPECIFIED") and name != "0"


def refused_argument(error: Exception, name: str) -> UsageError | None:
    """Return the error for an argument that the client of the model `name` does not take; None for another error."""
    if not (isinstance(error, TypeError) and "unexpected keyword argument" in str(error)):
        return None
    advice = "check limit_parameter, and what is bound to the model"
    return UsageError(f"{name} does not take what it was passed: {error}; {advice}")


def unusable_answer(error: Exception, name: str, secrets: Iterable[str]) -> BackendError:
    """Return the failure for an answer of the model `name` that its client could not read."""
    what = without_secrets(f"{type(error).__name__}: {error}", secrets)[:300]
    return BackendError(f"{name} sent no usable answer: {what}", retryable=True)
