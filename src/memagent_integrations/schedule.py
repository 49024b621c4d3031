"""Which of many readings goes on next: those of one document advance together, section by section."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from memagent_integrations.records import Prompt

AHEAD = 32
"""Sections by which one reading may be ahead of another of its document: so many of its chunks are kept at most."""


@dataclass(kw_only=True, eq=False)
class Waiting:
    """The seconds that a reading waited between its steps, `paused`, which do not count towards its time limit."""

    paused: float = 0.0
    _since: float | None = None
    _waited: float = 0.0

    def pause(self) -> None:
        """Begin to wait."""
        self._since = time.monotonic()

    def resume(self) -> None:
        """End the waiting."""
        if self._since is not None:
            self._waited, self._since = time.monotonic() - self._since, None
            self.paused += self._waited

    def resumed(self, prompt: Prompt) -> Prompt:
        """Return the prompt that waited with the reading: this time does not count towards its deadline."""
        waited, self._waited = self._waited, 0.0
        return replace(prompt, deadline=prompt.deadline + waited) if prompt.deadline else prompt


@dataclass(kw_only=True, eq=False)
class Task(Waiting):
    """A reading among others: its number, and the steps that it has made.

    `leads`: it is the first that comes to its section, and the others wait until `Schedule.opened`.
    """

    number: int
    group: _Group = field(repr=False)
    steps: int = 0
    leads: bool = False


class _Group:
    """The readings of one document."""

    def __init__(self) -> None:
        self.ready: dict[int, deque[Task]] = {}  # by the steps that they have made
        self.left: Counter[int] = Counter()  # readings that have not ended, by the same
        self.closed: set[int] = set()  # sections of which one reading makes the first call
        self.opened: set[int] = set()
        self.several = False

    def add(self, task: Task) -> None:
        self.ready.setdefault(task.steps, deque()).append(task)
        self.left[task.steps] += 1

    def take(self, *, leading: bool) -> Task | None:
        """Return the reading that has come least far, of those that may go on."""
        for steps in sorted(self.ready):
            if steps > min(self.left) + AHEAD:
                break
            if steps not in self.closed:
                return self._taken(steps, leading=leading and self.several)
        return None

    def _taken(self, steps: int, *, leading: bool) -> Task:
        task = self.ready[steps].popleft()
        if not self.ready[steps]:
            del self.ready[steps]
        task.leads = leading and steps not in self.opened
        if task.leads:
            self.closed.add(steps)
        return task

    def remove(self, task: Task) -> None:
        """Note that a task that was taken has left its section."""
        self.left[task.steps] -= 1
        if not self.left[task.steps]:
            del self.left[task.steps]
            self.opened.discard(task.steps)
        if task.leads:  # it made no call that others could wait for
            self.closed.discard(task.steps)

    def open(self, task: Task) -> None:
        task.leads = False
        self.closed.discard(task.steps)
        self.opened.add(task.steps)


class Schedule:
    """The order in which many readings make their steps.

    Of the readings of one document, the one that has come least far is next, and none is more than `AHEAD` sections
    ahead of another. The next document is begun when those that are begun leave a place free. So one reading of each
    document, and as many documents as there are places, are read to the end one after the other.

    A schedule is not locked: whoever takes tasks in several threads does that.

    Args:
        documents: for each reading, what stands for its document.
        lengths: for each reading, how long its document is; the longest are begun first, so that they do not end alone.
        leading: whether the first call about a section goes ahead of the others, which then find the section in the
            model's cache.
    """

    def __init__(self, documents: Sequence[Hashable], *, lengths: Sequence[float] = (), leading: bool = False) -> None:
        groups: dict[Hashable, _Group] = {}
        of_groups: dict[_Group, float] = {}
        self.tasks: list[Task] = []
        for number, document in enumerate(documents):
            group = groups.setdefault(document, _Group())
            group.several = group.left.total() > 0
            self.tasks.append(Task(number=number, group=group))
            group.add(self.tasks[-1])
            of_groups[group] = lengths[number] if lengths else 0.0
        self._waiting = deque(sorted(groups.values(), key=lambda group: -of_groups[group]))
        self._begun: list[_Group] = []
        self._leading, self._left = leading, len(self.tasks)

    @property
    def done(self) -> bool:
        """Whether all readings have ended."""
        return not self._left

    def take(self) -> Task | None:
        """Return the next reading, which nobody else takes until it is put back; None: there is none at the moment."""
        for group in self._begun:
            if group.ready and (task := group.take(leading=self._leading)):
                task.resume()
                return task
        if not self._waiting:
            return None
        self._begun.append(self._waiting.popleft())
        return self.take()

    def opened(self, task: Task) -> None:
        """Let the others follow: the model has begun to answer the first call about the section of `task`."""
        task.group.open(task)

    def put_back(self, task: Task, steps: int) -> None:
        """Give a reading back that has made so many steps by now."""
        task.group.remove(task)
        task.steps, task.leads = steps, False
        task.pause()
        task.group.add(task)

    def remove(self, task: Task) -> None:
        """Note that a reading has ended."""
        self._left -= 1
        task.group.remove(task)
        if not task.group.left:
            self._begun.remove(task.group)
