"""Replies put together from what a client gives: the part that all clients have in common."""

from __future__ import annotations

import time
from typing import Any

from memagent_integrations.errors import BackendError
from memagent_integrations.records import Reply, Usage

_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_length": "length",
    "safety": "content_filter",
    "refusal": "content_filter",
}


class ReplyBuilder:
    """One reply, piece by piece. `usage` and `finish_reason` are set by whoever adds the pieces."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.finish_reason: str | None = None
        self._started = time.perf_counter()
        self._pieces = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def note(self, text: str, reasoning: str = "") -> str:
        """Take a piece; its text is returned."""
        self._pieces += 1
        self._text.append(text)
        self._reasoning.append(reasoning)
        return text

    def reply(self) -> Reply:
        """The whole reply.

        Raises:
            BackendError: nothing came.
        """
        if not self._pieces:
            raise BackendError("the model ended without a reply", retryable=True)
        return Reply(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            usage=self.usage,
            finish_reason=self.finish_reason,
            seconds=time.perf_counter() - self._started,
        )


def finish_reason(told: Any) -> str | None:
    """Why a model stopped, by its name in OpenAI's protocol; `told` is what a client calls it, text or an enum."""
    if told is None or told == "":
        return None
    name = str(getattr(told, "value", told)).lower()
    return _REASONS.get(name, name)
