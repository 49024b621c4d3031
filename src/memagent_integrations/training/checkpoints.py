"""Where a training goes on: its weights, its optimizer and its place, written so that a kill at any instant leaves the last one whole."""

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

from memagent_integrations.backends.in_process import one_line
from memagent_integrations.errors import UsageError
from memagent_integrations.files import differences, reason
from memagent_integrations.training.policy import named

_WEIGHTS, _LEARNER, _STATE = "weights.safetensors", "learner.pt", "state.json"
LOCK = "training.lock"
_OURS = ("metrics.jsonl", LOCK, "checkpoints", "start.new", f"best/{_STATE}")
_MAY_DIFFER = ("steps", "evaluate_every", "save_every", "keep", "readings_every", "tokens")
"""Settings that may be others when a training goes on."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a training is: batches done, questions drawn by each of the processes, and the best evaluation so far.

    What is drawn at random follows from the settings' seed and these, so there is no state of a generator to keep.
    """

    step: int = 0
    positions: tuple[int, ...] = (0,)
    best: float | None = None


@dataclass(kw_only=True)
class Checkpoints:
    """The checkpoints of one training.

    `fingerprint` says how the training was begun: one that was begun in another way does not go on from them. `model` is the policy's, `stateful`
    what else has a state.
    """

    folder: Path
    fingerprint: Mapping[str, Any]
    model: Any
    stateful: Mapping[str, Any] = field(default_factory=dict)

    def save(self, place: Place, *, keep: int) -> None:
        """Write a checkpoint, and take away all but the last `keep`.

        Raises:
            UsageError: it cannot be written.
        """
        self._write(self.folder / "checkpoints" / f"step-{place.step:06d}", place)
        for old in self._found()[:-keep]:
            shutil.rmtree(old)

    def start(self) -> dict[str, torch.Tensor]:
        """The weights with which the training began; they are written when this is first called, and taken again where there is no checkpoint yet.

        Raises:
            UsageError: they are those of another training, damaged, or cannot be written; or the folder has been used for something else.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write to {str(self.folder)!r}: {reason(error)}") from error
        if (self.folder / "start").is_dir():
            self._same(self.folder / "start")
            if not self._found():
                load(self.model, self.folder / "start")
        elif any(self.folder.iterdir()) and not any((self.folder / name).exists() for name in _OURS):
            raise UsageError(f"{str(self.folder)!r} holds what no training has written; give a folder of its own")
        else:
            self._write(self.folder / "start", Place())
        return {
            name: weight.to(self.model.device) for name, weight in _weights(self.model, self.folder / "start").items()
        }

    def keep_best(self, place: Place) -> None:
        """Write the weights that did best so far."""
        self._write(self.folder / "best", place)

    def resume(self) -> Place | None:
        """Load the last checkpoint; where the training is then. None: there is none.

        Raises:
            UsageError: it is that of a training that was begun in another way, or damaged.
        """
        best, before = self.folder / "best", self.folder / "best.old"
        if not best.exists():  # a kill came while it was replaced
            with suppress(FileNotFoundError):
                before.replace(best)
        found = self._found()
        if not found:
            return None
        place = self._same(found[-1])
        load(self.model, found[-1])
        with _reading(found[-1] / _LEARNER) as file:
            states = torch.load(file, map_location=self.model.device, weights_only=True)
            for name, part in self.stateful.items():
                part.load_state_dict(states[name])
        return place

    def _same(self, checkpoint: Path) -> Place:
        """The place of a checkpoint, if it is one of this training.

        Raises:
            UsageError: it is not, or cannot be read.
        """
        with _reading(checkpoint / _STATE) as file:
            kept = json.loads(file.read_text(encoding="utf-8"))
            place, then = (
                Place(**kept["place"] | {"positions": tuple(kept["place"]["positions"])}),
                dict(kept["fingerprint"]),
            )
        now = json.loads(json.dumps(dict(self.fingerprint)))
        if other := differences(then, now, ignored=_MAY_DIFFER):
            raise UsageError(
                f"{str(self.folder)!r} holds a training with other settings ({other}); give another folder"
            )
        return place

    def _found(self) -> list[Path]:
        """The checkpoints that are whole, the last one last."""
        return sorted(
            path for path in (self.folder / "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdecimal()
        )

    def _write(self, target: Path, place: Place) -> None:
        """The folder is made beside its place and then put there."""
        new, old = (target.with_name(f"{target.name}.{suffix}") for suffix in ("new", "old"))
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            save_file(
                {name: parameter.detach().contiguous() for name, parameter in named(self.model).items()}, new / _WEIGHTS
            )
            torch.save({name: part.state_dict() for name, part in self.stateful.items()}, new / _LEARNER)
            (new / _STATE).write_text(
                json.dumps({"place": asdict(place), "fingerprint": dict(self.fingerprint)}, indent=1), encoding="utf-8"
            )
            for file in new.iterdir():
                with file.open("rb+") as handle:
                    os.fsync(handle.fileno())
            _sync(new)
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.replace(old)
            new.replace(target)
            _sync(target.parent)
            shutil.rmtree(old, ignore_errors=True)
        except (
            OSError,
            SafetensorError,
            RuntimeError,
        ) as error:  # torch and safetensors tell of a full disk in their own ways
            shutil.rmtree(new, ignore_errors=True)
            raise UsageError(
                f"cannot write {str(target)!r}: {reason(error) if isinstance(error, OSError) else one_line(error)}"
            ) from error


def load(model: Any, checkpoint: str | Path) -> None:
    """Put the weights of a checkpoint, or of `best`, into a model that was made ready in the same way.

    Raises:
        UsageError: there are none, or they are those of another model, which is left as it was.
    """
    weights = _weights(model, Path(checkpoint))
    with torch.no_grad():
        for name, parameter in named(model).items():
            parameter.copy_(weights[name])


def _weights(model: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Those of a checkpoint, if they are a model's."""
    with _reading(checkpoint / _WEIGHTS) as file:
        weights = load_file(file)
    kept, own = ({name: tuple(weight.shape) for name, weight in found.items()} for found in (weights, named(model)))
    if other := sorted(name for name in {*kept, *own} if kept.get(name) != own.get(name)):
        told = f"{other[0]} has the shape {kept.get(other[0])} there and {own.get(other[0])} here"
        raise UsageError(f"{str(file)!r} holds no weights of this model: {told} (None: it is not there)")
    return weights


@contextmanager
def _reading(file: Path) -> Iterator[Path]:
    """Turn whatever a file of a checkpoint makes its reader raise into an error that names it."""
    try:
        yield file
    except Exception as error:  # json, pickle, zip, torch and safetensors have their own each
        raise UsageError(
            f"cannot read {str(file)!r} ({one_line(error)}); remove {str(file.parent)!r} to go on without it"
        ) from error


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk, where a folder can be opened."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
