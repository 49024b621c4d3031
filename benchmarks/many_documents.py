"""Read a thousand documents over a server that fails one call in twenty; count outcomes, memory and open sockets.

    python benchmarks/many_documents.py [--documents N] [--sync]

The server runs in a process of its own. Every reading ends with an answer or with an error of this package.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.loopback import Loopback, Request, Response, chat

from memagent_integrations import Reader, Reading
from memagent_integrations.backends.openai import OpenAIBackend

IN_FLIGHT = 64
DOCUMENT = "Some words of a long document that has a few chunks. " * 80
FAULTS = (
    Response(status=429, body={"error": {"message": "slow down"}}),
    Response(status=500, body={"error": {"message": "down"}}),
    Response(status=503, body={"error": {"message": "down"}}),
    Response(reset=True),
    Response(body=b"{broken", headers={"Content-Type": "application/json"}),
    Response(body={"choices": []}),
    Response(status=400, body={"error": {"message": "out of order"}}),
)


def serve(pipe: Connection) -> None:
    """Run the server: send its URL through the pipe, and stop at the first message."""
    chance, good = random.Random(5), chat(lambda prompt: "a note of some words")

    def respond(request: Request) -> Response:
        return chance.choice(FAULTS) if chance.random() < 0.05 else good(request)

    with Loopback(respond) as server:
        server.requests = server._server.requests = _Forgetful()  # type: ignore[assignment]
        pipe.send(server.url)
        pipe.recv()


class _Forgetful(list[Request]):
    """A list that stays empty: the benchmark needs no record of the requests."""

    def append(self, request: Request) -> None:
        """Drop the request."""


class Watch:
    """Samples memory and open sockets of this process while a block runs."""

    def __init__(self) -> None:
        self.process, self.done = psutil.Process(), threading.Event()
        self.memory: list[int] = []
        self.sockets: list[int] = []

    def __enter__(self) -> Watch:
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def sample(self) -> None:
        """Sample both until the block ends."""
        while not self.done.wait(0.1):
            self.memory.append(self.process.memory_info().rss)
            self.sockets.append(len(self.process.net_connections("inet")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--sync", action="store_true", help="read_many in threads; aread_many otherwise")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    pipe, server_pipe = processes.Pipe()
    processes.Process(target=serve, args=(server_pipe,), daemon=True).start()
    url = pipe.recv()
    jobs = [(f"What does document {number} say?", DOCUMENT) for number in range(options.documents)]
    with tempfile.TemporaryDirectory() as folder:
        backend = OpenAIBackend(
            "m", base_url=f"{url}/v1", tokenizer="approximate", max_retries=2, timeout=30, concurrency=IN_FLIGHT
        )
        reader = Reader(backend, chunk_tokens=500, memory_tokens=60, window=2000, journal=Path(folder) / "runs.db")
        first = read(reader, jobs[:IN_FLIGHT], options.sync)  # so that imports, connections and pools are not measured
        gc.collect()
        before, started = psutil.Process().memory_info().rss, time.perf_counter()
        with Watch() as watch:
            readings = read(reader, jobs, options.sync)
        seconds = time.perf_counter() - started
        again = read(reader, jobs, options.sync)
        reader.close()
    pipe.send("end")
    figures = {
        "documents": len(readings),
        "calls": sum(len(reading.steps) for reading in readings),
        "outcomes": outcomes(readings),
        "outcomes_when_begun_again": outcomes(again),
        "seconds": round(seconds, 1),
        "memory_before_mb": round(before / 1e6),
        "memory_peak_mb": round(max(watch.memory) / 1e6),
        "memory_of_the_readings_mb": round(sum(len(reading.to_json()) for reading in readings) / 1e6, 1),
        "sockets_peak": max(watch.sockets),
        "first": len(first),
    }
    print(json.dumps(figures, indent=1))


def read(reader: Reader, jobs: list[tuple[str, str]], sync: bool) -> list[Reading]:
    return reader.read_many(jobs) if sync else asyncio.run(reader.aread_many(jobs))


def outcomes(readings: list[Reading]) -> dict[str, int]:
    """Count the readings that ended with an answer, and those of each class of error."""
    return dict(Counter(type(reading.error).__name__ if reading.error else "answered" for reading in readings))


if __name__ == "__main__":
    main()
