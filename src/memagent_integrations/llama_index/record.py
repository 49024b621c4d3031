"""What a response reports of its reading: instrumentation events, source nodes, a summary of the steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.schema import BaseNode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index_instrumentation import get_dispatcher

from memagent_integrations.documents import loaded, node_position
from memagent_integrations.records import NO_USAGE, Reading, Source, Step

dispatcher = get_dispatcher(__name__)

_Kept = tuple[int, int, NodeWithScore]
"""First character, end, and a light copy of a node."""


class MemAgentStep(BaseEvent):
    """A chunk was read, and the memory updated or kept (see `step.outcome`)."""

    step: Step

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "MemAgentStep"


class MemAgentAnswerEnd(BaseEvent):
    """The answer is complete; a streamed one has been consumed to its end."""

    reading: Reading

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "MemAgentAnswerEnd"


class ResponseRecord:
    """Collects nodes and steps while a reading runs, for the source nodes and the metadata of its response."""

    def __init__(self, model: str, include_text: bool) -> None:
        self.summary: dict[str, Any] = {"model": model, "memory": "", "steps": [], "usage": asdict(NO_USAGE)}
        self.summary["citations"] = []
        self._include_text = include_text
        self._usage = NO_USAGE
        self._nodes: dict[str, list[_Kept]] = {}  # by document
        self._sources: list[Source] = []
        self._span = active_span_id.get()

    def watch(self, nodes: Any) -> Any:
        """Return the nodes, to be collected when they are read. A list stays a list, which can be put in order."""
        if isinstance(nodes, AsyncIterable):
            return self._awatch(nodes)
        is_text = isinstance(nodes, (str, bytes, bytearray, Mapping))
        if is_text or not (isinstance(nodes, Iterable) or hasattr(nodes, "lazy_load_data")):
            return nodes
        watched = self._watch(nodes)
        return list(watched) if isinstance(nodes, Sequence) else watched

    def step(self, step: Step) -> None:
        """Collect a step, and send its event."""
        if step.span:
            self._sources += step.span.sources
            dispatcher.event(MemAgentStep(step=step, span_id=self._span))
        reply = step.reply
        self._usage += NO_USAGE if reply.recorded else reply.usage  # a recorded step costs nothing now
        line = {"phase": step.phase, "outcome": step.outcome, "cut": step.cut, "finish_reason": reply.finish_reason}
        self.summary["steps"].append({**line, **asdict(reply.usage), "seconds": reply.seconds})
        self.summary.update(memory=step.memory, usage=asdict(self._usage))

    def end(self, reading: Reading) -> str:
        """Send the event for the complete reading; return its answer."""
        self.summary["citations"] = [asdict(citation) for citation in reading.citations]
        dispatcher.event(MemAgentAnswerEnd(reading=reading, span_id=self._span))
        return reading.answer or ""

    def take(self, event: Step | Reading) -> None:
        """Collect what a streamed answer brings besides its text."""
        if isinstance(event, Step):
            self.step(event)
        else:
            self.end(event)

    def source_nodes(self) -> list[NodeWithScore]:
        """Return a node for each part of a document that was in a chunk."""
        for nodes in self._nodes.values():
            nodes.sort(key=itemgetter(0))
        return list(map(self._source_node, self._sources))

    def _source_node(self, source: Source) -> NodeWithScore:
        """Return the part of its node that a source is, or the node itself where it is all of it.

        The node is the last one that begins no later than the source and holds all of it. A `str` has no node.
        """
        nodes = self._nodes.get(source.document_id, [])
        earlier = (nodes[index] for index in reversed(range(bisect_right(nodes, source.start, key=itemgetter(0)))))
        start, end, origin = next((kept for kept in earlier if kept[1] >= source.end), (0, 0, None))
        if origin and (start, end) == (source.start, source.end):
            return origin
        node = TextNode(
            id_=f"{origin.node_id if origin else source.document_id}:{source.start}-{source.end}",
            text=origin.text[source.start - start : source.end - start] if origin else "",
            metadata=dict(origin.metadata) if origin else {},
            start_char_idx=source.start,
            end_char_idx=source.end,
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=source.document_id)},
        )
        return NodeWithScore(node=node, score=origin.score if origin else None)

    def _collect(self, item: Any) -> Any:
        node = item.node if isinstance(item, NodeWithScore) else item
        if isinstance(node, BaseNode):
            text, (document_id, start) = node.get_content(), node_position(node)
            end = start + len(text)
            kept = TextNode(
                id_=node.node_id,
                text=text if self._include_text else "",
                metadata=dict(node.metadata),
                start_char_idx=start,
                end_char_idx=end,
                relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document_id)},
            )
            score = item.score if isinstance(item, NodeWithScore) else None
            self._nodes.setdefault(document_id, []).append((start, end, NodeWithScore(node=kept, score=score)))
        return item

    def _watch(self, nodes: Any) -> Iterator[Any]:
        # a generator, so that a LlamaIndex reader loads with the first node, which async readings fetch in a thread
        yield from map(self._collect, items_of(nodes))

    async def _awatch(self, nodes: AsyncIterable[Any]) -> AsyncIterator[Any]:
        async for node in nodes:
            yield self._collect(node)


def items_of(source: Any) -> Iterable[Any]:
    """Return the documents or nodes of a source."""
    if isinstance(source, (BaseNode, NodeWithScore)):
        return [source]
    items = loaded(source)
    return source if items is None else items
