"""Trainings that are killed, and what they made compared with what undisturbed ones make."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.tiny_trainer import WAIT, figures, process, weights
from memagent_integrations.training.base import Training
from memagent_integrations.training.metrics import read


def assert_same(one: Training, other: Training) -> None:
    """They made the same figures, have the same weights, and kept the same."""
    lines, others = (figures(read(training.folder / "metrics.jsonl")) for training in (one, other))
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, expected in zip(lines, others, strict=True):
        assert line == pytest.approx(expected, abs=1e-6)
    assert one.progress == other.progress
    assert torch.allclose(weights(one), weights(other), atol=1e-6)
    for kept in ("start", "best"):
        if (one.folder / kept).exists():
            saved, expected = (load_file(training.folder / kept / "weights.safetensors") for training in (one, other))
            assert all(torch.allclose(saved[name], expected[name], atol=1e-6) for name in {*saved, *expected})


def killed_at_a_rename(pipe: Any, number: int, run: Callable[..., None], *args: Any) -> None:
    """Run until a rename would be the one of this number; what is left then is what the disk has."""
    rename, done = Path.replace, 0

    def counted(self: Path, target: Any) -> Path:
        nonlocal done
        done += 1
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.replace = counted  # type: ignore[method-assign]  # the process is nobody else's
    run(*args)
    pipe.send(done)


def ran_through(number: int, run: Callable[..., None], *args: Any) -> bool:
    """Whether there were fewer renames; else the process was killed."""
    with process(killed_at_a_rename, number, run, *args) as (worker, pipe):
        assert pipe.poll(WAIT)
        try:
            assert pipe.recv() == number - 1
        except EOFError:
            worker.join()
            assert worker.exitcode == -signal.SIGKILL
            return False
        return True


def survived_kills(make: Callable[[Path, Path], Training], model: Path, folder: Path) -> int:
    """Kill a training at its first rename, at its second, and so on; each ends the same. Return how many there are."""
    undisturbed = make(model, folder / "whole")
    list(undisturbed.train())
    number = 1
    while not ran_through(number, _train, make, model, folder / str(number)):
        last = make(model, folder / str(number))
        list(last.train())
        assert_same(undisturbed, last)
        number += 1
    return number - 1


def _train(make: Callable[[Path, Path], Training], model: Path, folder: Path) -> None:
    list(make(model, folder).train())
