"""Measure what the journal costs: the median milliseconds of a step with a journal and without one."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from memagent_integrations import Reader, ScriptedBackend
from memagent_integrations.records import Step

STEPS = 700  # as for 3.5 million tokens in chunks of 5,000
MEMORY = "A memory of about a thousand tokens, such as a model writes after a chunk. " * 60


def milliseconds(journal: Path | None) -> list[float]:
    """Return the milliseconds of each step of one reading."""
    moments = [time.perf_counter()]

    def progress(step: Step) -> None:
        moments.append(time.perf_counter())

    backend = ScriptedBackend(lambda prompt: f"{prompt.index} {MEMORY}")
    with Reader(backend, chunk_tokens=200, memory_tokens=1024, journal=journal) as reader:
        reader.read("What is it?", ("Some words of a document. " * 33 for _ in range(STEPS)), progress=progress)
    return [1000 * (after - before) for before, after in itertools.pairwise(moments)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for repeat in range(3):
            plain = statistics.median(milliseconds(None))
            recorded = statistics.median(milliseconds(Path(folder) / f"{repeat}.db"))
            figures = {"plain_ms": plain, "journal_ms": recorded, "overhead_ms": recorded - plain}
            results.append({name: round(value, 3) for name, value in figures.items()})
        print(json.dumps({"steps": STEPS, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
