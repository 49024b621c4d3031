"""Many queries about the same nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import QueryBundle, TextNode

from memagent_integrations import Journal, ScriptedBackend, UsageError
from memagent_integrations.llama_index import MemAgentQueryEngine
from memagent_integrations.records import Prompt

QUERIES = ["first?", QueryBundle("second?"), "third?"]
SIZES: dict[str, Any] = {"chunk_tokens": 70, "memory_tokens": 20}


def script(prompt: Prompt) -> str:
    question = prompt.messages[0].content.partition("<question>\n")[2].partition("\n")[0]
    return f"note {prompt.index}" if prompt.phase == "memory" else question.upper()


def nodes() -> Iterator[TextNode]:
    for number in range(6):
        yield TextNode(text=f"Page {number} of the file. " * 8, id_=f"node-{number}")


async def anodes() -> AsyncIterator[TextNode]:
    for node in nodes():
        yield node


def engine(source: Any, **settings: Any) -> MemAgentQueryEngine:
    return MemAgentQueryEngine.from_documents(source, ScriptedBackend(script), **SIZES, **settings)


@pytest.mark.parametrize("source", [list, iter, None], ids=["list", "iterator", "async iterator"])
async def test_many_queries_read_the_nodes_once(source: Any) -> None:
    alone = [engine(list(nodes())).reading(query) for query in QUERIES]
    if source is None:
        assert await engine(anodes()).areadings(QUERIES) == alone
        return
    assert engine(source(nodes())).readings(QUERIES) == alone
    assert await engine(source(nodes())).areadings(QUERIES) == alone
    assert [reading.answer for reading in alone] == ["FIRST?", "SECOND?", "THIRD?"]


async def test_queries_that_cannot_share_a_reading(tmp_path: Path) -> None:
    chosen = engine(list(nodes()), node_postprocessors=[SimilarityPostprocessor()])
    with pytest.raises(UsageError, match="choose other nodes for each query"):
        chosen.readings(QUERIES)
    with pytest.raises(UsageError, match="queries has to be a list"):
        await engine(list(nodes())).areadings("Why?")
    with Journal(tmp_path / "runs.db") as journal, pytest.raises(UsageError, match="run names one reading"):
        engine(list(nodes()), journal=journal, run="one").readings(QUERIES)


def test_no_queries_and_one_that_is_empty() -> None:
    assert engine(list(nodes())).readings([]) == []
    bad, good = engine(list(nodes())).readings(["", "why?"])
    assert (type(bad.error).__name__, good.answer) == ("QuestionError", "WHY?")
