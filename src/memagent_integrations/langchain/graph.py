"""A reading as a LangGraph graph: one step a chunk, so that it can be resumed, watched, edited and rewound."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from typing_extensions import TypedDict

from memagent_integrations.chunking import running_digest
from memagent_integrations.errors import MemAgentError, MissingExtra, UsageError
from memagent_integrations.langchain.messages import STEP, step_event, text_of
from memagent_integrations.langchain.reader import MemAgentReader, checked_reader
from memagent_integrations.reader import Reader
from memagent_integrations.records import NO_USAGE, Chunk, Reading, Step, Usage

try:
    from langgraph.graph import END, START, StateGraph
    from langgraph.graph.state import CompiledStateGraph
    from langgraph.types import Checkpointer
except ImportError as error:
    raise MissingExtra.extra("langgraph", "langchain") from error

NODES = ("begin", "read_chunk", "answer")
"""The nodes of a graph, in their order; "read_chunk" runs once a chunk."""

_STEPS = 10**9  # the document ends the loop: LangGraph's own count of steps has nothing to guard here
_REFERENCE = 10_000  # characters that a reference may have; a document in the state would be written anew with every checkpoint
_PLACES = 64  # places that are remembered; those of threads that nobody goes on with are forgotten first


class ReadingTask(TypedDict, total=False):
    """What a graph takes: a question, and a small reference to the document (a file's name, an id), which is kept in every checkpoint."""

    question: str
    source: Any


class ReadingState(ReadingTask, total=False):
    """What a graph keeps between steps; its size does not grow with the document.

    `memory` may be edited between steps. `chunk` is the number of the chunk that comes next, `more` whether there is one, and `read` a digest of
    those before it. `usage` sums the tokens of all calls (the fields of `records.Usage`). `answer` is None until it is there.
    """

    memory: str
    chunk: int
    more: bool
    read: str
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
    interrupt_before: Literal["*"] | Sequence[str] = (),
    interrupt_after: Literal["*"] | Sequence[str] = (),
    name: str = "memagent",
) -> ReadingGraph:
    """A graph that reads a document chunk by chunk and answers: "begin", "read_chunk" once a chunk, "answer".

    It takes `{"question", "source"}` and gives the `ReadingState`. `load(source)` is called when text is needed and returns what
    `documents.pieces` takes, or a `Blob`; called again it has to return the same text. A step that fails leaves the state as it was: with a
    `checkpointer`, `graph.invoke(None, config)` goes on there, also in another process, and makes no call twice. With
    `interrupt_after=["read_chunk"]` the graph waits after each chunk, and `graph.update_state(config, {"memory": ...})` edits the memory. An
    invocation with a question begins anew.

    Each memory update is followed by the custom event "memagent_step", also in the stream mode "custom". The mode "messages" has the answer's
    tokens only, where the model is a LangChain model.

    Raises:
        UsageError: an argument is wrong. From a run: also a memory that was edited beyond its budget, a document that is not what it was.
    """
    if checked_reader(reader).journal is not None:
        raise UsageError("a graph keeps its steps in the checkpointer; give it a reader without a journal")
    if not callable(load):
        raise UsageError(f"load has to be a function that takes the source and gives the document, not {type(load).__name__}")
    nodes = _Nodes(reader, load)
    builder = StateGraph(ReadingState, input_schema=ReadingTask)
    builder.add_node("begin", _begin)
    builder.add_node("read_chunk", _Node("read_chunk", nodes.read, nodes.aread))
    builder.add_node("answer", _Node("answer", nodes.answer, nodes.aanswer))
    builder.add_edge(START, "begin")
    builder.add_edge("begin", "read_chunk")
    builder.add_conditional_edges("read_chunk", _next, ["read_chunk", "answer"])
    builder.add_edge("answer", END)
    before, after = _stops(interrupt_before), _stops(interrupt_after)
    made = builder.compile(checkpointer, interrupt_before=before, interrupt_after=after, name=name)
    return ReadingGraph(**{key: value for key, value in vars(made).items() if key != "__orig_class__"})  # as `Pregel.copy` does


def _begin(state: ReadingState) -> ReadingState:
    """A reading at its start, whatever the thread has read before."""
    if not {"question", "source"} <= state.keys():
        raise UsageError("the input has to be a dict with 'question' and 'source'")
    if len(repr(state["source"])) > _REFERENCE:
        raise UsageError("source has to be a small reference to the document (a file's name, an id), for which `load` gives the text")
    return ReadingState(memory="", chunk=0, more=True, read="", usage=asdict(NO_USAGE), answer=None)


def _next(state: ReadingState) -> str:
    return "read_chunk" if state["more"] else "answer"


def _stops(names: Literal["*"] | Sequence[str]) -> Any:
    listed = [names] if isinstance(names, str) else list(names)
    if names != "*" and (unknown := set(listed) - set(NODES)):
        raise UsageError(f"the graph has no node {', '.join(map(repr, sorted(unknown)))}; it has {', '.join(NODES)}")
    return names if names == "*" else listed


def _unlimited(config: RunnableConfig | None) -> RunnableConfig:
    return {**(config or RunnableConfig()), "recursion_limit": _STEPS}


