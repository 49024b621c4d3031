"""Fold a text into a memory, section by section: one that fails for good is passed over, and holds up nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import AIMessage
from typing_extensions import TypedDict

from memagent_integrations.errors import MemAgentError, NoMemory
from memagent_integrations.langchain.notes import NoteTaking, to_notes
from memagent_integrations.reader import Reader
from memagent_integrations.reader.folding import TRIES, is_about_the_section
from memagent_integrations.reader.running import AsyncProgress, Progress
from memagent_integrations.records import Chunk, Reading, Step


class PassedOver(TypedDict):
    """A section that is not in the memory: its text, and what is wrong with it."""

    text: str
    reason: str


class Folding(NoteTaking):
    """`NoteTaking` for a text that is thrown away: each section is in the notes, or afterwards in `passed_over`.

    A section is passed over if it was withheld by a content filter, left no memory in three tries, or failed for good.
    A failure that may pass is raised, as is one that any section would have.
    """

    passed_over: Sequence[PassedOver] = ()  # not in the message, which traces show

    def memorize(self, reader: Reader, progress: Progress) -> AIMessage:
        """Return the notes."""
        fold = _Fold(reader, self._question, reader.chunks(self._document), self._memory)
        while part := fold.next_part():
            try:
                fold.take(reader.memorize(self._question, **part, strict=True, progress=progress))
            except MemAgentError as error:
                fold.fail(error)
        self.passed_over = fold.passed_over
        return fold.notes()

    async def amemorize(self, reader: Reader, progress: AsyncProgress) -> AIMessage:
        """`memorize`, async."""
        chunks = await asyncio.to_thread(lambda: list(reader.chunks(self._document)))
        fold = _Fold(reader, self._question, chunks, self._memory)
        while part := fold.next_part():
            try:
                fold.take(await reader.amemorize(self._question, **part, strict=True, progress=progress))
            except MemAgentError as error:
                await asyncio.to_thread(fold.fail, error)
        self.passed_over = fold.passed_over
        return fold.notes()


class _Fold:
    """What is folded so far, and what waits."""

    def __init__(self, reader: Reader, question: str, chunks: Iterable[Chunk], memory: str) -> None:
        self._reader, self._question, self._memory = reader, question, memory
        self._waiting, self._number, self._tries = deque(chunks), 0, 0
        self._steps: list[Step] = []
        self.passed_over: list[PassedOver] = []

    def next_part(self) -> dict[str, Any] | None:
        """Return the arguments of `Reader.memorize` for the next section; None if all are done."""
        if not self._waiting:
            return None
        return {"document": self._waiting[0], "memory": self._memory, "first": self._number}

    def take(self, reading: Reading) -> None:
        """Take the reading of the section."""
        self._steps += reading.steps
        self._memory = reading.memory
        withheld = reading.steps[-1].outcome == "kept"
        self._done("the server's content filter withheld the memory" if withheld else None)

    def fail(self, error: MemAgentError) -> None:
        """Take the failure of the section: it is tried again, or passed over.

        Raises:
            MemAgentError: the failure, if it may pass, or if every section would have it.
        """
        self._steps += error.reading.steps if error.reading else ()
        self._tries += 1
        if not is_about_the_section(error, self._reader, self._question):
            raise error
        if self._tries == TRIES or not isinstance(error, NoMemory):
            self._done(str(error))

    def notes(self) -> AIMessage:
        """Return the memory as a message."""
        reading = Reading(
            question=self._question,
            answer="",
            memory=self._memory,
            steps=tuple(self._steps),
            model=self._reader.backend.name,
            budgets=self._reader.budgets,
        )
        return to_notes(reading)

    def _done(self, problem: str | None) -> None:
        section = self._waiting.popleft()
        self._number, self._tries = self._number + 1, 0
        if problem:
            self.passed_over.append(PassedOver(text=section.text, reason=problem))
