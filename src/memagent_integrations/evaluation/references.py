"""Questions about one context each, as lines of a file: LongBench's, or those of a file of the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.rows import Row, lines, row_of, string, strings, where_of
from memagent_integrations.evaluation.samples import Fact
from memagent_integrations.evaluation.scoring import METRICS
from memagent_integrations.files import reason

_FACTS = TypeAdapter(tuple[Fact, ...])


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A question about one context. `metric` and `facts` are those of the row, where it has some."""

    question: str
    answers: tuple[str, ...]
    context: str
    metric: str | None = None
    facts: tuple[Fact, ...] = ()


class References(Sequence[Reference]):
    """The lines of a file, each read when it is asked for: contexts may be of any size. All are checked at the beginning."""

    def __init__(self, path: Path, record: Callable[[Row, str], Reference]) -> None:
        self._path, self._record = path, record
        self._places: list[tuple[int, int]] = []
        for number, start, line in lines(path):
            record(row_of(line, where_of(path, number)), where_of(path, number))
            self._places.append((number, start))
        if not self._places:
            raise UsageError(f"{path} has no rows")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:  # a slice has its own type
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        number, start = self._places[index]
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                line = file.readline()
        except OSError as error:
            raise UsageError(f"cannot read {str(self._path)!r}: {reason(error)}") from error
        return self._record(row_of(line, where_of(self._path, number)), where_of(self._path, number))


def references(path: Path) -> Sequence[Reference]:
    """The questions of a jsonl file with `question`, `answers` (one, or a list) and `context`.

    A row may have a `metric` (a name in `scoring.METRICS`) and `facts` (objects with the fields of `Fact`, whose texts stand in the context).

    Raises:
        UsageError: the file cannot be read, or a line of it is no such row.
    """
    return References(path, _reference)


def longbench(row: Row, where: str) -> Reference:
    """A row of LongBench.

    Raises:
        UsageError: it is none.
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
        facts=_facts(row, context, where),
    )


def _metric(row: Row, where: str) -> str | None:
    if row.get("metric") is None:
        return None
    metric = string(row, "metric", where)
    if metric not in METRICS:
        raise UsageError(f"{where}: there is no metric {metric!r}; the metrics are {', '.join(METRICS)}")
    return metric


def _facts(row: Row, context: str, where: str) -> tuple[Fact, ...]:
    try:
        facts = _FACTS.validate_python(row.get("facts") or ())
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{where}: facts: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    for fact in facts:
        if not fact.text or fact.text not in context:
            raise UsageError(f"{where}: the fact {fact.text[:80]!r} does not stand in the context")
    return facts
