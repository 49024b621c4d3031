"""The facade: connects a model and its settings to the loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from memagent_integrations import policies
from memagent_integrations.backends import Backend
from memagent_integrations.calls import Calls, Limits
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.documents import is_async
from memagent_integrations.errors import UsageError
from memagent_integrations.journal import Journal
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader.base import BaseReader
from memagent_integrations.reader.loading import TWO_LAYOUTS, load_setup
from memagent_integrations.reader.many import Job, ManyProgress, UniqueJobs, aread_jobs, read_jobs
from memagent_integrations.reader.model import Model
from memagent_integrations.reader.resuming import Given, arguments_of_run
from memagent_integrations.reader.running import AsyncProgress, Progress, Running
from memagent_integrations.reader.setup import Setup
from memagent_integrations.reader.sharing import SharedDocument
from memagent_integrations.reader.turns import Memory, turns_of_part, turns_of_reading
from memagent_integrations.reader.unanswered import Unanswered
from memagent_integrations.records import Chunk, Event, Layout, OnLostSection, Reading, Strategy
from memagent_integrations.schedule import Waiting
from memagent_integrations.scopes import in_thread


class Reader(BaseReader):
    """Reads documents of any length with a model of a fixed window.

    Args:
        model: a `Backend`, or a name that `load_backend` knows. "policy:DIR" brings its own prompts and budgets.
        prompts: the templates; default: this package's own.
        layout: order of the blocks in this package's own prompts; default: "section-first".
        chunk_tokens: most tokens of a chunk, 5,000 by default.
        memory_tokens: most tokens of the memory, 1,024 by default (an embedded model's: 256).
        question_tokens: most tokens of the question, 1,024 by default.
        output_tokens: most tokens of one reply, thinking included; default: `memory_tokens` for an update, 1,024 for
            the answer.
        overlap_tokens: tokens that a chunk repeats of the one before, 0 by default.
        window: the model's context window; default: what the backend says, else 8,192, with a warning in the log.
        journal: a `Journal`, or the file of one, in which every step is recorded. What is recorded is not read again:
            an interrupted reading is continued, a complete one costs nothing.
        limits: how long to wait for a slow model, and how often to retry a failing one.
        backend_options: more arguments of the backend that `model` names (`base_url`, `temperature`, ...).
        answer_model: another model for the answer, as `model`; `model` then writes the memory alone. Chunks, memory
            and question are counted in the tokens of `model`, and `window` is its window.
        answer_options: more arguments of the backend that `answer_model` names.
        output: what the answer has to be: a pydantic model class, or the JSON Schema of an object. The answer is then
            JSON that fits; `Reader.output.parse` returns the object. An answer that does not fit is a `BackendError`.
        on_lost_section: what to do when the model wrote no memory for a section, however often it was asked
            (`Limits.empty_retries`): end with `NoMemory` ("error"), or go on with the old memory ("skip"), which
            `Reading.lost_sections` and `Reading.warnings` tell.
        lookup: how many passages of the document to show beside the memory when it answers: those that match the
            question best (BM25), 0 by default. `Step.lookup` of the answer tells where they are.
        strategy: "sequential", or "parallel": `segments` of the document are read side by side, and their memories
            merged in order.
        segments: how many segments a parallel reading has, 8 by default.
        reread: 1: where the answer says that the memory does not suffice, the document is read once more, from the
            memory as it is, and the question asked again. 0 by default. The step of that first answer has the outcome
            "insufficient".

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
        answer_model: str | Backend | None = None,
        answer_options: Mapping[str, Any] | None = None,
        output: type[Any] | Mapping[str, Any] | None = None,
        on_lost_section: OnLostSection = "error",
        lookup: int = 0,
        strategy: Strategy = "sequential",
        segments: int | None = None,
        reread: int = 0,
    ) -> None:
        setup = load_setup(
            model,
            prompts=prompts,
            layout=layout,
            window=window,
            limits=limits,
            backend_options=backend_options,
            answer_model=answer_model,
            answer_options=answer_options,
            output=output,
            on_lost_section=on_lost_section,
            lookup=lookup,
            strategy=strategy,
            segments=segments,
            reread=reread,
            chunk_tokens=chunk_tokens,
            memory_tokens=memory_tokens,
            question_tokens=question_tokens,
            output_tokens=output_tokens,
            overlap_tokens=overlap_tokens,
        )
        super().__init__(setup, journal)
        self._has_policy = policies.names_policy(model)

    @classmethod
    def from_run(
        cls,
        journal: Journal | str | Path,
        run: str,
        *,
        model: str | None = None,
        window: int | None = None,
        limits: Limits | None = None,
        backend_options: Mapping[str, Any] | None = None,
        answer_model: str | None = None,
        answer_options: Mapping[str, Any] | None = None,
        on_lost_section: OnLostSection = "error",
    ) -> Self:
        """Return a reader with the models, prompts, budgets and the schema of a run.

        `read(question, document, run=run)` continues the run. `backend_options` override what the journal records of
        the backend (address, temperature, adapter, tokenizer), `answer_options` what it records of the one that
        answers.

        A run that was read elsewhere, or by somebody else, sets numbers, prompts and the name of a server's model by
        itself. An address, a file and a model that would be loaded or fetched have to be given again: as `model`,
        `answer_model` and in the options; the error names them.

        Raises:
            UsageError: there is no such run, one of its models was not given by a name, or it names what has to be
                given again.
            JournalError: the journal holds what no run of this package has.
        """
        opened = journal if isinstance(journal, Journal) else Journal(journal)
        given = Given(model=model, options=backend_options)
        arguments = arguments_of_run(opened, run, given, Given(model=answer_model, options=answer_options))
        reader = cls(**arguments, window=window, journal=opened, limits=limits, on_lost_section=on_lost_section)
        reader._opened_journal = opened if opened is not journal else None
        return reader

    def read(
        self,
        question: str,
        document: Any,
        *,
        memory: Memory = "",
        progress: Progress | None = None,
        run: str | None = None,
    ) -> Reading:
        """Read a document (see `documents.pieces` for what may be one) and answer the question.

        `memory` is the memory to start from: with the `memory` of a reading, this one carries on what that one noted.
        With a `NamedMemory` of the reader's journal, this reading carries on all that were read with that name.
        `progress` is called with each step when it is done. `run` names the reading in the journal: the run of
        that name is continued (from its own memory if none is given), or begun. By default the name follows from the
        question, the settings, the memory to start from and the document's beginning.

        Raises:
            UsageError: empty question or document, a document that is not text, a memory beyond its budget, or one that
                another journal keeps.
            ContextOverflow: the budgets do not fit the window, found before the first call.
            BackendError: the model failed; `error.reading` holds the steps until then.
            NoMemory: the model wrote no memory for a section (unless `on_lost_section` is "skip").
            JournalMismatch: the document or the settings are not those of the run.
            JournalError: the journal cannot be used, or the run is being read elsewhere.
        """
        return self._start(question, document, memory, run).read(progress)

    def stream(
        self,
        question: str,
        document: Any,
        *,
        memory: Memory = "",
        whole: bool = False,
        run: str | None = None,
    ) -> Iterator[Event]:
        """`read`, with what happens on the way: yield each `Step`, the answer in pieces of text, the `Reading` last.

        With `whole` the answer comes in one piece, from a call like the others: retried if it fails, bounded in
        number. A step is yielded once the next chunk has been cut.
        """
        yield from self._start(question, document, memory, run).stream(whole=whole)

    async def aread(
        self,
        question: str,
        document: Any,
        *,
        memory: Memory = "",
        progress: AsyncProgress | None = None,
        run: str | None = None,
    ) -> Reading:
        """`read`, async; the document may be an async iterator, and `progress` a coroutine function."""
        return await self._start(question, document, memory, run, awaiting=True).aread(progress)

    async def astream(
        self,
        question: str,
        document: Any,
        *,
        memory: Memory = "",
        whole: bool = False,
        run: str | None = None,
    ) -> AsyncGenerator[Event]:
        """`stream`, async; the document may be an async iterator."""
        running = self._start(question, document, memory, run, awaiting=True)
        async with aclosing(running.astream(whole=whole)) as events:
            async for event in events:
                yield event

    def begin(
        self,
        question: str,
        document: Any,
        *,
        memory: Memory = "",
        progress: Progress | None = None,
        run: str | None = None,
    ) -> Unanswered:
        """Make the memory as `read` does, and return the reading whose answer is still to be asked for.

        The two parts are one reading: one run of the journal, one span.

        Raises:
            MemAgentError: as `read` raises it.
        """
        waiting = Waiting()
        unanswered = Unanswered(self._start(question, document, memory, run, waiting=waiting), waiting)
        unanswered.memorizing(question).read(progress)
        return unanswered

    async def abegin(
        self,
        question: str,
        document: Any,
        *,
        memory: Memory = "",
        progress: AsyncProgress | None = None,
        run: str | None = None,
    ) -> Unanswered:
        """`begin`, async; the document may be an async iterator, and `progress` a coroutine function."""
        waiting = Waiting()
        started = self._start(question, document, memory, run, awaiting=True, waiting=waiting)
        unanswered = Unanswered(started, waiting)
        await unanswered.memorizing(question).aread(progress)
        return unanswered

    def memorize(
        self,
        question: str,
        document: Any,
        *,
        memory: str = "",
        first: int = 0,
        progress: Progress | None = None,
    ) -> Reading:
        """Read a document, or one `Chunk`, for a question that is not answered yet: the reading's `answer` is empty.

        Together with `answer` this is `read` in parts, for callers that keep the memory: a graph, a workflow, a
        conversation. It is not recorded in the journal, and `Limits.run_timeout` bounds each part.

        Args:
            question: what the memory is for.
            document: what to read.
            memory: the memory to start from.
            first: the number of the first step.
            progress: called with each step when it is done.

        Raises:
            MemAgentError: as `read` raises it.
        """
        setup = self._setup.for_reading()
        source = setup.checked_chunks(question, setup.chunks(document))
        part = {"memory": setup.checked_memory(memory), "first": first}
        return Running(setup=setup, turns=turns_of_part(setup, question, source, **part)).read(progress)

    async def amemorize(
        self,
        question: str,
        document: Any,
        *,
        memory: str = "",
        first: int = 0,
        progress: AsyncProgress | None = None,
    ) -> Reading:
        """`memorize`, async; the document may be an async iterator, and `progress` a coroutine function."""
        setup = self._setup.for_reading()
        chunks = setup.async_chunks(question, document)
        source = chunks or setup.checked_chunks(question, setup.chunks(document))
        part = {"memory": await in_thread(setup.checked_memory, memory), "first": first}
        turns = turns_of_part(setup, question, source, **part)
        return await Running(setup=setup, turns=turns, chunks=chunks).aread(progress)

    def answer(self, question: str, memory: str, *, first: int = 0) -> Reading:
        """Answer a question from a memory alone; `first` is the number of the step.

        Raises:
            MemAgentError: as `read` raises it.
        """
        return _answering(self._setup.for_reading(), question, memory, first).read()

    async def aanswer(self, question: str, memory: str, *, first: int = 0) -> Reading:
        """`answer`, async."""
        setup = self._setup.for_reading()
        return await (await in_thread(_answering, setup, question, memory, first)).aread()

    def ask(
        self, questions: Iterable[str], document: Any, *, memory: str = "", progress: ManyProgress | None = None
    ) -> list[Reading]:
        """Read a document once for many questions; return their readings in the order of the questions.

        All questions advance together, section by section, so that the document may be an iterator of any length. This
        is `read_many` with the document in each job. With `layout="section-shared"` a backend that caches the beginning
        of prompts computes each section once for all questions.

        Raises:
            UsageError: `questions` is a single text, or no iterable.
        """
        return self.read_many(_jobs_of(questions, document, memory), progress=progress)

    async def aask(
        self, questions: Iterable[str], document: Any, *, memory: str = "", progress: ManyProgress | None = None
    ) -> list[Reading]:
        """`ask`, async; the document may be an async iterator."""
        return await self.aread_many(_jobs_of(questions, document, memory), progress=progress)

    def read_many(self, jobs: Iterable[Job], *, progress: ManyProgress | None = None) -> list[Reading]:
        """Read for many (question, document) pairs; return the readings in the order of the jobs.

        A job may have a third part, the memory to start from.

        Jobs of one document (the same object, or equal texts or paths) advance together: it is read and chunked once,
        and may then be an iterator. A job that fails leaves the others untouched: its reading has `error` set.
        `progress` is called with the number of the job and each step, from the threads that read, one call at a time.

        Raises:
            UsageError: the jobs are not of this form.
        """
        setup, unique = self._setup.for_reading(), UniqueJobs(jobs, self.journal)
        return unique.spread(read_jobs(setup, self.journal, unique.jobs, unique.renumbered(progress)))

    async def aread_many(self, jobs: Iterable[Job], *, progress: ManyProgress | None = None) -> list[Reading]:
        """`read_many`, async: up to the backend's `concurrency` calls at a time, or its batches in a thread.

        Raises:
            UsageError: as `read_many`.
        """
        setup, unique = self._setup.for_reading(), UniqueJobs(jobs, self.journal)
        return unique.spread(await aread_jobs(setup, self.journal, unique.jobs, unique.renumbered(progress)))

    def changed(
        self,
        *,
        backend: Backend | None = None,
        answer_backend: Backend | None = None,
        prompts: PromptSet | None = None,
        layout: Layout | None = None,
        window: int | None = None,
        on_lost_section: OnLostSection | None = None,
        lookup: int | None = None,
        strategy: Strategy | None = None,
        segments: int | None = None,
        reread: int | None = None,
        limits: Limits | None = None,
        **budgets: int | None,
    ) -> Self:
        """Return a copy of this reader with other settings; None leaves a setting unchanged.

        `answer_backend` is another model that answers. Both readers share the journal, and without other `limits` also
        the breakers of their calls.

        Raises:
            UsageError: a setting is wrong.
        """
        check_int(**drop_none(window=window))
        if layout and (prompts or self._has_policy):
            raise UsageError(TWO_LAYOUTS)
        if layout:
            prompts = PromptSet.default(layout=layout)
        reader = copy(self)
        reader._opened_journal = None
        model, answer_model = self._setup.model, self._setup.answer_model
        if answer_backend:
            calls = answer_model.calls if answer_model else Calls(self.calls.limits)
            answer_model = Model(backend=answer_backend, calls=calls)
        if limits:
            model = replace(model, calls=Calls(limits))
            answer_model = answer_model and replace(answer_model, calls=Calls(limits))
        model = replace(model, **drop_none(backend=backend, window=window))
        setup = replace(self._setup, strategy=strategy, segments=None) if strategy == "sequential" else self._setup
        reader._setup = replace(
            setup,
            model=model,
            answer_model=answer_model if answer_model and answer_model.backend is not model.backend else None,
            budgets=replace(self.budgets, **drop_none(**budgets)),
            **drop_none(prompts=prompts, on_lost_section=on_lost_section, lookup=lookup),
            **drop_none(strategy=strategy, segments=segments, reread=reread),
        )
        return reader

    def _start(
        self,
        question: str,
        document: Any,
        memory: Memory,
        run: str | None,
        *,
        awaiting: bool = False,
        waiting: Waiting | None = None,
    ) -> Running:
        """Return a reading that is ready to run; with `awaiting` its document may be an async iterator."""
        setup = self._setup.for_reading()
        shared = document if isinstance(document, SharedDocument) else None
        document = shared.document if shared else document
        awaited = shared.achunks(setup.achunks) if shared and awaiting and is_async(document) else None
        chunks = setup.async_chunks(question, document, memory, awaited) if awaiting else None
        source: Iterable[Chunk] | None = chunks
        if source is None:
            own = shared.chunks(setup.chunks) if shared else setup.chunks(document)
            source = setup.checked_chunks(question, own, memory)
        turns = turns_of_reading(setup, self.journal, question, source, document, memory, run, waiting)
        return Running(setup=setup, turns=turns, chunks=chunks)


def _answering(setup: Setup, question: str, memory: str, first: int) -> Running:
    """Return a reading that only answers from a memory."""
    setup.check(question)
    turns = turns_of_part(setup, question, None, memory=setup.checked_memory(memory), first=first)
    return Running(setup=setup, turns=turns)


def _jobs_of(questions: Iterable[str], document: Any, memory: str) -> list[Job]:
    """Return a job for each question."""
    if isinstance(questions, str) or not isinstance(questions, Iterable):
        raise UsageError(
            f"questions has to be a list of texts, not {type(questions).__name__}; read takes a single one"
        )
    return [(question, document, memory) for question in questions]
