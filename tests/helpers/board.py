"""Results made up for tests of the page that shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from memagent_integrations.evaluation.diagnostics import FactTrace
from memagent_integrations.evaluation.results import Result, Results
from memagent_integrations.evaluation.samples import Fact
from memagent_integrations.records import Usage

from .readings import make_reading

TASK = "ruler_hqa_published"
"""A task with published figures for 50 paragraphs."""


def make_result(number: int = 0, **changes: Any) -> Result:
    """A result of a reading of four chunks: its fact was noted in the first and lost in the third."""
    fact = Fact(text="The key is Anna's.", depth=0.1, keys=("has the key",))
    trace = FactTrace(fact=fact, start=3, read_at=0, held=(True, True, False, False), answered=False)
    result = Result(
        task=TASK,
        length=50,
        reader="memagent",
        number=number,
        score=0.0,
        answer="Nobody.",
        metric="sub_em",
        question="Who has the key?",
        answers=("Anna", "Anna Lee"),
        facts=(fact,),
        calls=5,
        usage=Usage(prompt_tokens=900, completion_tokens=70, cached_tokens=0),
        seconds=2.5,
        details={"paragraphs": 50},
        reading=make_reading(),
        traces=(trace,),
        cause="lost after 2 chunks",
    )
    return replace(result, **changes)


def make_cut(number: int = 0, **changes: Any) -> Result:
    """A right answer of a reader without a memory."""
    without: dict[str, Any] = {"reading": None, "traces": (), "cause": None}
    return make_result(number, **({"reader": "cut", "score": 1.0, "answer": "Anna"} | without | changes))


def write_results(path: Path, *results: Result, **settings: Any) -> Path:
    """Write a file of results."""
    written = Results(path, {"model": "scripted", "budgets": {"chunk_tokens": 60}, **settings})
    with written.writing():
        for result in results:
            written.add(result)
    return path
