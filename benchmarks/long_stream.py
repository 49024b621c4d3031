"""Measure time and peak memory of reading a long stream, and of a stream a hundred times shorter.

The scripted backend replies to every memory prompt with a full memory of 1,024 tokens, so the figures are those of this
package: tokenizing, chunking, the loop and its records. Each size runs in a process of its own; the short stream is
read once for its memory, and a hundred times for its time, so that both times are of the same order.

    python benchmarks/long_stream.py [--tokens 3500000]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from memagent_integrations import Reader, ScriptedBackend
from memagent_integrations.records import Prompt

LINE = "The clerk noted entry {} in the ledger, closed the book and went on with the next of the many.\n"


def stream(tokens: int, reader: Reader) -> Iterator[str]:
    """Yield numbered lines of `tokens` tokens together."""
    left, number = tokens, 0
    while left > 0:
        line = LINE.format(number)
        left -= reader.count(line)
        number += 1
        yield line


def measure(tokens: int, times: int) -> dict[str, float]:
    """Read a stream of this size `times` times; return the calls and mean seconds of a reading, and the peak memory."""
    memory = "fact " * 1023

    def script(prompt: Prompt) -> str:
        return f"{prompt.index} {memory}" if prompt.phase == "memory" else "done"

    reader = Reader(ScriptedBackend(script))
    calls, started = 0, time.perf_counter()
    for _ in range(times):
        calls = len(reader.read("What was noted last?", stream(tokens, reader)).steps)
    seconds = (time.perf_counter() - started) / times
    return {
        "tokens": tokens,
        "calls": calls,
        "seconds": seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(tokens: int, times: int) -> dict[str, float]:
    """Return the figures of `measure` from a new process, whose peak memory is that of this size alone."""
    command = [sys.executable, __file__, "--tokens", str(tokens), "--times", str(times), "--one"]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3_500_000)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="measure only this size, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.tokens, options.times)))
        return
    sizes = [(options.tokens // 100, 1), (options.tokens // 100, 100), (options.tokens, 1)]
    short, repeated, long = (in_a_process(tokens, times) for tokens, times in sizes)
    growth = {"peak_mb_more": long["peak_mb"] - short["peak_mb"], "time_ratio": long["seconds"] / repeated["seconds"]}
    print(json.dumps({"short": short, "short, a hundred times": repeated, "long": long, **growth}, indent=1))


if __name__ == "__main__":
    main()
