"""Time a parallel reading against the sequential one, over a loopback server with a delay for each call and slots.

    python benchmarks/parallel_reading.py [--chunks 128] [--segments 8] [--slots 8] [--delay 0.2]

The server works on as many calls at a time as it has slots; each takes the delay. So the ratio is that of the calls
that wait for one another, and of what this package does between them.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.loopback import Loopback, Request, Response, chat

from memagent_integrations import Reader
from memagent_integrations.backends.openai import OpenAIBackend

CHUNK_TOKENS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds of a call")
    options = parser.parse_args()
    free, never = threading.Semaphore(options.slots), threading.Event()
    reply = chat(lambda prompt: f"A note of {len(prompt)} characters.")

    def respond(request: Request) -> Response:
        with free:
            never.wait(options.delay)
            return reply(request)

    settings: dict[str, Any] = {"chunk_tokens": CHUNK_TOKENS, "memory_tokens": 100, "output_tokens": 100}
    with Loopback(respond) as server:
        backend = OpenAIBackend(
            "m", base_url=f"{server.url}/v1", tokenizer="approximate", window=8192, concurrency=options.slots
        )
        reader = Reader(backend, **settings)
        document = text_of(options.chunks, reader)
        seconds, calls = {}, {}
        for name, each in (
            ("sequential", reader),
            ("parallel", reader.changed(strategy="parallel", segments=options.segments)),
        ):
            started = time.perf_counter()
            calls[name] = len(each.read("What was noted?", document).steps)
            seconds[name] = time.perf_counter() - started
    ratio = seconds["parallel"] / seconds["sequential"]
    print(json.dumps({**vars(options), "calls": calls, "seconds": seconds, "ratio": ratio}))


def text_of(chunks: int, reader: Reader) -> str:
    """Return a text of so many chunks."""
    line, lines = "The harbour master noted the tide and went home by the old road.\n", chunks
    while sum(1 for _ in reader.chunks(line * lines)) < chunks:
        lines += chunks
    while sum(1 for _ in reader.chunks(line * lines)) > chunks:
        lines -= 1
    return line * lines


if __name__ == "__main__":
    main()
