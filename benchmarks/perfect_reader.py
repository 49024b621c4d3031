"""Run a note-taker that never errs on the needle tasks and variable tracking, up to 3.5 million tokens.

The scripted model notes each sentence that the question is about, and answers from its notes. So the figures are those
of this package: that the samples can be solved at any length, that the loop loses nothing on the way, and the time and
memory that it takes. The second reader is `cut`: the same model with the document cut in the middle to fit its window.

    python benchmarks/perfect_reader.py --data DIR [--tokens 4096 65536 3500000] [--samples 2] [--readers NAME ...]
"""

from __future__ import annotations

import argparse
import re
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from memagent_integrations import ScriptedBackend
from memagent_integrations.evaluation import baselines, harness, report, tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.results import Results
from memagent_integrations.records import Budgets, Prompt

TASKS = [name for name in tasks.NAMES if name.startswith("niah_")] + ["vt"]
READERS = ("memagent", "cut")
NOTE = re.compile(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.|VAR (\w+) = (?:VAR )?(\w+)")


def note_taker(prompt: Prompt) -> str:
    """Return the notes, or the answer, that follow from the text of the prompt."""
    text = prompt.messages[-1].content
    question = text.partition("<question>")[2].partition("</question>")[0] or text
    notes = [match for match in NOTE.finditer(text) if match[3] or match[1] in question]
    if prompt.phase == "memory":
        return "\n".join(dict.fromkeys(match[0] for match in notes)) or "Nothing yet."
    values = dict.fromkeys(match[2] for match in notes if match[2])
    value = re.search(r"\b\d{5}\b", question)
    assigned = {match[3]: match[4] for match in notes}
    return " ".join(values) or " ".join(chained(assigned, value[0] if value else "")) or "It is not there."


def chained(assigned: dict[str, str], value: str) -> list[str]:
    """Return the variables that have this value, directly or through others."""
    variables: list[str] = []
    for variable in assigned:
        current, seen = variable, set[str]()
        while current in assigned and current not in seen:
            seen.add(current)
            current = assigned[current]
        if current == value:
            variables.append(variable)
    return variables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 65_536, 3_500_000])
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--readers", nargs="+", default=READERS)
    options = parser.parse_args()
    backend, data = ScriptedBackend(note_taker, window=8192), Data(options.data)
    readers = {name: baselines.make(name, backend, Budgets()) for name in options.readers}
    chosen = [replace(tasks.load(name, data), lengths=tuple(options.tokens)) for name in TASKS]
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder) / "results.jsonl", {"seed": 0})
        started = time.perf_counter()
        harness.evaluate(
            harness.jobs(chosen, options.readers, options.samples), readers, results, seed=0, count=backend.count
        )
        print(report.markdown(report.rows(results)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{time.perf_counter() - started:,.0f} s, peak memory {peak:,.0f} MB")
    lost = [result.key for result in results if result.reader.startswith("memagent") and result.score < 1]
    print(f"memagent missed: {lost or 'nothing'}")


if __name__ == "__main__":
    main()
