"""What every backend offers. `tests/contract.py` holds each of them to it."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from types import TracebackType
from typing import Any, Self

from memagent_integrations.errors import BackendError, MemAgentError
from memagent_integrations.records import Prompt, Reply


class Backend(ABC):
    """A language model that answers prompts.

    A subclass has to define `count` and `complete`; the rest follows from them. Every failure is a `MemAgentError`: `BackendError` with
    `retryable`, `ContextOverflow` when the prompt does not fit, `UsageError` when a setting is at fault.
    """

    name: str
    """How `load_backend` would name it; stands in every reading."""
    window: int | None = None
    """Context window in tokens, or None if unknown."""
    template_tokens: int = 64
    """Tokens that the chat template adds to a message, at most."""
    batch_size: int = 1
    """Prompts that `complete_batch` computes together. 1: calls are independent of one another, `concurrency` of them at a time."""
    concurrency: int = 1
    """Calls that `Reader.read_many` makes at a time."""
    max_retries: int = 0
    """How often the reader retries a call, unless its `Limits` say otherwise; 0 where the model's own client retries."""

    @property
    def identity(self) -> dict[str, Any]:
        """What besides the name decides what the model says (sampling, adapter), as JSON without secrets; a journal compares it."""
        return {}

    @abstractmethod
    def count(self, text: str) -> int:
        """Tokens of the text, without any that a template adds."""

    @abstractmethod
    def complete(self, prompt: Prompt) -> Reply:
        """The reply to one prompt, of at most `prompt.max_tokens` tokens."""

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """The replies to many prompts, in their order; where one failed, its error."""
        return [self._outcome(prompt) for prompt in prompts]

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """The reply in pieces, as the model writes it, and then the whole as a `Reply`."""
        reply = self.complete(prompt)
        yield reply.text
        yield reply

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        return await asyncio.to_thread(self.complete, prompt)

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        pieces, turn = self.stream(prompt), threading.Lock()

        def take() -> str | Reply | None:
            with turn:
                return next(pieces, None)

        def leave() -> None:
            with turn:  # a generator that is running cannot be closed
                pieces.close()

        try:
            while (piece := await asyncio.to_thread(take)) is not None:
                yield piece
        except asyncio.CancelledError:  # does not wait for the piece that is being made
            asyncio.get_running_loop().run_in_executor(None, leave)
            raise
        except GeneratorExit:
            await asyncio.to_thread(leave)
            raise

    def close(self) -> None:
        """Free what the backend holds: a model, a server, connections."""

    async def aclose(self) -> None:
        """`close`, async."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _outcome(self, prompt: Prompt) -> Reply | MemAgentError:
        try:
            return self.complete(prompt)
        except MemAgentError as error:
            return error


def digest(text: str) -> str:
    """A short hash, to tell settings apart without showing them."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def closed(name: str) -> BackendError:
    """The error of a call to a backend that has been closed."""
    return BackendError(f"{name} is closed; make a new backend")
