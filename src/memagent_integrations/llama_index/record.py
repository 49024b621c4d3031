"""What a response reports of its reading: instrumentation events, source nodes, a summary of the steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType
from llama_index_instrumentation import get_dispatcher

from memagent_integrations.documents import is_one_shot
from memagent_integrations.joining import as_read
from memagent_integrations.llama_index.nodes import NodeSettings
from memagent_integrations.llama_index.sources import SourceNodes
from memagent_integrations.records import NO_USAGE, Reading, Step

dispatcher = get_dispatcher(__name__)
_log = logging.getLogger(__name__)


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

    def __init__(self, model: str, include_text: bool | None = None, *, sources: SourceNodes | None = None) -> None:
        self.summary: dict[str, Any] = {"model": model, "memory": "", "steps": [], "usage": asdict(NO_USAGE)}
        self.summary |= {"citations": [], "not_read": [], "lost_sections": [], "warnings": []}
        self._of_query: list[dict[str, str]] = []
        self._usage = NO_USAGE
        self._include_text = include_text
        self._sources = sources or SourceNodes(include_text=bool(include_text))
        self._keeps_order = False
        self._cited: list[int] = []
        self._listed: list[NodeWithScore] = []
        self._span = active_span_id.get()

    def watch(self, nodes: Any, settings: NodeSettings) -> Any:
        """Return the nodes as a document, to be collected when they are read (see `joining.as_read`)."""
        if self._include_text is None:
            self._sources = SourceNodes(include_text=not is_one_shot(nodes))
        self._keeps_order = settings.order == "given"
        return as_read(nodes, settings, self._sources)

    def query(self, query: QueryType) -> None:
        """Note what a query holds besides text."""
        if isinstance(query, QueryBundle) and query.image_path:
            _log.warning("only the text of a query is read, not its image %s", query.image_path)
            self._of_query = [{"node_id": "", "holds": f"image {query.image_path} of the query"}]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was given to read."""
        return self._sources.is_empty

    def step(self, step: Step) -> None:
        """Collect a step, and send its event."""
        if step.span:
            dispatcher.event(MemAgentStep(step=step, span_id=self._span))
        reply = step.reply
        self._usage += NO_USAGE if reply.recorded else reply.usage  # a recorded step costs nothing now
        line = {"phase": step.phase, "outcome": step.outcome, "cut": step.cut, "finish_reason": reply.finish_reason}
        nodes = self._sources.read_in(step.span) if step.span else []
        self.summary["steps"].append({**line, **asdict(reply.usage), "seconds": reply.seconds, "nodes": nodes})
        not_read = self._of_query + self._sources.not_read()
        self.summary.update(memory=step.memory, usage=asdict(self._usage), not_read=not_read)

    def end(self, reading: Reading) -> str:
        """Send the event for the complete reading, and put the nodes that it cites first; return its answer."""
        nodes = self._sources.cited(reading.citations)
        self.summary["lost_sections"] = [asdict(span) for span in reading.lost_sections]
        self.summary["warnings"] = list(reading.warnings)
        self.summary["citations"] = [
            {**asdict(citation), "node_ids": self._sources.node_ids(numbers)}
            for citation, numbers in zip(reading.citations, nodes, strict=True)
        ]
        if not (self._keeps_order or self._sources.are_numbered):
            self._cited = list(dict.fromkeys(chain.from_iterable(nodes)))
            self._put_cited_first()
        dispatcher.event(MemAgentAnswerEnd(reading=reading, span_id=self._span))
        return reading.answer or ""

    def take(self, event: Step | Reading) -> None:
        """Collect what a streamed answer brings besides its text."""
        if isinstance(event, Step):
            self.step(event)
        else:
            self.end(event)

    def source_nodes(self, additional: Iterable[NodeWithScore] = ()) -> list[NodeWithScore]:
        """Return the nodes that were read: those that the answer rests on first, then the others in order.

        The list of a stream is put into this order when the stream ends. `additional` ones come last.
        """
        self._listed = [*self._sources.scored(), *additional]
        self._put_cited_first()
        return self._listed

    def _put_cited_first(self) -> None:
        if self._listed:
            others = sorted(set(range(len(self._listed))) - set(self._cited))
            self._listed[:] = [self._listed[number] for number in self._cited + others]
