"""What every backend offers. `tests/helpers/contract.py` holds each of them to it."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from typing import Any, Self

from memagent_integrations.errors import MemAgentError
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.scopes import in_thread


class Backend(ABC):
    """A language model that answers prompts.

    A subclass has to define `count` and `complete`; every other method has a default that builds on them. Each
    failure is a `MemAgentError`: a `BackendError` with `retryable`, a `ContextOverflow` when the prompt does not fit
    the window, a `UsageError` when a setting is wrong. A pickled backend is made again from its arguments; a deep copy
    is the backend itself.
    """

    name: str
    """The name under which `load_backend` would find it; every reading records it."""
    window: int | None = None
    """Context window in tokens, or None if unknown."""
    takes_any_length: bool = False
    """Whether its window need not be known: it has none, or one that is larger than what is assumed."""
    template_tokens: int = 64
    """Tokens that the chat template adds to a message, at most."""
    batch_size: int = 1
    """Prompts that `complete_batch` computes together. 1: calls are independent, `concurrency` of them at a time."""
    concurrency: int = 1
    """Calls that `Reader.read_many` makes at a time."""
    caches_prefixes: bool = False
    """Whether what several calls begin with is computed once, if the others come when the first is being answered."""
    max_retries: int = 0
    """How often the reader retries a call, unless its `Limits` say otherwise; 0 where the model's client does that."""
    structured: bool = False
    """Whether it keeps a reply to `Prompt.schema`."""
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Note the arguments: a pickle holds them, never a model, a server, a connection."""
        backend = super().__new__(cls)
        backend._arguments = args, options
        return backend

    def __reduce__(self) -> tuple[Any, ...]:
        args, options = self._arguments
        return partial(type(self), *args, **options), ()

    def __copy__(self) -> Self:
        backend = object.__new__(type(self))
        backend.__dict__.update(self.__dict__)
        return backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # what is copied shares the model

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the replies besides the name (sampling, adapter): JSON without secrets, compared by journals."""
        return {}

    @abstractmethod
    def count(self, text: str) -> int:
        """Return the number of tokens in the text, without any that a template adds."""

    @abstractmethod
    def complete(self, prompt: Prompt) -> Reply:
        """Return the reply to one prompt, of at most `prompt.max_tokens` tokens."""

    def for_reading(self) -> Backend:
        """Return the backend for one reading: this one, unless what it calls is looked up anew for each."""
        return self

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to many prompts, in their order; a prompt that failed has its error instead."""
        return [self._outcome(prompt) for prompt in prompts]

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply's text in pieces, as the model writes it, and the whole `Reply` last."""
        reply = self.complete(prompt)
        yield reply.text
        yield reply

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        return await in_thread(self.complete, prompt)

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        pieces, lock = self.stream(prompt), threading.Lock()

        def next_piece() -> str | Reply | None:
            with lock:
                return next(pieces, None)

        def close() -> None:
            with lock:  # a generator cannot be closed while it runs
                pieces.close()

        try:
            while (piece := await asyncio.to_thread(next_piece)) is not None:
                yield piece
        except asyncio.CancelledError:  # cancelling does not wait for the piece under way
            asyncio.get_running_loop().run_in_executor(None, close)
            raise
        except GeneratorExit:
            await asyncio.to_thread(close)
            raise

    def close(self) -> None:
        """Free what the backend holds: a model, a server, connections."""

    async def aclose(self) -> None:
        """`close`, async."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _outcome(self, prompt: Prompt) -> Reply | MemAgentError:
        try:
            return self.complete(prompt)
        except MemAgentError as error:
            return error


def digest(text: str) -> str:
    """Return a short hash, which distinguishes settings without showing them."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
