"""A reading as a LangGraph graph: one step per chunk, so that it can be resumed, watched, edited and rewound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import RunnableConfig
from typing_extensions import TypedDict

from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.langchain.messages import STEP, step_event
from memagent_integrations.langchain.positions import Positions
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader
from memagent_integrations.langchain.runless import Runless
from memagent_integrations.langchain.stored import StoredMemories, checked_store
from memagent_integrations.reader import Reader
from memagent_integrations.reader.position import Position
from memagent_integrations.records import NO_USAGE, Chunk, Reading, Usage, warnings_of
from memagent_integrations.scopes import in_thread

try:
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
    from langgraph.graph import END, START, StateGraph
    from langgraph.graph.state import CompiledStateGraph
    from langgraph.store.base import BaseStore
    from langgraph.types import Checkpointer
except ImportError as error:
    raise MissingExtra.extra("langgraph", "langchain") from error

NODES = ("begin", "read_chunk", "answer")
"""The nodes of a graph, in their order; "read_chunk" runs once per chunk."""

Item = TypeVar("Item")

_STATE_TYPES = {"chunk": int, "more": bool, "digest": str, "usage": dict}
_RECURSION_LIMIT = 10**9  # the document ends the loop: LangGraph's own count of steps has nothing to guard here
_MAX_SOURCE_BYTES = 10_000  # a whole document in the state would be written with every checkpoint


class ReadingTask(TypedDict, total=False):
    """The input of a graph: a question, and a small reference to the document (a file's name, an id).

    The reference is kept in every checkpoint. `memory` is the memory to start from (default: an empty one);
    `memory_key` instead the key of one in the graph's store, which then has what the reading leaves.
    """

    question: str
    source: Any
    memory: str
    memory_key: str


class ReadingState(ReadingTask, total=False):
    """The state of a graph between steps; its size does not grow with the document.

    `memory` may be edited between steps. `memory_digest` identifies the memory that the store had under `memory_key`
    when the reading began. `chunk` is the number of the next chunk, counted from 0, `more` whether there is one, and
    `digest` identifies the chunks before it. `usage` sums the tokens of all calls (the fields of `records.Usage`).
    `lost_sections` are the first and the last character of the sections that are not in the memory, `warnings` says so
    in words once there is an answer (see `Reading`). `answer` is None until the last step.
    """

    memory_digest: str
    chunk: int
    more: bool
    digest: str
    usage: dict[str, int | None]
    lost_sections: list[tuple[int, int]]
    warnings: list[str]
    answer: str | None


class ReadingGraph(CompiledStateGraph[ReadingState, None, ReadingTask, ReadingState]):
    """The graph that `build_graph` returns. It ignores the config's `recursion_limit`, so that it reads to the end.

    An input without a memory starts from an empty one, whatever the thread has read before.
    """

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Iterator[Any]:
        """`CompiledStateGraph.stream`, which `invoke` and `stream_events` call too."""
        return super().stream(_with_memory(input), _unlimited(config), **options)

    def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> AsyncIterator[Any]:
        """`stream`, async."""
        return super().astream(_with_memory(input), _unlimited(config), **options)


def build_graph(
    reader: MemAgentReader,
    *,
    load: Callable[[Any], Any] = Path,
    checkpointer: Checkpointer = None,
    store: BaseStore | None = None,
    namespace: tuple[str, ...] = ("memagent",),
    interrupt_before: Literal["*"] | Sequence[str] | None = None,
    interrupt_after: Literal["*"] | Sequence[str] | None = None,
    name: str = "memagent",
) -> ReadingGraph:
    """Build a graph that reads a document chunk by chunk and answers: "begin", "read_chunk" once per chunk, "answer".

    It takes `{"question", "source"}`, and perhaps `"memory"`, the memory to start from, and returns the `ReadingState`;
    an input begins a new reading. `load(source)` is called when text is needed and returns what `documents.pieces`
    takes, or a `Blob`; it has to return the same text each time.

    With `"memory_key"` the reading starts from what the `store` (or that of a graph around this one) has under this key
    in `namespace`, `{"memory": text}`. Once it has an answer, it writes the memory there: other threads carry it on.

    A step that fails leaves the state unchanged: with a `checkpointer`, `graph.invoke(None, config)` resumes there,
    also in another process. (Run with `durability="sync"`, so that a killed process loses no other step.) With
    `interrupt_after=["read_chunk"]` the graph waits after each chunk, and
    `graph.update_state(config, {"memory": ...})` edits the memory.

    Each memory update is followed by the custom event "memagent_step", also in the stream mode "custom". If the
    model is a LangChain model, the mode "messages" has the tokens of the answering call only, thinking included.

    Raises:
        UsageError: an argument is wrong; in a run: the memory is no text or beyond its budget, or the document changed.
        InUse: in a run: the memory in the store has been changed since the reading began.
    """
    if checked_reader(reader).journal is not None:
        raise UsageError("a graph keeps its steps in the checkpointer; give it a reader without a journal")
    if reader.limits and reader.limits.run_timeout:
        raise UsageError(
            "run_timeout bounds a reading in one call; "
            "bound a step of a graph with call_timeout or the graph's step_timeout"
        )
    if not callable(load):
        raise UsageError(
            f"load has to be a function that takes the source and gives the document, not {type(load).__name__}"
        )
    nodes = _Nodes(reader, load, StoredMemories(namespace))
    builder = StateGraph(ReadingState, input_schema=ReadingTask)
    builder.add_node("begin", Runless("begin", nodes.begin, nodes.abegin))
    builder.add_node("read_chunk", Runless("read_chunk", nodes.read, nodes.aread, reader.tracing))
    builder.add_node("answer", Runless("answer", nodes.answer, nodes.aanswer, reader.tracing))
    builder.add_edge(START, "begin")
    builder.add_edge("begin", "read_chunk")
    builder.add_conditional_edges("read_chunk", Runless("next", _next, _anext), ["read_chunk", "answer"])
    builder.add_edge("answer", END)
    before, after = _checked_nodes(interrupt_before), _checked_nodes(interrupt_after)
    graph = builder.compile(
        checkpointer, store=checked_store(store), interrupt_before=before, interrupt_after=after, name=name
    )
    attributes = {name: value for name, value in vars(graph).items() if name != "__orig_class__"}
    return ReadingGraph(**attributes)  # as `Pregel.copy` does


def _begun(key: str, memory: str, digest: str) -> ReadingState:
    """Return the state of a new reading, whatever the thread has read before."""
    return ReadingState(
        memory=memory,
        memory_key=key,
        memory_digest=digest,
        chunk=0,
        more=True,
        digest="",
        usage=asdict(NO_USAGE),
        lost_sections=[],
        warnings=[],
        answer=None,
    )


def _checked_task(state: ReadingState) -> tuple[str, str]:
    """Check the input; return the key of the memory to start from ("" if it has none) and the memory."""
    if not {"question", "source"} <= state.keys():
        raise UsageError("the input has to be a dict with 'question' and 'source'")
    if len(JsonPlusSerializer().dumps_typed(state["source"])[1]) > _MAX_SOURCE_BYTES:
        raise UsageError(
            "source has to be a small reference to the document (a file's name, an id), for which `load` gives the text"
        )
    key, memory = state.get("memory_key", ""), state.get("memory", "")
    if not isinstance(memory, str):
        raise UsageError(
            f"memory has to be text, not {type(memory).__name__}; a graph keeps memories with a name in its store: "
            "memory_key"
        )
    if not isinstance(key, str):
        raise UsageError(f"memory_key has to be the key of a memory in the store, not {type(key).__name__}")
    if key and memory:
        raise UsageError("give the memory to start from, or the key of one in the store, not both")
    return key, memory


def _with_memory(value: Any) -> Any:
    """Return an input that sets what a reading starts from, so that nothing of the thread's last one is left."""
    return {"memory": "", "memory_key": "", **value} if isinstance(value, Mapping) else value


def _next(state: ReadingState, _: RunnableConfig) -> str:
    return "read_chunk" if state.get("more", True) else "answer"


async def _anext(state: ReadingState, config: RunnableConfig) -> str:
    """`_next`, async."""
    # LangGraph would run a sync function in a thread: a run cancelled there has the chunk's writes but no next node
    return _next(state, config)


def _checked_nodes(names: Literal["*"] | Sequence[str] | None) -> Any:
    names = () if names is None else names
    if not isinstance(names, str | Iterable):
        raise UsageError(
            f"interrupt_before and interrupt_after take names of nodes ({', '.join(NODES)}) or '*', not {names!r}"
        )
    listed = [names] if isinstance(names, str) else list(names)
    if names != "*" and (unknown := set(listed) - set(NODES)):
        raise UsageError(f"the graph has no node {', '.join(map(repr, sorted(unknown)))}; it has {', '.join(NODES)}")
    return names if names == "*" else listed


def _unlimited(config: RunnableConfig | None) -> RunnableConfig:
    return {**(config or RunnableConfig()), "recursion_limit": _RECURSION_LIMIT}


class _Nodes:
    """The functions of the nodes: they pass the state to the reader, and return what changes in it."""

    def __init__(self, reader: MemAgentReader, load: Callable[[Any], Any], memories: StoredMemories) -> None:
        self._reader, self._load, self._memories, self._positions = reader, load, memories, Positions()

    def begin(self, state: ReadingState, _: RunnableConfig) -> ReadingState:
        key, memory = _checked_task(state)
        return _begun(key, *(self._memories.start(key) if key else (memory, "")))

    async def abegin(self, state: ReadingState, _: RunnableConfig) -> ReadingState:
        key, memory = _checked_task(state)
        return _begun(key, *(await self._memories.astart(key) if key else (memory, "")))

    def read(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader = self._reader_for(state, config)
        with self._position(state, config) as (position, chunk):
            reading = reader.memorize(state["question"], chunk, memory=state["memory"], first=state["chunk"])
        dispatch_custom_event(STEP, step_event(reading.steps[-1]), config=config)
        return self._advance(state, config, position, reading)

    async def aread(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader = await asyncio.to_thread(self._reader_for, state, config)
        async with _in_thread(self._position(state, config)) as (position, chunk):
            reading = await reader.amemorize(state["question"], chunk, memory=state["memory"], first=state["chunk"])
        await adispatch_custom_event(STEP, step_event(reading.steps[-1]), config=config)
        return await in_thread(self._advance, state, config, position, reading)

    def answer(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reading = self._reader_for(state, config).answer(state["question"], state["memory"], first=state["chunk"])
        if key := state.get("memory_key"):
            self._memories.leave(key, state["memory_digest"], state["memory"])
        return _answered(state, reading)

    async def aanswer(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader = await asyncio.to_thread(self._reader_for, state, config)
        reading = await reader.aanswer(state["question"], state["memory"], first=state["chunk"])
        if key := state.get("memory_key"):
            await self._memories.aleave(key, state["memory_digest"], state["memory"])
        return _answered(state, reading)

    def _reader_for(self, state: ReadingState, config: RunnableConfig) -> Reader:
        """Check that a graph wrote the state; return a reader whose calls are children of this node's run."""
        wrong = [name for name, kind in _STATE_TYPES.items() if not isinstance(state.get(name), kind)]
        if wrong or state["usage"].keys() != asdict(NO_USAGE).keys():
            raise UsageError(
                f"{', '.join(wrong) or 'usage'} in the state is not what a graph keeps there: "
                "a thread begins with a question and a source, and only the memory is to be edited"
            )
        return self._reader.under(config)

    @contextmanager
    def _position(self, state: ReadingState, config: RunnableConfig) -> Iterator[tuple[Position, Chunk]]:
        """Yield the state's position in the document and the chunk there; cache the position if the block fails."""
        # a reading that begins always loads its document
        position = self._positions.take(state, config) if state["chunk"] else None
        if position is None:
            reader = self._reader.under(RunnableConfig())  # without this run, which the position outlives
            position = reader.position(lambda: self._load(state["source"]), state["chunk"], state["digest"])
        chunk = position.chunk  # outside of `try`: a position where the document cannot be read is not cached
        try:
            yield position, chunk
        except BaseException:
            if position.number:
                self._positions.put(state, config, position)
            raise

    def _advance(
        self, state: ReadingState, config: RunnableConfig, position: Position, reading: Reading
    ) -> ReadingState:
        """Return what a chunk changes in the state, and cache the position after it."""
        position.advance()
        update = ReadingState(
            memory=reading.memory,
            chunk=position.number,
            more=position.more,
            digest=position.digest,
            usage=_usage(state, reading),
            lost_sections=[*_lost(state), *((span.start, span.end) for span in reading.lost_sections)],
        )
        if position.more:
            self._positions.put({**state, **update}, config, position)
        return update


@asynccontextmanager
async def _in_thread(manager: AbstractContextManager[Item]) -> AsyncIterator[Item]:
    """Enter a context manager in a thread, because its entry reads and tokenizes."""
    with ExitStack() as stack:
        yield await in_thread(stack.enter_context, manager)


def _answered(state: ReadingState, reading: Reading) -> ReadingState:
    """Return what the answer changes in the state."""
    cut = reading.steps[-1].cut
    warnings = warnings_of(_lost(state), state["chunk"], state["memory"], reading.answer, cut=cut)
    return ReadingState(answer=reading.answer, usage=_usage(state, reading), warnings=list(warnings))


def _lost(state: ReadingState) -> list[tuple[int, int]]:
    """Return the places that were lost; a checkpoint may have made lists of tuples, or be older than they are."""
    return [(start, end) for start, end in state.get("lost_sections", ())]


def _usage(state: ReadingState, reading: Reading) -> dict[str, int | None]:
    return asdict(Usage(**state["usage"]) + reading.new_usage)
