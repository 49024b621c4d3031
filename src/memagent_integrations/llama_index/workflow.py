"""A reading as a LlamaIndex workflow: one chunk per step, reviews by a person, contexts that can be resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Unpack
from weakref import WeakKeyDictionary

from llama_index.core.workflow import (
    Context,
    Event,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)
from pydantic import BaseModel, BeforeValidator, Field

from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.documents import is_async
from memagent_integrations.errors import UsageError
from memagent_integrations.joining import as_read
from memagent_integrations.llama_index.nodes import NodeOptions, NodeSettings
from memagent_integrations.llama_index.record import ResponseRecord
from memagent_integrations.llama_index.settings import Model, ReaderSettings, reader_over
from memagent_integrations.llama_index.sources import SourceNodes
from memagent_integrations.reader import Reader
from memagent_integrations.reader.position import Position
from memagent_integrations.records import NO_USAGE, Chunk, Step, Usage, warnings_of
from memagent_integrations.scopes import in_thread
from memagent_integrations.tokens import Counter

_MAX_REFERENCE = 10_000  # characters; a whole document in the context would be saved with it


class MemAgentStart(StartEvent):
    """Starts a reading of a document for a question; without either, the context's reading is resumed.

    `document` is a reference, from which the workflow's `load` makes the document; `memory` is the memory to start
    from, such as that of an earlier result.
    """

    question: str = ""
    memory: str = ""
    document: Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)] = ""


class MemAgentStepEvent(Event):
    """On the stream after each call.

    `number` counts the chunks from 1, `start` and `end` (exclusive) are the chunk's characters in the whole text, None
    for the answer. `step` is the call's line in the summary, as in `response.metadata["memagent"]["steps"]`.
    """

    number: int
    start: int | None
    end: int | None
    memory: str
    step: dict[str, Any]


class MemAgentReview(InputRequiredEvent):
    """Shows a person the memory after chunk `number`; the answer is a `MemAgentReviewed`.

    `problem` says why an earlier answer was refused.
    """

    number: int
    question: str
    memory: str
    problem: str = ""


class MemAgentReviewed(HumanResponseEvent):
    """A person's answer to a review: a new memory, or None to keep it; `number` names the chunk of the review."""

    memory: str | None = None
    number: int | None = None


class MemAgentAnswer(StopEvent):
    """The result: the answer, and the fields of a query engine's `response.metadata["memagent"]`."""

    answer: str
    memory: str
    model: str
    steps: list[dict[str, Any]]
    usage: dict[str, int | None]
    warnings: list[str] = Field(default_factory=list)

    def __str__(self) -> str:
        """The answer."""
        return self.answer


class MemAgentNext(Event):
    """Read the chunk number `index`, counted from 0."""

    index: int


class MemAgentResumed(HumanResponseEvent):
    """A run was resumed from its context."""


class MemAgentRead(Event):
    """All chunks have been read."""


class MemAgentState(BaseModel):
    """The reading in a context, without the document.

    `start` is the memory that it started from, `read` counts the chunks read, `digest` identifies them, `lost` are the
    places of those that are not in the memory.
    """

    question: str = ""
    document: str = ""
    start: str = ""
    memory: str = ""
    read: int = 0
    digest: str = ""
    waiting: bool = False
    answer: str | None = None
    steps: list[dict[str, Any]] = Field(default_factory=list)
    usage: dict[str, int | None] = Field(default_factory=lambda: asdict(NO_USAGE))
    lost: list[tuple[int, int]] = Field(default_factory=list)

    def add(self, record: ResponseRecord) -> None:
        """Add the record's step."""
        self.steps += record.summary["steps"]
        self.usage = asdict(Usage(**self.usage) + Usage(**record.summary["usage"]))


class WorkflowSettings(ReaderSettings, NodeOptions, total=False):
    """The arguments of `Reader` besides the model, and how nodes are read (see `NodeSettings`)."""


