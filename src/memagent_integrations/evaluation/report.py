"""What results say: a table with error bars, comparisons of two readers on the same samples, and published figures beside them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any

from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.evaluation.published import PUBLISHED, Published
from memagent_integrations.evaluation.results import Result
from memagent_integrations.evaluation.statistics import Comparison, compare, score
from memagent_integrations.records import NO_USAGE, Usage


@dataclass(frozen=True, kw_only=True)
class Row:
    """A reader on a task at a length: the mean score of `n` samples, 0..1, failures counted as 0 and told apart in `failed`.

    `low` and `high` bound the 95 % interval. `calls`, tokens and `seconds` (in the model) are means of a sample; None: the model does not say, or
    nobody measured it. `published`: not measured here.
    """

    task: str
    length: int
    reader: str
    mean: float
    stderr: float | None
    low: float | None
    high: float | None
    n: int
    failed: int | None
    calls: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    cached_tokens: float | None
    seconds: float | None
    published: bool = False


@dataclass(frozen=True, kw_only=True)
class Versus:
    """Two readers on the samples that both have; the difference is that of `reader` to `other`."""

    task: str
    length: int
    reader: str
    other: str
    compared: Comparison


def rows(results: Iterable[Result], *, published: bool = True) -> list[Row]:
    """A row for each task, length and reader, and the published ones at the lengths that were measured."""
    found = [_row(list(group)) for _, group in groupby(sorted(results, key=_place), key=_place)]
    if published:
        measured = {(row.task, row.length) for row in found}
        found += [_published(row) for row in PUBLISHED if (row.task, row.length) in measured]
    return sorted(found, key=lambda row: (row.task, row.length, row.published, row.reader))


def compared(results: Sequence[Result], reader: str) -> list[Versus]:
    """Each other reader against this one, on the samples that both have.

    Raises:
        UsageError: there are no results of this reader.
    """
    scores = {result.key: result.score for result in results}
    if not any(result.reader == reader for result in results):
        raise UsageError(
            f"there are no results of {reader!r}; there are: {', '.join(sorted({result.reader for result in results}))}"
        )
    pairs: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for (task, length, other, number), value in sorted(scores.items()):
        mine = scores.get((task, length, reader, number))
        if other != reader and mine is not None:
            pairs.setdefault((task, length, other), []).append((mine, value))
    return [
        Versus(task=task, length=length, reader=reader, other=other, compared=compare(*zip(*both, strict=True)))
        for (task, length, other), both in pairs.items()
    ]


def markdown(table: Sequence[Row]) -> str:
    """The table for people."""
    return _table([_told(row) for row in table])


def comparisons(table: Sequence[Versus]) -> str:
    """The comparisons for people."""
    told = [
        {
            "task": each.task,
            "length": f"{each.length:,}",
            "readers": f"{each.reader} - {each.other}",
            "difference": f"{100 * each.compared.difference:+.1f}",
            "better / worse": f"{each.compared.better} / {each.compared.worse}",
            "p": f"{each.compared.p:.3g}",
            "n": str(each.compared.n),
        }
        for each in table
    ]
    return _table(told)


def as_csv(table: Sequence[Row]) -> str:
    """The table for programs: one column a field of `Row`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in table)
    return text.getvalue()


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    try:
        from tabulate import tabulate
    except ImportError as error:
        raise MissingExtra.extra("tabulate", "eval") from error
    cells = [{name: _cell(text) for name, text in row.items()} for row in rows]
    return str(tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True))


def _cell(text: str) -> str:
    """The text so that it is one cell: a task may be named by a file."""
    return " ".join(text.split()).replace("|", "\\|")


def _place(result: Result) -> tuple[str, int, str]:
    return result.task, result.length, result.reader


def _row(results: Sequence[Result]) -> Row:
    first, n = results[0], len(results)
    found = score([result.score for result in results])
    usage: Usage = sum((result.usage for result in results), NO_USAGE)
    return Row(
        task=first.task,
        length=first.length,
        reader=first.reader,
        mean=found.mean or 0.0,
        stderr=found.stderr,
        low=found.low,
        high=found.high,
        n=n,
        failed=sum(result.error is not None for result in results),
        calls=sum(result.calls for result in results) / n,
        seconds=sum(result.seconds for result in results) / n,
        prompt_tokens=_mean(usage.prompt_tokens, n),
        completion_tokens=_mean(usage.completion_tokens, n),
        cached_tokens=_mean(usage.cached_tokens, n),
    )


def _mean(total: int | None, n: int) -> float | None:
    return None if total is None else total / n


def _published(row: Published) -> Row:
    unknown: dict[str, Any] = dict.fromkeys(field.name for field in fields(Row))
    return Row(**{**unknown, **asdict(row), "published": True})


def _told(row: Row) -> dict[str, str]:
    interval = "" if row.low is None or row.high is None else f"{100 * row.low:.0f}-{100 * row.high:.0f}"
    return {
        "task": row.task,
        "length": f"{row.length:,}" if row.length else "",
        "reader": f"{row.reader} (published)" if row.published else row.reader,
        "score": f"{100 * row.mean:.1f}",
        "95 %": interval,
        "n": str(row.n),
        "failed": _number(row.failed),
        "calls": _number(row.calls, 1),
        "prompt": _number(row.prompt_tokens),
        "written": _number(row.completion_tokens),
        "cached": _number(row.cached_tokens),
        "seconds": _number(row.seconds, 1),
    }


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
