"""The parts that all compared readers share: the model within its window, the outcome of a sample, the base class."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from memagent_integrations.backends import Backend
from memagent_integrations.backends.around import BackendAround
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
from memagent_integrations.prompts import MARGIN, strip_thinking
from memagent_integrations.reader.setup import Setup
from memagent_integrations.records import NO_USAGE, Message, Prompt, Reading, Reply, Usage
from memagent_integrations.sanitize import neutralise

CALLS_PER_PART = 10
"""A framework's reader is stopped after this many calls for each part of the document."""
_SHORT = 32  # characters; shorter texts are counted once: splitters ask for the same words again and again


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one sample: an answer, or the error that prevented it, and what it cost.

    Attributes:
        answer: None if and only if `error` is set.
        reply: the model's last reply, unprocessed: what the answer was taken from. None if there was none.
        error: why there is no answer.
        passing: whether the error is temporary, so that another attempt may succeed.
        too_long: whether the error is that the document does not fit a reader that takes it whole or not at all.
        calls: all calls to the model, failed ones included.
        usage: tokens of the replies; a number is unknown if one reply left it unknown.
        seconds: time spent in the model.
        reading: the whole reading, from a reader that makes one.
        details: what the reader did, as JSON.
    """

    answer: str | None
    reply: str | None = field(default=None, repr=False)
    error: str | None = None
    passing: bool = False
    too_long: bool = False
    calls: int = 0
    usage: Usage = NO_USAGE
    seconds: float = 0.0
    reading: Reading | None = field(default=None, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict)


class Contestant(Protocol):
    """A reader to compare."""

    name: str

    def answer(self, sample: Sample) -> Outcome:
        """Answer a sample. Failures of the model or the reader are outcomes; mistakes of the caller are raised."""


class Meter(BackendAround):
    """A backend that passes calls on to another one, adds up calls, tokens and seconds, and keeps the last reply."""

    def __init__(self, backend: Backend) -> None:
        self._stand_for(backend)
        self.calls, self.usage, self.seconds = 0, NO_USAGE, 0.0
        self.reply: str | None = None
        self._adding = threading.Lock()  # the calls of a parallel reading are made side by side

    def complete(self, prompt: Prompt) -> Reply:
        """Complete with the wrapped backend, and record what the call took."""
        with self._adding:
            self.calls += 1
        reply = self._backend.complete(prompt)
        with self._adding:
            self.usage += reply.usage
            self.seconds += reply.seconds
            self.reply = reply.text
        return reply


class Model:
    """The model, as a reader uses it for one answer: every call is checked against the window, and thinking is removed.

    `window` is the window, `output` the most tokens of an answer; `call_limit`, where set, the largest number of calls.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.window, self.output = setup.model.resolve_window(), setup.budgets.output("answer")
        self.meter = Meter(setup.model.backend)
        self.call_limit: int | None = None
        self._cached_count = lru_cache(maxsize=2**15)(self._count)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text in a prompt."""
        return self._cached_count(text) if len(text) <= _SHORT else self._count(text)

    def room(self, messages: Sequence[Message], *, answers: int = 0) -> int:
        """Return how many tokens of text fit into the window beside these messages and the new answer.

        `answers` is the number of earlier answers that the prompt will show too.

        Raises:
            ContextOverflow: nothing fits.
        """
        used = self._size(messages) + MARGIN
        free = self.window - used - (1 + answers) * self.output
        if free <= 0:
            raise ContextOverflow(
                f"question and template have {used} tokens, and {1 + answers} x {self.output} are for answers: "
                f"a window of {self.window} leaves no room for text"
            )
        return free

    def ask(self, messages: Sequence[Message], limit: int | None = None) -> str:
        """Return the model's reply, of at most `limit` tokens and at most the output tokens of an answer.

        Raises:
            ContextOverflow: prompt and reply do not fit the window.
            BackendError: the model failed, or the reader made more than `call_limit` calls.
        """
        if self.call_limit is not None and self.meter.calls >= self.call_limit:
            raise BackendError(
                f"gave up after {self.call_limit} calls, {CALLS_PER_PART} for each part of the document: "
                "the answers do not become shorter"
            )
        safe = tuple(replace(message, content=neutralise(message.content)) for message in messages)
        max_tokens = min(limit or self.output, self.output)
        size = self._size(safe)
        if size + max_tokens > self.window:
            raise ContextOverflow(
                f"a prompt of {size} tokens and {max_tokens} of output do not fit the window of {self.window}"
            )
        prompt = Prompt(index=self.meter.calls, phase="answer", messages=safe, max_tokens=max_tokens)
        return strip_thinking(self.setup.model.calls.complete(self.meter, prompt).text)

    def _size(self, messages: Sequence[Message]) -> int:
        return sum(self.count(message.content) + self.meter.template_tokens for message in messages)

    def _count(self, text: str) -> int:
        return self.setup.model.count(neutralise(text))


class DocumentTooLong(ContextOverflow):
    """The document does not fit a reader that takes it whole or not at all. So it was not read, and nothing failed."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, with the reading and the details that led to it."""

    text: str
    reading: Reading | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class Baseline(ABC):
    """Base class of the compared readers. `options` is the part of the reader's name after the colon."""

    def __init__(self, name: str, options: str, setup: Setup) -> None:
        self.name, self.setup = name, setup
        self.configure(options)

    def configure(self, options: str) -> None:
        """Apply the options. Subclasses without options inherit this method, which refuses any.

        Raises:
            UsageError: the options are wrong.
        """
        if options:
            raise UsageError(f"{self.name.partition(':')[0]} takes no options, so {self.name!r} is no reader")

    @abstractmethod
    def find_answer(self, sample: Sample, model: Model) -> Answer:
        """Return the answer to a sample. Errors are failures of this reader, except mistakes of the caller."""

    def answer(self, sample: Sample) -> Outcome:
        """Answer a sample; an empty answer is a failure."""
        model, answer, error, reading = Model(self.setup), None, None, None
        passing = too_long = False
        try:
            answer = self.find_answer(sample, model)
            if not answer.text.strip():
                raise BackendError("the model gave no answer: its reply is empty or only thinking")
        except (QuestionError, EmptyDocument) as failure:  # the fault of this sample, not of the caller
            error = str(failure)
        except (UsageError, MissingExtra):
            raise
        except MemAgentError as failure:
            error, reading, too_long = str(failure), failure.reading, isinstance(failure, DocumentTooLong)
            passing = isinstance(failure, BackendError) and failure.retryable
        except Exception as failure:  # from a framework: what its users would see
            error = f"{type(failure).__name__}: {failure}"
        return Outcome(
            answer=None if error or not answer else answer.text,
            reply=model.meter.reply,
            error=error,
            passing=passing,
            too_long=too_long,
            calls=model.meter.calls,
            usage=model.meter.usage,
            seconds=model.meter.seconds,
            reading=answer.reading if answer else reading,
            details=answer.details if answer else {},
        )
