"""Questions with one context each, read from a jsonl file: LongBench's format, or the one for files of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from memagent_integrations import files
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.rows import Row, lines, row_of, string, strings, where_of
from memagent_integrations.evaluation.samples import Fact
from memagent_integrations.evaluation.scoring import METRICS

_FACTS = TypeAdapter(tuple[Fact, ...])


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A question about one context. `metric`, `facts` and `superseded` come from the row, where it has them."""

    question: str
    answers: tuple[str, ...]
    context: str
    metric: str | None = None
    facts: tuple[Fact, ...] = ()
    superseded: tuple[Fact, ...] = ()


class References(Sequence[Reference]):
    """The rows of a file, all checked at the start. Each is read again on access, because contexts may be large."""

    def __init__(self, path: Path, record: Callable[[Row, str], Reference]) -> None:
        self._path, self._record = path, record
        self._offsets: list[tuple[int, int]] = []  # line number, first byte
        for number, start, line in lines(path):
            self._parse(line, number)
            self._offsets.append((number, start))
        if not self._offsets:
            raise UsageError(f"{path} has no rows")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:  # a slice returns a list
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        number, start = self._offsets[index]
        with files.accessing("read", self._path), self._path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        return self._parse(line, number)

    def _parse(self, line: bytes, number: int) -> Reference:
        where = where_of(self._path, number)
        return self._record(row_of(line, where), where)


def references(path: Path) -> Sequence[Reference]:
    """Return the rows of a jsonl file with the fields `question`, `answers` (a text or a list) and `context`.

    A row may also have a `metric` (a name in `scoring.METRICS`), and `facts` and `superseded` facts, as of `Sample`
    (objects with the fields of `Fact`, whose texts occur in the context).

    Raises:
        UsageError: the file cannot be read, or a line is not such a row.
    """
    return References(path, _reference)


def longbench(row: Row, where: str) -> Reference:
    """Convert a row of LongBench.

    Raises:
        UsageError: a field is missing or wrong.
    """
    return Reference(
        question=string(row, "input", where),
        answers=strings(row, "answers", where),
        context=string(row, "context", where),
    )


def _reference(row: Row, where: str) -> Reference:
    context = string(row, "context", where)
    return Reference(
        question=string(row, "question", where),
        answers=strings(row, "answers", where),
        context=context,
        metric=_metric(row, where),
        facts=_facts(row, "facts", context, where),
        superseded=_facts(row, "superseded", context, where),
    )


def _metric(row: Row, where: str) -> str | None:
    if row.get("metric") is None:
        return None
    metric = string(row, "metric", where)
    if metric not in METRICS:
        raise UsageError(f"{where}: there is no metric {metric!r}; the metrics are {', '.join(METRICS)}")
    return metric


def _facts(row: Row, name: str, context: str, where: str) -> tuple[Fact, ...]:
    try:
        facts = _FACTS.validate_python(row.get(name) or ())
    except ValidationError as error:
        raise UsageError(f"{where}: {name}: {files.first_error(error)}") from error
    for fact in facts:
        if not fact.text or fact.text not in context:
            raise UsageError(f"{where}: the fact {fact.text[:80]!r} does not stand in the context")
    return facts
