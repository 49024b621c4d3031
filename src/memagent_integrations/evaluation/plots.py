"""Plot results: accuracy and cost by length, needles by depth, and how long a memory keeps a fact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent_integrations import files
from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.evaluation.diagnostics import FactTrace
from memagent_integrations.evaluation.diagnostics import survival as survival_curve
from memagent_integrations.evaluation.report import Row
from memagent_integrations.evaluation.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class NothingToDraw(UsageError):
    """The results hold nothing that this plot shows."""


_DEPTHS = 10  # rows of a heat map
_WIDTH, _HEIGHT = 4.8, 3.2  # inches of one plot; readable at half the width of a page
_LINE: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.4}


def accuracy(rows: Sequence[Row], path: str | Path) -> None:
    """Plot the score by length: a plot for each task, a line with 95 % intervals for each reader.

    Published figures that were measured in the same way are dotted.
    """
    rows = [row for row in rows if not row.differs and row.mean is not None]
    figure, axes = _plot_per_task(rows)
    colours, shifts = _colours(rows), _shifts(rows)
    for task, ax in axes.items():
        for reader, line in _lines(row for row in rows if row.task == task):
            shift = shifts[reader]
            # The axis of documents without a length is linear, all others are logarithmic.
            lengths = [row.length * 2**shift if row.length else shift for row in line]
            means = [100 * (row.mean or 0) for row in line]
            if line[0].published:
                ax.plot(lengths, means, ":", color=colours[reader], marker=".", label=f"{reader} (published)")
                continue
            below = [max(mean - 100 * (row.low or 0), 0) for mean, row in zip(means, line, strict=True)]
            above = [max(100 * (row.high or 0) - mean, 0) for mean, row in zip(means, line, strict=True)]
            ax.errorbar(lengths, means, yerr=[below, above], capsize=2, color=colours[reader], label=reader, **_LINE)
        ax.set_ylim(-3, 103)
        ax.set_ylabel("score, %")
    _add_legend(figure, axes)
    _save(figure, path)


def cost(rows: Sequence[Row], path: str | Path) -> None:
    """Plot the tokens of a sample (read and written) by length: a plot for each task, a line for each reader.

    Both axes are logarithmic.
    """
    _by_length(rows, _tokens, "tokens a sample", path)


def per_answer(rows: Sequence[Row], path: str | Path) -> None:
    """Plot what a right answer took by length: money where there are prices, else tokens. Both axes are logarithmic."""
    priced = any(row.cost_per_right for row in rows)
    label = f"{'cost' if priced else 'tokens'} for each right answer"
    _by_length(rows, lambda row: row.cost_per_right if priced else row.tokens_per_right, label, path)


def _by_length(rows: Sequence[Row], value: Callable[[Row], float | None], label: str, path: str | Path) -> None:
    measured = [row for row in rows if value(row)]
    if not measured:
        raise NothingToDraw(f"there is nothing to draw: {label} is not known")
    figure, axes = _plot_per_task(measured)
    colours = _colours(rows)
    for task, ax in axes.items():
        for reader, line in _lines(row for row in measured if row.task == task):
            lengths, values = [row.length for row in line], [value(row) or math.nan for row in line]
            ax.plot(lengths, values, color=colours[reader], label=reader, **_LINE)
        ax.set_yscale("log")
        locator: Any = ax.yaxis.get_major_locator()
        locator.set_params(subs=(1, 2, 5))
        ax.yaxis.set_major_formatter("{x:,.0f}" if min(filter(None, map(value, measured))) >= 1 else "{x:g}")
        ax.yaxis.set_minor_formatter("")
        ax.set_ylabel(label)
    _add_legend(figure, axes)
    _save(figure, path)


def depths(results: Iterable[Result], path: str | Path) -> None:
    """Plot the share of needles that the answer holds, by depth and length: a heat map for each reader."""
    readers = _needles(results)
    if not readers:
        raise NothingToDraw("there are no results of needle tasks: there is no heat map to draw")
    lengths = sorted({length for cells in readers.values() for _, length in cells})
    figure = _figure(len(readers), height=3.0)
    for number, (reader, cells) in enumerate(sorted(readers.items()), start=1):
        ax = figure.add_subplot(*_grid(len(readers)), number)
        shares = [[_share(cells.get((depth, length), [])) for length in lengths] for depth in range(_DEPTHS)]
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
    """Plot the share of facts in the memory by the number of chunks since they were read.

    There is one line for each reader, over all its tasks and lengths.
    """
    readers: dict[str, list[tuple[FactTrace, ...]]] = {}
    for result in results:
        if result.traces:
            readers.setdefault(result.reader, []).append(result.traces)
    if not readers:
        raise NothingToDraw("no reader has a memory to follow: there is no curve to draw")
    figure = _figure(1)
    ax = figure.add_subplot()
    for reader, traced in sorted(readers.items()):
        curve = survival_curve(traced)
        distances, shares = [point.distance for point in curve], [100 * point.share for point in curve]
        ax.plot(distances, shares, label=reader, **_LINE)
    ax.set_ylim(-3, 103)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("chunks since the fact was read")
    ax.set_ylabel("facts in memory, %")
    ax.grid(alpha=0.25)
    ax.legend(fontsize=7)
    _save(figure, path)


def _needles(results: Iterable[Result]) -> dict[str, dict[tuple[int, int], list[bool]]]:
    """Return, for each reader, whether each needle was found, by (row of the heat map, length)."""
    readers: dict[str, dict[tuple[int, int], list[bool]]] = {}
    for result in results:
        answer = (result.answer or "").casefold()
        for fact in result.facts:
            if result.task.startswith("niah") and fact.keys:
                cell = min(int(fact.depth * _DEPTHS), _DEPTHS - 1), result.length
                found = all(key.casefold() in answer for key in fact.keys)
                readers.setdefault(result.reader, {}).setdefault(cell, []).append(found)
    return readers


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else math.nan


def _tokens(row: Row) -> float:
    """Return the tokens of a sample; 0 where they are unknown or no call was made."""
    if row.prompt_tokens is None or row.completion_tokens is None:
        return 0
    return row.prompt_tokens + row.completion_tokens


def _lines(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each reader in the order of their lengths, published ones last."""

    def line(row: Row) -> tuple[bool, str]:
        return row.published, row.reader

    ordered = sorted(rows, key=lambda row: (*line(row), row.length))
    return [(reader, list(group)) for (_, reader), group in groupby(ordered, key=line)]


