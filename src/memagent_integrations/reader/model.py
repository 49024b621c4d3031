"""A model as a reader uses it: its backend, the caller that keeps to the limits, and the window to keep to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from memagent_integrations.backends import Backend
from memagent_integrations.calls import Calls
from memagent_integrations.errors import MemAgentError
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.scopes import in_thread, side_by_side
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
        """Yield the reply to a prompt; the prompts of its round are asked side by side."""
        if not prompt.round:
            yield self.calls.complete(self.backend, prompt)
            return
        (outcome,) = self.complete_batch([prompt])
        yield _raised(outcome)

    async def acomplete(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`complete`, async."""
        if not prompt.round:
            yield await self.calls.acomplete(self.backend, prompt)
            return
        asked = prompt.round.to_ask(prompt)
        prompt.round.keep(asked, await self._atogether(asked))
        yield _raised(prompt.round.take(prompt))

    def stream(self, prompt: Prompt) -> Iterator[str | Reply]:
        """Yield the reply to a prompt, an answer in pieces before the whole."""
        return self.calls.stream(self.backend, prompt) if prompt.phase == "answer" else self.complete(prompt)

    def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        return self.calls.astream(self.backend, prompt) if prompt.phase == "answer" else self.acomplete(prompt)

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to many prompts, asked together with those of their rounds."""
        asked = [each for prompt in prompts for each in (prompt.round.to_ask(prompt) if prompt.round else (prompt,))]
        outcomes = self._together(asked)
        for each, outcome in zip(asked, outcomes, strict=True):
            if each.round:
                each.round.keep([each], [outcome])
        alone = iter([outcome for each, outcome in zip(asked, outcomes, strict=True) if not each.round])
        return [prompt.round.take(prompt) if prompt.round else next(alone) for prompt in prompts]

    def _together(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to prompts: computed together, or where the backend does not, in threads."""
        size = self.backend.batch_size
        if size > 1:
            batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
            return [outcome for batch in batches for outcome in self.calls.complete_batch(self.backend, batch)]

        def outcome(prompt: Prompt) -> Reply | MemAgentError:
            try:
                return self.calls.complete(self.backend, prompt)
            except MemAgentError as error:
                return error

        return side_by_side([partial(outcome, prompt) for prompt in prompts], self.backend.concurrency)

    async def _atogether(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """`_together`, async. If one raises, the others are cancelled."""
        if self.backend.batch_size > 1:
            return await in_thread(self._together, prompts)
        free = asyncio.Semaphore(self.backend.concurrency)

        async def outcome(prompt: Prompt) -> Reply | MemAgentError:
            async with free:
                try:
                    return await self.calls.acomplete(self.backend, prompt)
                except MemAgentError as error:
                    return error

        tasks = [asyncio.create_task(outcome(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


def _raised(outcome: Reply | MemAgentError) -> Reply:
    if isinstance(outcome, MemAgentError):
        raise outcome
    return outcome
