"""The facade: a model and its settings, introduced to the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import aclosing, closing
from copy import copy
from dataclasses import replace
from functools import partial
from inspect import isawaitable, iscoroutine
from pathlib import Path
from typing import Any, Self

from memagent_integrations import policies
from memagent_integrations.backends import KINDS, Backend, embedded, load_backend
from memagent_integrations.calls import Calls, Limits, limited
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.chunking import Chunker, SharedChunks, achunks, chunks
from memagent_integrations.documents import apieces, file_paths, is_async, is_one_shot, pieces
from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.journal import Journal, settings_of
from memagent_integrations.loop import AsyncCall, AsyncChunks, Turns, adrive, drive, drive_batch, reading_loop
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader.many import (
    AsyncProgress,
    Job,
    ManyProgress,
    Progress,
    UniqueJobs,
    numbered,
    one_at_a_time,
)
from memagent_integrations.reader.position import Position
from memagent_integrations.reader.setup import Setup
from memagent_integrations.records import Budgets, Chunk, Event, Layout, Plan, Prompt, Reading, Reply, Step
from memagent_integrations.telemetry import traced

_TWO_LAYOUTS = "pass prompts or layout, not both: a prompt set, like that of a policy, has its own layout"


class Reader:
    """Reads documents of any length with a model of a fixed window.

    Args:
        model: a `Backend`, or a name that `load_backend` knows. "policy:DIR" brings its own prompts and budgets.
        prompts: what is asked; default: this package's own.
        layout: order of the blocks in this package's own prompts; default: "section-first".
        chunk_tokens: most tokens of a chunk, 5,000 by default.
        memory_tokens: most tokens of the memory, 1,024 by default (an embedded model's: 256).
        question_tokens: most tokens of the question, 1,024 by default.
        output_tokens: most tokens of one reply, thinking included; by default `memory_tokens` for an update, 1,024 for the answer.
        overlap_tokens: tokens that a chunk repeats of the one before, 0 by default.
        window: the model's context window; default: what the backend says, else 8,192.
        journal: a `Journal`, or the file of one, in which every step is recorded. What is there already is not read again: a reading that was
            interrupted goes on, one that is complete costs nothing.
        limits: how long to wait for a slow model, and how often to retry a failing one.
        backend_options: more arguments of the backend that `model` names (`base_url`, `temperature`, ...).

    Raises:
        UsageError: a setting is wrong, or the model's name is unknown.
        MissingExtra: the model's package is not installed.
        JournalError: the journal cannot be used.
    """

    def __init__(
        self,
        model: str | Backend,
        *,
        prompts: PromptSet | None = None,
        layout: Layout | None = None,
        chunk_tokens: int | None = None,
        memory_tokens: int | None = None,
        question_tokens: int | None = None,
        output_tokens: int | None = None,
        overlap_tokens: int | None = None,
        window: int | None = None,
        journal: Journal | str | Path | None = None,
        limits: Limits | None = None,
        backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, (str, Backend)):
            raise UsageError(
                f"model has to be a name or a Backend, not {type(model).__name__}; "
                "for LangChain and LlamaIndex models use memagent_integrations.langchain and memagent_integrations.llama_index"
            )
        if backend_options and isinstance(model, Backend):
            raise UsageError("backend_options are for a model given by name; this backend has been made already")
        check_int(**drop_none(window=window))
        policy = (
            policies.load(model.removeprefix("policy:"))
            if isinstance(model, str) and model.startswith("policy:")
            else None
        )
        self.budgets = replace(
            _budgets(model, policy),
            **drop_none(
                chunk_tokens=chunk_tokens,
                memory_tokens=memory_tokens,
                question_tokens=question_tokens,
                output_tokens=output_tokens,
                overlap_tokens=overlap_tokens,
            ),
        )
        prompts = prompts or (policy.prompts if policy else None)
        if prompts and layout:
            raise UsageError(_TWO_LAYOUTS)
        self._trained = policy is not None
        self.prompts = prompts or PromptSet.default(layout=layout or "section-first")
        self.backend = model if isinstance(model, Backend) else load_backend(model, **(backend_options or {}))
        self._window = window
        self.journal = journal if isinstance(journal, Journal | None) else Journal(journal)
        self._own_journal = self.journal if self.journal is not journal else None
        if not isinstance(limits, Limits | None):
            raise UsageError(f"limits has to be a Limits, not {limits!r}")
        self.calls = Calls(limits or Limits())

    @classmethod
    def from_run(
        cls,
        journal: Journal | str | Path,
        run: str,
        *,
        window: int | None = None,
        limits: Limits | None = None,
        backend_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """A reader with the model, the prompts and the budgets that a run was begun with; `read(question, document, run=run)` goes on with it.

        `backend_options` come before what the journal knows of the backend (address, temperature, adapter, tokenizer).

        Raises:
            UsageError: there is no such run, or its model was not given by a name.
        """
        records = journal if isinstance(journal, Journal) else Journal(journal)
        begun = records.settings(run)
        if begun["model"] not in embedded.EMBEDDED and begun["model"].partition(":")[0] not in KINDS:
            raise UsageError(
                f"the run {run} was begun with {begun['model']}, a model that was made in Python; go on there: give a Reader with that model the "
                f"journal, and read with run={run!r}"
            )
        recorded = {
            name: value for name, value in begun["backend"].items() if name != "extra_body"
        }  # of which only a digest is there
        options = drop_none(**recorded) | dict(backend_options or {})
        settings = {"prompts": records.prompts(run), "window": window, "limits": limits, **begun["budgets"]}
        reader = cls(begun["model"], journal=records, backend_options=options, **settings)
        reader._own_journal = records if records is not journal else None
        return reader

    def read(
        self, question: str, document: Any, *, progress: Progress | None = None, run: str | None = None
    ) -> Reading:
        """Read a document (see `documents.pieces` for what may be one) and answer the question.

        `progress` is called with each step when it is done. `run` names the reading in the journal: it goes on with the run of that name, or
        begins it; without one the name follows from the question, the settings and the document's beginning.

        Raises:
            UsageError: empty question or document, a document that is not text.
            ContextOverflow: the budgets do not fit the window, found before the first call.
            BackendError: the model failed; `error.reading` holds the steps until then.
            JournalMismatch: the document or the settings are not those of the run.
            JournalError: the journal cannot be used, or the run is being read elsewhere.
        """
        return _raise_for_error(
            self._read(self._turns(question, self._checked(question, self._chunks(document)), document, run), progress)
        )

    def stream(self, question: str, document: Any, *, whole: bool = False, run: str | None = None) -> Iterator[Event]:
        """`read`, with what happens on the way: a `Step` after each call, the answer in pieces of text, the `Reading` last.

        With `whole` the answer comes in one piece, from a call that is like the others: repeated if it fails, bounded in number. A step is
        told when the next chunk is there.
        """
        call = self._complete if whole else self._streamed
        turns = self._turns(question, self._checked(question, self._chunks(document)), document, run)
        with closing(drive(turns, call, self.prompts)) as events:
            for event in events:
                yield _raise_for_error(event) if isinstance(event, Reading) else event

    async def aread(
        self, question: str, document: Any, *, progress: AsyncProgress | None = None, run: str | None = None
    ) -> Reading:
        """`read`, async; the document may be an async iterator, and `progress` a coroutine function."""
        return _raise_for_error(await self._aread(question, document, progress, run=run))

    async def astream(
        self, question: str, document: Any, *, whole: bool = False, run: str | None = None
    ) -> AsyncGenerator[Event]:
        """`stream`, async; the document may be an async iterator."""
        call = self._acomplete if whole else self._astreamed
        async with aclosing(self._adrive(question, document, call, run=run)) as events:
            async for event in events:
                yield _raise_for_error(event) if isinstance(event, Reading) else event

    def memorize(
        self,
        question: str,
        document: Any,
        *,
        memory: str = "",
        first: int = 0,
        strict: bool = False,
        progress: Progress | None = None,
    ) -> Reading:
        """Read a document, or one `Chunk`, on from a memory, for a question that is not answered yet: the reading's `answer` is empty.

        With `answer` this is `read` in parts, for whoever keeps the memory: a graph, a workflow, a conversation. Its steps are numbered from
        `first`. It is not recorded in the journal, and `Limits.run_timeout` bounds the part. With `strict`, for a text that is thrown away
        afterwards, a reply that is no memory is an error and not a step that keeps the old one, unless the server's filter withheld it.

        Raises:
            as `read`.
        """
        memory = self.checked_memory(memory)
        turns = self._part(
            question, self._checked(question, self._chunks(document)), memory=memory, first=first, strict=strict
        )
        return _raise_for_error(self._read(turns, progress))

    async def amemorize(
        self,
        question: str,
        document: Any,
        *,
        memory: str = "",
        first: int = 0,
        strict: bool = False,
        progress: AsyncProgress | None = None,
    ) -> Reading:
        """`memorize`, async; the document may be an async iterator, and `progress` a coroutine function."""
        memory = await asyncio.to_thread(self.checked_memory, memory)
        source = self._asource(question, document)
        turns = self._part(
            question,
            source or self._checked(question, self._chunks(document)),
            memory=memory,
            first=first,
            strict=strict,
        )
        return _raise_for_error(await self._alast(adrive(turns, self._acomplete, self.prompts, source), progress))

    def answer(self, question: str, memory: str, *, first: int = 0) -> Reading:
        """The answer to a question from a memory alone; `first` is the number of the step.

        Raises:
            as `read`.
        """
        self._fitting.check(question)
        return _raise_for_error(
            self._read(self._part(question, None, memory=self.checked_memory(memory), first=first), None)
        )

    async def aanswer(self, question: str, memory: str, *, first: int = 0) -> Reading:
        """`answer`, async."""
        await asyncio.to_thread(self._fitting.check, question)
        turns = self._part(question, None, memory=await asyncio.to_thread(self.checked_memory, memory), first=first)
        return _raise_for_error(await self._alast(adrive(turns, self._acomplete, self.prompts), None))

    def checked_memory(self, memory: str) -> str:
        """The memory, if it keeps to its budget. The model's own does; one that somebody wrote may not.

        Raises:
            UsageError: it is longer, or no text.
        """
        return self._fitting.memory(memory)

    def chunks(self, document: Any) -> Iterator[Chunk]:
        """The chunks in which a document is read."""
        return (chunk for chunk in self._chunks(document) if not chunk.text.isspace())

    def position(self, load: Callable[[], Any], number: int = 0, digest: str = "") -> Position:
        """Where a reading in parts stands in its document after `number` chunks, of which `digest` is the digest; no model is asked.

        `load` gives the document, each time with the same text.

        Raises:
            UsageError: the document cannot be read, or those chunks are not the ones that were read.
        """
        return Position(self.chunks(_given_by(load)), number, digest)

    def changed(
        self,
        *,
        backend: Backend | None = None,
        prompts: PromptSet | None = None,
        layout: Layout | None = None,
        window: int | None = None,
        **budgets: int | None,
    ) -> Self:
        """This reader with other settings; what is None stays. Both share the journal, and the limits and the breaker of their calls.

        Raises:
            UsageError: a setting is wrong.
        """
        check_int(**drop_none(window=window))
        if layout and (prompts or self._trained):
            raise UsageError(_TWO_LAYOUTS)
        reader = copy(self)
        reader.backend = backend or self.backend
        reader.prompts = prompts or (PromptSet.default(layout=layout) if layout else self.prompts)
        reader.budgets = replace(self.budgets, **drop_none(**budgets))
        reader._window, reader._own_journal = window or self._window, None
        return reader

    def read_many(self, jobs: Iterable[Job], *, progress: ManyProgress | None = None) -> list[Reading]:
        """Read for many (question, document) pairs; the readings come in the order of the jobs.

        A document that stands in several jobs (the same object) is chunked once for all of them, and may then be an iterator. One job's
        failure leaves the others untouched: its reading has `error` set. `progress` is called with the number of the job and each step, from
        the threads that read, one call at a time.

        Raises:
            UsageError: the jobs are no pairs, or one async iterator stands in several.
        """
        distinct = UniqueJobs(jobs, self.journal)
        return distinct.spread(self._read_many(distinct.jobs, distinct.numbered(progress), threading.Event()))

    async def aread_many(self, jobs: Iterable[Job], *, progress: ManyProgress | None = None) -> list[Reading]:
        """`read_many`, async: up to the backend's `concurrency` readings at a time, or its batches in a thread.

        Raises:
            UsageError: one async iterator stands in several jobs.
        """
        distinct = UniqueJobs(jobs, self.journal)
        return distinct.spread(await self._aread_many(distinct.jobs, distinct.numbered(progress)))

    async def _aread_many(self, listed: Sequence[Job], progress: ManyProgress | None) -> list[Reading]:
        if self.backend.batch_size > 1 and not any(is_async(document) for _, document in listed):
            cancelled = threading.Event()
            try:
                return await asyncio.to_thread(self._read_many, listed, progress, cancelled)
            finally:
                cancelled.set()
        places = asyncio.Semaphore(self.backend.concurrency)
        sources = self._sources(listed)

        async def one(number: int) -> Reading:
            question, document = listed[number]
            async with places:
                source = None if is_async(document) else sources[number]
                return await self._aread(question, document, numbered(number, progress), source)

        tasks = [asyncio.create_task(one(number)) for number in range(len(listed))]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def plan(self, question: str, document: Any) -> Plan:
        """What `read` would take, without calling the model (the text is tokenized to the end).

        Raises:
            UsageError: as `read`, and for an iterator, which a plan would use up.
            ContextOverflow: the budgets do not fit the window.
        """
        if is_one_shot(document):
            raise UsageError(
                "a plan would use up this iterator; plan for a document that can be read again (str, Path, list, loader)"
            )
        return self._fitting.plan(question, self._checked(question, self._chunks(document)))

    def count(self, text: str) -> int:
        """Tokens of a text as it stands in a prompt."""
        return self._fitting.count(text)

    def close(self) -> None:
        """Close the backend, and the journal if it was given as a file."""
        self.backend.close()
        if self._own_journal:
            self._own_journal.close()

    async def aclose(self) -> None:
        """`close`, async."""
        await self.backend.aclose()
        if self._own_journal:
            await asyncio.to_thread(self._own_journal.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Reader {self.backend.name} {self.prompts.name} {self.budgets}>"

    @property
    def _fitting(self) -> Setup:
        return Setup(
            backend=self.backend, calls=self.calls, prompts=self.prompts, budgets=self.budgets, window=self._window
        )

    def _turns(self, question: str, source: Iterable[Chunk], document: Any, run: str | None) -> Turns:
        """The loop of a whole reading, which the journal records."""
        turns = self._loop(question, source)
        if self.journal:
            settings = settings_of(question, self.backend.name, self.backend.identity, self.budgets, self.prompts)
            turns = self.journal.recorded(turns, settings, run, file_paths(document))
        elif run is not None:
            raise UsageError("run names a reading in a journal; give the reader one (journal=...)")
        return self._watched(turns)

    def _part(self, question: str, source: Iterable[Chunk] | None, **part: Any) -> Turns:
        """The loop of a part: updates of the memory, or without a source the answer."""
        return self._watched(self._loop(question, source, answering=source is None, **part))

    def _loop(self, question: str, source: Iterable[Chunk] | None, **part: Any) -> Turns:
        settings: dict[str, Any] = {
            "prompts": self.prompts,
            "budgets": self.budgets,
            "count": self.count,
            "model": self.backend.name,
        }
        return reading_loop(question, source, **settings, **part)

    def _watched(self, turns: Turns) -> Turns:
        return traced(limited(turns, self.calls.limits.run_timeout), model=self.backend.name, budgets=self.budgets)

    def _checked(self, question: str, source: Iterable[Chunk]) -> Iterator[Chunk]:
        """The chunks that are read: the loop meets a bad question as it meets a bad document; one of nothing but space costs no call."""
        self._fitting.check(question)
        yield from (chunk for chunk in source if not chunk.text.isspace())

    async def _achecked(self, question: str, source: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
        async with aclosing(source):
            await asyncio.to_thread(self._fitting.check, question)
            async for chunk in source:
                if not chunk.text.isspace():
                    yield chunk

    def _read(self, turns: Turns, progress: Progress | None, cancelled: threading.Event | None = None) -> Reading:
        """Run a loop to its end, or until nobody waits for it any more."""
        with closing(drive(turns, partial(self._complete, cancelled=cancelled), self.prompts)) as events:
            for event in events:
                if isinstance(event, Reading):
                    return event
                if cancelled and cancelled.is_set():
                    raise CancelledError
                _tell(event, progress)
        raise AssertionError("a driver ends with a reading")

    def _read_many(
        self, jobs: Sequence[Job], progress: ManyProgress | None, cancelled: threading.Event
    ) -> list[Reading]:
        """`read_many`, which makes no more calls once `cancelled` is set."""
        progress = one_at_a_time(progress)
        sources = zip(jobs, self._sources(jobs), strict=True)
        loops = [
            self._turns(question, self._checked(question, source), document, None)
            for (question, document), source in sources
        ]
        if self.backend.batch_size > 1:
            readings: dict[int, Reading] = {}
            with closing(drive_batch(loops, self._complete_batch, self.backend.batch_size)) as events:
                for number, event in events:
                    if cancelled.is_set():
                        break
                    if isinstance(event, Reading):
                        readings[number] = event
                    else:
                        _tell(event, numbered(number, progress))
            return [readings[number] for number in sorted(readings)]
        pool = ThreadPoolExecutor(self.backend.concurrency)
        try:
            tasks = [
                pool.submit(self._read, loop, numbered(number, progress), cancelled)
                for number, loop in enumerate(loops)
            ]
            for task in as_completed(tasks):
                task.result()
            return [task.result() for task in tasks]
        finally:
            cancelled.set()  # an interrupt, or a progress that raises, does not wait for what is running
            pool.shutdown(wait=False, cancel_futures=True)

    async def _aread(
        self,
        question: str,
        document: Any,
        progress: AsyncProgress | None,
        source: Iterable[Chunk] | None = None,
        run: str | None = None,
    ) -> Reading:
        return await self._alast(self._adrive(question, document, self._acomplete, source, run), progress)

    async def _alast(self, driver: AsyncGenerator[Event], progress: AsyncProgress | None) -> Reading:
        async with aclosing(driver) as events:
            async for event in events:
                if isinstance(event, Reading):
                    return event
                if progress and isinstance(event, Step) and isawaitable(told := progress(event)):
                    await told
        raise AssertionError("a driver ends with a reading")

    def _adrive(
        self,
        question: str,
        document: Any,
        call: AsyncCall,
        source: Iterable[Chunk] | None = None,
        run: str | None = None,
    ) -> AsyncGenerator[Event]:
        waiting = self._asource(question, document)
        turns = self._turns(
            question, waiting or self._checked(question, source or self._chunks(document)), document, run
        )
        return adrive(turns, call, self.prompts, waiting)

    def _asource(self, question: str, document: Any) -> AsyncChunks | None:
        return (
            AsyncChunks(self._achecked(question, achunks(apieces(document), self._chunker())))
            if is_async(document)
            else None
        )

    def _complete(self, prompt: Prompt, *, cancelled: threading.Event | None = None) -> Iterator[str | Reply]:
        yield self.calls.complete(self.backend, prompt, cancelled)

    async def _acomplete(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        yield await self.calls.acomplete(self.backend, prompt)

    def _complete_batch(self, prompts: Sequence[Prompt]) -> Sequence[Reply | MemAgentError]:
        return self.calls.complete_batch(self.backend, prompts)

    def _streamed(self, prompt: Prompt) -> Iterator[str | Reply]:
        return self.calls.stream(self.backend, prompt) if prompt.phase == "answer" else self._complete(prompt)

    def _astreamed(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        return self.calls.astream(self.backend, prompt) if prompt.phase == "answer" else self._acomplete(prompt)

    def _chunker(self) -> Chunker:
        return Chunker(self.count, self.budgets.chunk_tokens, self.budgets.overlap_tokens)

    def _chunks(self, document: Any) -> Iterator[Chunk]:
        if isinstance(document, Chunk):
            return iter((self._fitting.chunk(document),))
        return chunks(pieces(document), self._chunker())

    def _sources(self, jobs: Sequence[Job]) -> list[Iterable[Chunk]]:
        uses = Counter(id(document) for _, document in jobs)
        shared: dict[int, SharedChunks] = {}
        for _, document in jobs:
            if uses[id(document)] > 1 and isinstance(document, AsyncIterator):
                raise UsageError(
                    "an async iterator can be read once; collect it before reading it for several questions"
                )
            if uses[id(document)] > 1 and id(document) not in shared:
                shared[id(document)] = SharedChunks(self._chunks(document))
        return [shared.get(id(document)) or self._chunks(document) for _, document in jobs]


def _budgets(model: str | Backend, policy: policies.Policy | None) -> Budgets:
    """Those that a model brings."""
    if policy:
        return policy.budgets
    return embedded.EMBEDDED[model].budgets if isinstance(model, str) and model in embedded.EMBEDDED else Budgets()


def _given_by(load: Callable[[], Any]) -> Iterator[Any]:
    document = load()
    if document is None:
        raise UsageError("load gave no document for its reference, but None")
    if iscoroutine(document):
        document.close()
        raise UsageError("load has to be a plain function, not an async one; it is called in a thread")
    if is_async(document):
        raise UsageError(
            "a reading in parts needs a document that can be read again at any time, not an async iterator"
        )
    yield document


def _raise_for_error(reading: Reading) -> Reading:
    if reading.error:
        reading.error.reading = reading
        raise reading.error
    return reading


def _tell(event: Event, progress: Progress | None) -> None:
    if progress and isinstance(event, Step):
        progress(event)
