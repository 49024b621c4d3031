"""A trainer of a model small enough to be trained in tests, and processes that train."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from helpers.processes import PROCESSES

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from carry_a_fact import PROMPTS, TASK, constructed, drawn, fact, model_of, reader_of

from memagent_integrations.evaluation.samples import Sample, Task
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Settings
from memagent_integrations.training.trainer import Trainer

__all__ = [
    "PROMPTS",
    "WAIT",
    "by_key",
    "constructed",
    "draw",
    "drawn",
    "echo",
    "fact",
    "figures",
    "join",
    "letters",
    "model_of",
    "process",
    "reader_of",
    "trainer",
    "validation_set",
    "weights",
]

WAIT = 600
"""Seconds after which a test gives up on a process that is silent."""
SMALL = {
    "questions": 4,
    "group": 4,
    "updates": 2,
    "learning_rate": 1e-3,
    "warmup": 0,
    "kl": 0.0,
    "lora": None,
    "embeddings": True,
    "evaluate_every": 0,
    "readings_every": 0,
}


def draw(number: int, share: float) -> Any:
    return drawn(("train", number))


def echo(reading: Any, question: Any) -> float:
    """A reward that an untrained model sometimes gets: the share of its memories that are one sign."""
    memories = [step.reply.text for step in reading.steps if step.phase == "memory"]
    return sum(len(memory) == 1 for memory in memories) / len(memories)


def letters(reading: Any, question: Any) -> float:
    """A reward that hardly any two readings share."""
    return sum(len(step.reply.text) for step in reading.steps) / 100


def by_key(reading: Any, question: Any) -> float:
    """A reward that is equal for all readings of a question with an odd key."""
    return 1.0 if int(question.sample.question[1:]) % 2 else letters(reading, question)


class Letters(Task):
    """The score of an answer is its length, which differs between answers of an untrained model."""

    def score(self, answer: str, sample: Sample, *, reply: str | None = None) -> float:
        return len(answer) / 10


def validation_set(name: str, questions: int) -> list[Drawn]:
    task = Letters(name=name, metric="em", make=TASK.make, unit=None)
    return [replace(drawn((name, number)), task=task) for number in range(questions)]


def trainer(
    model: Path, folder: Path, kind: type[Sampler] = Sampler, adapter: Path | None = None, **settings: Any
) -> Trainer:
    """Return a trainer of a model of `model_of`; `settings` are those of `Settings` and `Trainer`."""
    names = ("validation", "reward", "draw", "accelerator")
    arguments = {"reward": echo, "draw": draw} | {name: settings.pop(name) for name in names if name in settings}
    merged = Settings(**(SMALL | {"steps": 3} | settings))
    reader = reader_of(model, kind, temperature=merged.temperature, adapter=adapter)
    return Trainer(reader, settings=merged, folder=folder, **arguments)


def figures(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the metrics without those that are measured in seconds."""
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def weights(trained: Trainer) -> torch.Tensor:
    parameters = trained.policy.model.parameters()
    return torch.cat([parameter.detach().flatten() for parameter in parameters if parameter.requires_grad])


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Connection]]:
    """Run `target(pipe, *args)` in another process, and yield it with our end of the pipe; kill it at the end."""
    here, there = PROCESSES.Pipe()
    worker = PROCESSES.Process(target=_run, args=(target, torch.get_num_threads(), there, *args), daemon=True)
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


def join(rank: int, meeting: Path) -> Accelerator:
    """Make this process one of two that train together; they meet in a file, since another program may take a port."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    torch.distributed.init_process_group(
        "gloo", init_method=meeting.as_uri(), rank=rank, world_size=2, timeout=timedelta(seconds=WAIT)
    )
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    return accelerator
