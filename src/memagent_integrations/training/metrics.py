"""Figures of a training: means over all tokens, steps or rollouts of all processes, one line a batch in a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memagent_integrations.errors import UsageError
from memagent_integrations.files import reason


class Sums:
    """Sums that become means: added up on the way, in any order, over all processes at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, values: Tensor | Sequence[float], count: float | None = None) -> None:
        """Add values to the mean of this name; `count`: of how many things they are, if not one each."""
        total = values.detach().cpu().double().sum().item() if isinstance(values, Tensor) else sum(values)
        before, things = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = before + total, things + (len(values) if count is None else count)

    def means(self, accelerator: Any, names: Iterable[str]) -> dict[str, float]:
        """The means of these names over all processes, which have to ask for the same; of what nobody added there is none."""
        asked = list(names)
        added = totals(accelerator, [number for name in asked for number in self._sums.get(name, (0.0, 0.0))])
        pairs = zip(added[::2], added[1::2], strict=True)
        return {name: total / count for name, (total, count) in zip(asked, pairs, strict=True) if count}


def totals(accelerator: Any, values: Sequence[float]) -> list[float]:
    """Each of the values, added up over all processes."""
    if accelerator.num_processes == 1:
        return list(values)
    added: list[float] = accelerator.reduce(
        torch.tensor(values, dtype=torch.float64, device=accelerator.device), reduction="sum"
    ).tolist()
    return added


def write(path: Path, metrics: Mapping[str, Any]) -> None:
    """Add a line.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {reason(error)}") from error


def read(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole, each with its "step".

    Raises:
        UsageError: the file holds something else.
    """
    if not path.exists():
        return []
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            lines.append({"step": int((found := json.loads(line))["step"])} | found)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{path}, line {number} is no line of metrics ({type(error).__name__}: {error})"
            ) from error
    return lines


def rewind(path: Path, step: int) -> None:
    """Take away the lines behind those of batch `step`, which are made again; at the beginning all of them."""
    if not path.exists():
        return
    lines = [metrics for metrics in read(path) if metrics["step"] <= step and step]
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(json.dumps(metrics) + "\n" for metrics in lines), encoding="utf-8")
    new.replace(path)
