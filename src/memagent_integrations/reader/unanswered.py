"""A reading in two parts: its memory is made now, its answer is asked for later, in any thread or event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from dataclasses import replace

from memagent_integrations.loop import Turns, adrive, advance, drive, exchange, step_made
from memagent_integrations.reader.many import raise_for_error
from memagent_integrations.reader.setup import Setup
from memagent_integrations.records import Event, Prompt, Reading, Step


class Unanswered:
    """A reading whose memory is made by `Reader.begin`, and whose answer comes from `stream` or `astream`, once.

    The call for the answer belongs to whoever consumes it: the thread or the event loop in which the memory was made
    may be gone by then. In a journal the run is in use until the answer has come, or this object is dropped. The time
    until the answer is asked for does not count towards `Limits.run_timeout`.
    """

    def __init__(self, setup: Setup, turns: Turns) -> None:
        self._setup, self._turns = setup, turns
        self._state: Prompt | Reading | None = None  # what the loop gave last: the prompt for the answer
        self._since = 0.0

    def memorizing(self, question: str) -> Turns:
        """Return the first part of the loop, which ends with a reading whose answer is empty, or that failed."""
        steps: list[Step] = []
        try:
            state = advance(self._turns, None)
            while isinstance(state, Prompt) and state.phase == "memory":
                prompt = state
                state = advance(self._turns, (yield from exchange(prompt)))
                if step := step_made(state, prompt):
                    steps.append(step)
        except BaseException:
            self._turns.close()
            raise
        self._state, self._since = state, time.monotonic()
        if isinstance(state, Reading):
            return state
        return Reading(
            question=question,
            answer="",
            memory=steps[-1].memory,
            steps=tuple(steps),
            model=self._setup.model.backend.name,
            budgets=self._setup.budgets,
        )

    def stream(self) -> Generator[Event]:
        """Yield the answer in pieces of text, its `Step`, and the `Reading` last.

        Raises:
            as `Reader.read`.
        """
        with closing(drive(self._answering(), self._setup.stream, self._setup.prompts)) as events:
            for event in events:
                yield raise_for_error(event) if isinstance(event, Reading) else event

    async def astream(self) -> AsyncGenerator[Event]:
        """`stream`, async."""
        async with aclosing(adrive(self._answering(), self._setup.astream, self._setup.prompts)) as events:
            async for event in events:
                yield raise_for_error(event) if isinstance(event, Reading) else event

    def _answering(self) -> Turns:
        """Return the rest of the loop."""
        with closing(self._turns):
            state = self._state
            if isinstance(state, Prompt) and state.deadline:
                state = replace(state, deadline=state.deadline + time.monotonic() - self._since)
            while isinstance(state, Prompt):
                state = advance(self._turns, (yield from exchange(state)))
        assert isinstance(state, Reading)
        return state
