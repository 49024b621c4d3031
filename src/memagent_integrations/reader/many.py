"""Run readings to their end: one, or many side by side. Equal jobs are read once, shared documents are cut once."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from memagent_integrations import scopes
from memagent_integrations.documents import is_async
from memagent_integrations.drivers import AsyncChunks, adrive, drive, drive_batch
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.journal import Journal, NamedMemory
from memagent_integrations.loop import Turns
from memagent_integrations.reader.setup import Setup
from memagent_integrations.reader.sharing import ChunkReader, SharedChunks, stands_for
from memagent_integrations.reader.turns import Memory, turns_of_reading
from memagent_integrations.records import Event, Prompt, Reading, Reply, Step
from memagent_integrations.schedule import Schedule, Task
from memagent_integrations.scopes import in_thread, side_by_side

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
            for number, job in enumerate(jobs):
                if not isinstance(job, tuple | list):  # a mapping would give its keys, a text its characters
                    raise TypeError(f"job {number} is of type {type(job).__name__}")
                question, document, *rest = job
                (memory,) = rest or ("",)
                key: Any = number
                if journal and isinstance(question, str):
                    key = (question, stands_for(document), memory)
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
        """Return the progress function for the unique jobs, from the one for all jobs.

        Raises:
            UsageError: it is a coroutine function.
        """
        if iscoroutinefunction(progress):
            raise UsageError("progress of many readings is called where they are read, in threads too: no coroutine")
        return (lambda position, step: progress(self._numbers[position], step)) if progress else None


class Readings:
    """Many readings under way: a loop for each job, in the order of a schedule; those of one document share its chunks.

    With `awaiting`, documents may be async.
    """

    def __init__(
        self,
        setup: Setup,
        journal: Journal | None,
        jobs: Sequence[WholeJob],
        progress: ManyProgress | None,
        *,
        awaiting: bool = False,
    ) -> None:
        self._setup, self._progress = setup, progress
        documents = [stands_for(document) for _, document, _ in jobs]
        backend = setup.model.backend
        side_by_side = max(backend.batch_size, backend.concurrency) > 1
        lengths = [_likely_length(document) for _, document, _ in jobs] if side_by_side else ()
        leading = setup.prompts.begins_with_section and backend.caches_prefixes and backend.concurrency > 1
        self._schedule = Schedule(documents, lengths=lengths, leading=leading)
        calls = setup.parallel_segments or 1  # that a reading makes at a time
        self._places = min(max(backend.concurrency // calls, 1), len(jobs))
        self._uses, self._shared = Counter(documents), dict[Hashable, SharedChunks]()
        self._async_chunks: list[AsyncChunks | None] = []
        self._loops: list[Turns] = []
        for task, (question, document, memory) in zip(self._schedule.tasks, jobs, strict=True):
            reader = self._reader(document, awaiting=awaiting)
            awaited = reader.aiter() if reader and awaiting and is_async(document) else None
            async_chunks = setup.async_chunks(question, document, memory, awaited) if awaiting else None
            source = async_chunks or setup.checked_chunks(question, reader or setup.chunks(document), memory)
            turns = turns_of_reading(setup, journal, question, source, document, memory, waiting=task)
            self._async_chunks.append(async_chunks)
            self._loops.append(_closing(turns, reader) if reader else turns)
        self._readings: dict[int, Reading] = {}

    def in_batches(self) -> list[Reading]:
        """Return the readings, whose prompts the backend computes together."""
        size = self._setup.model.backend.batch_size
        with closing(drive_batch(self._loops, self._setup.complete_batch, size, self._schedule)) as events:
            for number, event in events:
                scopes.check()
                self._note(number, event)
        return self._in_order()

    def in_threads(self) -> list[Reading]:
        """Return the readings, whose calls are made in threads."""
        changed, noting = threading.Condition(), threading.Lock()

        def opened(task: Task) -> None:
            with changed:
                self._schedule.opened(task)
                changed.notify()

        tasks = zip(self._loops, self._schedule.tasks, strict=True)
        events = [drive(turns, partial(self._call, task, opened)) for turns, task in tasks]

        def next_task() -> Task | None:
            for seconds in scopes.slices():
                with changed:
                    task = self._schedule.take()
                    if task or self._schedule.done:
                        changed.notify()  # there may be another
                        return task
                    changed.wait(seconds)
            return None

        def work() -> None:
            while task := next_task():
                try:
                    event = next(events[task.number])
                    scopes.check()
                    with noting:
                        self._note(task.number, event)
                except BaseException:
                    events[task.number].close()
                    raise
                with changed:
                    self._end_turn(task, event)
                    changed.notify()

        try:
            side_by_side([work] * self._places, self._places)
        finally:
            for each in events:
                with suppress(ValueError):  # a thread is still in it, and closes it
                    each.close()
        return self._in_order()

    async def in_tasks(self) -> list[Reading]:
        """Return the readings, whose calls are made in tasks. If one raises, all are cancelled."""
        changed = asyncio.Condition()

        async def opened(task: Task) -> None:
            async with changed:
                self._schedule.opened(task)
                changed.notify()

        parts = zip(self._loops, self._schedule.tasks, self._async_chunks, strict=True)
        events = [adrive(turns, partial(self._acall, task, opened), chunks=chunks) for turns, task, chunks in parts]

        async def next_task() -> Task | None:
            async with changed:
                while not (task := self._schedule.take()) and not self._schedule.done:
                    await changed.wait()
                changed.notify()
                return task

        async def work() -> None:
            while task := await next_task():
                event = await anext(events[task.number])
                self._note(task.number, event)
                async with changed:
                    self._end_turn(task, event)
                    changed.notify()

        workers = [asyncio.create_task(work()) for _ in range(self._places)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for each in events:
                await each.aclose()
            for shared in self._shared.values():
                await shared.aclose()
        return self._in_order()

    def _reader(self, document: Any, *, awaiting: bool) -> ChunkReader | None:
        """Return the chunks of a document that several jobs read, for one of them; None for one of a single job."""
        key = stands_for(document)
        if self._uses[key] == 1:
            return None
        if key not in self._shared:
            is_awaited = awaiting and is_async(document)
            source = self._setup.achunks(document) if is_awaited else self._setup.chunks(document)
            self._shared[key] = SharedChunks(source, self._uses[key])
        return ChunkReader(self._shared[key])

    def _call(self, task: Task, opened: Callable[[Task], None], prompt: Prompt) -> Iterator[str | Reply]:
        """Make a call; the first one about a section lets the others follow with the first piece of its reply."""
        prompt, model = task.resumed(prompt), self._setup.model
        try:
            if task.leads and prompt.phase == "memory":
                with closing(model.calls.stream(model.backend, prompt)) as pieces:
                    for piece in pieces:
                        if task.leads:
                            opened(task)
                        yield piece
                        if isinstance(piece, Reply):
                            return
        except BackendError:  # it is made once more, as the others are: with all retries, and not as a stream
            pass
        if task.leads:
            opened(task)
        yield from self._setup.complete(prompt)

    async def _acall(
        self, task: Task, opened: Callable[[Task], Awaitable[None]], prompt: Prompt
    ) -> AsyncGenerator[str | Reply]:
        """`_call`, async."""
        prompt, model = task.resumed(prompt), self._setup.model
        try:
            if task.leads and prompt.phase == "memory":
                async with aclosing(model.calls.astream(model.backend, prompt)) as pieces:
                    async for piece in pieces:
                        if task.leads:
                            await opened(task)
                        yield piece
                        if isinstance(piece, Reply):
                            return
        except BackendError:
            pass
        if task.leads:
            await opened(task)
        async with aclosing(self._setup.acomplete(prompt)) as reply:
            async for whole in reply:
                yield whole

    def _note(self, number: int, event: Event) -> None:
        if isinstance(event, Reading):
            self._readings[number] = event
        elif self._progress and isinstance(event, Step):
            self._progress(number, event)

    def _end_turn(self, task: Task, event: Event) -> None:
        if isinstance(event, Step):
            self._schedule.put_back(task, event.index + 1)
        else:
            self._schedule.remove(task)

    def _in_order(self) -> list[Reading]:
        return [self._readings[number] for number in range(len(self._loops))]


def read_jobs(
    setup: Setup,
    journal: Journal | None,
    jobs: Sequence[WholeJob],
    progress: ManyProgress | None,
) -> list[Reading]:
    """Return a reading for each job, in the backend's batches or in threads."""
    readings = Readings(setup, journal, jobs, progress)
    return readings.in_batches() if setup.model.backend.batch_size > 1 else readings.in_threads()


async def aread_jobs(
    setup: Setup, journal: Journal | None, jobs: Sequence[WholeJob], progress: ManyProgress | None
) -> list[Reading]:
    """`read_jobs`, async: batches are read in a thread, other jobs in tasks."""
    if setup.model.backend.batch_size > 1 and not any(is_async(document) for _, document, _ in jobs):
        return await in_thread(read_jobs, setup, journal, jobs, progress)
    return await Readings(setup, journal, jobs, progress, awaiting=True).in_tasks()


def _closing(turns: Turns, chunks: ChunkReader) -> Turns:
    """Return the loop; when it ends, it lets go of the chunks that it has not read."""
    with closing(chunks):
        return (yield from turns)


def _likely_length(document: Any) -> float:
    """Return how long a document is, in characters or bytes, if that is known without reading it; else infinity."""
    if isinstance(document, str):
        return len(document)
    if isinstance(document, list | tuple):
        return sum(map(_likely_length, document))
    try:
        return document.stat().st_size if isinstance(document, Path) else math.inf
    except (OSError, ValueError):
        return 0.0
