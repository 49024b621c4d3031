"""Is the place of the needle cited, however often the memory was rewritten since?

    nice python benchmarks/citations.py --data DIR --output docs/results/citations.json

200 documents of the needle tasks whose haystack is essays, each read twice: as it is, and followed by 1,000 sections of
books that have nothing to do with the question. The scripted reader notes the needles of the question in a form of its
own, and rewrites its whole memory in some of the sections: in other words, in another order, merged into one sentence,
shortened to keys, as a list. It also takes remarks from sections into its memory, and drops them again.

A needle is cited if the passage of one of the citations overlaps it; `all` is the share of documents whose needles are
all cited, `first` the share whose first citation is one of them. `precise` is the share of citations that overlap a
needle, among those of statements that hold its value. `chunk` is the share of documents where the chunk of every needle
could be told without following the rewriting, by the step since which a line has stood in the memory word for word.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent_integrations import Reader, Reading, ScriptedBackend
from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.haystacks import Cycled
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.lineage import Lineage
from memagent_integrations.records import Prompt

TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
LENGTH = 4096  # tokens of a document of the task
CHUNK = 600  # tokens; small, so that a thousand sections are read in seconds
REWRITES, REMARKS = 0.1, 0.05  # shares of the irrelevant sections in which the reader does so
NEEDLE = re.compile(r"One of the special magic (?P<kind>\w+?)s? for (?P<key>[\w-]+) is: (?P<value>[\w-]+)\.")
WORDINGS = (
    "The special magic {kind} for {key} is {value}.",
    "{value} is the magic {kind} of {key}.",
    "According to the text, {key} has the special {kind} {value}.",
    "The document gives {value} as the {kind} for {key}.",
    "For {key}, the {kind} that is mentioned is {value}.",
)

Facts = Sequence[re.Match[str]]


def verbatim(facts: Facts, dice: random.Random) -> str:
    return " ".join(fact[0] for fact in facts)


def paraphrased(facts: Facts, dice: random.Random) -> str:
    return " ".join(dice.choice(WORDINGS).format(**fact.groupdict()) for fact in facts)


def reordered(facts: Facts, dice: random.Random) -> str:
    return paraphrased(dice.sample(facts, len(facts)), dice)


def merged(facts: Facts, dice: random.Random) -> str:
    parts = [f"{fact['value']} for {fact['key']}" for fact in facts]
    return f"The special magic {facts[0]['kind']}s are {', '.join(parts)}, and no other was found so far."


def keys(facts: Facts, dice: random.Random) -> str:
    return "\n".join(f"{fact['key']}: {fact['value']}" for fact in facts)


def bullets(facts: Facts, dice: random.Random) -> str:
    lines = (f"- **{fact['key']}**: its magic {fact['kind']} is {fact['value']}" for fact in facts)
    return "\n".join(["Key facts:", *lines])


FORMS = (verbatim, paraphrased, reordered, merged, keys, bullets)


class Writer:
    """A reader that never errs, but never says a thing twice in the same way. `form` is the last form it used."""

    def __init__(self, question: str, seed: str) -> None:
        self._question, self._dice = question, random.Random(seed)
        self._facts: dict[str, re.Match[str]] = {}
        self._notes, self._remark = "Nothing about the question yet.", ""
        self.form: Callable[[Facts, random.Random], str] = verbatim

    def __call__(self, prompt: Prompt) -> str:
        """Return the reply to a prompt."""
        if prompt.phase == "answer":
            return ", ".join(fact["value"] for fact in self._facts.values()) or "It is not there."
        section = prompt.messages[-1].content.partition("<section>")[2].partition("</section>")[0]
        needles = {match[0]: match for match in NEEDLE.finditer(section) if f" {match['key']}" in self._question}
        dice = self._dice
        if needles or (self._facts and dice.random() < REWRITES):
            self._facts |= needles
            self.form = dice.choice(FORMS)
            self._notes = self.form(list(self._facts.values()), dice)
        if dice.random() < REMARKS:
            words = section.split()
            start = dice.randrange(max(len(words) - 12, 1))
            self._remark = f"The text speaks of {' '.join(words[start : start + 12])}."
        return f"{self._notes}\n{self._remark}".strip() or "There is nothing to note."


@dataclass
class Measured:
    """What was found for one document."""

    form: str
    cited: list[bool]
    first: bool
    precise: list[bool]
    chunk: bool
    characters: list[int]
    sections: int
    updated: int


def measure(sample: Sample, irrelevant: Sequence[str], seed: str) -> Measured:
    """Read a document, followed by the irrelevant text, and look at the citations."""
    text = "".join(sample.document())
    writer = Writer(sample.question, seed)
    reader = Reader(ScriptedBackend(writer), chunk_tokens=CHUNK, memory_tokens=400, output_tokens=400)
    reading = reader.read(sample.question, itertools.chain([text], irrelevant))
    places = [(at := text.index(fact.text), at + len(fact.text)) for fact in sample.facts]
    spans = [(citation.start, citation.end) for citation in reading.citations]

    def at_needle(span: tuple[int, int]) -> bool:
        return any(overlap(span, place) for place in places)

    values = [key for fact in sample.facts for key in fact.keys]
    about = [citation for citation in reading.citations if any(value in citation.statement for value in values)]
    return Measured(
        form=writer.form.__name__,
        cited=[any(overlap(span, place) for span in spans) for place in places],
        first=bool(spans) and at_needle(spans[0]),
        precise=[at_needle((citation.start, citation.end)) for citation in about],
        chunk=all(overlap(span, place) for place, span in zip(places, unbroken(reading, values), strict=True)),
        characters=[end - start for start, end in spans],
        sections=len(reading.steps) - 1,
        updated=sum(step.memory != step.memory_before for step in reading.steps),
    )


def overlap(span: tuple[int, int], place: tuple[int, int]) -> bool:
    return span[0] < place[1] and place[0] < span[1]


def unbroken(reading: Reading, values: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield for each value the chunk since which the line or sentence with it has stood in the memory."""
    steps = [step for step in reading.steps if step.span]
    for value in values:
        lines = (line for line in re.findall(r"[^.!?\n]+(?:[.!?]+|\n|$)", reading.memory) if value in line)
        line, place = " ".join(next(lines, "\0").split()), (0, 0)
        for step in reversed(steps):
            if line not in " ".join(step.memory.split()) or not step.span:
                break
            place = (step.span.start, step.span.end)
        yield place


