"""Read 200 documents with two workers on a local Ray, and kill one of them half way.

    python benchmarks/ray_restart.py [--documents N] [--seconds-of-a-call S]

Prints, with a journal and without one: how many rows came back, how many with the right answer, none or twice; how many
calls the server got, and how many of them it had answered before. Then the same job is run again on the journal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.ray_workers import Gates, answers, local_ray, read

BATCH = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--seconds-of-a-call", type=float, default=0.02)
    options = parser.parse_args()
    with local_ray(), tempfile.TemporaryDirectory() as folder:
        whole = Gates(seconds=options.seconds_of_a_call)
        report("no worker killed, no journal", whole, options.documents, Path(folder), journal=False)
        half = whole.calls.total() // 2
        for journal in (False, True):
            model = Gates(deadly=half, seconds=options.seconds_of_a_call)
            name = f"a worker killed at call {half}, {'a' if journal else 'no'} journal"
            report(name, model, options.documents, Path(folder), journal=journal)
        report("the job again, on the journal", Gates(), options.documents, Path(folder), journal=True)


def report(name: str, model: Gates, documents: int, folder: Path, *, journal: bool) -> None:
    """Read the documents, and print a line of what came of it."""
    began = time.perf_counter()
    rows = read(model, documents, folder, journal=journal, batch_size=BATCH)
    seconds = time.perf_counter() - began
    times = Counter(row["id"] for row in rows)
    right = len({(row["id"], row["answer"]) for row in rows} & {*answers(documents)})
    print(
        f"{name}: {len(rows)} rows, {right} right, {documents - len(times)} missing, "
        f"{sum(count > 1 for count in times.values())} twice; {len(model.killed)} killed; {model.calls.total()} calls, "
        f"{model.repeated} of them repeated; {seconds:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
