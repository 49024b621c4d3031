from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.loopback import Loopback, chat
from helpers.serving import QUESTION, HeldModel

from memagent_integrations import Journal, Reader
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.serve import Server


@pytest.fixture
def model() -> Iterator[HeldModel]:
    model = HeldModel()
    yield model
    model.passes.release(100)


@pytest.fixture
def endpoint(model: HeldModel) -> Iterator[Loopback]:
    with Loopback(chat(model)) as running:
        yield running


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("\n".join(f"Line {number} tells of a harbour and a key." for number in range(50)), encoding="utf-8")
    return path


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "runs.db") as records:
        yield records


@pytest.fixture
def read(endpoint: Loopback, book: Path, journal: Journal) -> Callable[..., Any]:
    def read(run: str = "first", document: Any = None) -> Any:
        backend = OpenAIBackend("m", base_url=f"{endpoint.url}/v1", tokenizer="approximate", max_retries=0)
        with Reader(backend, journal=journal, chunk_tokens=100, memory_tokens=80, window=2000) as reader:
            return reader.read(QUESTION, document or book, run=run)

    return read


@pytest.fixture
def server(journal: Journal) -> Iterator[Server]:
    server = Server(journal, lambda records, run: Reader.from_run(records, run, window=2000))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join()
