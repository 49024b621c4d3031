"""Results as one HTML file: scores by task and length, cost, facts kept, and every sample with its memories.

The page needs no network. Its tables are plain HTML; the samples are compressed, and a script shows the one that is
chosen with the parts of the page of a reading (`trace`). Text from a document or a model is never treated as markup.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation import report
from memagent_integrations.evaluation.diagnostics import FactTrace, survival
from memagent_integrations.evaluation.report import Row, Versus
from memagent_integrations.evaluation.results import Key, Result
from memagent_integrations.trace import build_page, escaped_json, step_data

_JSON = TypeAdapter(Any)
_MOST_BYTES = 128 << 20  # of the page: browsers open it in about a second
_MOST_LISTED = 160  # characters of an answer in the list of samples; the sample itself has all of it
Group = tuple[str, int, str]
"""Task, length, reader."""


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """A score in the table of a task, and the number of its group; None for a published figure."""

    row: Row
    group: int | None


class Leaderboard:
    """Collects results one by one, with their readings, and returns the page. Of two with one key the later counts."""

    def __init__(self) -> None:
        self._samples: dict[Key, list[Any]] = {}

    def add(self, result: Result) -> None:
        """Add a result; its reading is kept in compressed form."""
        self._samples[result.key] = _sample(result)

    def page(
        self,
        results: Sequence[Result],
        rows: Sequence[Row],
        settings: Mapping[str, Any],
        comparisons: Sequence[Versus] = (),
        totals: Sequence[Row] = (),
    ) -> str:
        """Return the page as HTML. The `results`, with the `rows` of their report, are those that were added.

        `totals` are the rows of readers over all tasks; the page tells what a right answer took for these too.

        Raises:
            UsageError: the page would have more than 128 MB.
        """
        size = sum(len(sample[-1]) for sample in self._samples.values())
        if size > _MOST_BYTES:
            raise UsageError(
                f"the page would have {size >> 20:,} MB, and browsers open no more than {_MOST_BYTES >> 20} well; "
                "make it of fewer results"
            )
        grouped = {group: list(members) for group, members in groupby(results, key=_group)}
        numbers = {group: number for number, group in enumerate(grouped)}
        same = [row for row in rows if not row.differs]
        measured = [row for row in same if not row.published]
        samples = [
            {
                **dict(zip(("task", "length", "reader"), group, strict=True)),
                "samples": [self._samples[result.key] for result in members],
            }
            for group, members in grouped.items()
        ]
        folder = resources.files(__name__)
        template, script, style = (
            folder.joinpath(f"board.{kind}").read_text(encoding="utf-8") for kind in ("html", "js", "css")
        )
        return build_page(
            f"Leaderboard of {settings.get('model', 'readers')}",
            template=template,
            script=script,
            style=style,
            settings=dict(_settings(settings)),
            scores={task: _pivot(list(group), numbers) for task, group in groupby(same, key=lambda row: row.task)},
            measured=[
                (numbers[_group(row)], shown | _facts(grouped[_group(row)]))
                for row, shown in zip(measured, report.cells(measured), strict=True)
            ],
            per_answer=report.cells_per_answer([*totals, *rows]),
            survival=_survival(results),
            comparisons=report.cells_of_comparisons(comparisons),
            published=report.differing(rows),
            groups=[escaped_json(group) for group in samples],
        )


def _group(result: Result | Row) -> Group:
    return result.task, result.length, result.reader


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings with their names, one level deep."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _settings(value)
        elif value is not None:
            yield name.replace("_", " "), str(value)


def _pivot(rows: Sequence[Row], numbers: Mapping[Group, int]) -> dict[str, Any]:
    """Return the lengths of a task, and for each reader its score at each length; the best mean comes first."""
    lengths = sorted({row.length for row in rows})
    readers: dict[str, dict[int, _Cell]] = {}
    for row, shown in zip(rows, report.cells(rows), strict=True):
        group = None if row.published else numbers[_group(row)]
        readers.setdefault(shown["reader"], {})[row.length] = _Cell(row=row, group=group)

    def mean(line: Mapping[int, _Cell]) -> float:
        means = [cell.row.mean for cell in line.values() if cell.row.mean is not None]
        return sum(means) / len(means) if means else -1.0

    ordered = sorted(readers.items(), key=lambda item: -mean(item[1]))
    return {"lengths": lengths, "readers": {name: [line.get(length) for length in lengths] for name, line in ordered}}


def _facts(results: Iterable[Result]) -> dict[str, str]:
    """Return how many facts the memory held at any time, and at the end."""
    traced = [trace for result in results for trace in result.traces]
    noted, kept = sum(trace.noted_at is not None for trace in traced), sum(trace.in_memory for trace in traced)
    shares = [f"{100 * count / len(traced):.0f}" if traced else "" for count in (noted, kept)]
    return dict(zip(("facts noted, %", "facts kept, %"), shares, strict=True))


def _survival(results: Sequence[Result]) -> dict[str, Any]:
    """Return distances in chunks, and for each reader with a memory the share of facts it holds at each of them."""
    traced: dict[str, list[tuple[FactTrace, ...]]] = {}
    for result in results:
        if result.traces:
            traced.setdefault(result.reader, []).append(result.traces)
    curves = {reader: curve for reader, traces in sorted(traced.items()) if (curve := survival(traces))}
    longest = max(map(len, curves.values()), default=0)
    distances = [0, *(1 << power for power in range(longest.bit_length()) if 1 << power < longest)] if longest else []
    return {
        "distances": distances,
        "readers": {
            reader: [curve[distance] if distance < len(curve) else None for distance in distances]
            for reader, curve in curves.items()
        },
    }


def _sample(result: Result) -> list[Any]:
    """Return what the list of samples shows of a result, and behind it all of the result, compressed."""
    traces, usage = result.traces, result.usage
    reading = result.reading
    steps = [step for step in reading.steps if step.phase == "memory"] if reading else []
    whole: dict[str, Any] = {
        "steps": [{**step_data(step), "memory": step.memory} for step in steps],
        "warnings": reading.warnings if reading else (),
        "model": reading.model if reading else "",
        "question": result.question,
        "answer": result.answer,
        "error": result.error,
        "tokens": [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens],
        "seconds": result.seconds,
        "statements": [],
        "golds": result.answers,
        "score": result.score,
        "cause": result.cause,
        "details": {name: str(value) for name, value in result.details.items()},
        "facts": [[trace.fact.text, trace.read_at, trace.noted_at, trace.lost_at, trace.answered] for trace in traces]
        or [[fact.text, None, None, None, None] for fact in result.facts],
    }
    return [
        result.number,
        round(result.score, 4),
        _shortened(result.answer or ""),
        _shortened(" | ".join(result.answers)),
        (result.error and _shortened(f"failed: {result.error}")) or result.cause or "",
        f"{sum(trace.in_memory for trace in traces)} of {len(traces)}" if traces else "",
        base64.b64encode(zlib.compress(_JSON.dump_json(whole))).decode(),
    ]


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_LISTED else f"{text[:_MOST_LISTED]}…"
