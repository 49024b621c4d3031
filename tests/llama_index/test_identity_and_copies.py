"""What identifies an LLM in a journal, which LLM a reading has, and backends that are copied and pickled."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_llm import SIZES, documents, fake, prompt
from helpers.integrations import Anthropic, Chatting, Completing, watched
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.llms import LLM, ChatMessage, CustomLLM, LLMMetadata, MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.settings import Settings
from pydantic import BaseModel, Field, PrivateAttr, SecretStr

from memagent_integrations import Journal, MemAgentQueryEngine, Reader
from memagent_integrations.llama_index import LLMBackend, MemAgentMemoryBlock, MemAgentSynthesizer, MemAgentWorkflow


class Counted(Completing):
    """A custom LLM with a counter, a tokenizer and keys of its own."""

    counter: Any = None
    tokenizer: Any = None
    listeners: list[Any] = Field(default_factory=list)
    callback_manager: Any = None  # type: ignore[assignment]
    api_key: str = ""
    token: SecretStr | None = None
    default_headers: dict[str, str] = Field(default_factory=dict)
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    temperature: float = 0.1


def identity(llm: LLM, **options: Any) -> Any:
    return LLMBackend(llm, **options).identity


@pytest.mark.parametrize(
    "extra",
    [
        {"counter": TokenCountingHandler()},
        {"tokenizer": len},
        {"tokenizer": Settings.tokenizer},
        {"callback_manager": CallbackManager([TokenCountingHandler()])},
        {"listeners": [TokenCountingHandler()]},
        {"additional_kwargs": {"logger": object()}},
        {"api_key": "sk-1"},
        {"token": SecretStr("two")},
        {"default_headers": {"Authorization": "Bearer three"}},
        {"additional_kwargs": {"api_key": "four", "extra_headers": {"Authorization": "five"}}},
        {"sent": [("chat", [ChatMessage(content="hello")])]},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_a_counter_a_callback_or_a_key_does_not_change_what_an_llm_is(extra: dict[str, Any]) -> None:
    assert identity(Counted(**extra)) == identity(Counted())
    assert identity(Counted(), callback_manager=watched(TokenCountingHandler())) == identity(Counted())


def test_what_decides_the_replies_does() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"additional_kwargs": {"seed": 1}},
        {"additional_kwargs": {"stop": ["a", "b"]}},
        {"system_prompt": "Be brief."},
        {"completion_to_prompt": str.upper},
        {"completion_to_prompt": shouted},
        {"query_wrapper_prompt": PromptTemplate("Q: {query_str}")},
    ]
    identities = [str(identity(Counted(**each))) for each in settings]
    assert len(set(identities)) == len(settings)


def shouted(text: str) -> str:
    return f"{text}!"


class Gate(BaseModel):
    gate: str


class Door(BaseModel):
    gate: str
    door: int


def test_an_object_to_answer_with_is_part_of_what_a_structured_llm_is() -> None:
    llm = Counted(temperature=0.7)
    assert identity(llm.as_structured_llm(Gate)) == identity(Counted(temperature=0.7).as_structured_llm(Gate))
    assert identity(llm.as_structured_llm(Gate)) != identity(Counted().as_structured_llm(Gate))
    assert identity(llm.as_structured_llm(Gate)) != identity(llm.as_structured_llm(Door))


@pytest.mark.heavy
def test_an_llm_is_the_same_in_another_process() -> None:
    code = (
        "from llama_index.core.callbacks import TokenCountingHandler\n"
        "from llama_index.core.llms.mock import MockFunctionCallingLLM\n"
        "from memagent_integrations.llama_index import LLMBackend\n"
        "class Custom(MockFunctionCallingLLM):\n"
        "    counter: object = None\n"
        "    names: set = {'a', 'b', 'c', 'd'}\n"
        "llm = Custom(counter=TokenCountingHandler(), completion_to_prompt=lambda text: text + '!')\n"
        "print(LLMBackend(llm).identity)\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=None).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert "settings" in runs[0]


def test_a_run_goes_on_when_somebody_counts_its_tokens(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.db")
    for number in range(2):
        llm = Counted(counter=TokenCountingHandler() if number else None)
        reader = Reader(LLMBackend(llm, callback_manager=watched(TokenCountingHandler())), journal=journal, **SIZES)
        reader.read("q", "text", run="r")
        assert len(llm.sent) == (2 if number == 0 else 0)


# Settings.llm


async def test_the_llm_of_the_settings_is_looked_up_for_each_reading(
    settings_llm: Callable[[LLM | None], None],
) -> None:
    engine = MemAgentQueryEngine.from_documents(documents(), **SIZES)
    synthesizer, reader = MemAgentSynthesizer(**SIZES), Reader(LLMBackend(), **SIZES)
    block, workflow = MemAgentMemoryBlock(chunk_tokens=200, memory_tokens=50), MemAgentWorkflow(load=lambda _: "x" * 50)

    async def ask() -> None:
        engine.query("q")
        await engine.aquery("q")
        synthesizer.get_response("q", ["text"])
        reader.read("q", "text")
        list(reader.stream("q", "text"))
        await reader.aread("q", "text")
        reader.read_many([("q", "text")])
        reader.answer("q", reader.memorize("q", "text").memory)
        block.pending = "user: hello"
        await block.afold()
        await workflow.run(question="q", document="d")

    first, second = fake(), fake()
    settings_llm(first)
    await ask()
    calls = len(first.calls)
    settings_llm(second)
    await ask()
    assert (len(first.calls), len(second.calls)) == (calls, calls)


@pytest.mark.parametrize(
    "method", ["read", "stream", "aread", "astream", "read_many", "memorize", "workflow", "engine"]
)
async def test_a_reading_under_way_keeps_its_llm(method: str, settings_llm: Callable[[LLM | None], None]) -> None:
    second = fake()

    def switch(_: str) -> str:
        settings_llm(second)
        return "one note"

    first = fake(switch)
    settings_llm(first)
    reader, text = Reader(LLMBackend(), **SIZES), documents()[0].text
    if method == "read_many":
        reader.read_many([("q", text)])
    elif method == "stream":
        list(reader.stream("q", text))
    elif method == "workflow":
        await MemAgentWorkflow(load=lambda _: text, **SIZES).run(question="q", document="d")
    elif method == "engine":
        list(MemAgentQueryEngine.from_documents(documents(), streaming=True, **SIZES).query("q").response_gen)  # type: ignore[union-attr, arg-type]
    elif method == "aread":
        await reader.aread("q", text)
    elif method == "astream":
        [each async for each in reader.astream("q", text)]
    else:
        getattr(reader, method)("q", text)
    assert len(first.calls) > 2
    assert second.calls == []


async def test_callbacks_go_with_the_llm_of_the_settings(settings_llm: Callable[[LLM | None], None]) -> None:
    counting = TokenCountingHandler()
    engine = MemAgentQueryEngine.from_documents(documents(), callback_manager=watched(counting), **SIZES)
    for llm in (fake(), fake()):
        counting.reset_counts()
        settings_llm(llm)
        await asyncio.to_thread(engine.query, "q")
        assert len(counting.llm_token_counts) == len(llm.calls) > 2


class Connected(Chatting):
    """Its async connections belong to the event loop that first used them, as those of most SDKs."""

    _home: Any = PrivateAttr(default=None)

    async def achat(self, messages: Any, **kwargs: Any) -> Any:
        self._home = self._home or asyncio.get_running_loop()
        if self._home is not asyncio.get_running_loop():
            raise RuntimeError("Event loop is closed")
        return self.respond(messages, kwargs)


@pytest.mark.parametrize("wrap", [lambda llm: LLMBackend(llm), lambda llm: LLMBackend(llm, callback_manager=watched())])
def test_an_llm_is_used_in_one_event_loop_after_the_other(
    wrap: Callable[[Any], LLMBackend], settings_llm: Callable[[LLM | None], None]
) -> None:
    llm = Connected()
    for _ in range(3):
        assert asyncio.run(wrap(llm).acomplete(prompt())).text == "so it is"
    settings_llm(llm)
    assert asyncio.run(wrap(None).acomplete(prompt())).text == "so it is"


# Copies


class Replying(CustomLLM):
    """A module's class, which a pickle finds again."""

    reply: str = "so it is"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="replying", context_window=4096)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        return MockLLM(max_tokens=3).complete(prompt)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        return MockLLM(max_tokens=3).stream_complete(prompt)


@pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy, copy.copy])
@pytest.mark.parametrize("options", [{}, {"tokenizer": "approximate"}, {"tokenizer": len}, {"window": 1024}])
def test_a_backend_is_copied_with_its_settings(again: Callable[[Any], Any], options: dict[str, Any]) -> None:
    backend = LLMBackend(Replying(), limit_parameter="n", concurrency=3, **options)
    backend.complete(prompt())
    other = again(backend)
    assert other.complete(prompt()).text == backend.complete(prompt()).text
    assert (other.name, other.identity, other.window) == (backend.name, backend.identity, backend.window)
    assert other.count("Hello, world!") == backend.count("Hello, world!")
    assert other.concurrency == 3
    assert Reader(other, **SIZES).read("q", "text").answer


@pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
def test_a_backend_without_an_llm_is_copied_too(
    again: Callable[[Any], Any], settings_llm: Callable[[LLM | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    settings_llm(Replying())
    handler = LlamaDebugHandler(print_trace_on_end=False)
    handler.lock = threading.Lock()  # type: ignore[attr-defined]  # as exporters of traces have
    other = again(LLMBackend(callback_manager=CallbackManager([handler])))
    assert other.complete(prompt()).text == "text text text"
    assert ("callback manager" in caplog.text) == (again is not copy.deepcopy), "a deep copy shares it"


def test_the_backend_s_own_fields_do_not_hold_the_key_in_a_representation() -> None:
    assert "sk-1" not in repr(LLMBackend(Counted(api_key="sk-1"))) + str(LLMBackend(Anthropic()).identity)
