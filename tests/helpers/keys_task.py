"""A task of keys in texts, a reader that says what a function makes of a sample, and a run of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memagent_integrations.evaluation import harness
from memagent_integrations.evaluation.baselines import Contestant, Outcome
from memagent_integrations.evaluation.results import Results
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.records import Usage
from memagent_integrations.tokens import Counter

SETTINGS = {"model": "scripted", "seed": 0}


def make(length: int, seed: int, number: int, count: Counter) -> Sample:
    key = f"{seed}{length}{number}"
    text = f"The key is {key}."
    return Sample(
        id=key,
        question="Which key?",
        answers=(key,),
        document=lambda: iter([text]),
        facts=(Fact(text=text, depth=number % 10 / 10, keys=(key,)),),
    )


TASK = Task(name="niah_test", metric="string_match_all", make=make, lengths=(100, 200))


class Answers:
    """A reader whose answer is `say(sample)`; a ValueError is a failure. With `passing`, its server is down."""

    def __init__(self, say: Callable[[Sample], str], *, passing: bool = False) -> None:
        self.name, self._say, self._passing, self.asked = "answers", say, passing, list[str]()

    def answer(self, sample: Sample) -> Outcome:
        self.asked.append(sample.id)
        usage = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=1)
        try:
            text, error = self._say(sample), None
        except ValueError as failure:
            text, error = None, str(failure)
        if self._passing:
            text, error = None, "the server is down"
        return Outcome(answer=text, error=error, passing=self._passing, calls=2, usage=usage, seconds=0.5)


def right(sample: Sample) -> str:
    return f"It is {sample.answers[0]}."


def run(
    path: Path,
    readers: Mapping[str, Contestant],
    *,
    samples: int = 4,
    on_result: harness.OnResult | None = None,
    tasks: tuple[Task, ...] = (TASK,),
    **options: Any,
) -> Results:
    results = Results(path, SETTINGS)
    todo = harness.jobs(tasks, list(readers), samples)
    harness.evaluate(todo, readers, results, seed=0, count=len, on_result=on_result, **options)
    return results


def answer_slowly(path: Path) -> None:
    """Run two readers on 100 samples of each length, slowly enough to be killed on the way."""

    def say(sample: Sample) -> str:
        time.sleep(0.002)
        return right(sample) if int(sample.id) % 3 else "no"

    run(path, {"one": Answers(say), "two": Answers(right)}, samples=100, concurrency=4)
