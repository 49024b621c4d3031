"""Run readings to their end: one, or many side by side. Equal jobs are read once, shared documents are cut once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from memagent_integrations import scopes
from memagent_integrations.documents import is_async
from memagent_integrations.drivers import drive_batch
from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.journal import Journal, NamedMemory
from memagent_integrations.loop import Turns
from memagent_integrations.reader.running import Progress, Running
from memagent_integrations.reader.setup import Setup
from memagent_integrations.reader.turns import Memory, turns_of_reading
from memagent_integrations.records import Chunk, Reading, Step
from memagent_integrations.scopes import Scope, in_thread, side_by_side

ManyProgress = Callable[[int, Step], None]
Job = tuple[str, Any] | tuple[str, Any, Memory]
"""A question and the document to read for it; the memory to start from, if there is one."""
WholeJob = tuple[str, Any, Memory]


class UniqueJobs:
    """The jobs to read: with a journal, equal jobs are one run, which is read once."""

    def __init__(self, jobs: Iterable[Job], journal: Journal | None) -> None:
        self.jobs: list[WholeJob] = []
        self._numbers: list[int] = []  # of each unique job: its number among all jobs
        self._positions: list[int] = []  # of each of all jobs: its position among the unique ones
        known: dict[Any, int] = {}
        try:
            for number, (question, document, *rest) in enumerate(jobs):
                (memory,) = rest or ("",)
                key: Any = number
                if journal and isinstance(question, str):
                    key = (question, document if isinstance(document, str) else id(document), memory)
                if key not in known:
                    known[key] = len(self.jobs)
                    self.jobs.append((question, document, memory))
                    self._numbers.append(number)
                self._positions.append(known[key])
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the jobs have to be (question, document), or with a memory as a third ({error})"
            ) from error
        names = Counter(memory for _, _, memory in self.jobs if isinstance(memory, NamedMemory))
        if twice := [memory.name for memory, number in names.items() if number > 1]:
            raise UsageError(
                f"the memory {twice[0]!r} is in several jobs, which run side by side; read them one after the other"
            )

    def spread(self, readings: Sequence[Reading]) -> list[Reading]:
        """Return a reading for each of all jobs, from those of the unique ones."""
        return [readings[position] for position in self._positions]

    def renumbered(self, progress: ManyProgress | None) -> ManyProgress | None:
        """Return the progress function for the unique jobs, from the one for all jobs."""
        return (lambda position, step: progress(self._numbers[position], step)) if progress else None


class SharedChunks:
    """Chunks that several loops read in several threads: each is made once, and kept until all loops are done."""

    def __init__(self, source: Iterator[Chunk]) -> None:
        self._source = source
        self._chunks: list[Chunk] = []
        self._end: StopIteration | MemAgentError | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Chunk]:
        for number in itertools.count():
            with self._lock:
                if number == len(self._chunks) and not self._end:
                    self._fetch()
                if number == len(self._chunks):
                    if isinstance(self._end, MemAgentError):
                        raise self._end
                    return
                chunk = self._chunks[number]
            yield chunk

    def _fetch(self) -> None:
        try:
            with Scope(extend=True):  # the time of one reading is not that of the others
                self._chunks.append(next(self._source))
        except (StopIteration, MemAgentError) as end:
            self._end = end


def read_jobs(
    setup: Setup,
    journal: Journal | None,
    jobs: Sequence[WholeJob],
    progress: ManyProgress | None,
) -> list[Reading]:
    """Return a reading for each job, in the backend's batches or in threads."""
    sources = _shared_chunks(jobs, setup)
    loops = [
        turns_of_reading(setup, journal, question, setup.checked_chunks(question, source, memory), document, memory)
        for (question, document, memory), source in zip(jobs, sources, strict=True)
    ]
    read = _read_in_batches if setup.model.backend.batch_size > 1 else _read_in_threads
    return read(setup, loops, progress)


async def aread_jobs(
    setup: Setup, journal: Journal | None, jobs: Sequence[WholeJob], progress: ManyProgress | None
) -> list[Reading]:
    """`read_jobs`, async: batches are read in a thread, other jobs in tasks. If one raises, all are cancelled."""
    if setup.model.backend.batch_size > 1 and not any(is_async(document) for _, document, _ in jobs):
        return await in_thread(read_jobs, setup, journal, jobs, progress)
    sources, free = _shared_chunks(jobs, setup), asyncio.Semaphore(setup.model.backend.concurrency)

    async def read(number: int) -> Reading:
        question, document, memory = jobs[number]
        async with free:
            async_chunks = setup.async_chunks(question, document, memory)
            chunks = async_chunks or setup.checked_chunks(question, sources[number], memory)
            turns = turns_of_reading(setup, journal, question, chunks, document, memory)
            running = Running(setup=setup, turns=turns, chunks=async_chunks)
            return await running.afinish(_of_job(number, progress))

    tasks = [asyncio.create_task(read(number)) for number in range(len(jobs))]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _read_in_batches(setup: Setup, loops: Sequence[Turns], progress: ManyProgress | None) -> list[Reading]:
    readings: dict[int, Reading] = {}
    with closing(drive_batch(loops, setup.complete_batch, setup.model.backend.batch_size)) as events:
        for number, event in events:
            scopes.check()
            if isinstance(event, Reading):
                readings[number] = event
            elif progress:
                progress(number, event)
    return [readings[number] for number in sorted(readings)]


def _read_in_threads(setup: Setup, loops: Sequence[Turns], progress: ManyProgress | None) -> list[Reading]:
    progress = _one_at_a_time(progress)
    readings = [
        partial(Running(setup=setup, turns=turns).finish, _of_job(number, progress))
        for number, turns in enumerate(loops)
    ]
    return side_by_side(readings, setup.model.backend.concurrency)


def _shared_chunks(jobs: Sequence[WholeJob], setup: Setup) -> list[Iterable[Chunk]]:
    """Return the chunks of each job's document; a document of several jobs is cut once.

    Raises:
        UsageError: an async iterator, which can be read once, stands in several jobs.
    """
    uses = Counter(id(document) for _, document, _ in jobs)
    shared: dict[int, SharedChunks] = {}
    for _, document, _ in jobs:
        if uses[id(document)] == 1:
            continue
        if isinstance(document, AsyncIterator):
            raise UsageError("an async iterator can be read once; collect it before reading it for several questions")
        if id(document) not in shared:
            shared[id(document)] = SharedChunks(setup.chunks(document))
    return [shared.get(id(document)) or setup.chunks(document) for _, document, _ in jobs]


def _of_job(number: int, progress: ManyProgress | None) -> Progress | None:
    """Return the progress function of one job."""
    return partial(progress, number) if progress else None


def _one_at_a_time(progress: ManyProgress | None) -> ManyProgress | None:
    """Return the progress function, called by one thread at a time."""
    if not progress:
        return None
    lock = threading.Lock()

    def call(number: int, step: Step) -> None:
        with lock:
            progress(number, step)

    return call
