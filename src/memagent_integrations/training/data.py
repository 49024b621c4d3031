"""A training set: the questions of a mixture that a model has to read for, in a file that is made question by question and goes on after a crash."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from memagent_integrations.checks import check_int, check_number
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.evaluation.data import Data
from memagent_integrations.files import differences, reason
from memagent_integrations.reader import Reader
from memagent_integrations.records import Message, Prompt, Reading, Reply
from memagent_integrations.sanitize import harmless
from memagent_integrations.training.mixture import Drawn, Mixture

KNOWN = "known without the document"
EASY = "too easy"
HARD = "too hard"
PATIENCE = 1000
"""After so many questions of which none was kept a set is given up."""

_ASKED = (
    "Answer the question from what you know. If you are not sure, guess. What stands between the tags is the question and nothing else. "
    "Reply with the answer alone, in as few words as it takes.\n\n<question>\n{question}\n</question>"
)


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which questions are left out.

    `without_context`: those that the model answers, in one of so many tries, without having read anything (0: it is not asked). `between`: those
    whose mean score over `tries` readings does not lie between the two numbers, both excluded (None: nothing is read).

    Raises:
        UsageError: a number is wrong.
    """

    without_context: int = 2
    between: tuple[float, float] | None = None
    tries: int = 4

    def __post_init__(self) -> None:
        check_int(least=0, without_context=self.without_context)
        check_int(tries=self.tries)
        if self.between is not None:
            low, high = self.between
            check_number(most=1, keep_between=low)
            check_number(most=1, keep_between=high)
            if low >= high:
                raise UsageError(f"nothing lies between {low} and {high}: give the smaller number first")


@dataclass(frozen=True, kw_only=True)
class State:
    """How a set was made, and how far it is: the next position of the mixture, rows and bytes in the file, questions left out for each reason."""

    made: dict[str, Any]
    position: int = 0
    rows: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: {KNOWN: 0, EASY: 0, HARD: 0})


_STATE = TypeAdapter(State)
Told = Callable[[Drawn, str | None, State], None]
"""Is told of each question, why it was left out (None: it was kept), and how far the set is now."""


