"""Keep all places busy with documents of very different length, and read one document for a thousand questions.

    python benchmarks/scheduling.py [--milliseconds N] [--questions N]

The model is a script that waits, as a server would. The ideal of many documents is what no order can beat: the calls of
the longest document one after the other, or all calls divided by the places, whichever is more. "asyncio alone" makes
calls and does nothing else than to wait for a thread after each: as a reader does, which tokenizes in threads. For the
questions, the text is read from an iterator; the memory is what was allocated at the peak, less what the readings
themselves take.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

from memagent_integrations import Reader, ScriptedBackend
from memagent_integrations.records import Prompt, Reply

SECTION = "Some words of a long document that has a few chunks of them.\n" * 5
SIZES: dict[str, Any] = {"chunk_tokens": 66, "memory_tokens": 20}  # a chunk is one SECTION


class Waiting(ScriptedBackend):
    """Replies after a time."""

    def __init__(self, seconds: float, places: int) -> None:
        super().__init__(lambda prompt: "a note", concurrency=places)
        self.seconds = seconds

    def complete(self, prompt: Prompt) -> Reply:
        """Return the reply after the time."""
        time.sleep(self.seconds)
        return super().complete(prompt)

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        await asyncio.sleep(self.seconds)
        return super().complete(prompt)


class Forgetful(list[Prompt]):
    """A list that stays empty: the benchmark needs no record of the prompts."""

    def append(self, prompt: Prompt) -> None:
        """Drop the prompt."""


def documents(seconds: float, places: int, how: str) -> dict[str, Any]:
    """Read 64 documents of 1 to 64 chunks, the shortest given first."""
    jobs = [(f"What is in document {number}?", SECTION * number) for number in range(1, 65)]
    reader = Reader(Waiting(seconds, places), **SIZES)
    started, cpu = time.perf_counter(), time.process_time()
    readings = reader.read_many(jobs) if how == "read_many" else asyncio.run(reader.aread_many(jobs))
    taken, cpu = time.perf_counter() - started, time.process_time() - cpu
    calls = [len(reading.steps) for reading in readings]
    ideal = seconds * max(*calls, sum(calls) / places)
    return {
        "how": how,
        "places": places,
        "milliseconds": round(1000 * seconds),
        "calls": sum(calls),
        "longest": max(calls),
        "of_ideal": round(ideal / taken, 3),
        "cpu_milliseconds_a_call": round(1000 * cpu / sum(calls), 2),
    }


def asyncio_alone(seconds: float, places: int) -> dict[str, Any]:
    """Make 40 calls in each place, with nothing between them but an empty function in a thread."""

    async def work() -> None:
        for _ in range(40):
            await asyncio.sleep(seconds)
            await asyncio.to_thread(int)

    async def all_places() -> None:
        await asyncio.gather(*[work() for _ in range(places)])

    started = time.perf_counter()
    asyncio.run(all_places())
    taken = time.perf_counter() - started
    return {"how": "asyncio alone", "places": places, "of_ideal": round(40 * seconds / taken, 3)}


def questions(number: int, chunks: int) -> dict[str, Any]:
    """Read one document for so many questions."""
    backend = Waiting(0, 4)
    backend.prompts = Forgetful()
    reader, read = Reader(backend, **SIZES), 0

    def text() -> Iterator[str]:
        nonlocal read
        for _ in range(chunks):
            read += 1
            yield SECTION

    tracemalloc.start()
    started = time.perf_counter()
    readings = reader.ask([f"What of {name}?" for name in range(number)], text())
    seconds, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    assert not any(reading.error for reading in readings)
    assert read == chunks
    steps = sum(len(reading.steps) for reading in readings)
    gc.collect()
    with_readings = tracemalloc.get_traced_memory()[0]
    readings.clear()
    gc.collect()
    own = with_readings - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "questions": number,
        "chunks": chunks,
        "times_read": read // chunks,
        "readings_mb": round(own / 1e6, 1),
        "peak_besides_mb": round((peak - own) / 1e6, 1),
        "milliseconds_a_call": round(1000 * seconds / steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=int, default=50, help="of a call")
    parser.add_argument("--questions", type=int, default=1000)
    options = parser.parse_args()
    seconds = options.milliseconds / 1000
    for how in ("read_many", "aread_many"):
        for places in (64, 16):
            print(json.dumps(documents(seconds, places, how)), flush=True)
    for places in (64, 16):
        print(json.dumps(asyncio_alone(seconds, places)), flush=True)
    for chunks in (5, 20):
        print(json.dumps(questions(options.questions, chunks)), flush=True)


if __name__ == "__main__":
    main()
