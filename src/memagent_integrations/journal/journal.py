"""An append-only record of readings, many in one SQLite file: what was read once is not read again.

Every step is committed before the next call starts. A reading that is begun again is the same loop, fed with the recorded replies in place
of calls, until it comes to a step that is not there. Nothing recorded is ever changed: an edit makes a new run, a branch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from memagent_integrations.checks import check_int
from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.journal.recording import (
    OURS,
    SCHEMA,
    VERSION,
    add_run,
    checked_name,
    now,
    recorded,
    settings_of,
    step_from,
    step_to,
)
from memagent_integrations.journal.store import Store
from memagent_integrations.loop import Turns
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Reading, Step

__all__ = ["Journal", "Run", "State", "settings_of"]


State = Literal["unfinished", "reading", "pausing", "paused", "finished"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recorded reading, as `Journal.runs` lists it.

    `steps` counts those recorded; `files` are those that were read, if it was files; a branch knows its `parent` and the step it left it at.
    `active`: it is being read now, in this process or another one; `paused`: a pause has been requested since that began.
    """

    name: str
    question: str
    model: str
    steps: int
    finished: bool
    active: bool
    paused: bool
    created: datetime
    files: tuple[str, ...] = ()
    parent: str | None = None
    parent_step: int | None = None

    @property
    def state(self) -> State:
        """The state in a word."""
        if self.finished:
            return "finished"
        if self.active:
            return "pausing" if self.paused else "reading"
        return "paused" if self.paused else "unfinished"


