"""The jobs of many readings: which of them are the same, and what is told of their progress."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from memagent_integrations.errors import UsageError
from memagent_integrations.journal import Journal
from memagent_integrations.records import Reading, Step

Progress = Callable[[Step], None]
AsyncProgress = Callable[[Step], Awaitable[None] | None]
ManyProgress = Callable[[int, Step], None]
Job = tuple[str, Any]
"""A question and the document to read for it."""


class UniqueJobs:
    """The jobs of `read_many` to be read: with a journal equal ones are one run, which is read once."""

    def __init__(self, jobs: Iterable[Job], journal: Journal | None) -> None:
        first: dict[Any, int] = {}
        self.jobs: list[Job] = []
        self._numbers: list[int] = []  # which job each of the distinct ones was
        self._places: list[int] = []  # which of the distinct ones each job is
        try:
            for number, (question, document) in enumerate(jobs):
                key = (
                    (question, document if isinstance(document, str) else id(document))
                    if journal and isinstance(question, str)
                    else number
                )
                if key not in first:
                    first[key] = len(self.jobs)
                    self.jobs.append((question, document))
                    self._numbers.append(number)
                self._places.append(first[key])
        except (TypeError, ValueError) as error:
            raise UsageError(f"the jobs have to be (question, document) pairs ({error})") from error

    def spread(self, readings: Sequence[Reading]) -> list[Reading]:
        """A reading for each of the jobs."""
        return [readings[place] for place in self._places]

    def numbered(self, progress: ManyProgress | None) -> ManyProgress | None:
        """The progress, told the numbers of the jobs."""
        return (lambda place, step: progress(self._numbers[place], step)) if progress else None


def numbered(number: int, progress: ManyProgress | None) -> Progress | None:
    """The progress of one job."""
    return partial(progress, number) if progress else None


def one_at_a_time(progress: ManyProgress | None) -> ManyProgress | None:
    """The progress, told by one thread at a time."""
    if not progress:
        return None
    lock = threading.Lock()

    def call(number: int, step: Step) -> None:
        with lock:
            progress(number, step)

    return call
