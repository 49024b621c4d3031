"""What was measured, one line a sample in a JSONL file: it outlives a crash, and a run that is begun again does nothing twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.diagnostics import Trace
from memagent_integrations.evaluation.samples import Fact
from memagent_integrations.files import reason
from memagent_integrations.records import NO_USAGE, Reading, Usage
from memagent_integrations.sanitize import encodable

Key = tuple[str, int, str, int]
"""Task, length, reader, number of the sample."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One sample, answered or failed.

    `score` is that of the task's metric, 0..1; a failure (`error`) scores 0, and where it may be `passing`, a run that goes on tries again. `length`
    is in the task's unit, 0 where documents are as long as they are. `calls`, `usage` and `seconds` (in the model) are those of this sample.
    `reading` is the whole reading, for a reader that makes one, `traces` the way of the facts through its memories, `cause` why its answer was wrong.
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


_RESULT, _JSON = TypeAdapter(Result), TypeAdapter(Any)
_BEGINNING = b'{"made": '  # of a file of results


class Results:
    """A file of results.

    Its first line says how they were made; a run goes on in it only if it would make them the same way. What is `noted` there too (versions, the
    command) may differ. The readings stay in the file, because those of a run may be of any size: `reading` is None in what is iterated.

    Raises:
        UsageError: the file is no such file, or was made with other settings.
    """

    def __init__(
        self, path: str | Path, made: Mapping[str, Any] | None = None, noted: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.made = json.loads(json.dumps(dict(made or {}), default=str))
        self.noted = dict(noted or {})
        self._results: dict[Key, Result] = {}
        self._wanted = None if made is None else self.made
        self._lines, self._end = 0, 0  # whole lines that were read or written, and where the last of them ends
        self._load()
        if made is None and not self._lines:
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
                self._load()  # another run may have written to it, and ended, since we looked
                if not self._lines:
                    self._append(json.dumps({"made": self.made, "noted": self.noted}).encode())
                yield self
        except Timeout:
            raise UsageError(f"{str(self.path)!r} is being written by another run") from None
        except OSError as error:
            raise UsageError(f"cannot write {str(self.path)!r}: {reason(error)}") from error

    def add(self, result: Result) -> None:
        """Write one result; it is on the disk when this returns."""
        self._append(_JSON.dump_json(encodable(_RESULT.dump_python(result))))
        self._results[result.key] = replace(result, reading=None)

    def _load(self) -> None:
        """Read what was written since the last time. A line without an end is left: a run was killed while it wrote it, and makes it anew."""
        try:
            if not self.path.is_file():
                return
            with self.path.open("rb") as file:
                file.seek(self._end)
                for line in file:
                    if not line.endswith(b"\n"):
                        if not self._lines and line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
                            raise self._foreign()
                        return
                    self._take(line)
        except OSError as error:
            raise UsageError(f"cannot read {str(self.path)!r}: {reason(error)}") from error

    def _take(self, line: bytes) -> None:
        if not self._lines:
            self.made = self._checked(line)
        else:
            try:
                result = _RESULT.validate_json(line)
            except ValidationError as error:
                raise UsageError(
                    f"{self.path}, line {self._lines + 1}, is no result: {error.errors()[0]['msg']}"
                ) from error
            self._results[result.key] = replace(result, reading=None)
        self._lines, self._end = self._lines + 1, self._end + len(line)

    def _checked(self, line: bytes) -> dict[str, Any]:
        """How the results were made, which the first line says."""
        try:
            made = json.loads(line)["made"]
        except (ValueError, KeyError, TypeError, RecursionError):
            made = None
        if not isinstance(made, dict):
            raise self._foreign()
        if self._wanted is not None and made != self._wanted:
            raise UsageError(
                f"{str(self.path)!r} was made with other settings ({_differing(made, self._wanted)}); give another file"
            )
        return made

    def _foreign(self) -> UsageError:
        return UsageError(f"{str(self.path)!r} is no file of results: its first line does not say how they were made")

    def _append(self, line: bytes) -> None:
        with self.path.open("ab") as file:
            file.truncate(self._end)  # what stands behind it was not written to its end
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._lines, self._end = self._lines + 1, self._end + len(line) + 1


def merged(files: Sequence[Results]) -> list[Result]:
    """The results of several files; of a sample that stands in two of them, the last.

    Raises:
        UsageError: the files were made with different settings, of which a table would not tell.
    """
    for one, other in pairwise(files):
        if one.made != other.made:
            told = _differing(one.made, other.made)
            raise UsageError(
                f"{str(one.path)!r} and {str(other.path)!r} were made with different settings ({told}); report each of them by itself"
            )
    found = {result.key: result for results in files for result in results}
    return [found[key] for key in sorted(found)]


def _differing(made: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    names = sorted(name for name in {*made, *wanted} if made.get(name) != wanted.get(name))
    return "; ".join(f"{name}: {made.get(name)!r} against {wanted.get(name)!r}" for name in names)
