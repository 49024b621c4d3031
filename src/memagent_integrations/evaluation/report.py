"""Report results: a table with intervals and published figures, and comparisons of readers on the same samples."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from decimal import Decimal
from itertools import groupby
from types import MappingProxyType
from typing import Any

from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.evaluation.prices import Prices
from memagent_integrations.evaluation.published import PUBLISHED, Published
from memagent_integrations.evaluation.results import Result
from memagent_integrations.evaluation.scoring import SKIP_EMPTY
from memagent_integrations.evaluation.statistics import Comparison, compare, score
from memagent_integrations.records import NO_USAGE, Usage


@dataclass(frozen=True, kw_only=True)
class Row:
    """A reader on a task at a length.

    Attributes:
        task: name of the task.
        length: of the documents, in the task's unit.
        reader: name of the reader.
        mean: mean score of the samples, from 0 to 1; failures count as 0, unless the metric's published code skips
            them (`scoring.SKIP_EMPTY`). Documents that are too long for a reader are left out; None where all are.
        stderr: its standard error.
        low: lower bound of the 95 % interval.
        high: upper bound of the 95 % interval.
        n: number of samples in the mean.
        failed: how many samples failed.
        too_long: how many documents did not fit a reader that takes them whole or not at all.
        calls: mean number of calls for a sample.
        prompt_tokens: mean for a sample. This and the means below are None where the model does not report them, or
            the figure is published.
        completion_tokens: mean for a sample.
        cached_tokens: mean for a sample.
        seconds: mean time in the model for a sample.
        cost: mean price of a sample's tokens, in the currency of the prices; None without prices.
        right: the sum of the scores: an answer that is half right counts half.
        tokens_per_right: all prompt and completion tokens, divided by `right`. This and the two below are None where no
            answer is right.
        seconds_per_right: all seconds, divided by `right`.
        cost_per_right: the price of all tokens, divided by `right`.
        published: whether the figure is published, not measured.
        differs: in what the measurement of a published figure differs from the run; "" where it does not.
    """

    task: str
    length: int
    reader: str
    mean: float | None
    stderr: float | None
    low: float | None
    high: float | None
    n: int
    failed: int | None
    too_long: int | None
    calls: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    cached_tokens: float | None
    seconds: float | None
    cost: float | None
    right: float | None
    tokens_per_right: float | None
    seconds_per_right: float | None
    cost_per_right: float | None
    published: bool = False
    differs: str = ""


@dataclass(frozen=True, kw_only=True)
class Versus:
    """A comparison of `reader` with `other`, on the samples that both have."""

    task: str
    length: int
    reader: str
    other: str
    compared: Comparison


def rows(
    results: Iterable[Result],
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    published: bool = True,
    prices: Prices | None = None,
) -> list[Row]:
    """Return a row for each task, length and reader, with the published figures for the lengths that were measured.

    `settings` are those of the results (`Results.settings`); they decide which figures were measured in the same way.
    With `prices` the rows have costs.
    """
    groups = [list(group) for _, group in groupby(sorted(results, key=_group), key=_group)]
    table = [_row(group, prices) for group in groups]
    if published:
        measured = dict.fromkeys((group[0].task, group[0].length, group[0].metric) for group in groups)
        table += [
            _published(figure, task, figure.differences(task, metric, settings))
            for task, length, metric in measured
            for figure in PUBLISHED
            if figure.fits(task, length)
        ]
    return sorted(table, key=lambda row: (row.task, row.length, row.published, row.reader))


def totals(results: Iterable[Result], *, prices: Prices | None = None) -> list[Row]:
    """Return a row for each reader over all its samples, as of the task "all"; none where there is one task and length.

    Each sample counts alike, so readers are to be compared where they have the same samples.
    """
    by_reader: dict[str, list[Result]] = {}
    for result in results:
        by_reader.setdefault(result.reader, []).append(result)
    if len({(result.task, result.length) for group in by_reader.values() for result in group}) < 2:
        return []
    return [replace(_row(group, prices), task="all", length=0) for _, group in sorted(by_reader.items())]


def compared(results: Sequence[Result], reader: str) -> list[Versus]:
    """Compare this reader with every other one, on the samples that both have read.

    Raises:
        UsageError: there are no results of this reader.
    """
    readers = {result.reader for result in results}
    if reader not in readers:
        raise UsageError(f"there are no results of {reader!r}; there are: {', '.join(sorted(readers))}")
    scores = {result.key: result.score for result in results if not result.too_long}
    pairs: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for (task, length, other, number), other_score in sorted(scores.items()):
        reader_score = scores.get((task, length, reader, number))
        if other != reader and reader_score is not None:
            pairs.setdefault((task, length, other), []).append((reader_score, other_score))
    return [
        Versus(task=task, length=length, reader=reader, other=other, compared=compare(*zip(*both, strict=True)))
        for (task, length, other), both in pairs.items()
    ]


def markdown(table: Sequence[Row]) -> str:
    """Return the table as Markdown; published figures of another setup follow under headings that say what differs."""
    parts = [_table(cells([row for row in table if not row.differs]))]
    for differs, rows in differing(table).items():
        parts.append(f"## Published, and not measured in the same way\n\nThey differ in: {differs}.\n\n{_table(rows)}")
    return "\n\n".join(parts)


def per_answer(table: Sequence[Row]) -> str:
    """Return what a right answer took, as a Markdown table: tokens, seconds, and money where there are prices.

    A reader without a right answer has none of these.
    """
    return f"## For each right answer\n\n{_table(cells_per_answer(table))}"


def comparisons(table: Sequence[Versus]) -> str:
    """Return the comparisons as a Markdown table."""
    return _table(cells_of_comparisons(table))


def cells(table: Sequence[Row]) -> list[dict[str, str]]:
    """Return the rows as they are shown: texts by the names of the columns."""
    hidden = set() if any(row.too_long for row in table) else {"too long"}
    return [{name: cell for name, cell in _cells(row).items() if name not in hidden} for row in table]


def differing(table: Sequence[Row]) -> dict[str, list[dict[str, str]]]:
    """Return the published figures of another setup as they are shown, by what differs."""
    names = ("task", "length", "reader", "score", "n")
    found: dict[str, list[dict[str, str]]] = {}
    for row in table:
        if row.differs:
            found.setdefault(row.differs, []).append({name: _cells(row)[name] for name in names})
    return found


def cells_per_answer(table: Sequence[Row]) -> list[dict[str, str]]:
    """Return what a right answer took as it is shown, for each row that was measured."""
    measured = [row for row in table if not row.published]
    shown = [
        {
            **{name: cell for name, cell in _cells(row).items() if name in ("task", "length", "reader", "score")},
            "right": f"{row.right:g} of {row.n}",
            "tokens": _number(row.tokens_per_right),
            "seconds": _number(row.seconds_per_right, 1),
            "cost": "" if row.cost_per_right is None else f"{Decimal(f'{row.cost_per_right:.3g}'):f}",
        }
        for row in measured
    ]
    if all(row.cost is None for row in measured):
        return [{name: cell for name, cell in row.items() if name != "cost"} for row in shown]
    return shown


def cells_of_comparisons(table: Sequence[Versus]) -> list[dict[str, str]]:
    """Return the comparisons as they are shown."""
    return [
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


def as_csv(table: Sequence[Row]) -> str:
    """Return the table as CSV, with a column for each field of `Row`."""
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
    cells = [{name: _one_cell(text) for name, text in row.items()} for row in rows]
    return str(tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True))


def _one_cell(text: str) -> str:
    """Escape what would end the cell: the name of a task may be any file name."""
    return " ".join(text.split()).replace("|", "\\|")


def _group(result: Result) -> tuple[str, int, str]:
    return result.task, result.length, result.reader


def _row(group: Sequence[Result], prices: Prices | None) -> Row:
    results = [result for result in group if not result.too_long]
    first, n = group[0], len(results)
    skipped = first.metric in SKIP_EMPTY
    scored = score([result.score for result in results if not skipped or result.answer is not None])
    usage: Usage = sum((result.usage for result in results), NO_USAGE)
    seconds, right = sum(result.seconds for result in results), sum(result.score for result in results)
    cost = prices.cost(usage) if prices else None
    return Row(
        task=first.task,
        length=first.length,
        reader=first.reader,
        mean=(scored.mean or 0.0) if results else None,
        stderr=scored.stderr,
        low=scored.low,
        high=scored.high,
        n=scored.n,
        failed=sum(result.error is not None for result in results),
        too_long=len(group) - n,
        calls=_divided(sum(result.calls for result in results), n),
        prompt_tokens=_divided(usage.prompt_tokens, n),
        completion_tokens=_divided(usage.completion_tokens, n),
        cached_tokens=_divided(usage.cached_tokens, n),
        seconds=_divided(seconds, n),
        cost=_divided(cost, n),
        right=right,
        tokens_per_right=_divided(_tokens(usage), right),
        seconds_per_right=_divided(seconds, right),
        cost_per_right=_divided(cost, right),
    )


def _tokens(usage: Usage) -> int | None:
    if usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    return usage.prompt_tokens + usage.completion_tokens


def _divided(total: float | None, by: float) -> float | None:
    return total / by if total is not None and by else None


def _published(figure: Published, task: str, differs: str) -> Row:
    row: dict[str, Any] = dict.fromkeys(field.name for field in fields(Row))
    row |= {"task": task, "published": True, "differs": differs}
    row |= {"length": figure.length, "reader": figure.reader, "mean": figure.mean, "n": figure.n}
    return Row(**row)


def _cells(row: Row) -> dict[str, str]:
    interval = (
        "" if row.mean is None or row.low is None or row.high is None else f"{100 * row.low:.0f}-{100 * row.high:.0f}"
    )
    return {
        "task": row.task,
        "length": f"{row.length:,}" if row.length else "",
        "reader": f"{row.reader} (published)" if row.published else row.reader,
        "score": "too long" if row.mean is None else f"{100 * row.mean:.1f}",
        "95 %": interval,
        "n": str(row.n),
        "failed": _number(row.failed),
        "too long": _number(row.too_long),
        "calls": _number(row.calls, 1),
        "prompt": _number(row.prompt_tokens),
        "written": _number(row.completion_tokens),
        "cached": _number(row.cached_tokens),
        "seconds": _number(row.seconds, 1),
    }


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
