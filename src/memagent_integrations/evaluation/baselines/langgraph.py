"""Map-reduce as a LangGraph graph, whose map step is one `Send` for each part of the document."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from memagent_integrations.evaluation.baselines.base import CALLS_PER_PART, Answer, Baseline, Model
from memagent_integrations.evaluation.baselines.langchain_splitter import split
from memagent_integrations.evaluation.baselines.prompts import EXTRACT, SEPARATOR, plain
from memagent_integrations.evaluation.samples import Sample


class _State(TypedDict, total=False):
    """`texts` are to be read next, `extracts` all that was extracted, of which the first `packed` are in texts."""

    texts: list[str]
    extracts: Annotated[list[str], operator.add]
    packed: int
    answer: str


class _Part(TypedDict):
    """The state of one map step."""

    text: str


class MapReduce(Baseline):
    """Extracts from each part what helps to answer, packs the extracts, and so on until they fit the answer's prompt.

    Where no two extracts fit together this would not end, so it fails after `CALLS_PER_PART` calls for each part.
    """

    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Run the graph and return its answer."""
        size = min(model.room(plain(sample.question, "", *task)) for task in ((), (EXTRACT,)))
        parts = split(sample, size, model)
        model.call_limit = CALLS_PER_PART * len(parts)
        graph = _graph(sample.question, size, model)
        # One call at a time, as the other readers make them; the harness runs several samples.
        config = {"max_concurrency": 1, "recursion_limit": 2 * model.call_limit + 3}
        return Answer(
            text=graph.invoke({"texts": parts, "packed": 0}, config)["answer"],
            details={"parts": len(parts), "part_tokens": size},
        )


def _graph(question: str, size: int, model: Model) -> Any:
    """Return the compiled graph for a question."""
    failures: list[Exception] = []

    def route(state: _State) -> str | list[Send]:
        texts = state["texts"]
        return "answer" if len(texts) == 1 else [Send("extract", _Part(text=text)) for text in texts]

    def extract(state: _Part) -> _State:
        if failures:  # LangGraph starts the next call before it hears that one has failed
            raise failures[0]
        try:
            return {"extracts": [model.ask(plain(question, state["text"], EXTRACT))]}
        except Exception as failure:
            failures.append(failure)
            raise

    def pack(state: _State) -> _State:
        new = state["extracts"][state["packed"] :]
        return {"texts": list(packed(new, size, model)), "packed": len(state["extracts"])}

    def answer(state: _State) -> _State:
        return {"answer": model.ask(plain(question, state["texts"][0]))}

    graph = StateGraph(_State)
    graph.add_node("extract", extract)
    graph.add_node("pack", pack)
    graph.add_node("answer", answer)
    graph.add_conditional_edges(START, route, ["extract", "answer"])
    graph.add_edge("extract", "pack")
    graph.add_conditional_edges("pack", route, ["extract", "answer"])
    graph.add_edge("answer", END)
    return graph.compile()


def packed(texts: Sequence[str], size: int, model: Model) -> Iterator[str]:
    """Yield the texts in order, joined where they have at most `size` tokens together."""
    joined = ""
    for text in filter(str.strip, texts):
        longer = f"{joined}{SEPARATOR}{text}" if joined else text
        if joined and model.count(longer) > size:
            yield joined
            longer = text
        joined = longer
    yield joined
