"""A picture of a training: what was rewarded, what was learned, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memagent_integrations.errors import UsageError
from memagent_integrations.files import reason

_PANELS = (  # title, figures in it, lowest and highest value
    ("reward", ("reward", "validation"), (0.0, 1.0)),
    ("groups whose rewards are all equal", ("collapsed",), (0.0, 1.0)),
    ("entropy of a token", ("entropy",), (0.0, None)),
    ("divergence from the start", ("kl",), (0.0, None)),
    ("tokens of a memory and of an answer", ("memory_tokens", "answer_tokens"), (0.0, None)),
    ("norm of the gradient", ("gradient_norm",), (0.0, None)),
)
_SMOOTH = 20  # points of which a curve shows the mean, where there are many


def curves(lines: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw what `metrics.read` gives; a figure that is in no line is left out.

    Raises:
        UsageError: there is nothing to draw, or the file cannot be written.
    """
    panels = [panel for panel in _PANELS if any(name in line for line in lines for name in panel[1])]
    if not panels:
        raise UsageError("there are no metrics to draw")
    figure = Figure(figsize=(9, 2.6 * ((len(panels) + 1) // 2)), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    for number, (title, names, (low, high)) in enumerate(panels, start=1):
        axes = figure.add_subplot((len(panels) + 1) // 2, 2, number)
        for place, name in enumerate(names):
            _curve(axes, [(line["step"], line[name]) for line in lines if name in line], name, f"C{place}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("batch", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(low, high)
        axes.grid(alpha=0.3)
        if sum(any(name in line for line in lines) for name in names) > 1:
            axes.legend(fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {str(path)!r}: {reason(error)}") from error


def _curve(axes: Axes, points: Sequence[tuple[int, float]], name: str, colour: str) -> None:
    """The points, and where there are many their running mean."""
    if not points:
        return
    steps, values = zip(*points, strict=True)
    many = len(points) > 2 * _SMOOTH
    axes.plot(
        steps,
        values,
        color=colour,
        alpha=0.3 if many else 1.0,
        marker=None if many else ".",
        label=None if many else name,
    )
    if many:
        means = [sum(values[max(end - _SMOOTH, 0) : end]) / min(end, _SMOOTH) for end in range(1, len(values) + 1)]
        axes.plot(steps, means, color=colour, label=name)
