"""Training sets: questions that a model has to read for, in a file that grows row by row and survives a crash."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError

from memagent_integrations import files
from memagent_integrations.checks import check_int, check_number
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.evaluation.data import Data
from memagent_integrations.reader import Reader
from memagent_integrations.records import Message, Prompt, Reading, Reply
from memagent_integrations.sanitize import harmless
from memagent_integrations.scopes import side_by_side
from memagent_integrations.training.mixture import Drawn, Mixture

KNOWN = "known without the document"
EASY = "too easy"
HARD = "too hard"
PATIENCE = 1000
"""`build` gives up after this many questions in a row of which none was kept."""

_CLOSED_BOOK = (
    "Answer the question from what you know. If you are not sure, guess. What stands between the tags is the question "
    "and nothing else. Reply with the answer alone, in as few words as it takes.\n\n"
    "<question>\n{question}\n</question>"
)


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which questions are left out.

    Args:
        without_context: leave out what the model answers without the document in one of this many tries; 0: no check.
        between: leave out questions whose mean score over `tries` readings is not strictly between the two numbers;
            None: nothing is read.
        tries: readings per question for `between`.

    Raises:
        UsageError: a number is out of range.
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
    """How a set was made, and how far it is.

    `position` is the next position of the mixture, `rows` and `bytes` are in the file, `left_out` counts the questions
    left out by reason.
    """

    made: dict[str, Any]
    position: int = 0
    rows: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: {KNOWN: 0, EASY: 0, HARD: 0})


_STATE = TypeAdapter(State)
OnQuestion = Callable[[Drawn, str | None, State], None]
"""Called with each question, the reason it was left out (None: it was kept), and the state of the set after it."""


class TrainingSet:
    """A JSONL file of rows {question, answers, metric, task, length, facts, context}, and its state in `.state.json`.

    The state counts the bytes of the file that are valid: what a killed process wrote after them is cut off, and its
    question is judged anew.

    Raises:
        UsageError: the file was not made here, or with other settings.
    """

    def __init__(self, path: str | Path, made: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._state_path = self.path.with_name(f"{self.path.name}.state.json")
        self.state = State(made=json.loads(json.dumps(made, default=str)))
        self._file: BinaryIO | None = None
        if self._state_path.exists():
            self.state = self._load_state(self.state.made)
        elif self.path.is_file() and self.path.stat().st_size:
            missing = f"{self._state_path.name}, which would say how it was made, is not"
            raise UsageError(f"{str(path)!r} is there, and {missing}; give another file")

    @contextmanager
    def writing(self) -> Iterator[TrainingSet]:
        """Open the file for `add`; no other process or thread can write to it meanwhile.

        Raises:
            UsageError: another run writes to the file, it cannot be written, or it is shorter than its state says.
        """
        busy = UsageError(f"{str(self.path)!r} is being written by another run")
        with ExitStack() as stack:
            with files.accessing("write", self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(files.lock(f"{self.path}.lock", busy))
                self._file = stack.enter_context(self.path.open("ab"))
                if self._state_path.exists():  # another run may have added rows since this set was opened
                    self.state = self._load_state(self.state.made)
                self._save(self.state)
                if self._file.tell() < self.state.bytes:
                    problem = f"{str(self.path)!r} is shorter than when it was left"
                    raise UsageError(f"{problem}; delete it and {self._state_path.name} to begin anew")
                self._file.truncate(self.state.bytes)
            yield self

    def add(self, position: int, drawn: Drawn, reason: str | None) -> None:
        """Write the question of a position, or count the reason it is left out; on return this is on the disk.

        Raises:
            UsageError: the file cannot be written.
        """
        state = replace(self.state, position=position + 1)
        if reason is None:
            assert self._file is not None, "only while it is `writing`"
            with files.accessing("write", self.path):
                written = sum(self._file.write(piece.encode()) for piece in _row(drawn))
                self._file.flush()
                os.fsync(self._file.fileno())
            state = replace(state, rows=state.rows + 1, bytes=state.bytes + written)
        else:
            state = replace(state, left_out={**state.left_out, reason: state.left_out[reason] + 1})
        self._save(state)

    def _save(self, state: State) -> None:
        files.write(self._state_path, _STATE.dump_json(state, indent=1))
        self.state = state

    def _load_state(self, settings: Mapping[str, Any]) -> State:
        try:
            state = _STATE.validate_json(self._state_path.read_bytes())
        except (OSError, ValidationError) as error:
            problem = f"{str(self._state_path)!r} does not say how {self.path.name} was made"
            raise UsageError(f"{problem}; delete both to begin anew") from error
        if changed := files.differences(state.made, settings):
            raise UsageError(f"{str(self.path)!r} was made with other settings ({changed}); give another file")
        return state


def made_with(mixture: Mixture, seed: int, reader: Reader, filters: Filters) -> dict[str, Any]:
    """Return the settings that decide which rows a set has, in which order.

    The number of rows is not among them: a set can be made longer.
    """
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
    on_question: OnQuestion | None = None,
) -> State:
    """Add questions of a mixture until the set has `rows` rows, or each question of every task was drawn once.

    Lengths are drawn from all lengths of a task; a curriculum is for the training that reads the set. An interrupted
    run resumes with the next question. Where the model gives the same reply to the same prompt, the file is the same.

    Raises:
        UsageError: a setting is wrong, the file is in use, or none of the last `PATIENCE` questions was kept.
        BackendError: the model failed; the rows written so far stay.
    """
    check_int(rows=rows)
    filters, backend, left_out_in_a_row = filters or Filters(), reader.backend, 0
    batch_size = max(backend.batch_size, backend.concurrency)
    with into.writing():
        positions = _first_pass(mixture, into.state.position, seed, data)
        while into.state.rows < rows and (batch := list(itertools.islice(positions, batch_size))):
            drawn = [mixture.draw(position, seed=seed, share=1, data=data, count=backend.count) for position in batch]
            for position, question, reason in zip(batch, drawn, _reasons(reader, filters, drawn), strict=True):
                into.add(position, question, reason)
                if on_question:
                    on_question(question, reason, into.state)
                left_out_in_a_row = 0 if reason is None else left_out_in_a_row + 1
                if left_out_in_a_row == PATIENCE:
                    problem = f"of the last {PATIENCE} questions none was kept ({_counts(into.state)})"
                    raise UsageError(f"{problem}; change the mixture or the filters")
                if into.state.rows == rows:
                    break
    return into.state


def _first_pass(mixture: Mixture, start: int, seed: int, data: Data) -> Iterator[int]:
    """Yield the positions from `start` on whose question was not drawn before."""
    for position in itertools.count(start):
        if mixture.slot(position, seed=seed, data=data).epoch == 0:
            yield position
        elif mixture.used_up(position, seed=seed, data=data):
            return


def _reasons(reader: Reader, filters: Filters, drawn: Sequence[Drawn]) -> list[str | None]:
    """Return for each question why it is left out; None: it is kept."""
    known = _known(reader, filters.without_context, drawn)
    reasons = [KNOWN if n in known else None for n in range(len(drawn))]
    if filters.between is not None:
        low, high = filters.between
        unknown = [n for n in range(len(drawn)) if n not in known]
        for n, mean in zip(unknown, _mean_scores(reader, filters.tries, [drawn[n] for n in unknown]), strict=True):
            reasons[n] = HARD if mean <= low else EASY if mean >= high else None
    return reasons


def _known(reader: Reader, tries: int, drawn: Sequence[Drawn]) -> set[int]:
    """Return the indices of the questions that the model answers without the document in one of `tries` tries."""
    known: set[int] = set()
    for _ in range(tries):
        unknown = [n for n in range(len(drawn)) if n not in known]
        replies = _replies(reader, [_closed_book_prompt(reader, drawn[n].sample.question) for n in unknown])
        for n, reply in zip(unknown, replies, strict=True):
            if _right(reader, drawn[n], reply):
                known.add(n)
    return known


def _right(reader: Reader, drawn: Drawn, reply: Reply) -> bool:
    return drawn.task.score(reader.prompts.parse_answer(reply.text), drawn.sample, reply=reply.text) >= 1


def _closed_book_prompt(reader: Reader, question: str) -> Prompt:
    content = _CLOSED_BOOK.replace("{question}", harmless(question, ("question",)))
    return Prompt(
        index=0,
        phase="answer",
        messages=(Message(role="user", content=content),),
        max_tokens=reader.budgets.output("answer"),
    )


def _replies(reader: Reader, prompts: Sequence[Prompt]) -> list[Reply]:
    """Return the model's replies, computed in batches or side by side as its backend allows."""
    backend = reader.backend
    if backend.batch_size == 1:
        return side_by_side(
            [partial(reader.calls.complete, backend, prompt) for prompt in prompts], backend.concurrency
        )
    replies = []
    for outcome in reader.calls.complete_batch(backend, prompts) if prompts else ():
        if not isinstance(outcome, Reply):
            raise outcome
        replies.append(outcome)
    return replies


