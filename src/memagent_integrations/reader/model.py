"""A model as a reader uses it: its backend, the caller that keeps to the limits, and the window to keep to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from memagent_integrations.backends import Backend
from memagent_integrations.calls import Calls
from memagent_integrations.errors import MemAgentError
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.scopes import side_by_side
from memagent_integrations.tokens import Counter

_DEFAULT_WINDOW = 8192


@dataclass(frozen=True, kw_only=True)
class Model:
    """A backend and how it is called. `window` is the caller's; None: the backend's own."""

    backend: Backend
    calls: Calls
    window: int | None = None

    def for_reading(self) -> Model:
        """Return the model for one reading, which keeps its backend until the end."""
        backend = self.backend.for_reading()
        return self if backend is self.backend else replace(self, backend=backend)

    def __getstate__(self) -> dict[str, Any]:
        return {"backend": self.backend, "calls": self.calls, "window": self.window}  # without the cached counter

    def resolve_window(self) -> int:
        """Return the window to keep to: the one that was set, else the backend's (perhaps by a call), else 8,192.

        That it is not known is a warning in the log, once.
        """
        if window := self.window or self.calls.query(self.backend, lambda: self.backend.window):
            return window
        if not self.backend.takes_any_length:
            self.calls.warn(
                f"{self.backend.name} does not know its context window; {_DEFAULT_WINDOW:,} tokens are assumed: "
                "pass window=..."
            )
        return _DEFAULT_WINDOW

    def count(self, text: str) -> int:
        """Return the tokens of a text as it is."""
        return self.calls.count(self.backend, text)

    @cached_property
    def count_template(self) -> Counter:
        """Counts a text of the prompt set, each only once: with many endpoints a count is a call."""
        return lru_cache(partial(self.calls.count, self.backend))

    def complete(self, prompt: Prompt) -> Iterator[str | Reply]:
        """Yield the reply to a prompt."""
        yield self.calls.complete(self.backend, prompt)

    async def acomplete(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`complete`, async."""
        yield await self.calls.acomplete(self.backend, prompt)

    def stream(self, prompt: Prompt) -> Iterator[str | Reply]:
        """Yield the reply to a prompt, an answer in pieces before the whole."""
        return self.calls.stream(self.backend, prompt) if prompt.phase == "answer" else self.complete(prompt)

    def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        return self.calls.astream(self.backend, prompt) if prompt.phase == "answer" else self.acomplete(prompt)

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to many prompts: computed together, or where the backend does not, in threads."""
        if self.backend.batch_size > 1:
            return self.calls.complete_batch(self.backend, prompts)

        def outcome(prompt: Prompt) -> Reply | MemAgentError:
            try:
                return self.calls.complete(self.backend, prompt)
            except MemAgentError as error:
                return error

        return side_by_side([partial(outcome, prompt) for prompt in prompts], self.backend.concurrency)
