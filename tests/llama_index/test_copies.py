"""Engines, synthesizers and workflows are pickled and copied like those of LlamaIndex."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_llm import FixedRetriever, documents
from helpers.loopback import Loopback, chat
from llama_index.core import Document, Settings, SummaryIndex
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore

from memagent_integrations import Limits, MemAgentQueryEngine, MemAgentSynthesizer, ScriptedBackend, UsageError
from memagent_integrations.llama_index import LLMBackend, MemAgentAnswer, MemAgentWorkflow

SIZES: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50, "output_tokens": 50}
SAID = "text text text"


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def llm() -> MockLLM:
    return MockLLM(max_tokens=3)


def load(reference: str) -> str:
    return f"The text of {reference}. " * 50


@pytest.fixture(params=[pickled, copy.deepcopy, copy.copy])
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def settings_llm() -> Iterator[None]:
    before, Settings._llm = Settings._llm, llm()
    yield
    Settings._llm = before


async def test_an_engine_and_its_copy_answer_alike(copied: Callable[[Any], Any]) -> None:
    retriever = FixedRetriever([NodeWithScore(node=document, score=0.5) for document in documents()])
    for engine in (
        MemAgentQueryEngine.from_documents(documents(), llm(), **SIZES),
        MemAgentQueryEngine.from_retriever(retriever, llm(), **SIZES),
        SummaryIndex(documents()).as_query_engine(
            llm=llm(), response_synthesizer=MemAgentSynthesizer(llm(), tokenizer="approximate", **SIZES)
        ),
    ):
        expected = engine.query("q")
        for other in (copied(engine), copied(copied(engine))):
            response = other.query("q")
            assert str(response) == str(await other.aquery("q")) == SAID
            assert [node.node.node_id for node in response.source_nodes] == [
                node.node.node_id for node in expected.source_nodes
            ]


def test_a_copy_keeps_every_setting(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    counting = TokenCountingHandler()
    engine = MemAgentQueryEngine.from_documents(
        documents(),
        llm(),
        streaming=True,
        include_text=True,
        empty_response="Nothing.",
        journal=tmp_path / "runs.db",
        limits=Limits(run_timeout=60),
        callback_manager=CallbackManager([counting]),
        **SIZES,
    )
    engine.update_prompts({"response_synthesizer:answer": PromptTemplate("{question} {memory} Be brief.")})
    other = copied(engine)
    assert str(other.query("q")) == SAID
    assert other.get_prompts()["response_synthesizer:answer"].get_template() == "{question} {memory} Be brief."
    synthesizer = other._get_prompt_modules()["response_synthesizer"]
    reader = synthesizer.reader
    assert (reader.budgets.chunk_tokens, reader.calls.limits.run_timeout) == (200, 60)
    assert reader.journal.path == tmp_path / "runs.db"
    assert str(synthesizer.synthesize("q", [])) == "Nothing."
    assert all(node.node.text for node in other.query("q").source_nodes)
    (run,) = reader.journal.runs()
    assert run.finished


def test_a_copy_is_independent(copied: Callable[[Any], Any]) -> None:
    engine = MemAgentQueryEngine.from_documents(documents(), llm(), **SIZES)
    if copied is not copy.copy:
        other = copied(engine)
        other.update_prompts({"response_synthesizer:answer": PromptTemplate("{question} {memory} Be brief.")})
        assert "Be brief" not in engine.get_prompts()["response_synthesizer:answer"].get_template()


def test_a_copy_without_a_model_asks_settings_where_it_is(copied: Callable[[Any], Any], settings_llm: None) -> None:
    engine = copied(MemAgentQueryEngine.from_documents(documents(), **SIZES))
    assert str(engine.query("q")) == SAID


@pytest.mark.heavy
def test_models_given_by_name_are_made_again(copied: Callable[[Any], Any]) -> None:
    with Loopback(chat(lambda _: "so it is")) as server:
        engine = MemAgentQueryEngine.from_documents(
            documents(), "openai:m", backend_options={"base_url": f"{server.url}/v1", "api_key": "k"}, **SIZES
        )
        assert str(copied(engine).query("q")) == str(engine.query("q")) == "so it is"


def test_a_script_is_copied_as_far_as_it_can_be(copied: Callable[[Any], Any]) -> None:
    synthesizer = MemAgentSynthesizer(ScriptedBackend(["note", "answer"]), **SIZES)
    assert copied(synthesizer).get_response("q", ["text"]) == "answer"
    with pytest.raises(Exception, match="lambda"):
        pickle.dumps(MemAgentSynthesizer(ScriptedBackend(lambda prompt: "so"), **SIZES))


def test_a_backend_over_an_llm_is_copied(copied: Callable[[Any], Any]) -> None:
    backend = copied(LLMBackend(llm(), window=4000, tokenizer="approximate", concurrency=3))
    assert (backend.window, backend.concurrency, backend.count("aaaaaa")) == (4000, 3, 2)


async def test_a_workflow_and_its_copy_answer_alike(copied: Callable[[Any], Any]) -> None:
    workflow = MemAgentWorkflow(llm(), load=load, timeout=60.0, num_concurrent_runs=2, **SIZES)
    if copied is not copy.copy:
        await workflow.run(question="q", document="log")  # one that has run already
    other = copied(workflow)
    result = await other.run(question="q", document="log")
    assert isinstance(result, MemAgentAnswer)
    assert (result.answer, other._timeout) == (SAID, 60.0)


async def test_a_subclass_of_the_workflow_keeps_its_own_fields(copied: Callable[[Any], Any]) -> None:
    workflow = Named(llm(), load=load, **SIZES)
    workflow.title = "mine"
    assert copied(workflow).title == "mine"


class Named(MemAgentWorkflow):
    title = ""


def test_an_iterator_cannot_be_pickled_and_the_error_says_what_to_do() -> None:
    engine = MemAgentQueryEngine.from_documents((document for document in documents()), llm(), **SIZES)
    with pytest.raises(UsageError, match="list"):
        pickle.dumps(engine)
    with pytest.raises(UsageError, match="list"):
        copy.deepcopy(engine)


@pytest.mark.heavy
def test_an_engine_goes_to_another_process(tmp_path: Path) -> None:
    engine = RetrieverQueryEngine(
        SummaryIndex([Document(text="Some words. " * 100)]).as_retriever(), MemAgentSynthesizer(llm(), **SIZES)
    )
    (tmp_path / "engine").write_bytes(pickle.dumps(engine))
    script = "import pickle, sys; print(pickle.loads(open(sys.argv[1], 'rb').read()).query('q'))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "engine")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == SAID