def irrelevant_text(data: Data, number: int, sections: int) -> list[str]:
    """Return text of books for this many sections, another part for each document."""
    filler, count = Cycled(data.books, batch=17 * number), ScriptedBackend([]).count
    units = filler.size(sections * CHUNK, count) if sections else 0
    batches = range(0, units, 64)
    return [" " + " ".join(map(filler.unit, range(first, min(first + 64, units)))) for first in batches]


def summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the shares over these documents."""
    precise = [each for one in measured for each in one.precise]
    return {
        "documents": len(measured),
        "all": statistics.mean(all(one.cited) for one in measured),
        "first": statistics.mean(one.first for one in measured),
        "needles": statistics.mean(each for one in measured for each in one.cited),
        "precise": statistics.mean(precise) if precise else None,
        "chunk": statistics.mean(one.chunk for one in measured),
        "median characters": statistics.median(n for one in measured for n in one.characters),
        "sections": statistics.mean(one.sections for one in measured),
        "rewritten": statistics.mean(one.updated for one in measured),
    }


def cost(data: Data, sections: int = 50) -> dict[str, float]:
    """Return the milliseconds of CPU that noting the passages of a section of 5,000 tokens takes.

    The memory has 60 statements, 30 of them new.
    """
    reader, taken = Reader(ScriptedBackend([]), chunk_tokens=5000), []
    text = "".join(irrelevant_text(data, 0, sections * 5000 // CHUNK))
    dice = random.Random(0)
    for chunk in reader.chunks(text):
        words = chunk.text.split()
        memories = [" ".join(words[start : start + 12]) + "." for start in dice.sample(range(len(words) - 12), 90)]
        lineage = Lineage("\n".join(memories[:60]))
        begun = time.process_time()
        lineage.find("\n".join(memories[30:]), chunk.text)
        taken.append(1000 * (time.process_time() - begun))
    return {"median": statistics.median(taken), "most": max(taken), "sections": len(taken)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--sections", type=int, nargs="+", default=[0, 1000], help="irrelevant sections that follow")
    parser.add_argument("--seed", type=int, default=0, help="of the documents")
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    data, count = Data(args.data), ScriptedBackend([]).count
    loaded = {name: tasks.load(name, data) for name in TASKS}
    command = f"python benchmarks/citations.py --data DIR --seed {args.seed}"
    results: dict[str, Any] = {"command": command, "noting a section of 5,000 tokens, ms": cost(data)}
    for sections in args.sections:
        measured: dict[str, list[Measured]] = {name: [] for name in TASKS}
        begun = time.perf_counter()
        for number in range(args.documents):
            name = TASKS[number % len(TASKS)]
            sample = loaded[name].make(LENGTH, args.seed, number // len(TASKS), count)
            measured[name].append(
                measure(sample, irrelevant_text(data, number, sections), f"{name}/{args.seed or ''}{number}")
            )
            if not (number + 1) % 10:
                missed = sum(not all(one.cited) for each in measured.values() for one in each)
                print(f"{sections} sections: {number + 1} documents, {missed} missed", file=sys.stderr, flush=True)
        every = [one for each in measured.values() for one in each]
        forms = {form.__name__: [one for one in every if one.form == form.__name__] for form in FORMS}
        results[f"{sections} irrelevant sections"] = {
            "seconds": time.perf_counter() - begun,
            "together": summary(every),
            "by task": {name: summary(each) for name, each in measured.items() if each},
            "by the last form": {name: summary(each) for name, each in forms.items() if each},
        }
    written = json.dumps(results, indent=1)
    print(written)
    if args.output:
        args.output.write_text(written + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
