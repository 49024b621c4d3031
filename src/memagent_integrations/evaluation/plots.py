"""Pictures of results: accuracy and cost by length, needles by depth, how long a memory keeps a fact."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.evaluation.diagnostics import Trace
from memagent_integrations.evaluation.diagnostics import survival as survival_curve
from memagent_integrations.evaluation.report import Row
from memagent_integrations.evaluation.results import Result
from memagent_integrations.files import reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class NothingToDraw(UsageError):
    """The results hold nothing that this picture shows."""


_DEPTHS = 10  # rows of a heat map
_SIZE = (4.8, 3.2)  # inches of one picture; at 160 dots it reads well at half a page


def accuracy(rows: Sequence[Row], path: str | Path) -> None:
    """Score by length, a line a reader with its 95 % interval, a picture a task; published figures are dotted."""
    figure, axes = _one_for_each_task(rows)
    colours = _colours(rows)
    for task, ax in axes.items():
        for reader, line in _lines(row for row in rows if row.task == task):
            colour, aside = colours[reader]
            lengths = [
                row.length * aside or math.log2(aside) for row in line
            ]  # the axis of documents without a length is linear
            means = [100 * row.mean for row in line]
            if line[0].published:
                ax.plot(lengths, means, ":", color=colour, marker=".", label=f"{reader} (published)")
                continue
            below = [100 * max(row.mean - (row.low or 0), 0) for row in line]
            above = [100 * max((row.high or 0) - row.mean, 0) for row in line]
            ax.errorbar(
                lengths,
                means,
                yerr=[below, above],
                marker="o",
                markersize=4,
                capsize=2,
                linewidth=1.4,
                color=colour,
                label=reader,
            )
        ax.set_ylim(-3, 103)
        ax.set_ylabel("score, %")
    _finish(figure, axes, path)


def cost(rows: Sequence[Row], path: str | Path) -> None:
    """Tokens of a sample (read and written) by length, a line a reader, a picture a task; both axes are logarithmic."""
    measured = [row for row in rows if _tokens(row)]
    if not measured:
        raise NothingToDraw("no reader's model told its tokens: there is no cost to show")
    figure, axes = _one_for_each_task(measured)
    colours = _colours(rows)
    for task, ax in axes.items():
        for reader, line in _lines(row for row in measured if row.task == task):
            ax.plot(
                [row.length for row in line],
                [_tokens(row) for row in line],
                marker="o",
                markersize=4,
                linewidth=1.4,
                color=colours[reader][0],
                label=reader,
            )
        ax.set_yscale("log")
        locator: Any = ax.yaxis.get_major_locator()
        locator.set_params(subs=(1, 2, 5))
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_minor_formatter("")
        ax.set_ylabel("tokens a sample")
    _finish(figure, axes, path)


def depths(results: Iterable[Result], path: str | Path) -> None:
    """Of the needles at each depth and length the share that the answer holds: a heat map a reader."""
    found: dict[str, dict[tuple[int, int], list[bool]]] = {}
    for result in results:
        for fact in result.facts:
            if result.task.startswith("niah") and fact.keys:
                cell = min(int(fact.depth * _DEPTHS), _DEPTHS - 1), result.length
                told = (result.answer or "").casefold()
                found.setdefault(result.reader, {}).setdefault(cell, []).append(
                    all(key.casefold() in told for key in fact.keys)
                )
    if not found:
        raise NothingToDraw("there are no results of needle tasks: there is no heat map to draw")
    lengths = sorted({length for cells in found.values() for _, length in cells})
    figure = _figure(len(found), height=3.0)
    for number, (reader, cells) in enumerate(sorted(found.items()), start=1):
        ax = figure.add_subplot(*_grid(len(found)), number)
        shares = [[_share(cells.get((depth, length))) for length in lengths] for depth in range(_DEPTHS)]
        image = ax.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        ax.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
        ax.set_yticks(range(0, _DEPTHS, 3), [f"{100 * depth // _DEPTHS} %" for depth in range(0, _DEPTHS, 3)])
        ax.set_title(reader, fontsize=9)
        ax.set_xlabel("length, tokens", fontsize=8)
        ax.set_ylabel("depth", fontsize=8)
        ax.tick_params(labelsize=7)
    figure.colorbar(image, ax=figure.axes, shrink=0.8, label="needles found")
    _save(figure, path)


def survival(results: Iterable[Result], path: str | Path) -> None:
    """The share of the facts that a memory still holds, so many chunks after they were read: a line a reader, over all its tasks and lengths."""
    readers: dict[str, list[tuple[Trace, ...]]] = {}
    for result in results:
        if result.traces:
            readers.setdefault(result.reader, []).append(result.traces)
    if not readers:
        raise NothingToDraw("no reader's memories were followed: there is no curve to draw")
    figure = _figure(1)
    ax = figure.add_subplot()
    for reader, traced in sorted(readers.items()):
        curve = survival_curve(traced)
        ax.plot(
            [at.distance for at in curve],
            [100 * at.share for at in curve],
            marker="o",
            markersize=4,
            linewidth=1.4,
            label=reader,
        )
    ax.set_ylim(-3, 103)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("chunks since the fact was read")
    ax.set_ylabel("facts in memory, %")
    ax.grid(alpha=0.25)
    ax.legend(fontsize=7)
    _save(figure, path)


def _share(found: list[bool] | None) -> float:
    return sum(found) / len(found) if found else float("nan")


def _tokens(row: Row) -> float:
    """Tokens of a sample; 0 where they are unknown, or no call was made."""
    return (
        0 if row.prompt_tokens is None or row.completion_tokens is None else row.prompt_tokens + row.completion_tokens
    )


def _lines(rows: Iterable[Row]) -> Iterable[tuple[str, list[Row]]]:
    ordered = sorted(rows, key=lambda row: (row.published, row.reader, row.length))
    return (
        (reader, list(group)) for (_, reader), group in groupby(ordered, key=lambda row: (row.published, row.reader))
    )


def _colours(rows: Sequence[Row]) -> dict[str, tuple[str, float]]:
    """For each reader a colour, the same in every picture, and by how much its points stand aside, so that error bars do not hide one another."""
    readers = list(dict.fromkeys(reader for reader, _ in _lines(rows)))
    return {
        reader: (f"C{number % 10}", 2 ** (0.05 * (number - (len(readers) - 1) / 2)))
        for number, reader in enumerate(readers)
    }


def _one_for_each_task(rows: Sequence[Row]) -> tuple[Figure, dict[str, Axes]]:
    tasks = sorted({row.task for row in rows})
    if not tasks:
        raise NothingToDraw("there are no results: there is nothing to draw")
    figure = _figure(len(tasks))
    axes = {task: figure.add_subplot(*_grid(len(tasks)), number) for number, task in enumerate(tasks, start=1)}
    for task, ax in axes.items():
        lengths = sorted({row.length for row in rows if row.task == task})
        ax.set_title(task, fontsize=9, parse_math=False)  # a file's name is no formula
        if all(lengths):
            ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [_short(length) for length in lengths])
        ax.minorticks_off()
        ax.set_xlabel("length")
        ax.grid(alpha=0.25)
    return figure, axes


def _finish(figure: Figure, axes: Mapping[str, Axes], path: str | Path) -> None:
    labelled: dict[str, Any] = {}
    for ax in axes.values():
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            labelled.setdefault(label, handle)
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4, fontsize=7)
    _save(figure, path)


def _figure(pictures: int, height: float = _SIZE[1]) -> Figure:
    try:
        from matplotlib.figure import Figure  # it takes its time
    except ImportError as error:
        raise MissingExtra.extra("matplotlib", "eval") from error
    down, across = _grid(pictures)
    return Figure(figsize=(_SIZE[0] * across, height * down + 0.4), dpi=160, layout="constrained")


def _grid(pictures: int) -> tuple[int, int]:
    across = min(pictures, 2)
    return -(-pictures // across), across


def _short(length: int) -> str:
    if not length:
        return "as they are"
    return (
        f"{length / 1e6:g}M"
        if length >= 1_000_000
        else f"{length / 1024:g}K"
        if length >= 1024 and length % 1024 == 0
        else f"{length:,}"
    )


def _save(figure: Figure, path: str | Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {str(path)!r}: {reason(error)}") from error