class MemAgentWorkflow(Workflow):
    """Reads a document one chunk per step, and answers.

        result = await MemAgentWorkflow(llm).run(question="Who pays?", document="contract.txt")

    Args:
        llm: a LlamaIndex LLM, a `Backend`, or a name that `load_backend` knows; default: `Settings.llm`, looked up for
            each reading.
        load: makes the document (see `documents.pieces`) from the reference that `run` gets; by default it is a path.
            It is called in a thread when the reading begins or is resumed elsewhere, and has to return the same text.
        ask_every: every this many chunks, show a person the memory (`MemAgentReview`) and wait for the answer
            (`MemAgentReviewed`).
        tokenizer: counts the tokens of a LlamaIndex LLM, see `LLMBackend`.
        timeout: seconds after which a run is given up; default: never.
        verbose: whether to print the steps.
        num_concurrent_runs: the maximum number of runs at a time.
        settings: as in `Reader`, without `journal`; and how nodes are read (`order`, `trim_overlap`, `metadata_mode`,
            `docstore`), see `NodeSettings`.

    A `ctx.to_dict()` saved at any time, or the context of a run that failed, can be resumed in this workflow or in
    another one with the same settings: `run(ctx=Context.from_dict(workflow, saved))`. Calls finished by then are
    not made again; an open review is put on the stream again.

    Raises:
        UsageError: a setting is wrong; from a run: there is nothing to resume, the document is not that of the context,
            and what `Reader.read` raises.
    """

    def __init__(
        self,
        llm: Model = None,
        *,
        load: Callable[[str], Any] = Path,
        ask_every: int | None = None,
        tokenizer: str | Counter | None = None,
        timeout: float | None = None,
        verbose: bool = False,
        num_concurrent_runs: int | None = None,
        **settings: Unpack[WorkflowSettings],
    ) -> None:
        if settings.get("journal") is not None:
            raise UsageError("a workflow is not recorded in a journal; keep the context's to_dict()")
        check_int(**drop_none(ask_every=ask_every))
        if not callable(load):
            raise UsageError(
                f"load has to be a function that takes the reference and gives the document, not {type(load).__name__}"
            )
        if (limits := settings.get("limits")) and limits.run_timeout:
            raise UsageError(
                "run_timeout bounds a reading in one call; "
                "bound a workflow with its timeout, and a call with call_timeout"
            )
        others: dict[str, Any] = {**settings}
        options = {name: others.pop(name) for name in NodeOptions.__annotations__ if name in others}
        self._node_settings = NodeSettings(**options)
        self.reader = reader_over(llm, tokenizer, **others)
        self._load, self._ask_every = load, ask_every
        self._runs: WeakKeyDictionary[object, _Run] = WeakKeyDictionary()  # by the stores of their contexts
        self._options: dict[str, Any] = drop_none(verbose=verbose, num_concurrent_runs=num_concurrent_runs)
        self._options["timeout"] = timeout  # None: never; LlamaIndex's default is 45 seconds
        own = set(vars(self))
        super().__init__(**self._options)
        self._remade = {"_runs", *(set(vars(self)) - own)}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: runs stay where they are, and what LlamaIndex's class holds is made again."""
        return {name: value for name, value in vars(self).items() if name not in self._remade}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _runs=WeakKeyDictionary())
        super().__init__(**self._options)

    def run(self, ctx: Context[Any] | None = None, start_event: StartEvent | None = None, **kwargs: Any) -> Any:
        """Begin a reading (`question`, `document`), or resume that of a context."""
        is_resumed = ctx is not None and ctx.is_running
        handler = super().run(ctx=ctx, start_event=start_event, **kwargs)
        if is_resumed and handler.ctx:
            handler.ctx.send_event(MemAgentResumed())
        return handler

    @step
    async def resumed(self, ctx: Context[MemAgentState], ev: MemAgentResumed) -> MemAgentReview | None:
        """Show the review that was open when the context was saved."""
        state = await ctx.store.get_state()
        return _review(state) if state.waiting else None

    @step
    async def begin(self, ctx: Context[MemAgentState], ev: MemAgentStart) -> MemAgentNext | MemAgentReview | None:
        """Begin, or resume the same reading that failed in this context."""
        async with ctx.store.edit_state() as state:
            question, document = ev.question or state.question, ev.document or state.document
            if not question or not document:
                raise UsageError("run needs a question and a document, or the context of a reading to resume")
            if len(document) > _MAX_REFERENCE:
                raise UsageError(
                    "document has to be a small reference (a file's name, an id), for which `load` gives the text"
                )
            is_same = (question, document) == (state.question, state.document)
            start = ev.memory or (state.start if is_same else "")
            if not is_same or start != state.start or state.answer is not None:
                await in_thread(self.reader.checked_memory, start)
                fresh = MemAgentState(question=question, document=document, start=start, memory=start)
                for name in MemAgentState.model_fields:
                    setattr(state, name, getattr(fresh, name))
        return self._after(ctx, state)

    @step(num_workers=1)
    async def read_chunk(
        self, ctx: Context[MemAgentState], ev: MemAgentNext
    ) -> MemAgentNext | MemAgentReview | MemAgentRead | None:
        """Read one chunk, unless that was done before the context was saved."""
        state = await ctx.store.get_state()
        if ev.index != state.read:
            return self._after(ctx, state)
        run = self._run(ctx)
        if (position := run.position) is None:
            load = partial(self._nodes, state.document, run.sources)
            position = await in_thread(run.reader.position, load, state.read, state.digest)
        if position.number and not position.more:
            return MemAgentRead()
        run.position = None  # computed again if this step fails
        chunk = position.chunk
        reading = await run.reader.amemorize(state.question, chunk, memory=state.memory, first=state.read)
        await in_thread(position.advance)
        run.position = position
        record = self._record(ctx, reading.steps[-1])
        async with ctx.store.edit_state() as state:
            state.memory, state.read, state.digest = reading.memory, position.number, position.digest
            state.waiting = bool(self._ask_every and state.read % self._ask_every == 0)
            state.lost += [(span.start, span.end) for span in reading.lost_sections]
            state.add(record)
        _notify(ctx, state, chunk)
        return self._after(ctx, state)

    @step(num_workers=1)
    async def reviewed(
        self, ctx: Context[MemAgentState], ev: MemAgentReviewed | HumanResponseEvent
    ) -> MemAgentNext | MemAgentReview | None:
        """Resume from a person's answer: ignore one that is late, show the review again after one that is invalid."""
        state = await ctx.store.get_state()
        if not isinstance(ev, MemAgentReviewed) or (ev.number or 0) > state.read:
            return _review(state, f"answer with MemAgentReviewed, for chunk {state.read}") if state.waiting else None
        if ev.number not in (None, state.read):
            return None
        if state.waiting and ev.memory is not None:
            try:
                await in_thread(self.reader.checked_memory, ev.memory)
            except UsageError as error:
                return _review(state, str(error))
        async with ctx.store.edit_state() as state:
            if state.waiting:
                state.waiting, state.memory = False, state.memory if ev.memory is None else ev.memory
        return self._after(ctx, state)

    @step(num_workers=1)
    async def answer(self, ctx: Context[MemAgentState], ev: MemAgentRead) -> MemAgentAnswer:
        """Answer from the memory."""
        state = await ctx.store.get_state()
        if state.answer is None:
            reading = await self._run(ctx).reader.aanswer(state.question, state.memory, first=state.read)
            record = self._record(ctx, reading.steps[-1])
            async with ctx.store.edit_state() as state:
                state.answer = reading.answer
                state.add(record)
            _notify(ctx, state, None)
        model = self._run(ctx).reader.backend.name
        return MemAgentAnswer(
            answer=state.answer or "",
            memory=state.memory,
            model=model,
            steps=state.steps,
            usage=state.usage,
            warnings=list(warnings_of(state.lost, state.read, state.memory, state.answer)),
        )

    def _after(self, ctx: Context[MemAgentState], state: MemAgentState) -> MemAgentNext | MemAgentReview | None:
        return _review(state) if state.waiting else self._run(ctx).issue(MemAgentNext(index=state.read))

    def _nodes(self, reference: str, sources: SourceNodes) -> Any:
        """Return the document for a reference; what is read of its nodes is noted."""
        document = self._load(reference)
        return document if is_async(document) else as_read(document, self._node_settings, sources)

    def _record(self, ctx: Context[MemAgentState], step: Step) -> ResponseRecord:
        run = self._run(ctx)
        record = ResponseRecord(run.reader.backend.name, sources=run.sources)
        record.step(step)
        return record

    def _run(self, ctx: Context[MemAgentState]) -> _Run:
        if (run := self._runs.get(ctx.store)) is None:
            run = self._runs[ctx.store] = _Run(self.reader.for_reading())
        return run


class _Run:
    """What a run keeps in this process: its reader, its nodes, its position in them, and the last chunk to read."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.sources = SourceNodes(include_text=False)
        self.position: Position | None = None
        self._issued = -1

    def issue(self, event: MemAgentNext) -> MemAgentNext | None:
        """Return the event, but only once per chunk: of two answers to a review the first counts."""
        if event.index <= self._issued:
            return None
        self._issued = event.index
        return event


def _review(state: MemAgentState, problem: str = "") -> MemAgentReview:
    return MemAgentReview(number=state.read, question=state.question, memory=state.memory, problem=problem)


def _notify(ctx: Context[MemAgentState], state: MemAgentState, chunk: Chunk | None) -> None:
    """Put the event of the last step on the stream."""
    start, end = (chunk.span.start, chunk.span.end) if chunk else (None, None)
    event = MemAgentStepEvent(number=state.read, start=start, end=end, memory=state.memory, step=state.steps[-1])
    ctx.write_event_to_stream(event)
