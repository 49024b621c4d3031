"""A window that nobody knows: every door says once that 8,192 tokens are assumed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fake_llm import FakeLLM
from helpers.loopback import Loopback, chat
from helpers.scripted_chat import INPUT, Model, count
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW

from memagent_integrations import MemAgentQueryEngine, MemAgentReader, MemAgentSynthesizer, Reader, ScriptedBackend
from memagent_integrations.backends import Backend
from memagent_integrations.records import Prompt, Reply

SIZES: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50}


class Windowless(Backend):
    """A backend of a caller's own, which says nothing about its window."""

    name = "mine"

    def count(self, text: str) -> int:
        return len(text.split())

    def complete(self, prompt: Prompt) -> Reply:
        return Reply(text="note")


Door = Callable[..., Callable[[], Any]]
"""Makes a reader with some settings; returns what reads a document with it."""


def core(model: Any) -> Door:
    def door(**settings: Any) -> Callable[[], Any]:
        reader = Reader(model, **SIZES, **settings)
        return lambda: reader.read(*INPUT.values())

    return door


def langchain(model: Any) -> Door:
    def door(**settings: Any) -> Callable[[], Any]:
        reader = MemAgentReader(model=model, **counted(model), **SIZES, **settings)
        return lambda: reader.invoke(INPUT)

    return door


def llama_index(model: Any) -> Door:
    def door(**settings: Any) -> Callable[[], Any]:
        synthesizer = MemAgentSynthesizer(model, **counted(model), **SIZES, **settings)
        engine = MemAgentQueryEngine(INPUT["context"], synthesizer)
        return lambda: engine.query(INPUT["question"])

    return door


def counted(model: Any) -> dict[str, Any]:
    return {} if isinstance(model, Backend) else {"tokenizer": count}


DOORS: dict[str, Callable[[], Door]] = {
    "Reader": lambda: core(Windowless()),
    "LangChain's model": lambda: langchain(Model()),
    "LangChain, wrapped": lambda: langchain(Model().with_retry()),
    "LangChain, a backend": lambda: langchain(Windowless()),
    "LlamaIndex's model": lambda: llama_index(FakeLLM(script=lambda _: "note", context=DEFAULT_CONTEXT_WINDOW)),
    "LlamaIndex, a backend": lambda: llama_index(Windowless()),
}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "window" in (text := record.getMessage())]


@pytest.mark.parametrize("door", DOORS)
def test_an_unknown_window_is_told_once_in_every_door(door: str, caplog: pytest.LogCaptureFixture) -> None:
    read = DOORS[door]()()
    for _ in range(3):
        read()
    (text,) = told(caplog)
    assert "does not know its context window; 8,192 tokens are assumed: pass window=" in text
    caplog.clear()
    DOORS[door]()(window=8000)()
    assert not told(caplog), "the caller knows it"


def test_each_of_two_models_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Reader(Windowless(), answer_model=ScriptedBackend(["x"]), **SIZES).read(*INPUT.values())
    assert len(told(caplog)) == 1
    other = Windowless()
    other.name = "another"
    caplog.clear()
    Reader(ScriptedBackend(lambda _: "x", window=8192), answer_model=other, **SIZES).read(*INPUT.values())
    (text,) = told(caplog)
    assert text.startswith("another ")


def test_a_script_takes_prompts_of_any_length(caplog: pytest.LogCaptureFixture) -> None:
    for door in (core, langchain, llama_index):
        door(ScriptedBackend(lambda _: "x"))()()
    assert not told(caplog)


OPENAI = {"api_key": "k", "base_url": "https://api.openai.com/v1", "tokenizer": "approximate"}


def test_the_windows_of_openais_models_are_larger_than_what_is_assumed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Reader("openai:gpt-5-mini", backend_options=OPENAI) as reader:
        reader.plan(*INPUT.values())
    assert not told(caplog)


@pytest.mark.heavy
def test_an_endpoint_that_reports_its_window_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Loopback(chat(lambda _: "x")) as server, caplog.at_level(logging.WARNING):
        options = {"base_url": f"{server.url}/v1", "api_key": "k"}
        with Reader("openai:test", backend_options=options, **SIZES) as reader:
            reader.read(*INPUT.values())
    assert not told(caplog)
