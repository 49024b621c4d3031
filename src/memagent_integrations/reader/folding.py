"""Fold a text into a memory, section by section: one that fails for good is passed over, and holds up nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memagent_integrations.errors import BackendClosed, BackendError, ContextOverflow, MemAgentError, NoMemory
from memagent_integrations.reader.base import BaseReader
from memagent_integrations.reader.reader import Reader
from memagent_integrations.reader.running import AsyncProgress, Progress
from memagent_integrations.records import Chunk, Reading, Step
from memagent_integrations.scopes import in_thread

_OF_THE_REQUEST = (None, 400, 413, 422)
"""The statuses of a failure that another section need not have; others are about the key, the model or the address."""


def is_about_the_section(error: MemAgentError, reader: BaseReader, question: str) -> bool:
    """Return whether another section may be read in spite of this error, and the same one will fail again."""
    if isinstance(error, NoMemory):
        return True
    if isinstance(error, ContextOverflow):
        return _budgets_fit(reader, question)
    if isinstance(error, BackendClosed):
        return False
    return isinstance(error, BackendError) and not error.retryable and error.status in _OF_THE_REQUEST


def _budgets_fit(reader: BaseReader, question: str) -> bool:
    try:
        reader.plan(question, "any text")
    except ContextOverflow:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A section that is not in the memory: its text, and what is wrong with it."""

    text: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A text in a memory: a reading without an answer, and the sections that are not in its memory."""

    reading: Reading
    passed_over: tuple[PassedOver, ...]


def fold(reader: Reader, question: str, document: Any, *, memory: str = "", progress: Progress | None = None) -> Folded:
    """Return a memory that each section of the document is in, or else passed over.

    `Reader.memorize` for a text that is thrown away afterwards. A section is passed over if the model wrote no memory
    for it, or if it failed for good.

    Raises:
        MemAgentError: a failure that may pass, or one that any section would have.
    """
    folding = _Fold(reader.changed(on_lost_section="skip"), question, reader.chunks(document), memory)
    while part := folding.next_part():
        try:
            folding.take(folding.reader.memorize(question, **part, progress=progress))
        except MemAgentError as error:
            folding.fail(error)
    return folding.folded()


async def afold(
    reader: Reader, question: str, document: Any, *, memory: str = "", progress: AsyncProgress | None = None
) -> Folded:
    """`fold`, async."""
    chunks = await in_thread(lambda: list(reader.chunks(document)))
    folding = _Fold(reader.changed(on_lost_section="skip"), question, chunks, memory)
    while part := folding.next_part():
        try:
            folding.take(await folding.reader.amemorize(question, **part, progress=progress))
        except MemAgentError as error:
            await in_thread(folding.fail, error)
    return folding.folded()


class _Fold:
    """What is folded so far, and what waits."""

    def __init__(self, reader: Reader, question: str, chunks: Iterable[Chunk], memory: str) -> None:
        self.reader, self._question, self._memory = reader, question, memory
        self._waiting, self._number = deque(chunks), 0
        self._steps: list[Step] = []
        self._passed_over: list[PassedOver] = []

    def next_part(self) -> dict[str, Any] | None:
        """Return the arguments of `Reader.memorize` for the next section; None if all are done."""
        if not self._waiting:
            return None
        return {"document": self._waiting[0], "memory": self._memory, "first": self._number}

    def take(self, reading: Reading) -> None:
        """Take the reading of the section."""
        self._steps += reading.steps
        self._memory = reading.memory
        self._done(reading.steps[-1].problem)

    def fail(self, error: MemAgentError) -> None:
        """Take the failure of the section, which is passed over.

        Raises:
            MemAgentError: the failure, if it may pass, or if every section would have it.
        """
        self._steps += error.reading.steps if error.reading else ()
        if not is_about_the_section(error, self.reader, self._question):
            raise error
        self._done(str(error))

    def folded(self) -> Folded:
        """Return what is folded."""
        reading = Reading(
            question=self._question,
            answer="",
            memory=self._memory,
            steps=tuple(self._steps),
            model=self.reader.backend.name,
            budgets=self.reader.budgets,
        )
        return Folded(reading=reading, passed_over=tuple(self._passed_over))

    def _done(self, problem: str | None) -> None:
        section = self._waiting.popleft()
        self._number += 1
        if problem:
            self._passed_over.append(PassedOver(text=section.text, reason=problem))
