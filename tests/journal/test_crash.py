"""Readings that are killed at any instant lose nothing, and only the call in flight is made twice."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.loopback import Loopback, chat
from helpers.processes import PROCESSES

from memagent_integrations import Journal, Reader, Reading
from memagent_integrations.backends.openai import OpenAIBackend

pytestmark = pytest.mark.heavy

RUNS = 50
CALLS = 7
DOCUMENT = "".join(f"Line {n} of a document that is long enough. " for n in range(120))


def reply(prompt: str) -> str:
    """Return a digest of the prompt, so that a wrong memory shows in all later ones."""
    return f"note {hashlib.sha256(prompt.encode()).hexdigest()[:12]}"


def question(run: int) -> str:
    return f"What does run {run} say?"


def read(url: str, journal: Path | None, document: Path, run: int) -> Reading:
    with OpenAIBackend("m", base_url=f"{url}/v1", tokenizer="approximate") as backend:
        reader = Reader(backend, chunk_tokens=400, memory_tokens=60, journal=journal)
        try:
            return reader.read(question(run), document)
        finally:
            reader.close()


def test_killed_readings_go_on(tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT)
    journal = tmp_path / "runs.db"
    chance = random.Random(7)
    plans = [(run, chance.randint(1, CALLS), chance.uniform(0, 0.02)) for run in range(RUNS)]
    arrived = {(run, number): threading.Event() for run in range(RUNS) for number in range(CALLS + 2)}
    seen: Counter[int] = Counter()
    lock = threading.Lock()

    def respond(prompt: str) -> str:
        run = int(prompt.split("What does run ")[1].split()[0])
        with lock:
            seen[run] += 1
            arrived[run, min(seen[run], CALLS + 1)].set()
        return reply(prompt)

    with Loopback(chat(respond)) as server:

        def killed(plan: tuple[int, int, float]) -> int | None:
            run, calls, moment = plan
            child = PROCESSES.Process(target=read, args=(server.url, journal, document, run))
            child.start()
            assert arrived[run, calls].wait(60)
            time.sleep(moment)  # any instant from the arrival of that call on
            child.kill()
            child.join()
            return child.exitcode

        with ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(killed, plans))
        assert ends.count(-9) > RUNS // 2, "most were killed on the way"
        with Journal(journal) as records:
            recorded = {run.question: run.steps for run in records.runs()}
        assert len({recorded.get(question(run), 0) for run in range(RUNS)}) > 3, "at different steps"

        resumed = [read(server.url, journal, document, run) for run in range(RUNS)]
        asked = Counter(body["messages"][0]["content"] for body in server.bodies("/v1/chat/completions"))
        for run in range(RUNS):
            assert resumed[run].answer == read(server.url, None, document, run).answer
            counts = [number for prompt, number in asked.items() if question(run) in prompt]
            assert len(counts) == CALLS
            assert sorted(counts)[:-1] == [1] * (CALLS - 1), "no step was called twice"
            assert max(counts) <= 2, "except the one in flight"