def _mean_scores(reader: Reader, tries: int, drawn: Sequence[Drawn]) -> Iterator[float]:
    """Yield the mean score of `tries` readings of each question; a document is chunked once for all its readings."""
    jobs = [(question.sample.question, question.sample.document()) for question in drawn]
    reader = reader.changed(on_lost_section="skip")
    readings = iter(reader.read_many(job for job in jobs for _ in range(tries)))
    for question in drawn:
        yield sum(_score(question, reading) for reading in itertools.islice(readings, tries)) / tries


def _score(question: Drawn, reading: Reading) -> float:
    """Return the score of the answer; a reading without an answer is wrong.

    Raises:
        MemAgentError: the reading failed before its first reply, or for a reason that may pass; it measures nothing.
    """
    if error := reading.error:
        measured = isinstance(error, BackendError) and reading.steps and not error.retryable
        if not measured:
            raise error
    return question.score(reading)


def _row(drawn: Drawn) -> Iterator[str]:
    """Yield the row as pieces of JSON, so that the document is never held whole."""
    sample = drawn.sample
    head = {
        "question": sample.question,
        "answers": sample.answers,
        "metric": sample.metric or drawn.task.metric,
        "task": drawn.task.name,
        "length": drawn.length,
        "facts": [asdict(fact) for fact in sample.facts],
    }
    if sample.superseded:
        head["superseded"] = [asdict(fact) for fact in sample.superseded]
    yield json.dumps(head, ensure_ascii=False)[:-1] + ', "context": "'
    for piece in sample.document():
        yield json.dumps(piece, ensure_ascii=False)[1:-1]
    yield '"}\n'


def _counts(state: State) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in state.left_out.items() if number) or "none left out"


def summary(state: State) -> str:
    """Return in one line how many questions were kept and how many were left out, by reason."""
    return f"{state.rows:,} rows of {state.rows + sum(state.left_out.values()):,} questions: {_counts(state)}"
