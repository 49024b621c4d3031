"""Replies built from the pieces that a client delivers: the part that all clients have in common."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from memagent_integrations.backends.failures import is_withheld, translated
from memagent_integrations.errors import BackendError
from memagent_integrations.records import Reply, Usage

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
    name = str(getattr(value, "value", value)).lower()
    return _FINISH_REASONS.get(name, name)
