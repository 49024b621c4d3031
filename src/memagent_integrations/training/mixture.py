"""What a training draws its questions from: tasks, their lengths and weights, in a file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from math import gcd
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from memagent_integrations.checks import check_int, check_number
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.samples import Sample, Task
from memagent_integrations.evaluation.tasks.files import PREFIX
from memagent_integrations.tokens import Counter
from memagent_integrations.training import tables

Curriculum = Literal["all", "growing"]

SEEDS = 1 << 30
"""The least seed of a sample that is drawn for training. Evaluation stays below it."""

_HANDS = 5040  # divided by all numbers up to 10: the weights that people give are exact
_INSTEAD = {
    "ruler_hqa": "hqa_train",
    "qa_2": "hqa_train",
    "qa_1": "squad_train",
    "longbench_musique": "musique_train",
    "longbench_hotpotqa": "hqa_train",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A task of a mixture: a name of `evaluation.tasks`, the lengths of its documents in its unit, and how often it is drawn beside the others.

    Raises:
        UsageError: a length or the weight is no such number.
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
    """A question to train on; `length` is in the task's unit, 0 where documents are as long as they are."""

    task: Task
    length: int
    sample: Sample


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What stands at a position: sample `number` of a task, in its pass number `epoch` through the task (always 0 where a task has no end)."""

    task: Task
    part: Part
    epoch: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Tasks that are drawn from in turns, in proportion to their weights (to 1 in 5,040) and in an order that a seed decides.

    `curriculum`: "all" draws every length of a task from the beginning, "growing" at share p of a run only the first 1 + floor(p x lengths).

    Raises:
        UsageError: there is no task, one stands there twice, or there is no such curriculum.
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
        """The mixture in a TOML file: `curriculum`, and a table `[[task]]` with `name`, `lengths` and `weight` for each task.

        Raises:
            UsageError: the file cannot be read, or is no mixture; the message names the key.
        """
        return tables.load(path, _MIXTURE, "mixture")

    def tasks(self, data: Data) -> tuple[Task, ...]:
        """The tasks, each loaded once and kept.

        Raises:
            UsageError: a task is unknown, is one for evaluation, needs lengths or has none; or its data are missing.
        """
        return tuple(_task(part, data) for part in self.parts)

    def draw(self, position: int, *, seed: int, share: float, data: Data, count: Counter) -> Drawn:
        """The question at a position (from 0), when `share` (0.0 to 1.0) of the run is over: the same arguments, the same question.

        Positions that follow one another go through all questions of a task before one of them comes again, then in another order and with other
        paragraphs or books around it. Seeds of samples are hashes of `seed`, `SEEDS` at least: an evaluation whose seed is smaller never makes
        the same document. Tasks with a finite number of questions are those of `evaluation.tasks.TRAINING` and files alone.

        Raises:
            UsageError: as `tasks`, or the document cannot be made in this length.
        """
        turn = self.turn(position, seed=seed, data=data)
        length = self._length(turn.part, f"{seed}/{position}", share)
        made = _seed(seed, turn.task.name, turn.epoch)
        return Drawn(task=turn.task, length=length, sample=turn.task.make(length, made, turn.number, count))

    def turn(self, position: int, *, seed: int, data: Data) -> Turn:
        """What stands at a position; no document is made.

        Raises:
            UsageError: as `tasks`.
        """
        which, before = self._dealt(position, seed)
        task = self.tasks(data)[which]
        epoch, number = divmod(before[which], task.size) if task.size else (0, before[which])
        return Turn(task=task, part=self.parts[which], epoch=epoch, number=number)

    def used_up(self, position: int, *, seed: int, data: Data) -> bool:
        """Whether every question of every task stands before this position."""
        _, before = self._dealt(position, seed)
        return all(
            task.size is not None and drawn >= task.size for task, drawn in zip(self.tasks(data), before, strict=True)
        )

    def _dealt(self, position: int, seed: int) -> tuple[int, tuple[int, ...]]:
        """Which task stands at a position, and how often each was drawn before it."""
        check_int(least=0, position=position, seed=seed)
        rounds, place = divmod(position, sum(self._hands))
        order = _order(self._hands, f"{seed}/{rounds}")
        before = (rounds * hands + order[:place].count(which) for which, hands in enumerate(self._hands))
        return order[place], tuple(before)

    @cached_property
    def _hands(self) -> tuple[int, ...]:
        """How often each task is drawn in a round, after which the next begins."""
        total = sum(part.weight for part in self.parts)
        exact = [part.weight / total * _HANDS for part in self.parts]
        hands = [max(int(share), 1) for share in exact]
        for which in sorted(range(len(hands)), key=lambda which: hands[which] - exact[which])[
            : max(_HANDS - sum(hands), 0)
        ]:
            hands[which] += 1
        return tuple(number // gcd(*hands) for number in hands)

    def _length(self, part: Part, key: str, share: float) -> int:
        check_number(most=1, share=share)
        if not part.lengths:
            return 0
        known = (
            min(1 + int(share * len(part.lengths)), len(part.lengths))
            if self.curriculum == "growing"
            else len(part.lengths)
        )
        return random.Random(f"{key}/length").choice(part.lengths[:known])


_MIXTURE = TypeAdapter(Mixture)


@lru_cache(maxsize=256)
def _task(part: Part, data: Data) -> Task:
    task = tasks.load(part.name, data)
    if task.size is not None and part.name not in tasks.TRAINING and not part.name.startswith(PREFIX):
        instead = _INSTEAD.get(part.name) or part.name.replace("babilong_", "babilong_train_")
        hint = f"train on {instead}" if instead in tasks.TRAINING else f"train on others: {', '.join(tasks.TRAINING)}"
        raise UsageError(f"the questions of {part.name} are for evaluation; {hint}")
    check_lengths(part.name, task, part.lengths)
    return task


def check_lengths(name: str, task: Task, lengths: tuple[int, ...]) -> None:
    """See that a task has lengths where it needs them, and nowhere else.

    Raises:
        UsageError: it has not; `name` is how the caller knows it.
    """
    if task.unit is not None and not lengths:
        raise UsageError(f"the task {name} needs lengths, in {task.unit}: lengths = [...]")
    if task.unit is None and lengths:
        raise UsageError(f"the documents of {name} are as long as they are: leave out its lengths")


@lru_cache(maxsize=16)
def _order(hands: tuple[int, ...], key: str) -> tuple[int, ...]:
    order = [which for which, number in enumerate(hands) for _ in range(number)]
    random.Random(f"{key}/order").shuffle(order)
    return tuple(order)


def _seed(seed: int, name: str, epoch: int) -> int:
    return SEEDS | int.from_bytes(sha256(f"training/{seed}/{name}/{epoch}".encode()).digest()[:4]) % SEEDS
