"""A local Ray with two workers that read documents from a loopback server, and one of them killed half way."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.data import DataContext

from helpers.loopback import Loopback, chat
from memagent_integrations.ray import read_dataset

_FILLER = " ".join(
    f"On day {day} the harbour master noted the tide, the wind and the names of the ships." for day in range(30)
)
"""A few chunks, no two of them alike."""
SETTINGS = {"chunk_tokens": 200, "memory_tokens": 60, "output_tokens": 60}
IN_FLIGHT = 4
"""Calls that a worker makes at a time."""


@contextmanager
def local_ray() -> Iterator[None]:
    """Start Ray on this machine, for two workers."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet = {"log_to_driver": False, "logging_level": "critical"}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, **quiet)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()


@dataclass
class Gates:
    """A model that finds the code of a gate, counts its calls, and at call `deadly` kills one of the workers.

    `workers` is the folder with their process ids. A call takes `seconds`.
    """

    deadly: int | None = None
    seconds: float = 0.0
    workers: Path | None = None
    calls: Counter[str] = field(default_factory=Counter)
    killed: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, prompt: str) -> str:
        with self._lock:
            self.calls[prompt] += 1
            if self.deadly and self.calls.total() == self.deadly and self.workers:
                self.killed.append(min(int(file.name) for file in self.workers.iterdir()))
                os.kill(self.killed[0], signal.SIGKILL)
        if self.seconds:
            time.sleep(self.seconds)
        found = re.search(r"The code of gate \d+ is (\d+)\.", prompt)
        if "<section>" in prompt:
            return found.group() if found else "Nothing of a gate yet."
        return f"It is {found.group(1)}." if found else "The memory does not say."

    @property
    def repeated(self) -> int:
        """How many calls were made again."""
        return self.calls.total() - len(self.calls)


def rows(number: int) -> list[dict[str, Any]]:
    """Return rows of which each asks for the code in its document."""
    return [
        {
            "id": n,
            "question": f"What is the code of gate {n}?",
            "document": f"Log {n}. {_FILLER} The code of gate {n} is {1000 + n}.",
        }
        for n in range(number)
    ]


def answers(number: int) -> list[tuple[int, str]]:
    """Return the number of each row with its right answer."""
    return [(n, f"It is {1000 + n}.") for n in range(number)]


def signing(folder: Path) -> Callable[[str], str]:
    """Return a function that loads a document, and leaves the process id of its worker in the folder."""

    def load(text: str) -> str:  # a local function is sent by value: workers do not know the modules of the tests
        (folder / str(os.getpid())).touch()
        return text

    return load


def read(model: Gates, number: int, folder: Path, *, journal: bool = True, batch_size: int = 8) -> list[dict[str, Any]]:
    """Return the rows that two workers read; `model` may kill one of them."""
    model.workers = folder / f"workers-{len(list(folder.iterdir()))}"
    model.workers.mkdir()
    with Loopback(chat(model.reply)) as server:
        dataset = read_dataset(
            ray.data.from_items(rows(number), override_num_blocks=max(number // batch_size, 2)),
            "openai:tiny",
            load=signing(model.workers),
            journal_dir=folder / "journals" if journal else None,
            concurrency=2,
            batch_size=batch_size,
            backend_options={
                "base_url": f"{server.url}/v1",
                "api_key": "none",
                "tokenizer": "approximate",
                "window": 8192,
                "concurrency": IN_FLIGHT,
            },
            **SETTINGS,
        )
        return list(dataset.take_all())
