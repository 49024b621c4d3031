"""Metrics of a training: means over all tokens, steps or rollouts of all processes, one JSON line per batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memagent_integrations import files
from memagent_integrations.errors import UsageError


class Sums:
    """Sums that become means: filled in any order in each process, added up over all processes at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, values: Tensor | Sequence[float], count: float | None = None) -> None:
        """Add values to the mean called `name`; `count` is what they are divided by, if not their number."""
        total = values.detach().cpu().double().sum().item() if isinstance(values, Tensor) else sum(values)
        total_before, count_before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = total_before + total, count_before + (len(values) if count is None else count)

    def means(self, accelerator: Any, names: Iterable[str]) -> dict[str, float]:
        """Return these means over all processes, without those that have no values.

        Every process has to call this with the same names.
        """
        names = list(names)
        summed = totals(accelerator, [number for name in names for number in self._sums.get(name, (0.0, 0.0))])
        pairs = zip(summed[::2], summed[1::2], strict=True)
        return {name: total / count for name, (total, count) in zip(names, pairs, strict=True) if count}


def totals(accelerator: Any, values: Sequence[float]) -> list[float]:
    """Return each value added up over all processes."""
    if accelerator.num_processes == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    summed: list[float] = accelerator.reduce(tensor, reduction="sum").tolist()
    return summed


def write(path: Path, metrics: Mapping[str, Any]) -> None:
    """Append a line.

    Raises:
        UsageError: the file cannot be written.
    """
    with files.accessing("write", path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines, each with its "step"; an unfinished last line is left out.

    Raises:
        UsageError: the file cannot be read, or a line holds no metrics.
    """
    if not path.exists():
        return []
    lines = []
    for number, line in enumerate(files.read_bytes(path).split(b"\n")[:-1], 1):
        try:
            metrics = json.loads(line)
            lines.append({"step": int(metrics["step"])} | metrics)
        except (ValueError, TypeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise UsageError(f"{path}, line {number} is no line of metrics ({problem})") from error
    return lines


def rewind(path: Path, step: int) -> None:
    """Delete the lines after batch `step`, which is done again; at step 0 all lines.

    Raises:
        UsageError: the file cannot be read or written.
    """
    if path.exists():
        kept = [metrics for metrics in read(path) if metrics["step"] <= step and step]
        files.write(path, "".join(json.dumps(metrics) + "\n" for metrics in kept))