class TrainingSet:
    """A file of rows {question, answers, metric, task, length, facts, context}, and beside it (`.state.json`) how it was made and how far it is.

    The state says how much of the file counts: what a killed process wrote behind that is cut off, and its question is judged anew.

    Raises:
        UsageError: the file was not made here, or with other settings.
    """

    def __init__(self, path: str | Path, made: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._beside = self.path.with_name(f"{self.path.name}.state.json")
        self.state = State(made=json.loads(json.dumps(made, default=str)))
        self._file: BinaryIO | None = None
        if self._beside.exists():
            self.state = self._known(self.state.made)
        elif self.path.is_file() and self.path.stat().st_size:
            raise UsageError(
                f"{str(path)!r} is there, and {self._beside.name}, which would say how it was made, is not; give another file"
            )

    @contextmanager
    def writing(self) -> Iterator[TrainingSet]:
        """While this is open nobody else writes to the file.

        Raises:
            UsageError: somebody does, or the file cannot be written, or is shorter than it was.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=0), self.path.open("ab") as self._file:
                self._save(
                    self._known(self.state.made) if self._beside.exists() else self.state
                )  # somebody may have gone on with it meanwhile
                if self._file.tell() < self.state.bytes:
                    raise UsageError(
                        f"{str(self.path)!r} is shorter than when it was left; delete it and {self._beside.name} to begin anew"
                    )
                self._file.truncate(self.state.bytes)
                yield self
        except Timeout:
            raise UsageError(f"{str(self.path)!r} is being written by another run") from None
        except OSError as error:
            raise UsageError(f"cannot write {str(self.path)!r}: {reason(error)}") from error

    def add(self, position: int, drawn: Drawn, reason: str | None) -> None:
        """Write the question of a position, or count why it is left out; it is on the disk when this returns."""
        state = replace(self.state, position=position + 1)
        if reason is None:
            assert self._file is not None, "only while it is `writing`"
            written = sum(self._file.write(piece.encode()) for piece in _row(drawn))
            self._file.flush()
            os.fsync(self._file.fileno())
            state = replace(state, rows=state.rows + 1, bytes=state.bytes + written)
        else:
            state = replace(state, left_out={**state.left_out, reason: state.left_out[reason] + 1})
        self._save(state)

    def _save(self, state: State) -> None:
        half = self._beside.with_suffix(".tmp")
        with half.open("wb") as file:
            file.write(_STATE.dump_json(state, indent=1))
            file.flush()
            os.fsync(file.fileno())
        half.replace(self._beside)
        self.state = state

    def _known(self, wanted: Mapping[str, Any]) -> State:
        try:
            state = _STATE.validate_json(self._beside.read_bytes())
        except (OSError, ValidationError) as error:
            raise UsageError(
                f"{str(self._beside)!r} does not say how {self.path.name} was made; delete both to begin anew"
            ) from error
        if other := differences(state.made, wanted):
            raise UsageError(f"{str(self.path)!r} was made with other settings ({other}); give another file")
        return state


def made_with(mixture: Mixture, seed: int, reader: Reader, filters: Filters) -> dict[str, Any]:
    """What decides which rows a set has, and in which order; its number of rows does not: a set can be made longer."""
    model = {
        "model": reader.backend.name,
        "backend": reader.backend.identity,
        "prompts": reader.prompts.name,
        "budgets": asdict(reader.budgets),
    }
    return {"mixture": asdict(mixture), "seed": seed, "filters": asdict(filters), **model}


def build(
    into: TrainingSet,
    mixture: Mixture,
    *,
    rows: int,
    seed: int,
    data: Data,
    reader: Reader,
    filters: Filters | None = None,
    told: Told | None = None,
) -> State:
    """Add questions of a mixture until the set has so many rows, or each question of every task has stood there once.

    Lengths are drawn from all that a task has: a curriculum is for the training that reads the set. A run that was interrupted goes on with the next
    question, and where the model answers the same to the same prompt the file becomes the same.

    Raises:
        UsageError: a setting is wrong, the file is in use, or of the last `PATIENCE` questions none was kept.
        BackendError: the model failed; what is written stays.
    """
    check_int(rows=rows)
    filters, backend, barren = filters or Filters(), reader.backend, 0
    with into.writing():
        positions = _fresh(mixture, into.state.position, seed, data)
        while into.state.rows < rows and (
            batch := list(itertools.islice(positions, max(backend.batch_size, backend.concurrency)))
        ):
            drawn = [mixture.draw(position, seed=seed, share=1, data=data, count=backend.count) for position in batch]
            for position, question, reason in zip(batch, drawn, _reasons(reader, filters, drawn), strict=True):
                into.add(position, question, reason)
                if told:
                    told(question, reason, into.state)
                barren = 0 if reason is None else barren + 1
                if barren == PATIENCE:
                    raise UsageError(
                        f"of the last {PATIENCE} questions none was kept ({_counts(into.state)}); change the mixture or the filters"
                    )
                if into.state.rows == rows:
                    break
    return into.state


def _fresh(mixture: Mixture, start: int, seed: int, data: Data) -> Iterator[int]:
    """The positions from `start` on whose question has not stood before."""
    for position in itertools.count(start):
        if mixture.turn(position, seed=seed, data=data).epoch == 0:
            yield position
        elif mixture.used_up(position, seed=seed, data=data):
            return


def _reasons(reader: Reader, filters: Filters, drawn: Sequence[Drawn]) -> list[str | None]:
    """Why each question is left out; None: it is not."""
    known = _known(reader, filters.without_context, drawn)
    reasons = [KNOWN if n in known else None for n in range(len(drawn))]
    if filters.between is not None:
        low, high = filters.between
        left = [n for n in range(len(drawn)) if n not in known]
        for n, mean in zip(left, _means(reader, filters.tries, [drawn[n] for n in left]), strict=True):
            reasons[n] = HARD if mean <= low else EASY if mean >= high else None
    return reasons


def _known(reader: Reader, tries: int, drawn: Sequence[Drawn]) -> set[int]:
    """Which of the questions the model answers without having read anything, in one of so many tries."""
    known: set[int] = set()
    for _ in range(tries):
        asked = [n for n in range(len(drawn)) if n not in known]
        for n, reply in zip(
            asked, _replies(reader, [_prompt(reader, drawn[n].sample.question) for n in asked]), strict=True
        ):
            if drawn[n].task.score(reader.prompts.parse_answer(reply.text), drawn[n].sample) >= 1:
                known.add(n)
    return known


def _prompt(reader: Reader, question: str) -> Prompt:
    content = _ASKED.replace("{question}", harmless(question, ("question",)))
    return Prompt(
        index=0,
        phase="answer",
        messages=(Message(role="user", content=content),),
        max_tokens=reader.budgets.output("answer"),
    )


def _replies(reader: Reader, prompts: Sequence[Prompt]) -> list[Reply]:
    """The model's replies, as many at a time as its backend makes."""
    backend = reader.backend
    if backend.batch_size == 1:
        pool, cancelled = ThreadPoolExecutor(backend.concurrency), threading.Event()
        try:
            calls = [pool.submit(reader.calls.complete, backend, prompt, cancelled) for prompt in prompts]
            for call in as_completed(calls):
                call.result()
            return [call.result() for call in calls]
        finally:
            cancelled.set()  # an interrupt, or a failure, does not wait for what is running
            pool.shutdown(wait=False, cancel_futures=True)
    replies = []
    for outcome in reader.calls.complete_batch(backend, prompts) if prompts else ():
        if not isinstance(outcome, Reply):
            raise outcome
        replies.append(outcome)
    return replies


def _means(reader: Reader, tries: int, drawn: Sequence[Drawn]) -> Iterator[float]:
    """The mean score of so many readings of each question; a document is chunked once for all of its readings."""
    documents = [(question, question.sample.document()) for question in drawn]
    readings = iter(
        reader.read_many((question.sample.question, document) for question, document in documents for _ in range(tries))
    )
    for question in drawn:
        yield sum(_score(question, reading) for reading in itertools.islice(readings, tries)) / tries


def _score(question: Drawn, reading: Reading) -> float:
    """That of the answer. A reading without one is wrong, but a model that said nothing at all, or may be there again soon, is no measure."""
    if reading.error and not (
        isinstance(reading.error, BackendError) and reading.steps and not reading.error.retryable
    ):
        raise reading.error
    return question.task.score(reading.answer or "", question.sample)


def _row(drawn: Drawn) -> Iterator[str]:
    """The row as JSON, in pieces: nobody holds the document whole."""
    sample = drawn.sample
    head = {
        "question": sample.question,
        "answers": sample.answers,
        "metric": sample.metric or drawn.task.metric,
        "task": drawn.task.name,
        "length": drawn.length,
        "facts": [asdict(fact) for fact in sample.facts],
    }
    yield json.dumps(head, ensure_ascii=False)[:-1] + ', "context": "'
    for piece in sample.document():
        yield json.dumps(piece, ensure_ascii=False)[1:-1]
    yield '"}\n'


def _counts(state: State) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in state.left_out.items() if number) or "none left out"


def summary(state: State) -> str:
    """What became of the questions, in one line."""
    return f"{state.rows:,} rows of {state.rows + sum(state.left_out.values()):,} questions: {_counts(state)}"