class _Node(Runnable[ReadingState, ReadingState]):
    """A node in its sync and its async form. It has no run of its own: LangGraph makes one for each node."""

    def __init__(self, name: str, run: Callable[..., ReadingState], arun: Callable[..., Any]) -> None:
        self.name, self._run, self._arun = name, run, arun

    def invoke(self, input: ReadingState, config: RunnableConfig | None = None, **_: Any) -> ReadingState:
        return self._run(input, ensure_config(config))

    async def ainvoke(self, input: ReadingState, config: RunnableConfig | None = None, **_: Any) -> ReadingState:
        return cast("ReadingState", await self._arun(input, ensure_config(config)))


class _Nodes:
    """What the nodes do: they hand the state to the reader, and take over what comes of it."""

    def __init__(self, reader: MemAgentReader, load: Callable[[Any], Any]) -> None:
        self._reader, self._load, self._places = reader, load, _Places()

    def read(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader, place, chunk = self._arrive(state, config)
        try:
            reading = reader.memorize(state["question"], chunk, memory=state["memory"])
        except BaseException:
            self._places.put(_key(state, config), place)  # the same chunk again
            raise
        dispatch_custom_event(STEP, step_event(_step(state, reading)), config=config)
        return self._leave(state, config, place, reading)

    async def aread(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader, place, chunk = await asyncio.to_thread(self._arrive, state, config)
        try:
            reading = await reader.amemorize(state["question"], chunk, memory=state["memory"])
        except BaseException:
            self._places.put(_key(state, config), place)
            raise
        await adispatch_custom_event(STEP, step_event(_step(state, reading)), config=config)
        return await asyncio.to_thread(self._leave, state, config, place, reading)

    def answer(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reading = self._ready(state, config).answer(state["question"], state["memory"])
        return ReadingState(answer=reading.answer, usage=_usage(state, reading))

    async def aanswer(self, state: ReadingState, config: RunnableConfig) -> ReadingState:
        reader = await asyncio.to_thread(self._ready, state, config)
        reading = await reader.aanswer(state["question"], state["memory"])
        return ReadingState(answer=reading.answer, usage=_usage(state, reading))

    def _arrive(self, state: ReadingState, config: RunnableConfig) -> tuple[Reader, _Place, Chunk]:
        """The reader, the place in the document where the state is, and the chunk there."""
        reader = self._ready(state, config)
        place = self._places.take(_key(state, config)) or self._found(state)
        if place.error:
            raise place.error
        if (place.number, place.digest) != (state["chunk"], state["read"]) or (place.next is None and place.number):
            raise UsageError(f"the text before chunk {state['chunk']} is not what was read: the document or the settings changed; begin anew")
        if place.next is None:
            raise UsageError("the document is empty: there is no text to read")
        return reader, place, place.next

    def _leave(self, state: ReadingState, config: RunnableConfig, place: _Place, reading: Reading) -> ReadingState:
        """The state after a chunk."""
        place.advance()
        update = ReadingState(memory=reading.memory, chunk=place.number, more=place.more, read=place.digest, usage=_usage(state, reading))
        if place.more:
            self._places.put(_key({**state, **update}, config), place)
        return update

    def _ready(self, state: ReadingState, config: RunnableConfig) -> Reader:
        """A reader whose calls are children of this node's run."""
        metadata = {**config.get("metadata", {}), "memagent_chunk": state["chunk"]}
        return self._reader.under({**config, "metadata": metadata})

    def _found(self, state: ReadingState) -> _Place:
        """The place in the document, found by cutting it into chunks up to there; no model is asked."""
        reader = self._reader.under(RunnableConfig())  # the place outlives this run
        try:
            document = text_of(self._load(state["source"]))
        except MemAgentError:
            raise
        except Exception as error:
            raise UsageError(f"loading the document failed: {type(error).__name__}: {error}") from error
        place = _Place(reader.chunks(document))
        while place.number < state["chunk"] and place.next:
            place.advance()
        return place


class _Place:
    """A place in a document: the chunk that comes next, or the error in its stead, and a digest of those before it."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self.number, self.digest = 0, ""
        self._fetch()

    @property
    def more(self) -> bool:
        """Whether anything comes here; the end of the document is known before, so that no step is made in vain."""
        return bool(self.next or self.error)

    def advance(self) -> None:
        if self.next:
            self.number, self.digest = self.number + 1, running_digest(self.digest, self.next)
        self._fetch()

    def _fetch(self) -> None:
        self.next, self.error = None, None
        try:
            self.next = next(self._chunks, None)
        except MemAgentError as error:  # the chunk before it counts all the same
            self.error = error


class _Places:
    """The places of documents that are being read, between two steps. Who takes one has it alone; one that is gone can be found anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], _Place] = OrderedDict()

    def take(self, key: tuple[Any, ...]) -> _Place | None:
        with self._lock:
            return self._kept.pop(key, None)

    def put(self, key: tuple[Any, ...], place: _Place) -> None:
        with self._lock:
            self._kept[key] = place
            while len(self._kept) > _PLACES:
                self._kept.popitem(last=False)


def _key(state: Any, config: RunnableConfig) -> tuple[Any, ...]:
    return config.get("configurable", {}).get("thread_id"), repr(state["source"]), state["chunk"], state["read"]


def _step(state: ReadingState, reading: Reading) -> Step:
    """The step that was made, with its number in the whole reading."""
    return replace(reading.steps[-1], index=state["chunk"])


def _usage(state: ReadingState, reading: Reading) -> dict[str, int | None]:
    return asdict(Usage(**state["usage"]) + reading.new_usage)
