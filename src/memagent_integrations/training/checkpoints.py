"""Checkpoints of a training: weights, optimizer and progress. A kill at any instant leaves the last one whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from memagent_integrations import files
from memagent_integrations.backends.in_process import one_line
from memagent_integrations.errors import UsageError
from memagent_integrations.training.policy import trainable

_WEIGHTS, _LEARNER, _STATE = "weights.safetensors", "learner.pt", "state.json"
LOCK = "training.lock"
_WRITTEN_BY_US = ("metrics.jsonl", LOCK, "checkpoints", "start", "start.new", f"best/{_STATE}")
_MAY_DIFFER = ("steps", "passes", "evaluate_every", "save_every", "keep", "readings_every", "tokens")
"""Settings that may change when a training resumes."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is: batches done, questions drawn by each process, and the best validation score so far.

    Everything random follows from the settings' seed and these numbers, so no generator state is kept.
    """

    step: int = 0
    positions: tuple[int, ...] = (0,)
    best: float | None = None


@dataclass(kw_only=True)
class Checkpoints:
    """The checkpoints of one training.

    `fingerprint` describes how the training was begun; a training that was begun in another way does not resume from
    them. `model` is the policy's model, `stateful` are the other objects with a state (optimizer, scheduler), by name.
    """

    folder: Path
    fingerprint: Mapping[str, Any]
    model: Any
    stateful: Mapping[str, Any] = field(default_factory=dict)

    def save(self, progress: Progress, *, keep: int) -> None:
        """Write a checkpoint and delete all but the last `keep`.

        Raises:
            UsageError: it cannot be written.
        """
        self._write(self.folder / "checkpoints" / f"step-{progress.step:06d}", progress)
        for old in self._list()[:-keep]:
            shutil.rmtree(old)

    def start(self) -> dict[str, torch.Tensor]:
        """Return the weights with which the training began.

        The first call writes them. Later calls read them, and load them into the model if there is no checkpoint yet.

        Raises:
            UsageError: they belong to another training, are damaged or cannot be written; or the folder holds
                something else.
        """
        check(self.folder)
        start = self.folder / "start"
        if start.is_dir():
            self._read_progress(start)
            if not self._list():
                load(self.model, start)
        else:
            self._write(start, Progress())
        return {name: weight.to(self.model.device) for name, weight in _weights(self.model, start).items()}

    def keep_best(self, progress: Progress) -> None:
        """Write the weights with the best validation score so far."""
        self._write(self.folder / "best", progress)

    def resume(self) -> Progress | None:
        """Load the last checkpoint and return its progress; None if there is no checkpoint.

        Raises:
            UsageError: the checkpoint is damaged, or of a training that was begun in another way.
        """
        best, previous = self.folder / "best", self.folder / "best.old"
        if not best.exists():  # the process was killed while it replaced `best`
            with suppress(FileNotFoundError):
                previous.replace(best)
        checkpoints = self._list()
        if not checkpoints:
            return None
        last = checkpoints[-1]
        progress = self._read_progress(last)
        load(self.model, last)
        with _reading(last / _LEARNER) as file:
            states = torch.load(file, map_location=self.model.device, weights_only=True)
            for name, part in self.stateful.items():
                part.load_state_dict(states[name])
        return progress

    def _read_progress(self, checkpoint: Path) -> Progress:
        """Return the progress of a checkpoint.

        Raises:
            UsageError: it cannot be read, or is of a training with other settings.
        """
        with _reading(checkpoint / _STATE) as file:
            state = json.loads(file.read_text(encoding="utf-8"))
            saved = state["progress"] if "progress" in state else state["place"]  # the key in older checkpoints
            progress = Progress(**saved | {"positions": tuple(saved["positions"])})
            then = dict(state["fingerprint"])
        now = json.loads(json.dumps(dict(self.fingerprint)))
        if changed := files.differences(then, now, ignored=_MAY_DIFFER):
            raise UsageError(
                f"{str(self.folder)!r} holds a training with other settings ({changed}); give another folder"
            )
        return progress

    def _list(self) -> list[Path]:
        """Return the complete checkpoints in the order of their steps."""
        every = (self.folder / "checkpoints").glob("step-*")
        return sorted(path for path in every if path.name.removeprefix("step-").isdecimal())

    def _write(self, target: Path, progress: Progress) -> None:
        """Write a checkpoint under another name beside `target`, then rename it."""
        new, old = (target.with_name(f"{target.name}.{suffix}") for suffix in ("new", "old"))
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            self._write_files(new, progress)
            _sync(new)
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.replace(old)
            new.replace(target)
            _sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError, RuntimeError) as error:  # a full disk is a RuntimeError of torch
            shutil.rmtree(new, ignore_errors=True)
            cause = files.reason(error) if isinstance(error, OSError) else one_line(error)
            raise UsageError(f"cannot write {str(target)!r}: {cause}") from error

    def _write_files(self, folder: Path, progress: Progress) -> None:
        weights = {name: parameter.detach().contiguous() for name, parameter in trainable(self.model).items()}
        save_file(weights, folder / _WEIGHTS)
        torch.save({name: part.state_dict() for name, part in self.stateful.items()}, folder / _LEARNER)
        state = {"progress": asdict(progress), "fingerprint": dict(self.fingerprint)}
        (folder / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        for file in folder.iterdir():
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())


def check(folder: str | Path) -> None:
    """Make the folder of a training, and check that it holds nothing else.

    Raises:
        UsageError: it cannot be made, or holds what no training has written.
    """
    folder = Path(folder)
    with files.accessing("write", folder):
        folder.mkdir(files.OWNERS_FOLDER, parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    if not empty and not any((folder / name).exists() for name in _WRITTEN_BY_US):
        raise UsageError(f"{str(folder)!r} holds what no training has written; give a folder of its own")


def load(model: Any, checkpoint: str | Path) -> None:
    """Load the weights of a checkpoint, or of `best`, into a model that was prepared in the same way.

    Raises:
        UsageError: there are none, or they are of another model; then `model` is unchanged.
    """
    weights = _weights(model, Path(checkpoint))
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(weights[name])


def _weights(model: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint after checking that their names and shapes are those of the model."""
    with _reading(checkpoint / _WEIGHTS) as file:
        weights = load_file(file)
    saved, expected = (
        {name: tuple(weight.shape) for name, weight in tensors.items()} for tensors in (weights, trainable(model))
    )
    if wrong := sorted(name for name in {*saved, *expected} if saved.get(name) != expected.get(name)):
        shapes = f"{wrong[0]} has the shape {saved.get(wrong[0])} there and {expected.get(wrong[0])} here"
        raise UsageError(f"{str(file)!r} holds no weights of this model: {shapes} (None: it is not there)")
    return weights


@contextmanager
def _reading(file: Path) -> Iterator[Path]:
    """Turn any error of the block into one that names the file; json, pickle, zip, torch and safetensors differ."""
    try:
        yield file
    except Exception as error:
        advice = f"remove {str(file.parent)!r} to go on without it"
        raise UsageError(f"cannot read {str(file)!r} ({one_line(error)}); {advice}") from error


def _sync(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the system can open a folder."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
