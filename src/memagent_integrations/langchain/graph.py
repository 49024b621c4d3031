"""A reading as a LangGraph graph: one step a chunk, so that it can be resumed, watched, edited and rewound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from typing_extensions import TypedDict

from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.langchain.messages import STEP, step_event, text_of
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader
from memagent_integrations.reader import Reader
from memagent_integrations.reader.position import Position
from memagent_integrations.records import NO_USAGE, Chunk, Reading, Usage

try:
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
    from langgraph.graph import END, START, StateGraph
    from langgraph.graph.state import CompiledStateGraph
    from langgraph.types import Checkpointer
except ImportError as error:
    raise MissingExtra.extra("langgraph", "langchain") from error

NODES = ("begin", "read_chunk", "answer")
"""The nodes of a graph, in their order; "read_chunk" runs once a chunk."""

Item = TypeVar("Item")

_KEPT = {"chunk": int, "more": bool, "digest": str, "usage": dict}
_STEPS = 10**9  # the document ends the loop: LangGraph's own count of steps has nothing to guard here
_REFERENCE = (
    10_000  # bytes that a reference may have; a document in the state would be written anew with every checkpoint
)
_PLACES = 256  # places that are remembered: a chunk and the text after it each; those that nobody goes on with are forgotten first


class ReadingTask(TypedDict, total=False):
    """What a graph takes: a question, and a small reference to the document (a file's name, an id), which is kept in every checkpoint."""

    question: str
    source: Any


class ReadingState(ReadingTask, total=False):
    """What a graph keeps between steps; its size does not grow with the document.

    `memory` may be edited between steps. `chunk` is the number of the chunk that comes next, `more` whether there is one, and `digest` stands
    for those before it. `usage` sums the tokens of all calls (the fields of `records.Usage`). `answer` is None until it is there.
    """

    memory: str
    chunk: int
    more: bool
    digest: str
    usage: dict[str, int | None]
    answer: str | None


class ReadingGraph(CompiledStateGraph[ReadingState, None, ReadingTask, ReadingState]):
    """The graph that `build_graph` makes. It runs to the end of the document, whatever `recursion_limit` the caller's config has."""

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Iterator[Any]:
        """`CompiledStateGraph.stream`; `invoke` and `stream_events` go this way too."""
        return super().stream(input, _unlimited(config), **options)

    def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> AsyncIterator[Any]:
        """`stream`, async."""
        return super().astream(input, _unlimited(config), **options)


def build_graph(
    reader: MemAgentReader,
    *,
    load: Callable[[Any], Any] = Path,
    checkpointer: Checkpointer = None,
    interrupt_before: Literal["*"] | Sequence[str] | None = None,
    interrupt_after: Literal["*"] | Sequence[str] | None = None,
    name: str = "memagent",
) -> ReadingGraph:
    """A graph that reads a document chunk by chunk and answers: "begin", "read_chunk" once a chunk, "answer".

    It takes `{"question", "source"}` and gives the `ReadingState`. `load(source)` is called when text is needed and returns what
    `documents.pieces` takes, or a `Blob`; called again it has to return the same text. A step that fails leaves the state as it was: with a
    `checkpointer`, `graph.invoke(None, config)` goes on there, also in another process. (A process that is killed loses no other step if it was
    run with `durability="sync"`.) With `interrupt_after=["read_chunk"]` the graph waits after each chunk, and
    `graph.update_state(config, {"memory": ...})` edits the memory. An invocation with a question begins anew.

    Each memory update is followed by the custom event "memagent_step", also in the stream mode "custom". The mode "messages" has the
    tokens of the call that answers only, thinking included, where the model is a LangChain model.

    Raises:
        UsageError: an argument is wrong. From a run: also a memory that was edited beyond its budget, a document that is not what it was.
    """
    if checked_reader(reader).journal is not None:
        raise UsageError("a graph keeps its steps in the checkpointer; give it a reader without a journal")
    if reader.limits and reader.limits.run_timeout:
        raise UsageError(
            "run_timeout bounds a reading in one call; bound a step of a graph with call_timeout or the graph's step_timeout"
        )
    if not callable(load):
        raise UsageError(
            f"load has to be a function that takes the source and gives the document, not {type(load).__name__}"
        )
    nodes = _Nodes(reader, load)
    builder = StateGraph(ReadingState, input_schema=ReadingTask)
    builder.add_node("begin", _begin)
    builder.add_node("read_chunk", _Node("read_chunk", nodes.read, nodes.aread))
    builder.add_node("answer", _Node("answer", nodes.answer, nodes.aanswer))
    builder.add_edge(START, "begin")
    builder.add_edge("begin", "read_chunk")
    builder.add_conditional_edges("read_chunk", _Node("next", _next, _anext), ["read_chunk", "answer"])
    builder.add_edge("answer", END)
    before, after = _stops(interrupt_before), _stops(interrupt_after)
    made = builder.compile(checkpointer, interrupt_before=before, interrupt_after=after, name=name)
    return ReadingGraph(
        **{key: value for key, value in vars(made).items() if key != "__orig_class__"}
    )  # as `Pregel.copy` does


def _begin(state: ReadingState) -> ReadingState:
    """A reading at its start, whatever the thread has read before."""
    if not {"question", "source"} <= state.keys():
        raise UsageError("the input has to be a dict with 'question' and 'source'")
    if len(JsonPlusSerializer().dumps_typed(state["source"])[1]) > _REFERENCE:
        raise UsageError(
            "source has to be a small reference to the document (a file's name, an id), for which `load` gives the text"
        )
    return ReadingState(memory="", chunk=0, more=True, digest="", usage=asdict(NO_USAGE), answer=None)


def _next(state: ReadingState, _: RunnableConfig) -> str:
    return "read_chunk" if state.get("more", True) else "answer"


async def _anext(state: ReadingState, config: RunnableConfig) -> str:
    """Without a thread, in which LangGraph would run a sync one: a run cancelled there has the chunk's writes but not where to go."""
    return _next(state, config)


def _stops(names: Literal["*"] | Sequence[str] | None) -> Any:
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
    return {**(config or RunnableConfig()), "recursion_limit": _STEPS}


class _Node(Runnable[ReadingState, Any]):
    """A node, or the way to the next, in its sync and its async form. It has no run of its own: LangGraph makes one for each node."""

    def __init__(self, name: str, run: Callable[..., Any], arun: Callable[..., Any]) -> None:
        self.name, self._run, self._arun = name, run, arun

    def invoke(self, input: ReadingState, config: RunnableConfig | None = None, **_: Any) -> Any:
        return self._run(input, ensure_config(config))

    async def ainvoke(self, input: ReadingState, config: RunnableConfig | None = None, **_: Any) -> Any:
        return await self._arun(input, ensure_config(config))


class _Nodes:
    """What the nodes do: they hand the state to the reader, and take over what comes of it."""

    def __init__(self, reader: MemAgentReader, load: Callable[[Any], Any]) -> None:
        self._reader, self._load, self._places = reader, load, _Places()

    def read(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader = self._ready(state, config)
        with self._at(state, config) as (place, chunk):
            reading = reader.memorize(state["question"], chunk, memory=state["memory"], first=state["chunk"])
        dispatch_custom_event(STEP, step_event(reading.steps[-1]), config=config)
        return self._leave(state, config, place, reading)

    async def aread(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader = await asyncio.to_thread(self._ready, state, config)
        async with _in_thread(self._at(state, config)) as (place, chunk):
            reading = await reader.amemorize(state["question"], chunk, memory=state["memory"], first=state["chunk"])
        await adispatch_custom_event(STEP, step_event(reading.steps[-1]), config=config)
        return await asyncio.to_thread(self._leave, state, config, place, reading)

    def answer(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reading = self._ready(state, config).answer(state["question"], state["memory"], first=state["chunk"])
        return ReadingState(answer=reading.answer, usage=_usage(state, reading))

    async def aanswer(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader = await asyncio.to_thread(self._ready, state, config)
        reading = await reader.aanswer(state["question"], state["memory"], first=state["chunk"])
        return ReadingState(answer=reading.answer, usage=_usage(state, reading))

    def _ready(self, state: ReadingState, config: RunnableConfig) -> Reader:
        """A reader whose calls are children of this node's run, once the state is known to be one that a graph left."""
        wrong = [name for name, kind in _KEPT.items() if not isinstance(state.get(name), kind)]
        if wrong or state["usage"].keys() != asdict(NO_USAGE).keys():
            raise UsageError(
                f"{', '.join(wrong) or 'usage'} in the state is not what a graph keeps there: a thread begins with a question and a source, and only "
                "the memory is to be edited"
            )
        return self._reader.under(config)

    @contextmanager
    def _at(self, state: ReadingState, config: RunnableConfig) -> Iterator[tuple[Position, Chunk]]:
        """The place in the document where the state is, and the chunk there; it is kept for another try if what is done there fails."""
        place = (
            self._places.take(_key(state, config)) if state["chunk"] else None
        )  # a reading that begins loads its document
        if place is None:
            reader = self._reader.under(RunnableConfig())  # the place outlives this run
            place = reader.position(lambda: text_of(self._load(state["source"])), state["chunk"], state["digest"])
        chunk = place.chunk  # a place where the document broke is not kept
        try:
            yield place, chunk
        except BaseException:
            if place.number:
                self._places.put(_key(state, config), place)
            raise

    def _leave(self, state: ReadingState, config: RunnableConfig, place: Position, reading: Reading) -> ReadingState:
        """The state after a chunk."""
        place.advance()
        update = ReadingState(
            memory=reading.memory,
            chunk=place.number,
            more=place.more,
            digest=place.digest,
            usage=_usage(state, reading),
        )
        if place.more:
            self._places.put(_key({**state, **update}, config), place)
        return update


@asynccontextmanager
async def _in_thread(manager: AbstractContextManager[Item]) -> AsyncIterator[Item]:
    """A context manager whose entry reads and tokenizes."""
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, manager)


class _Places:
    """The places of documents that are being read, between two steps. Who takes one has it alone; one that is gone can be found anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[tuple[Any, ...], Position]] = []  # several may stand at the same place

    def take(self, key: tuple[Any, ...]) -> Position | None:
        with self._lock:
            found = next((number for number, (kept, _) in enumerate(self._kept) if kept == key), None)
            return None if found is None else self._kept.pop(found)[1]

    def put(self, key: tuple[Any, ...], place: Position) -> None:
        with self._lock:
            self._kept = [*self._kept, (key, place)][-_PLACES:]


def _key(state: Any, config: RunnableConfig) -> tuple[Any, ...]:
    return config.get("configurable", {}).get("thread_id"), repr(state["source"]), state["chunk"], state["digest"]


def _usage(state: ReadingState, reading: Reading) -> dict[str, int | None]:
    return asdict(Usage(**state["usage"]) + reading.new_usage)