class Journal:
    """The journal in a file, which is made if it is not there. Processes and threads may share it, but not a run that is being read.

    With `readonly` it can be looked at, also where nothing may be written.

    Raises:
        JournalError: the file cannot be opened or written, is damaged, or is no journal.
    """

    def __init__(self, path: str | Path, *, readonly: bool = False) -> None:
        self._store = Store(path, owner=OURS, version=VERSION, schema=SCHEMA, readonly=readonly)
        self.path = self._store.path

    def runs(self) -> list[Run]:
        """The recorded runs, oldest first."""
        return self._runs("")

    def run(self, name: str) -> Run:
        """One run.

        Raises:
            UsageError: there is no such run.
        """
        return next(iter(self._runs("WHERE name = ?", name)), None) or self._unknown(name)

    def _runs(self, where: str, *values: str) -> list[Run]:
        rows = self._store.rows(
            "SELECT name, settings, files, parent, parent_step, created, paused,"
            " ifnull((SELECT max(number) + 1 FROM step WHERE run = name), 0),"
            " ifnull((SELECT phase FROM step WHERE run = name ORDER BY number DESC LIMIT 1), '')"
            f" FROM run {where} ORDER BY created, name",
            *values,
        )
        with self._store.errors():
            return [self._listed(row) for row in rows]

    def _listed(self, row: tuple[Any, ...]) -> Run:
        name, text, files, parent, parent_step, created, paused, steps, phase = row
        settings = json.loads(text)
        return Run(
            name=name,
            question=settings["question"],
            model=settings["model"],
            steps=steps,
            finished=phase == "answer",
            active=phase != "answer" and self._store.is_locked(name),
            paused=paused is not None,
            created=datetime.fromisoformat(created),
            files=tuple(json.loads(files)),
            parent=parent,
            parent_step=parent_step,
        )

    def reading(self, run: str, *, start: int = 0) -> Reading:
        """What is recorded of a run, from step `start` on. If it is not finished, the reading has an `error` that says so.

        Raises:
            UsageError: there is no such run.
        """
        settings, steps = self.settings(run), tuple(self._steps(run, start))
        with self._store.errors():
            budgets, prompts = Budgets(**settings["budgets"]), PromptSet(**settings["prompts"])
        answered = bool(steps) and steps[-1].phase == "answer"
        return Reading(
            question=settings["question"],
            answer=prompts.parse_answer(steps[-1].reply.text) if answered else None,
            memory=steps[-1].memory if steps else "",
            steps=steps,
            model=settings["model"],
            budgets=budgets,
            error=None if answered else MemAgentError(self._unfinished(run)),
        )

    def _steps(self, run: str, start: int) -> list[Step]:
        rows = self._store.rows("SELECT step FROM step WHERE run = ? AND number >= ? ORDER BY number", run, start)
        with self._store.errors():
            return [step_from(text) for (text,) in rows]

    def settings(self, run: str) -> dict[str, Any]:
        """What a run was begun with: question, model, budgets, prompts, as JSON.

        Raises:
            UsageError: there is no such run.
        """
        row = self._store.row("SELECT settings FROM run WHERE name = ?", run) or self._unknown(run)
        with self._store.errors():
            settings: dict[str, Any] = json.loads(row[0])
        return settings

    def prompts(self, run: str) -> PromptSet:
        """The prompts that a run was begun with."""
        settings = self.settings(run)
        with self._store.errors():
            return PromptSet(**settings["prompts"])

    def edit(self, run: str, step: int, *, memory: str | None = None, name: str | None = None) -> str:
        """Make a branch of a run, which goes on from `step`, with `memory` as the memory after it; returns the name of the branch.

        The branch has the steps before, and that step with the new memory, taken as it is (None: with its own); reading the document under the
        branch's name goes on from there. The run itself stays as it is.

        Raises:
            UsageError: there is no such run or step, the memory is empty, or `name` is taken.
        """
        if memory is not None and not (isinstance(memory, str) and memory.strip()):
            raise UsageError("the memory is empty; write what it is to hold")
        check_int(least=0, step=step)
        name = name and checked_name(name)
        settings, files = self.settings(run), self.run(run).files
        with self._store.writing():
            rows = self._store.rows(
                "SELECT number, phase, prompt, step FROM step WHERE run = ? AND number <= ?", run, step
            )
            if not rows or rows[-1][:2] != (step, "memory"):
                raise UsageError(f"the run {run} has no memory after step {step}")
            taken = {found for (found,) in self._store.rows("SELECT name FROM run")}
            free = (f"{run[:190]}.{number}" for number in itertools.count(1))
            name = name or next(new for new in free if new not in taken)
            if name in taken:
                raise UsageError(f"there is a run {name!r} already")
            *before, (number, phase, prompt, text) = rows
            add_run(self._store, name, settings, files, run, step)
            for row in (*before, (number, phase, prompt, text if memory is None else _edited(text, memory))):
                self._store.write("INSERT INTO step VALUES (?, ?, ?, ?, ?)", name, *row)
        return name

    def pause(self, run: str) -> None:
        """Have the reading of a run, in this process or another one, stop with a `RunPaused` after its current step.

        Raises:
            UsageError: there is no such run, or it is finished.
        """
        if self.run(run).finished:
            raise UsageError(f"the run {run} is finished")
        with self._store.writing():
            self._store.write("UPDATE run SET paused = ? WHERE name = ?", now(), run)

    def delete(self, run: str) -> None:
        """Remove a run and its steps. Its branches stay; each has all of its own steps.

        Raises:
            UsageError: there is no such run.
            JournalError: it is being read.
        """
        self.settings(run)
        with self._store.lock(run), self._store.writing():
            self._store.write("DELETE FROM run WHERE name = ?", run)

    def recorded(
        self, turns: Turns, settings: Mapping[str, Any], run: str | None = None, files: Sequence[str] = ()
    ) -> Turns:
        """The loop `turns`, which gets the replies of a run where they are recorded, and whose other steps are recorded.

        `settings` are those of the reading (`settings_of`). Without `run` the name is made from them and from the first chunk, so that the same
        reading finds its own record again; a document that goes on differently gets a run of its own, which begins with the steps that both
        have. A run that was named has to have these settings and this document: else, and when the journal fails, the reading ends with
        a `JournalMismatch` or a `JournalError`. `files` is noted, for whoever wants to resume.
        """
        return recorded(turns, self._store, settings, run, files)

    def _unfinished(self, run: str) -> str:
        if self._store.is_locked(run):
            return f"the run {run} is being read"
        how = f"read the document again with this journal to resume (memagent runs resume {run} --journal {self.path.name})"
        return f"the run {run} is not finished; {how}"

    def _unknown(self, run: str) -> NoReturn:
        raise UsageError(f"{self.path} holds no run {run!r}")

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Journal], tuple[Path]]:
        return Journal, (self.path,)

    def __repr__(self) -> str:
        return f"<Journal {self.path}>"


def _edited(text: str, memory: str) -> str:
    """A recorded step with another memory."""
    step = step_from(text)
    return step_to(replace(step, memory=memory, outcome="updated", cut=False, reply=replace(step.reply, edited=memory)))
