"""A reading in two parts: its memory is made now, its answer is asked for later, in any thread or event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import closing
from dataclasses import replace

from memagent_integrations.lineage import memory_after
from memagent_integrations.loop import Turns, advance, exchange, step_made
from memagent_integrations.reader.running import Running
from memagent_integrations.records import Event, Prompt, Reading, Step
from memagent_integrations.schedule import Waiting


class Unanswered:
    """A reading whose memory is made by `Reader.begin`, and whose answer comes from `stream` or `astream`, once.

    The call for the answer belongs to whoever consumes it: the thread or the event loop in which the memory was made
    may be gone by then. So do those of a second pass (`reread`). In a journal the run is in use until the answer has
    come, or this object is dropped. The time until the answer is asked for does not count towards `Limits.run_timeout`.
    """

    def __init__(self, running: Running, waiting: Waiting) -> None:
        self._running, self._turns, self._waiting = running, running.turns, waiting
        self._state: Prompt | Reading | None = None  # what the loop gave last: the prompt for the answer

    def memorizing(self, question: str) -> Running:
        """Return the first part of the reading, which ends with an empty answer."""
        return replace(self._running, turns=self._until_answer(question))

    def stream(self) -> Generator[Event]:
        """Yield the answer in pieces of text, its `Step`, and the `Reading` last.

        Raises:
            MemAgentError: as `Reader.read` raises it.
        """
        return self._answering().stream()

    def astream(self) -> AsyncGenerator[Event]:
        """`stream`, async."""
        return self._answering().astream()

    def _answering(self) -> Running:
        return replace(self._running, turns=self._from_answer(), chunks=None)

    def _until_answer(self, question: str) -> Turns:
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
        self._state = state
        self._waiting.pause()
        if isinstance(state, Reading):
            return state
        return Reading(
            question=question,
            answer="",
            memory=memory_after(steps),
            steps=tuple(steps),
            model=self._running.setup.model.backend.name,
            budgets=self._running.setup.budgets,
        )

    def _from_answer(self) -> Turns:
        with closing(self._turns):
            self._waiting.resume()
            state = self._state
            while isinstance(state, Prompt):
                state = advance(self._turns, (yield from exchange(self._waiting.resumed(state))))
        assert isinstance(state, Reading)
        return state
