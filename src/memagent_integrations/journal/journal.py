"""An append-only record of readings, many in one SQLite file: what was read once is not read again.

Every step is committed before the next call starts. To resume a reading, the same loop runs again on the
recorded replies in place of calls, up to the first step that is not recorded. Nothing recorded is ever changed:
an edit makes a new run, a branch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any, Literal, NoReturn, Self

from memagent_integrations.checks import check_int
from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.journal.memories import NamedMemory, memory_with, names_of_memories
from memagent_integrations.journal.recording import (
    add_run,
    checked_name,
    is_own,
    now,
    recorded,
    step_from_json,
    step_to_json,
)
from memagent_integrations.journal.schema import APPLICATION_ID, SCHEMA
from memagent_integrations.journal.settings import files_from_json, settings_from_json, settings_of
from memagent_integrations.journal.store import Store
from memagent_integrations.lineage import memory_after
from memagent_integrations.loop import Turns
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Reading, Step

__all__ = ["Journal", "NamedMemory", "Run", "State", "settings_of"]

State = Literal["unfinished", "reading", "pausing", "paused", "finished"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recorded reading, as `Journal.runs` lists it.

    Attributes:
        steps: how many steps are recorded.
        active: the run is being read now, in this process or another one.
        paused: a pause has been requested since that reading began.
        files: the files of the document, if it consists of files.
        parent: of a branch, the run it was made from.
        parent_step: of a branch, the step at which it left the parent.
        own: this user read it on this machine, so that the server, the models and the files that it names are theirs.
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
    own: bool = False

    @property
    def state(self) -> State:
        """Return the state in one word."""
        if self.finished:
            return "finished"
        if self.active:
            return "pausing" if self.paused else "reading"
        return "paused" if self.paused else "unfinished"


class Journal:
    """A journal in a file, which is created if it does not exist.

    Processes and threads may share a journal, but only one of them can read a run at a time. With `readonly`
    the journal can be inspected, even where nothing may be written.

    Raises:
        JournalError: the file cannot be opened or written, is damaged, or is no journal.
    """

    def __init__(self, path: str | Path, *, readonly: bool = False) -> None:
        self._store = Store(path, application_id=APPLICATION_ID, schema=SCHEMA, readonly=readonly)
        self.path = self._store.path

    def runs(self) -> list[Run]:
        """Return the recorded runs, oldest first."""
        return self._runs("")

    def run(self, name: str) -> Run:
        """Return one run.

        Raises:
            UsageError: there is no such run.
        """
        return next(iter(self._runs("WHERE name = ?", name)), None) or self._unknown(name)

    def _runs(self, where: str, *values: str) -> list[Run]:
        mark = "mark" if self._store.version >= 4 else "NULL"  # an older file that is only read
        rows = self._store.rows(
            f"SELECT name, settings, files, {mark}, parent, parent_step, created, paused,"
            " ifnull((SELECT max(number) + 1 FROM step WHERE run = name), 0),"
            " ifnull((SELECT phase FROM step WHERE run = name ORDER BY number DESC LIMIT 1), '')"
            f" FROM run {where} ORDER BY created, name",
            *values,
        )
        with self._store.errors():
            return [self._to_run(row) for row in rows]

    def _to_run(self, row: tuple[Any, ...]) -> Run:
        name, settings_json, files, mark, parent, parent_step, created, paused, steps, phase = row
        settings = settings_from_json(settings_json)
        return Run(
            name=name,
            question=settings["question"],
            model=settings["model"],
            steps=steps,
            finished=phase == "answer",
            active=phase != "answer" and self._store.is_locked(name),
            paused=paused is not None,
            created=datetime.fromisoformat(created),
            files=files_from_json(files),
            parent=parent,
            parent_step=parent_step,
            own=is_own(settings_json, files, mark),
        )

    def memory(self, name: str) -> NamedMemory:
        """Return the memory of a name, which readings carry on; it is empty until one has.

        Raises:
            UsageError: a memory cannot have this name.
        """
        return NamedMemory(self._store, checked_name(name, "memory"))

    def memories(self) -> list[NamedMemory]:
        """Return the named memories, in the order of their names."""
        return [NamedMemory(self._store, name) for name in names_of_memories(self._store)]

    def reading(self, run: str, *, start: int = 0, stop: int | None = None) -> Reading:
        """Return what is recorded of a run, from step `start` on; `error` is set if the run is not finished.

        With `stop`, steps from that number on are left out, as if they were not recorded yet.

        Raises:
            UsageError: there is no such run.
        """
        settings, steps = self.settings(run), tuple(self._steps(run, start, stop))
        with self._store.errors():
            budgets, prompts = Budgets(**settings["budgets"]), PromptSet(**settings["prompts"])
        answered = bool(steps) and steps[-1].is_answer
        answer = prompts.parse_answer(steps[-1].reply.text, structured="output" in settings) if answered else ""
        return Reading(
            question=settings["question"],
            answer=answer or None,
            memory=memory_after(steps) if steps else settings.get("memory", ""),
            steps=steps,
            model=settings["model"],
            answer_model=settings.get("answer_model"),
            budgets=budgets,
            error=None if answer else MemAgentError(self._unfinished(run)),
        )

    def _steps(self, run: str, start: int, stop: int | None) -> list[Step]:
        query = "SELECT step FROM step WHERE run = ? AND number >= ? AND number < ifnull(?, 1e18) ORDER BY number"
        rows = self._store.rows(query, run, start, stop)
        with self._store.errors():
            return [step_from_json(text) for (text,) in rows]

    def settings(self, run: str) -> dict[str, Any]:
        """Return the settings of a run, as JSON: question, model, backend, budgets, prompts.

        With another model for the answer also answer_model and answer_backend, with a schema for it also output, with
        a memory to start from also memory; lookup, segments and reread where they are used.

        Raises:
            UsageError: there is no such run.
        """
        settings = self._settings(run)
        return self._unknown(run) if settings is None else settings

    def starting_memory(self, run: str) -> str:
        """Return the memory that a run starts from; "" if there is no such run.

        Raises:
            UsageError: a run cannot have this name.
        """
        settings = self._settings(checked_name(run)) or {}
        return str(settings.get("memory", ""))

    def _settings(self, run: str) -> dict[str, Any] | None:
        row = self._store.row("SELECT settings FROM run WHERE name = ?", run)
        with self._store.errors():
            return settings_from_json(row[0]) if row else None

    def prompts(self, run: str) -> PromptSet:
        """Return the prompts of a run."""
        settings = self.settings(run)
        with self._store.errors():
            return PromptSet(**settings["prompts"])

    def edit(self, run: str, step: int, *, memory: str | None = None, name: str | None = None) -> str:
        """Make a branch of a run that continues after `step`, and return its name. The run itself is not changed.

        To continue, read the document under the branch's name.

        Args:
            run: the run to branch from.
            step: the last step that the branch has; it has all those before it too.
            memory: the memory after `step`, stored unchanged; default: the recorded one.
            name: the name of the branch; default: the run's name with a number.

        Raises:
            UsageError: there is no such run or step, the memory is empty, or `name` is taken.
        """
        if memory is not None and not (isinstance(memory, str) and memory.strip()):
            raise UsageError("the memory is empty; write what it is to hold")
        check_int(least=0, step=step)
        name = name and checked_name(name)
        settings, parent = self.settings(run), self.run(run)
        with self._store.writing():
            query = "SELECT number, phase, prompt, step FROM step WHERE run = ? AND number <= ?"
            rows = self._store.rows(query, run, step)
            if not rows or rows[-1][:2] != (step, "memory"):
                raise UsageError(f"the run {run} has no memory after step {step}")
            names = {other for (other,) in self._store.rows("SELECT name FROM run")}
            numbered = (f"{run[:190]}.{number}" for number in itertools.count(1))
            name = name or next(free for free in numbered if free not in names)
            if name in names:
                raise UsageError(f"there is a run {name!r} already")
            *before, (number, phase, prompt, last) = rows
            if memory is not None:
                last = _edited(last, memory)
            add_run(self._store, name, settings, parent.files, run, step, own=parent.own)
            for row in (*before, (number, phase, prompt, last)):
                self._store.write("INSERT INTO step VALUES (?, ?, ?, ?, ?)", name, *row)
        return name

    def pause(self, run: str) -> None:
        """Stop the reading of a run, in this process or another, with a `RunPaused` after its current step.

        Raises:
            UsageError: there is no such run, or it is finished.
        """
        if self.run(run).finished:
            raise UsageError(f"the run {run} is finished")
        with self._store.writing():
            self._store.write("UPDATE run SET paused = ? WHERE name = ?", now(), run)

    def delete(self, run: str) -> None:
        """Remove a run and its steps. Its branches stay: each holds all of its own steps.

        Raises:
            UsageError: there is no such run, or a named memory rests on it.
            JournalError: it is being read.
        """
        self.settings(run)
        with self._store.lock(run), self._store.writing():
            if memory := memory_with(self._store, run):
                raise UsageError(f"the memory {memory!r} rests on the run {run}; delete that memory first")
            self._store.write("DELETE FROM run WHERE name = ?", run)

    def recorded(
        self,
        turns: Turns,
        settings: Mapping[str, Any],
        run: str | None = None,
        files: Sequence[str] = (),
        complete: Callable[[str, Reading], None] | None = None,
    ) -> Turns:
        """Return the loop `turns` with recorded replies in place of calls, and with its other steps recorded.

        If the journal fails, the reading ends with a `JournalError`.

        Args:
            turns: the loop.
            settings: those of the reading (`settings_of`).
            run: the name of the run. If its settings or its document differ, the reading ends with a
                `JournalMismatch`. By default the name follows from the settings and the first chunk, so that
                the same reading finds its record again; a document that continues differently gets a run of
                its own, which begins with the steps that both have in common.
            files: the files of the document, recorded so that the run can be resumed without naming them.
            complete: called with the run's name and the reading, when it has an answer.
        """
        return recorded(turns, self._store, settings, run, files, complete)

    def _unfinished(self, run: str) -> str:
        if self._store.is_locked(run):
            return f"the run {run} is being read"
        return (
            f"the run {run} is not finished; read the document again with this journal to resume "
            f"(memagent runs resume {quote(run)} --journal {quote(str(self.path))})"
        )

    def _unknown(self, run: str) -> NoReturn:
        raise UsageError(f"{self.path} holds no run {run!r}")

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Journal], tuple[Path]]:
        return Journal, (self.path,)

    def __repr__(self) -> str:
        return f"<Journal {self.path}>"


def _edited(text: str, memory: str) -> str:
    """Return a recorded step, as JSON, with another memory."""
    step = step_from_json(text)
    reply = replace(step.reply, edited=memory)
    return step_to_json(replace(step, memory=memory, outcome="updated", cut=False, reply=reply))
