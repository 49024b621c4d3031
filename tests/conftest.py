from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.data import DATA
from tenacity import wait_none

from memagent_integrations import calls


def pytest_configure() -> None:
    """Point tiktoken to the vocabularies that llama-index-core ships, so that no test downloads one."""
    spec = find_spec("llama_index") and find_spec("llama_index.core")
    if spec and spec.origin and "TIKTOKEN_CACHE_DIR" not in os.environ:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(spec.origin).parent / "_static" / "tiktoken_cache")


@pytest.fixture(scope="session")
def books() -> Path:
    """Return the folder of the novels in shared/data."""
    folder = DATA / "books"
    if not folder.is_dir():
        pytest.skip("the books of shared/data are not here")
    return folder


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry calls at once."""
    monkeypatch.setattr(calls, "_BACKOFF", wait_none())
