"""The records of a benchmark: a task, its samples, and the facts that answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memagent_integrations.evaluation.scoring import METRICS, OF_REPLIES
from memagent_integrations.tokens import Counter

Unit = Literal["tokens", "paragraphs"]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A gold fact: a text that occurs in the document word for word, and how deep (0.0 its beginning, 1.0 its end).

    `keys` are the parts that a memory must contain to hold the fact: the needle's value, the names an answer needs.
    """

    text: str
    depth: float
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question about one document.

    Attributes:
        id: its name in messages.
        question: the question.
        answers: the gold answers: alternatives, or all of them together, depending on the task's metric.
        document: returns the text anew at every call, piece by piece, so that it is never held as a whole.
        facts: the facts that answer the question.
        superseded: facts that answered it until a later one replaced them; a memory has to hold each until then.
        oracle: the text of the passages that hold them.
        details: how the document was made, as JSON.
        metric: the metric of this sample, where it differs from the task's.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    document: Callable[[], Iterator[str]] = field(repr=False)
    facts: tuple[Fact, ...] = ()
    superseded: tuple[Fact, ...] = ()
    oracle: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark: how to make its samples and how to score an answer.

    Attributes:
        name: its name on the command line and in results.
        metric: a name in `scoring.METRICS`.
        make: `make(length, seed, number, count)` returns sample `number`. The same arguments give the same bytes.
            `count` is the reader's tokenizer.
        unit: the unit of `lengths`; None if the documents have lengths of their own.
        lengths: the default lengths.
        size: the largest number of samples; None if there is no limit.
        questions: how many successive samples ask about one document: the document of sample n depends on
            n // questions, and on the length and the seed, alone.
        answer_tokens: the most tokens of an answer that are scored, where the benchmark lets a model write no more;
            None if there is no limit but the reader's.
        example: `example(seed, number)` returns an example of a text, a question and its answer for sample `number`, of
            a benchmark that shows one; `ruler.with_example` shows it.
    """

    name: str
    metric: str
    make: Callable[[int, int, int, Counter], Sample]
    unit: Unit | None = "tokens"
    lengths: tuple[int, ...] = ()
    size: int | None = None
    questions: int = 1
    answer_tokens: int | None = None
    example: Callable[[int, int], str] | None = None

    def score(self, answer: str, sample: Sample, *, reply: str | None = None) -> float:
        """Return the score of an answer to one of the samples, from 0.0 to 1.0.

        `reply` is what the model wrote, for the metrics in `scoring.OF_REPLIES`; None where it is the answer itself.
        """
        metric = self.metric_of(sample)
        return METRICS[metric](answer if reply is None or metric not in OF_REPLIES else reply, sample.answers)

    def metric_of(self, sample: Sample) -> str:
        """Return the name of the metric for a sample."""
        return sample.metric or self.metric

    def gold(self, sample: Sample) -> str:
        """Return an answer that scores 1.0: all golds where the metric wants all of them, else the first.

        What a metric extracts answers from is not part of it: a box, or "the answer is".
        """
        return ", ".join(sample.answers) if self.metric_of(sample) == "string_match_all" else sample.answers[0]
