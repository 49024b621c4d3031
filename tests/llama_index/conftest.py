"""Fixtures of the tests of the LlamaIndex door."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from llama_index.core.llms import LLM
from llama_index.core.settings import Settings


@pytest.fixture
def settings_llm() -> Iterator[Callable[[LLM | None], None]]:
    """A function that sets `Settings.llm`; it is as before after the test."""
    before = Settings._llm

    def use(llm: LLM | None) -> None:
        Settings._llm = llm

    yield use
    Settings._llm = before
