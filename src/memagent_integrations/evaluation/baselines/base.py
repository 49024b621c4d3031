"""What every reader to compare is: one model, one window, an answer, and what it took."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from memagent_integrations.backends import Backend
from memagent_integrations.calls import Calls
from memagent_integrations.errors import (
    BackendError,
    ContextOverflow,
    EmptyDocument,
    MemAgentError,
    MissingExtra,
    QuestionError,
    UsageError,
)
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.prompts import MARGIN, PromptSet, strip_thinking
from memagent_integrations.records import NO_USAGE, Budgets, Message, Prompt, Reading, Reply, Usage
from memagent_integrations.sanitize import neutralise

CALLS_A_PART = 10
"""Calls for each part of a document after which a framework's reader that goes on is given up."""
_SHORT = 32  # characters of a text whose count is kept: splitters ask for the same words again and again


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one sample; `answer` is None if and only if `error` says why; `passing`: the same may succeed later.

    `calls` are all that were made, failed ones too; `usage` is that of the replies (a number that one of them left unknown is unknown), `seconds`
    the time in the model. `reading` is the whole reading, for a reader that makes one. `details` (JSON) say what the reader did.
    """

    answer: str | None
    error: str | None = None
    passing: bool = False
    calls: int = 0
    usage: Usage = NO_USAGE
    seconds: float = 0.0
    reading: Reading | None = field(default=None, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict)


class Contestant(Protocol):
    """A reader to compare."""

    name: str

    def answer(self, sample: Sample) -> Outcome:
        """What the reader makes of a sample: a failure of the model or of the reader is an outcome, a mistake of the caller is raised."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all readers have in common, and the prompts of the MemAgent among them, where a policy has its own."""

    backend: Backend
    budgets: Budgets
    window: int
    calls: Calls
    prompts: PromptSet | None = None

    @property
    def output(self) -> int:
        """Most tokens of an answer."""
        return self.budgets.output("answer")


class Meter(Backend):
    """A backend over another, which notes what the calls for one answer take."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name, self.window, self.template_tokens = backend.name, backend.window, backend.template_tokens
        self.max_retries = backend.max_retries
        self.calls, self.usage, self.seconds = 0, NO_USAGE, 0.0

    @property
    def identity(self) -> dict[str, Any]:
        """The backend's."""
        return self._backend.identity

    def count(self, text: str) -> int:
        """The backend's count."""
        return self._backend.count(text)

    def complete(self, prompt: Prompt) -> Reply:
        """The backend's reply."""
        self.calls += 1
        reply = self._backend.complete(prompt)
        self.usage += reply.usage
        self.seconds += reply.seconds
        return reply


class Model:
    """The model as a reader has it for one answer: plain calls, each kept to the window; `most` of them, where that is set.

    Of a reply a reader gets what any client would show: no thinking.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.meter = Meter(terms.backend)
        self.most: int | None = None
        self._known = lru_cache(maxsize=2**15)(self._count)

    def count(self, text: str) -> int:
        """Tokens of a text as it stands in a prompt."""
        return self._known(text) if len(text) <= _SHORT else self._count(text)

    def room(self, messages: Sequence[Message], *, answers: int = 0) -> int:
        """Tokens that the window leaves for text beside these messages and one more answer to write, and `answers` of them to show.

        Raises:
            ContextOverflow: it leaves none.
        """
        taken = self._size(messages) + MARGIN
        left = self.terms.window - taken - (1 + answers) * self.terms.output
        if left <= 0:
            raise ContextOverflow(
                f"question and template have {taken} tokens, and {1 + answers} x {self.terms.output} are for answers: "
                f"a window of {self.terms.window} leaves no room for text"
            )
        return left

    def ask(self, messages: Sequence[Message], limit: int | None = None) -> str:
        """The model's reply, of at most `limit` tokens, and never more than an answer may have.

        Raises:
            ContextOverflow: prompt and reply do not fit the window.
            BackendError: the model failed, or a reader that does not come to an end asked it too often.
        """
        if self.most is not None and self.meter.calls >= self.most:
            raise BackendError(
                f"gave up after {self.most} calls, {CALLS_A_PART} for each part of the document: the answers do not become shorter"
            )
        sent = tuple(replace(message, content=neutralise(message.content)) for message in messages)
        written = min(limit or self.terms.output, self.terms.output)
        size = self._size(sent)
        if size + written > self.terms.window:
            raise ContextOverflow(
                f"a prompt of {size} tokens and {written} of output do not fit the window of {self.terms.window}"
            )
        prompt = Prompt(index=self.meter.calls, phase="answer", messages=sent, max_tokens=written)
        return strip_thinking(self.terms.calls.complete(self.meter, prompt).text)

    def _size(self, messages: Sequence[Message]) -> int:
        return sum(self.count(message.content) + self.meter.template_tokens for message in messages)

    def _count(self, text: str) -> int:
        return self.terms.calls.count(self.terms.backend, neutralise(text))


@dataclass(frozen=True, kw_only=True)
class Found:
    """An answer, and how a reader came to it."""

    answer: str
    reading: Reading | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class Baseline(ABC):
    """A reader to compare. A subclass says how it comes to its answer; what may stand after the colon of its name are `options`."""

    def __init__(self, name: str, options: str, terms: Terms) -> None:
        self.name, self.terms = name, terms
        self.configure(options)

    def configure(self, options: str) -> None:
        """Take the options.

        Raises:
            UsageError: they are wrong; there are none unless a subclass has some.
        """
        if options:
            raise UsageError(f"{self.name.partition(':')[0]} takes no options, so {self.name!r} is no reader")

    @abstractmethod
    def find(self, sample: Sample, model: Model) -> Found:
        """The answer; whatever is raised, but for mistakes of the caller, is a failure of this reader."""

    def answer(self, sample: Sample) -> Outcome:
        """What the reader makes of a sample."""
        model, found, error, passing, reading = Model(self.terms), None, None, False, None
        try:
            found = self.find(sample, model)
            if not found.answer.strip():
                raise BackendError("the model gave no answer: its reply is empty or only thinking")
        except (QuestionError, EmptyDocument) as failure:  # a matter of this sample
            error = str(failure)
        except (UsageError, MissingExtra):
            raise
        except MemAgentError as failure:
            error, reading = str(failure), failure.reading
            passing = isinstance(failure, BackendError) and failure.retryable
        except Exception as failure:  # of a framework: what its users would meet
            error = f"{type(failure).__name__}: {failure}"
        return Outcome(
            answer=None if error or not found else found.answer,
            error=error,
            passing=passing,
            calls=model.meter.calls,
            usage=model.meter.usage,
            seconds=model.meter.seconds,
            reading=found.reading if found else reading,
            details=found.details if found else {},
        )
