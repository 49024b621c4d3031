"""How long does the page of 10,000 results take to make and to open, and how large is it?

    python benchmarks/leaderboard.py [--sections 4] [--output docs/results/leaderboard.json]

The results are made up: five tasks, four lengths, five readers, 100 samples of each, every one with a reading of
`--sections` sections, after each of which the memory has about ten words more. `make` is the command that writes the
page, `open` what Chromium needs until the page is loaded, `samples` and `sample` from the click to the list of 100
samples and to the memories of one. Processor seconds are given beside those of the clock, because other work on the
machine slows the clock alone. Needs Chromium, its driver, and selenium.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from pydantic import TypeAdapter
from selenium import webdriver

from memagent_integrations import Budgets, Reading
from memagent_integrations.evaluation.diagnostics import FactTrace
from memagent_integrations.evaluation.results import Result
from memagent_integrations.evaluation.samples import Fact
from memagent_integrations.records import Reply, Span, Step, Usage

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from browsing import browser

TASKS = [f"task_{number}" for number in range(5)]
LENGTHS = (4096, 16384, 65536, 262144)
READERS = [f"reader-{number}" for number in range(5)]
SAMPLES = 100
WORDS = topics["compound"].split()


def results(sections: int) -> Iterator[Result]:
    """Yield the results."""
    dice = random.Random("leaderboard")
    for task, length, reader, number in product(TASKS, LENGTHS, READERS, range(SAMPLES)):
        steps, memory = [], ""
        for index in range(sections):
            before, memory = memory, f"{memory}{' '.join(dice.choices(WORDS, k=10))}. "
            usage = Usage(prompt_tokens=1500, completion_tokens=60, cached_tokens=0)
            span = Span(index=index, start=4000 * index, end=4000 * (index + 1), tokens=1000)
            steps.append(
                Step(
                    index=index,
                    phase="memory",
                    span=span,
                    memory_before=before,
                    memory=memory,
                    reply=Reply(text=memory, usage=usage, seconds=1.5),
                    outcome="updated",
                    cut=False,
                )
            )
        gold, said = dice.choices(WORDS, k=2)
        fact = Fact(text=" ".join(dice.choices(WORDS, k=8)), depth=0.5, keys=(gold,))
        trace = FactTrace(fact=fact, start=0, read_at=0, held=(gold in memory,) * sections, answered=gold == said)
        question = f"What does the text say of {gold}?"
        yield Result(
            task=task,
            length=length,
            reader=reader,
            number=number,
            score=float(dice.random() < 0.6),
            answer=said,
            metric="sub_em",
            question=question,
            answers=(gold,),
            facts=(fact,),
            calls=sections + 1,
            usage=Usage(prompt_tokens=1500 * sections, completion_tokens=60 * sections, cached_tokens=0),
            seconds=1.5 * sections,
            reading=Reading(
                question=question, answer=said, memory=memory, steps=tuple(steps), model="m", budgets=Budgets()
            ),
            traces=(trace,),
        )


def opened(page: webdriver.Chrome, address: str, selector: str) -> float:
    """Return the seconds from a click on a link of the page until what it leads to is laid out."""
    script = """
        const [address, selector, done] = arguments;
        const begun = performance.now();
        location.hash = address;
        const look = () => document.querySelector(selector)?.offsetHeight
            ? done((performance.now() - begun) / 1000) : requestAnimationFrame(look);
        look();
    """
    return float(page.execute_async_script(script, address, selector))  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=int, default=4, help="of each reading (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    command = f"python benchmarks/leaderboard.py --sections {args.sections}"
    figures: dict[str, Any] = {"command": command, "results": len(TASKS) * len(LENGTHS) * len(READERS) * SAMPLES}
    with tempfile.TemporaryDirectory() as folder:
        file, html = Path(folder) / "results.jsonl", Path(folder) / "page.html"
        adapter = TypeAdapter(Result)
        with file.open("wb") as lines:
            lines.write(b'{"made": {"model": "m"}, "noted": {}}\n')
            lines.writelines(adapter.dump_json(result) + b"\n" for result in results(args.sections))
        begun = time.perf_counter()
        report = [sys.executable, "-m", "memagent_integrations", "eval", "report", file, "--html", html]
        subprocess.run(report, check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures["make, s"] = round(time.perf_counter() - begun, 2)
        figures["make, processor s"] = round(used.ru_utime + used.ru_stime, 2)
        figures["results, MB"] = round(file.stat().st_size / 1e6, 1)
        figures["page, MB"] = round(html.stat().st_size / 1e6, 1)
        with browser(1440, 900) as page:
            page.get(html.as_uri())
            timing = "return performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"
            figures["open, s"] = round(page.execute_script(timing), 2)  # type: ignore[no-untyped-call]
            figures["samples, s"] = round(opened(page, "g7", "#list tr"), 2)
            figures["sample, s"] = round(opened(page, "g7/50", "#step .memory"), 2)
    written = json.dumps(figures, indent=1)
    print(written)
    if args.output:
        args.output.write_text(written + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
