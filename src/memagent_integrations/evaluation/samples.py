"""What is asked of a reader: a question, a document of any length, and what a right answer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memagent_integrations.evaluation.scoring import METRICS
from memagent_integrations.tokens import Counter

Unit = Literal["tokens", "paragraphs"]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A gold fact of a document: a text that stands in it, word for word, and how deep (0.0 its beginning, 1.0 its end).

    `keys` are what of it a memory has to hold to have it: the needle's value, the names that an answer needs.
    """

    text: str
    depth: float
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question.

    `answers` are the golds: alternatives, or all of them together, as the task's metric takes them. `document()` gives the text anew, piece by
    piece: nobody holds it whole. `facts` are what has to be found in it, `oracle` the text of the passages that hold them. `details` say how the
    document was made (JSON). `metric` is this sample's own, where it comes before the task's.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    document: Callable[[], Iterator[str]] = field(repr=False)
    facts: tuple[Fact, ...] = ()
    oracle: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark: how its samples are made and how an answer is scored.

    `metric` is a name in `scoring.METRICS`. `lengths` are measured in `unit`; None: the documents are as long as they are.
    `make(length, seed, number, count)` gives sample `number`: the same arguments, the same bytes. `count` is the reader's tokenizer. `size` is how
    many samples there are at most; None: any number.
    """

    name: str
    metric: str
    make: Callable[[int, int, int, Counter], Sample]
    unit: Unit | None = "tokens"
    lengths: tuple[int, ...] = ()
    size: int | None = None

    def score(self, answer: str, sample: Sample) -> float:
        """How right an answer to one of the samples is, from 0.0 to 1.0."""
        return METRICS[sample.metric or self.metric](answer, sample.answers)

    def gold(self, sample: Sample) -> str:
        """An answer that scores 1.0: all of the golds where the metric wants all of them, else the first."""
        return ", ".join(sample.answers) if (sample.metric or self.metric) == "string_match_all" else sample.answers[0]
