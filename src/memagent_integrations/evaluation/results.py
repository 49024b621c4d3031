"""What was measured, one line a sample in a JSONL file: it outlives a crash, and a run that is begun again does nothing twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from memagent_integrations.errors import UsageError, why
from memagent_integrations.evaluation.diagnostics import Trace
from memagent_integrations.evaluation.samples import Fact
from memagent_integrations.records import NO_USAGE, Reading, Usage

Key = tuple[str, int, str, int]
"""Task, length, reader, number of the sample."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One sample, answered or failed.

    `score` is that of the task's metric, 0..1; a failure (`error`) scores 0; where it may be
    `passing`, a run that goes on tries again. `length` is in the task's unit, 0 where documents are as long as they
    are. `calls`, `usage` and `seconds` (in the model) are those of this sample; `reading` is the whole reading, for a reader that makes one, `traces`
    the way of the facts through its memories, `cause` why its answer was wrong.
    """

    task: str
    length: int
    reader: str
    number: int
    score: float
    answer: str | None
    error: str | None = None
    passing: bool = False
    question: str = ""
    answers: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    calls: int = 0
    usage: Usage = NO_USAGE
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    reading: Reading | None = None
    traces: tuple[Trace, ...] = ()
    cause: str | None = None

    @property
    def key(self) -> Key:
        """What tells it from the other results of a run."""
        return self.task, self.length, self.reader, self.number


_RESULT = TypeAdapter(Result)


class Results:
    """A file of results.

    Its first line says how they were made; a run goes on in it only if it would make them the same way. What is `noted` there too (versions, the
    command) may differ.

    Raises:
        UsageError: the file is no such file, or was made with other settings.
    """

    def __init__(self, path: str | Path, made: Mapping[str, Any] | None = None, noted: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.made = json.loads(json.dumps(dict(made or {}), default=str))
        self.noted = dict(noted or {})
        self._results: dict[Key, Result] = {}
        if self.path.exists() and self.path.stat().st_size:
            self._load(None if made is None else self.made)
        elif made is None:
            raise UsageError(f"there are no results in {str(path)!r}")

    def __iter__(self) -> Iterator[Result]:
        """The results by task, length, reader and number, whatever the order in which they came."""
        return (self._results[key] for key in sorted(self._results))

    def __contains__(self, key: Key) -> bool:
        return key in self._results and not self._results[key].passing

    @contextmanager
    def writing(self) -> Iterator[Results]:
        """While this is open nobody else writes to the file.

        Raises:
            UsageError: somebody does, or the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=0):
                self._begin()
                yield self
        except Timeout:
            raise UsageError(f"{str(self.path)!r} is being written by another run") from None
        except OSError as error:
            raise UsageError(f"cannot write {str(self.path)!r}: {why(error)}") from error

    def add(self, result: Result) -> None:
        """Write one result; it is on the disk when this returns."""
        self._append(_RESULT.dump_json(result))
        self._results[result.key] = result

    def _load(self, wanted: Mapping[str, Any] | None) -> None:
        with self.path.open("rb") as file:
            lines = iter(enumerate(file, start=1))
            _, first = next(lines)
            self.made = self._header(first)
            if wanted is not None and (other := [name for name in {*wanted, *self.made} if wanted.get(name) != self.made.get(name)]):
                told = "; ".join(f"{name}: {self.made.get(name)!r}, now {wanted.get(name)!r}" for name in sorted(other))
                raise UsageError(f"{str(self.path)!r} was made with other settings ({told}); give another file")
            for number, line in lines:
                if not line.endswith(b"\n"):
                    break  # a run was killed while it wrote this line: its sample is made anew
                try:
                    result = _RESULT.validate_json(line)
                except ValidationError as error:
                    raise UsageError(f"{self.path}, line {number}, is no result: {error.errors()[0]['msg']}") from error
                self._results[result.key] = result

    def _header(self, line: bytes) -> dict[str, Any]:
        try:
            made = json.loads(line)["made"]
            if isinstance(made, dict):
                return made
        except (ValueError, KeyError, TypeError):
            pass
        raise UsageError(f"{str(self.path)!r} is no file of results: its first line does not say how they were made")

    def _begin(self) -> None:
        """Write the first line, or take away the last one if it is not whole."""
        if not self.path.exists() or not self.path.stat().st_size:
            self._append(json.dumps({"made": self.made, "noted": self.noted}, ensure_ascii=False).encode())
            return
        with self.path.open("rb+") as file:
            whole = 0
            for line in file:
                whole += len(line) if line.endswith(b"\n") else 0
            file.truncate(whole)

    def _append(self, line: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())


def merged(files: Iterable[Results]) -> list[Result]:
    """The results of several files; of one that stands in two, the last."""
    found = {result.key: result for results in files for result in results}
    return [found[key] for key in sorted(found)]
