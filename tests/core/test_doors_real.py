"""The integrations with the embedded model and a real document: a chain, a graph that is resumed, a query engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langgraph.checkpoint.sqlite import SqliteSaver
from llama_index.core import Document

from memagent_integrations import Backend, BackendError, MemAgentQueryEngine, MemAgentReader, Reader, load_backend
from memagent_integrations.langchain import build_graph
from memagent_integrations.records import Prompt, Reply

pytestmark = [pytest.mark.real, pytest.mark.heavy]
QUESTION = "What does the import statement do?"
SIZES: dict[str, Any] = {"chunk_tokens": 150, "memory_tokens": 16, "output_tokens": 16}


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with load_backend("smollm2") as backend:
        yield backend


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """Write the beginning of the Python manual's chapter on imports, which Python ships, to a file."""
    path = tmp_path / "import.txt"
    path.write_text(topics["import"][:1800], encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def calls(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """Record the calls of the backend."""
    prompts: list[Prompt] = []
    complete = backend.complete

    def recorded(prompt: Prompt) -> Reply:
        prompts.append(prompt)
        return complete(prompt)

    monkeypatch.setattr(backend, "complete", recorded)
    return prompts


def test_a_chain(backend: Backend, document: Path) -> None:
    chain = MemAgentReader(backend, **SIZES) | StrOutputParser()
    assert chain.invoke({"question": QUESTION, "context": document}).strip()


def test_a_graph_is_cut_off_and_its_memory_edited(
    backend: Backend, document: Path, tmp_path: Path, calls: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = Reader(backend, **SIZES).plan(QUESTION, document).chunks
    assert chunks >= 3
    complete = backend.complete

    def broken(prompt: Prompt) -> Reply:
        if len(calls) == 2:
            raise BackendError("the model went away")
        return complete(prompt)

    config: Any = {"configurable": {"thread_id": "1"}}
    task = {"question": QUESTION, "source": str(document)}
    with SqliteSaver.from_conn_string(str(tmp_path / "threads.db")) as saver:
        calls.clear()
        monkeypatch.setattr(backend, "complete", broken)
        with pytest.raises(BackendError):
            build_graph(MemAgentReader(backend, **SIZES), checkpointer=saver).invoke(task, config)
        monkeypatch.setattr(backend, "complete", complete)
        graph = build_graph(MemAgentReader(backend, **SIZES), checkpointer=saver, interrupt_before=["answer"])
        state = graph.invoke(None, config)
        assert (state["chunk"], len(calls)) == (chunks, chunks), "no call was made twice"
        assert state["memory"].strip()
        graph.update_state(config, {"memory": "The import statement finds a module and binds its name."})
        assert graph.invoke(None, config)["answer"].strip()
        assert "binds its name" in calls[-1].messages[-1].content


def test_a_query_engine(backend: Backend, document: Path) -> None:
    engine = MemAgentQueryEngine.from_documents(
        [Document(text=document.read_text(encoding="utf-8"))], llm=backend, **SIZES
    )
    response = engine.query(QUESTION)
    assert str(response).strip()
    *updates, _ = response.metadata["memagent"]["steps"]
    [source] = response.source_nodes
    assert len(updates) > 1
    assert all(read["node_id"] == source.node.node_id for step in updates for read in step["nodes"])
