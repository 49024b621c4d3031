"""Results in a JSONL file, one line for each sample. It survives a crash, and a run that is started again continues."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from memagent_integrations import files
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.diagnostics import FactTrace
from memagent_integrations.evaluation.samples import Fact
from memagent_integrations.records import NO_USAGE, Reading, Usage
from memagent_integrations.sanitize import encodable

Key = tuple[str, int, str, int]
"""Task, length, reader, number of the sample."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one sample for one reader, answered or failed.

    Attributes:
        task: name of the task.
        length: of the document, in the task's unit; 0 where documents have lengths of their own.
        reader: name of the reader.
        number: number of the sample.
        score: by the metric, from 0 to 1; 0 for a failure.
        metric: its name; None in results of older versions.
        answer: None for a failure. Cut where the task limits the tokens of an answer: `details["answer_tokens"]`.
        error: why the sample failed.
        passing: whether the error is temporary, so that a run which continues tries the sample again.
        too_long: whether the error is that the document does not fit a reader that takes it whole or not at all.
        question: of the sample.
        answers: of the sample: the golds.
        facts: of the sample.
        calls: made for this sample.
        usage: tokens of those calls.
        seconds: time spent in the model.
        details: how the document was made, and what the reader did.
        reading: the whole reading, from a reader that makes one.
        traces: what happened to the facts in its memories.
        cause: why its answer was wrong.
    """

    task: str
    length: int
    reader: str
    number: int
    score: float
    answer: str | None
    metric: str | None = None
    error: str | None = None
    passing: bool = False
    too_long: bool = False
    question: str = ""
    answers: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    calls: int = 0
    usage: Usage = NO_USAGE
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    reading: Reading | None = None
    traces: tuple[FactTrace, ...] = ()
    cause: str | None = None

    @property
    def key(self) -> Key:
        """What identifies the result in a run."""
        return self.task, self.length, self.reader, self.number


_RESULT, _JSON = TypeAdapter(Result), TypeAdapter(Any)
_HEADER_START = b'{"made": '


class Results:
    """A file of results.

    Its first line holds the settings that they were made with; a run continues in the file only with the same settings.
    The `notes` beside them (versions, the command) may differ. Readings stay in the file, because they can be
    large: `reading` is None in the results that iteration gives.

    Args:
        path: the file.
        settings: those of a run that is going to write; None to read a file whatever its settings.
        notes: what else to record when the file is created.
        on_result: is called with each result that is read from the file, its reading included. Of two with the same key
            the later one counts.

    Raises:
        UsageError: the file is not a file of results, or was made with other settings.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
        *,
        on_result: Callable[[Result], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self.settings = json.loads(json.dumps(dict(settings or {}), default=str))
        self.notes = dict(notes or {})
        self._results: dict[Key, Result] = {}
        self._on_result = on_result
        self._required = None if settings is None else self.settings
        self._lines, self._end = 0, 0  # number of complete lines read or written, and the offset behind them
        self._load()
        if settings is None and not self._lines:
            raise UsageError(f"there are no results in {str(path)!r}")

    def __iter__(self) -> Iterator[Result]:
        """Iterate over the results by task, length, reader and number, in whatever order they were written."""
        return (self._results[key] for key in sorted(self._results))

    def __contains__(self, key: Key) -> bool:
        return key in self._results and not self._results[key].passing

    @contextmanager
    def writing(self) -> Iterator[Results]:
        """Lock the file against other writers and read what they have added.

        Raises:
            UsageError: another run is writing to the file, or it cannot be written.
        """
        busy = UsageError(f"{str(self.path)!r} is being written by another run")
        with ExitStack() as stack:
            with files.accessing("write", self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(files.lock(f"{self.path}.lock", busy))
            self._load()
            if not self._lines:
                self._append(json.dumps({"made": self.settings, "noted": self.notes}).encode())
            yield self

    def add(self, result: Result) -> None:
        """Write one result; it is on the disk when this returns.

        Raises:
            UsageError: the file cannot be written.
        """
        self._append(_JSON.dump_json(encodable(_RESULT.dump_python(result))))
        self._results[result.key] = replace(result, reading=None)

    def _load(self) -> None:
        """Read the lines added since the last time, except the incomplete last line of a killed run."""
        with files.accessing("read", self.path):
            if not self.path.is_file():
                return
            with self.path.open("rb") as file:
                file.seek(self._end)
                for line in file:
                    if not line.endswith(b"\n"):
                        if not self._lines and line[: len(_HEADER_START)] != _HEADER_START[: len(line)]:
                            raise self._foreign()
                        return
                    self._parse(line)

    def _parse(self, line: bytes) -> None:
        if not self._lines:
            self.settings = self._parse_header(line)
        else:
            try:
                result = _RESULT.validate_json(line)
            except ValidationError as error:
                message = files.first_error(error)
                raise UsageError(f"{self.path}, line {self._lines + 1}, is no result: {message}") from error
            if self._on_result:
                self._on_result(result)
            self._results[result.key] = replace(result, reading=None)
        self._lines, self._end = self._lines + 1, self._end + len(line)

    def _parse_header(self, line: bytes) -> dict[str, Any]:
        """Return the settings in the first line, which have to be the required ones."""
        try:
            settings = json.loads(line)["made"]
        except (ValueError, KeyError, TypeError, RecursionError):
            settings = None
        if not isinstance(settings, dict):
            raise self._foreign()
        if self._required is not None and (changed := files.differences(settings, self._required)):
            raise UsageError(f"{str(self.path)!r} was made with other settings ({changed}); give another file")
        return settings

    def _foreign(self) -> UsageError:
        return UsageError(f"{str(self.path)!r} is no file of results: its first line does not say how they were made")

    def _append(self, line: bytes) -> None:
        with files.accessing("write", self.path):
            files.create(self.path)
        with files.accessing("write", self.path), self.path.open("ab") as file:
            file.truncate(self._end)  # drop an incomplete last line
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._lines, self._end = self._lines + 1, self._end + len(line) + 1


def merged(sources: Sequence[Results]) -> list[Result]:
    """Return the results of several files, sorted; where two have the same sample, that of the later file.

    Raises:
        UsageError: the files were made with different settings, which a table could not show.
    """
    for first, other in pairwise(sources):
        if changed := files.differences(first.settings, other.settings):
            raise UsageError(
                f"{str(other.path)!r} was made with other settings than {str(first.path)!r} ({changed}); "
                "report each of them by itself"
            )
    results = {result.key: result for source in sources for result in source}
    return [results[key] for key in sorted(results)]
