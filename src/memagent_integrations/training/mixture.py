"""The mixture that a training draws its questions from: tasks, their lengths and weights, in a file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import gcd
from operator import mul
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from memagent_integrations.checks import check_int, check_number
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.samples import Sample, Task
from memagent_integrations.evaluation.tasks import prose
from memagent_integrations.evaluation.tasks.files import PREFIX
from memagent_integrations.records import Reading
from memagent_integrations.tokens import Counter
from memagent_integrations.training import tables

Curriculum = Literal["all", "growing"]

SEEDS = 1 << 30
"""The least seed of a sample that is drawn for training. Evaluation stays below it."""

_ROUND = 5040  # turns in a round, before division by the counts' gcd; divisible by all numbers up to 10
_TRAINING_TASKS = {  # the task to train on in place of one for evaluation
    "ruler_hqa": "hqa_train",
    "qa_2": "hqa_train",
    "qa_1": "squad_train",
    "longbench_musique": "musique_train",
    "longbench_hotpotqa": "hqa_train",
    **dict(zip(prose.EVALUATION, prose.TRAINING, strict=True)),
    "cloze": "cloze_train",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A task of a mixture.

    Args:
        name: a name of `evaluation.tasks`.
        lengths: the lengths of its documents, in its unit.
        weight: how often it is drawn, relative to the others.

    Raises:
        UsageError: a length or the weight is out of range.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: str
    lengths: tuple[int, ...] = ()
    weight: float = 1.0

    def __post_init__(self) -> None:
        for length in self.lengths:
            check_int(lengths=length)
        check_number(weight=self.weight)
        if not self.weight:
            raise UsageError(f"the weight of {self.name} has to be more than 0; leave the task out")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A question to train on; `length` is in the task's unit, 0 where documents have a length of their own."""

    task: Task
    length: int
    sample: Sample

    def score(self, reading: Reading) -> float:
        """Return the score of a reading's answer by the metric of its task, from 0.0 to 1.0; 0.0 without an answer."""
        if reading.answer is None:
            return 0.0
        return self.task.score(reading.answer, self.sample, reply=reading.steps[-1].reply.text)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The question at a position: sample `number` of a task, in pass `epoch` through it (0 if the task is endless)."""

    task: Task
    part: Part
    epoch: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Tasks to draw from in proportion to their weights (to 1 in 5,040), in an order that a seed decides.

    A task with several questions about a document is drawn so many times in a row. `curriculum` "all" draws every
    length of a task from the beginning; "growing" draws, at share p of a run, only the first 1 + floor(p * lengths).

    Raises:
        UsageError: there is no task, a task occurs twice, or the curriculum is unknown.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    parts: Annotated[tuple[Part, ...], Field(validation_alias="task")]
    curriculum: Curriculum = "all"

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names:
            raise UsageError("a mixture needs at least one task: [[task]], name = ...")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"the task {twice} stands in the mixture twice: give it all its lengths in one place")
        if self.curriculum not in ("all", "growing"):
            raise UsageError(f"curriculum has to be all or growing, not {self.curriculum!r}")

    @classmethod
    def load(cls, path: str | Path) -> Mixture:
        """Read a TOML file: `curriculum`, and for each task a table `[[task]]` with `name`, `lengths` and `weight`.

        Raises:
            UsageError: the file cannot be read, or is no mixture; the message names the key.
        """
        return tables.load(path, _MIXTURE, "mixture")

    def tasks(self, data: Data) -> tuple[Task, ...]:
        """Return the tasks, each loaded once and kept.

        Raises:
            UsageError: a task is unknown, is for evaluation, or has no lengths where it needs them (or lengths where it
                takes none); or its data are missing.
        """
        return tuple(_load_task(part, data) for part in self.parts)

    def draw(self, position: int, *, seed: int, share: float, data: Data, count: Counter) -> Drawn:
        """Return the question at a position (from 0) when `share` (0.0 to 1.0) of the run is over.

        The same arguments give the same question. Consecutive positions go through all questions of a task before one
        repeats, then in another order and with other paragraphs or books around them. Seeds of samples are hashes of
        `seed`, and at least `SEEDS`: an evaluation with a smaller seed never makes the same document. The only tasks
        with a finite number of questions are those of `evaluation.tasks.TRAINING`, and files. The questions about a
        document have the same document, byte for byte, if the curriculum allows the same lengths at each of them.

        Raises:
            UsageError: as `tasks`, or the document cannot be made in this length.
        """
        slot = self.slot(position, seed=seed, data=data)
        first = position - slot.number % slot.task.questions  # the position of the document's first question
        length = self._length(slot.part, f"{seed}/{first}", share)
        sample_seed = _sample_seed(seed, slot.task.name, slot.epoch)
        return Drawn(task=slot.task, length=length, sample=slot.task.make(length, sample_seed, slot.number, count))

    def slot(self, position: int, *, seed: int, data: Data) -> Slot:
        """Return which question is at a position, without making its document.

        Raises:
            UsageError: as `tasks`.
        """
        index, draws_before = self._deal(position, seed, data)
        task = self.tasks(data)[index]
        before = draws_before[index]
        epoch, number = divmod(before, task.size) if task.size else (0, before)
        return Slot(task=task, part=self.parts[index], epoch=epoch, number=number)

    def used_up(self, position: int, *, seed: int, data: Data) -> bool:
        """Return whether every question of every task comes before this position."""
        _, draws_before = self._deal(position, seed, data)
        pairs = zip(self.tasks(data), draws_before, strict=True)
        return all(task.size is not None and drawn >= task.size for task, drawn in pairs)

    def _deal(self, position: int, seed: int, data: Data) -> tuple[int, tuple[int, ...]]:
        """Return the index of the task at a position, and how often each task was drawn before it."""
        check_int(least=0, position=position, seed=seed)
        questions = tuple(task.questions for task in self.tasks(data))
        turns = _turns_per_round(tuple(part.weight for part in self.parts), questions)
        rounds, within = divmod(position, sum(map(mul, turns, questions)))
        order = _round_order(turns, questions, f"{seed}/{rounds}")
        drawn = zip(map(mul, turns, questions), map(order[:within].count, range(len(turns))), strict=True)
        return order[within], tuple(rounds * per_round + before for per_round, before in drawn)

    def _length(self, part: Part, key: str, share: float) -> int:
        check_number(most=1, share=share)
        if not part.lengths:
            return 0
        allowed = len(part.lengths)
        if self.curriculum == "growing":
            allowed = min(1 + int(share * allowed), allowed)
        return random.Random(f"{key}/length").choice(part.lengths[:allowed])


_MIXTURE = TypeAdapter(Mixture)


@lru_cache(maxsize=256)
def _load_task(part: Part, data: Data) -> Task:
    task = tasks.load(part.name, data)
    held_out = task.size is not None or part.name in _TRAINING_TASKS
    if held_out and part.name not in tasks.TRAINING and not part.name.startswith(PREFIX):
        other = _TRAINING_TASKS.get(part.name) or part.name.replace("babilong_", "babilong_train_")
        hint = f"train on {other}" if other in tasks.TRAINING else f"train on others: {', '.join(tasks.TRAINING)}"
        raise UsageError(f"the questions of {part.name} are for evaluation; {hint}")
    check_lengths(part.name, task, part.lengths)
    return task


def check_lengths(name: str, task: Task, lengths: tuple[int, ...]) -> None:
    """Check that a task is given lengths if it needs them, and none otherwise; `name` is for the message.

    Raises:
        UsageError: lengths are missing, or given to a task that takes none.
    """
    if task.unit is not None and not lengths:
        raise UsageError(f"the task {name} needs lengths, in {task.unit}: lengths = [...]")
    if task.unit is None and lengths:
        raise UsageError(f"the documents of {name} are as long as they are: leave out its lengths")


@lru_cache(maxsize=16)
def _turns_per_round(weights: tuple[float, ...], questions: tuple[int, ...]) -> tuple[int, ...]:
    """Return how often each task has its turn in a round, by the method of largest remainders.

    In a turn, all questions about a document are drawn.
    """
    shares = [weight / number for weight, number in zip(weights, questions, strict=True)]
    exact = [share / sum(shares) * _ROUND for share in shares]
    turns = [max(int(number), 1) for number in exact]
    by_remainder = sorted(range(len(turns)), key=lambda index: turns[index] - exact[index])
    for index in by_remainder[: max(_ROUND - sum(turns), 0)]:
        turns[index] += 1
    return tuple(number // gcd(*turns) for number in turns)


@lru_cache(maxsize=16)
def _round_order(turns: tuple[int, ...], questions: tuple[int, ...], key: str) -> tuple[int, ...]:
    """Return the index of the task at each position of a round."""
    order = [index for index, number in enumerate(turns) for _ in range(number)]
    random.Random(f"{key}/order").shuffle(order)
    return tuple(index for index in order for _ in range(questions[index]))


def _sample_seed(seed: int, name: str, epoch: int) -> int:
    return SEEDS | int.from_bytes(sha256(f"training/{seed}/{name}/{epoch}".encode()).digest()[:4]) % SEEDS