def _readers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(reader for reader, _ in _lines(rows)))


def _colours(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a colour for each reader, the same in every plot."""
    from matplotlib import colormaps  # slow to import

    readers = _readers(rows)
    palette = colormaps["tab10" if len(readers) <= 10 else "tab20"]
    return {reader: palette(number % palette.N) for number, reader in enumerate(readers)}


def _shifts(rows: Sequence[Row]) -> dict[str, float]:
    """Return how far each reader's points are shifted along the axis, so that error bars do not hide one another."""
    readers = _readers(rows)
    step = min(0.05, 0.4 / max(len(readers), 1))
    return {reader: step * (number - (len(readers) - 1) / 2) for number, reader in enumerate(readers)}


def _plot_per_task(rows: Sequence[Row]) -> tuple[Figure, dict[str, Axes]]:
    tasks = sorted({row.task for row in rows})
    if not tasks:
        raise NothingToDraw("there are no results: there is nothing to draw")
    figure = _figure(len(tasks))
    axes = {task: figure.add_subplot(*_grid(len(tasks)), number) for number, task in enumerate(tasks, start=1)}
    for task, ax in axes.items():
        lengths = sorted({row.length for row in rows if row.task == task})
        ax.set_title(task, fontsize=9, parse_math=False)  # a file name may hold a $
        if all(lengths):
            ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [_short(length) for length in lengths])
        ax.minorticks_off()
        ax.set_xlabel("length")
        ax.grid(alpha=0.25)
    return figure, axes


def _add_legend(figure: Figure, axes: Mapping[str, Axes]) -> None:
    """Add one legend for all plots of the figure."""
    handles: dict[str, Any] = {}
    for ax in axes.values():
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=7)


def _figure(plots: int, height: float = _HEIGHT) -> Figure:
    try:
        from matplotlib.figure import Figure  # slow to import
    except ImportError as error:
        raise MissingExtra.extra("matplotlib", "eval") from error
    rows, columns = _grid(plots)
    return Figure(figsize=(_WIDTH * columns, height * rows + 0.4), dpi=160, layout="constrained")


def _grid(plots: int) -> tuple[int, int]:
    """Return the number of rows and columns of a figure with this many plots."""
    columns = min(plots, 2)
    return -(-plots // columns), columns


def _short(length: int) -> str:
    if not length:
        return "as they are"
    if length >= 1_000_000:
        return f"{length / 1e6:g}M"
    return f"{length / 1024:g}K" if length >= 1024 and length % 1024 == 0 else f"{length:,}"


def _save(figure: Figure, path: str | Path) -> None:
    with files.accessing("write", path):
        figure.savefig(path)
