"""A reading under way, and the ways to drive it: to its end or event by event, sync or async."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, closing
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction

from memagent_integrations import scopes
from memagent_integrations.drivers import AsyncChunks, adrive, drive
from memagent_integrations.errors import UsageError
from memagent_integrations.loop import Turns
from memagent_integrations.reader.setup import Setup
from memagent_integrations.records import Event, Reading, Step

Progress = Callable[[Step], None]
AsyncProgress = Callable[[Step], Awaitable[None] | None]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A loop and the models that reply to it. `chunks` are those that the loop reads, if the document is async."""

    setup: Setup
    turns: Turns
    chunks: AsyncChunks | None = None

    def finish(self, progress: Progress | None = None) -> Reading:
        """Run the loop to its end and return the reading, `error` set if it failed.

        Raises:
            CancelledError: its scope was cancelled.
            UsageError: `progress` is a coroutine function.
        """
        if iscoroutinefunction(progress):
            raise UsageError("progress is called without being awaited here: no coroutine, or use the async method")
        with closing(drive(self.turns, self.setup.complete)) as events:
            for event in events:
                if isinstance(event, Reading):
                    return event
                scopes.check()
                if progress and isinstance(event, Step):
                    progress(event)
        raise AssertionError("a driver ends with a reading")

    async def afinish(self, progress: AsyncProgress | None = None) -> Reading:
        """`finish`, async."""
        async with aclosing(adrive(self.turns, self.setup.acomplete, chunks=self.chunks)) as events:
            async for event in events:
                if isinstance(event, Reading):
                    return event
                if progress and isinstance(event, Step) and isawaitable(waiting := progress(event)):
                    await waiting
        raise AssertionError("a driver ends with a reading")

    def read(self, progress: Progress | None = None) -> Reading:
        """Run the loop to its end and return the reading.

        Raises:
            MemAgentError: the error that ended it.
        """
        return _raised(self.finish(progress))

    async def aread(self, progress: AsyncProgress | None = None) -> Reading:
        """`read`, async."""
        return _raised(await self.afinish(progress))

    def stream(self, *, whole: bool = False) -> Generator[Event]:
        """Yield each step, the answer in pieces (with `whole`: in one), and the reading last.

        Raises:
            MemAgentError: the error that ended it.
        """
        call = self.setup.complete if whole else self.setup.stream
        with closing(drive(self.turns, call, self.setup.prompts)) as events:
            for event in events:
                yield _raised(event) if isinstance(event, Reading) else event

    async def astream(self, *, whole: bool = False) -> AsyncGenerator[Event]:
        """`stream`, async."""
        call = self.setup.acomplete if whole else self.setup.astream
        async with aclosing(adrive(self.turns, call, self.setup.prompts, self.chunks)) as events:
            async for event in events:
                yield _raised(event) if isinstance(event, Reading) else event


def _raised(reading: Reading) -> Reading:
    """Return a reading that has an answer; raise the error that ended any other."""
    if reading.error:
        reading.error.reading = reading
        raise reading.error
    return reading
