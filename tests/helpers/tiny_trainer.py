"""A trainer of a model small enough to be trained in tests, and processes that train."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from carry_a_fact import TASK, drawn, model_of, reader_of

from memagent_integrations.evaluation.samples import Sample, Task
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Settings
from memagent_integrations.training.trainer import Trainer

__all__ = [
    "asked",
    "by_key",
    "draw",
    "drawn",
    "echo",
    "figures",
    "letters",
    "model_of",
    "process",
    "reader_of",
    "trainer",
    "weights",
]

SMALL = {
    "questions": 4,
    "group": 4,
    "updates": 2,
    "learning_rate": 1e-3,
    "warmup": 0,
    "kl": 0.0,
    "lora": None,
    "evaluate_every": 0,
    "readings_every": 0,
}
_PROCESSES = multiprocessing.get_context(
    "forkserver"
)  # a server imports once; it has computed nothing when a process is forked from it
_PROCESSES.set_forkserver_preload(
    ["matplotlib.figure", "memagent_integrations.training.trainer", "transformers.models.llama.modeling_llama"]
)


def draw(number: int, share: float) -> Any:
    return drawn(("train", number))


def echo(reading: Any, asked: Any) -> float:
    """A reward that an untrained model gets sometimes: of its memories, how many are one sign."""
    memories = [step.reply.text for step in reading.steps if step.phase == "memory"]
    return sum(len(memory) == 1 for memory in memories) / len(memories)


def letters(reading: Any, asked: Any) -> float:
    """A reward that hardly two readings share."""
    return sum(len(step.reply.text) for step in reading.steps) / 100


def by_key(reading: Any, asked: Any) -> float:
    """Questions with an odd key teach nothing."""
    return 1.0 if int(asked.sample.question[1:]) % 2 else letters(reading, asked)


class Letters(Task):
    """An answer scores by its length: those of an untrained model differ."""

    def score(self, answer: str, sample: Sample) -> float:
        return len(answer) / 10


def asked(name: str, questions: int) -> list[Drawn]:
    """A validation set."""
    task = Letters(name=name, metric="em", make=TASK.make, unit=None)
    return [replace(drawn((name, number)), task=task) for number in range(questions)]


def trainer(
    model: Path, folder: Path, kind: type[Sampler] = Sampler, adapter: Path | None = None, **settings: Any
) -> Trainer:
    """A trainer of what `model_of` made; `settings` are those of `Settings` and `Trainer`."""
    more = {name: settings.pop(name) for name in ("validation", "reward", "draw", "accelerator") if name in settings}
    told = Settings(**(SMALL | {"steps": 3} | settings))
    reader = reader_of(model, kind, temperature=told.temperature, adapter=adapter)
    return Trainer(reader, more.pop("draw", draw), told, folder, **({"reward": echo} | more))


def figures(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Metrics without what the clock says."""
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def weights(found: Trainer) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().flatten() for parameter in found.policy.model.parameters() if parameter.requires_grad]
    )


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Connection]]:
    """`target(pipe, *args)` in a process of its own, and the other end of the pipe; it is killed at the end of the block."""
    here, there = _PROCESSES.Pipe()
    worker = _PROCESSES.Process(target=_run, args=(target, torch.get_num_threads(), there, *args), daemon=True)
    worker.start()
    there.close()
    try:
        yield worker, here
    finally:
        worker.kill()
        worker.join()
        here.close()


def _run(target: Callable[..., None], threads: int, *args: Any) -> None:
    torch.set_num_threads(threads)
    target(*args)
