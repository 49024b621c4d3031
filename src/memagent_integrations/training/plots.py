"""Draw the curves of a training: rewards, what was learned, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memagent_integrations import files
from memagent_integrations.errors import UsageError

_PANELS = (  # title, metrics in it, lowest and highest value
    ("reward and validation", ("reward", "validation"), (0.0, 1.0)),
    ("loss", ("loss",), (None, None)),
    ("groups whose rewards are all equal", ("collapsed",), (0.0, 1.0)),
    ("entropy of a token", ("entropy",), (0.0, None)),
    ("divergence from the start", ("kl",), (0.0, None)),
    ("tokens of a memory and of an answer", ("memory_tokens", "answer_tokens"), (0.0, None)),
    ("norm of the gradient", ("gradient_norm",), (0.0, None)),
    ("learning rate", ("learning_rate",), (0.0, None)),
)
_WINDOW = 20  # points of the running mean, which is drawn over long curves


def curves(lines: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw the lines of `metrics.read`; a metric that is in no line is left out.

    Raises:
        UsageError: there is nothing to draw, or the file cannot be written.
    """
    panels = [panel for panel in _PANELS if any(name in line for line in lines for name in panel[1])]
    if not panels:
        raise UsageError("there are no metrics to draw")
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(9, 2.6 * rows), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    for number, (title, names, (low, high)) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, 2, number)
        for colour, name in enumerate(names):
            _curve(axes, [(line["step"], line[name]) for line in lines if name in line], name, f"C{colour}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(low, high)
        axes.grid(alpha=0.3)
        if sum(any(name in line for line in lines) for name in names) > 1:
            axes.legend(fontsize=8)
    with files.accessing("write", path):
        figure.savefig(path)


def _curve(axes: Axes, points: Sequence[tuple[int, float]], name: str, colour: str) -> None:
    """Draw the points; if there are many, faintly, with their running mean over them."""
    if not points:
        return
    steps, values = zip(*points, strict=True)
    if len(points) <= 2 * _WINDOW:
        axes.plot(steps, values, color=colour, marker=".", label=name)
        return
    axes.plot(steps, values, color=colour, alpha=0.3)
    means = [sum(values[max(end - _WINDOW, 0) : end]) / min(end, _WINDOW) for end in range(1, len(values) + 1)]
    axes.plot(steps, means, color=colour, label=name)
