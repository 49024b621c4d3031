"""An append-only record of readings, many in one SQLite file: what was read once is not read again.

Every step is committed before the next call starts. A reading that is begun again is the same loop, fed with the recorded replies in place
of calls, until it comes to a step that is not there. Nothing recorded is ever changed: an edit makes a new run, a branch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from pydantic import TypeAdapter

from memagent_integrations.errors import JournalError, JournalMismatch, MemAgentError, UsageError
from memagent_integrations.loop import Turns, advance
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Prompt, Reading, Reply, Step
from memagent_integrations.settings import check_int
from memagent_integrations.store import InUse, Store

_OURS = 0x4D454D41  # "MEMA", in the header of the file
_VERSIONS = (
    """
CREATE TABLE run (
    name TEXT PRIMARY KEY,
    settings TEXT NOT NULL,
    parent TEXT,
    parent_step INTEGER,
    created TEXT NOT NULL
);
CREATE TABLE step (
    run TEXT NOT NULL REFERENCES run (name) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    phase TEXT NOT NULL,
    prompt TEXT NOT NULL,
    step TEXT NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID
""",
    """
ALTER TABLE run ADD COLUMN files TEXT NOT NULL DEFAULT '[]';
CREATE TABLE pause (run TEXT PRIMARY KEY REFERENCES run (name) ON DELETE CASCADE)
""",
)
_STEP = TypeAdapter(Step)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recorded reading, as `Journal.runs` lists it.

    `steps` counts those recorded; `files` are those that were read, if it was files; a branch knows its `parent` and the step it left it at.
    `active`: it is being read now, in this process or another one; `paused`: somebody wants that to end, or has ended it.
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
    def state(self) -> str:
        """The state in a word."""
        return "finished" if self.finished else "reading" if self.active else "paused" if self.paused else "unfinished"


class RunPaused(JournalError):
    """Somebody paused the run (`Journal.pause`). Read again, it goes on."""


class Journal:
    """The journal in a file, which is made if it is not there. Processes and threads may share it, but not a run that is being read.

    With `readonly` it can be looked at, also where nothing may be written.

    Raises:
        JournalError: the file cannot be opened or written, is damaged, or is no journal.
    """

    def __init__(self, path: str | Path, *, readonly: bool = False) -> None:
        self._store = Store(path, owner=_OURS, versions=_VERSIONS, readonly=readonly)
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
            "SELECT name, settings, parent, parent_step, created, files, count(number), ifnull(max(phase = 'answer'), 0), pause.run IS NOT NULL"
            f" FROM run LEFT JOIN step ON step.run = name LEFT JOIN pause ON pause.run = name {where} GROUP BY name ORDER BY created, name",
            *values,
        )
        with self._store.errors():
            return [self._listed(row) for row in rows]

    def _listed(self, row: tuple[Any, ...]) -> Run:
        name, text, parent, parent_step, created, files, steps, finished, paused = row
        settings = json.loads(text)
        return Run(
            name=name,
            question=settings["question"],
            model=settings["model"],
            steps=steps,
            finished=bool(finished),
            active=not finished and self._store.taken(name),
            paused=bool(paused),
            created=datetime.fromisoformat(created),
            files=tuple(json.loads(files)),
            parent=parent,
            parent_step=parent_step,
        )

    def reading(self, run: str) -> Reading:
        """What is recorded of a run. If it is not finished, the reading has an `error` that says so.

        Raises:
            UsageError: there is no such run.
        """
        settings, steps = self.settings(run), tuple(self.steps(run))
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
            error=None if answered else MemAgentError(f"the run {run} is not finished; read the document again with this journal to go on"),
        )

    def steps(self, run: str, *, start: int = 0) -> list[Step]:
        """The recorded steps of a run, from step `start` on."""
        rows = self._store.rows("SELECT step FROM step WHERE run = ? AND number >= ? ORDER BY number", run, start)
        with self._store.errors():
            return [_step(text) for (text,) in rows]

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
        name = name and _checked(name)
        settings, files = self.settings(run), self.run(run).files
        with self._store.writing():
            rows = self._store.rows("SELECT number, phase, prompt, step FROM step WHERE run = ? AND number <= ?", run, step)
            if not rows or rows[-1][:2] != (step, "memory"):
                raise UsageError(f"the run {run} has no memory after step {step}")
            taken = {found for (found,) in self._store.rows("SELECT name FROM run")}
            name = name or next(f"{run}.{number}" for number in range(1, len(taken) + 2) if f"{run}.{number}" not in taken)
            if name in taken:
                raise UsageError(f"there is a run {name!r} already")
            *before, (number, phase, prompt, text) = rows
            self._add_run(name, settings, files, run, step)
            for row in (*before, (number, phase, prompt, text if memory is None else _text(_edited(_step(text), memory)))):
                self._store.write("INSERT INTO step VALUES (?, ?, ?, ?, ?)", name, *row)
        return name

    def pause(self, run: str) -> None:
        """Have whoever reads a run, in this process or another one, end after the step that is being made, with a `RunPaused`.

        Raises:
            UsageError: there is no such run, or it is finished.
        """
        if self.run(run).finished:
            raise UsageError(f"the run {run} is finished")
        with self._store.writing():
            self._store.write("INSERT OR IGNORE INTO pause VALUES (?)", run)

    def delete(self, run: str) -> None:
        """Remove a run and its steps. Its branches stay; each has all of its own steps.

        Raises:
            UsageError: there is no such run.
            JournalError: it is being read.
        """
        self.settings(run)
        with self._store.alone(run), self._store.writing():
            self._store.write("DELETE FROM run WHERE name = ?", run)

    def recorded(self, turns: Turns, settings: Mapping[str, Any], run: str | None = None, files: Sequence[str] = ()) -> Turns:
        """The loop `turns`, which gets the replies of a run where they are recorded, and whose other steps are recorded.

        `settings` are those of the reading (`settings_of`). Without `run` the name is made from them and from the first chunk, so that the same
        reading finds its own record again; a document that goes on differently gets a run of its own, which begins with the steps that both
        have. A run that was named has to have these settings and this document: else, and when the journal fails, the reading ends with
        a `JournalMismatch` or a `JournalError`. `files` is noted, for whoever wants to go on.
        """
        state = advance(turns, None)
        if isinstance(state, Reading):  # it failed before the first call
            return state
        try:
            with ExitStack() as alone:
                base = _digest([_compared(settings), _fingerprint(state)])[:16]
                names = self._named(_checked(run), settings) if run is not None else self._numbered(base)
                mine, last = None, None  # the run that is written, and that of the last recorded reply
                while isinstance(state, Prompt):
                    if mine is None:
                        found = self._going_on(names, state, named=run)
                        names = list(found)
                        having = next((name for name in names if found[name]), None)
                        last = having or last
                        if having is None:  # a call has to be made: from here on nobody else may
                            mine = self._claim(run, base, names, last, state, settings, files, alone)
                            self._begin(mine, files)
                    elif self._store.row("SELECT 1 FROM pause WHERE run = ?", mine):
                        raise RunPaused(f"run {mine} was paused after {state.index} steps; read again to go on")
                    state = yield from self._turn(turns, state, mine or str(last), settings, files)
                return state
        except (JournalError, UsageError) as error:
            return _ended(turns, error)

    def _named(self, run: str, settings: Mapping[str, Any]) -> list[str]:
        self._compare(run, settings)
        return [run]

    def _numbered(self, base: str) -> list[str]:
        """The runs with an automatic name: `base`, and more with a number where documents begin alike."""
        found = self._store.rows("SELECT name FROM run WHERE name = ? OR name GLOB ?", base, f"{base}-[0-9]*")
        return sorted(name for (name,) in found)

    def _going_on(self, names: list[str], prompt: Prompt, *, named: str | None) -> dict[str, bool]:
        """Those of the runs that have this prompt next (True), or nothing yet (False)."""
        asked = _fingerprint(prompt)
        found = {name: self._prompt(name, prompt) for name in names}
        fitting = {name: recorded is not None for name, recorded in found.items() if recorded in (None, asked)}
        if named is not None and not fitting:
            raise _mismatch(named, prompt)
        return fitting

    def _prompt(self, run: str, prompt: Prompt) -> str | None:
        """The fingerprint that is recorded in the place of this prompt."""
        row = self._store.row("SELECT prompt FROM step WHERE run = ? AND number = ?", run, prompt.index)
        return row[0] if row else None

    def _claim(
        self,
        run: str | None,
        base: str,
        names: list[str],
        last: str | None,
        prompt: Prompt,
        settings: Mapping[str, Any],
        files: Sequence[str],
        alone: ExitStack,
    ) -> str:
        """The run to go on with, locked until `alone` ends: the one that was named, one that ends here, or a new one."""
        if run is not None:
            return alone.enter_context(self._store.alone(run, patience=0.2))  # whoever only looks whether it is free has it for a moment
        new = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
        for name in itertools.chain(names, new):
            with suppress(InUse), ExitStack() as trial:
                trial.enter_context(self._store.alone(name))
                known = self._compare(name, settings)
                if known and (name not in names or self._prompt(name, prompt) not in (None, _fingerprint(prompt))):
                    continue
                if not known and last:
                    self._copy(last, name, prompt.index, settings, files)
                alone.push(trial.pop_all())
                return name
        raise AssertionError("there is always another number")

    def _begin(self, run: str, files: Sequence[str]) -> None:
        """The run is read on: a pause that somebody wanted before is over, and its files may have moved."""
        with self._store.writing():
            self._store.write("DELETE FROM pause WHERE run = ?", run)
            if files:
                self._store.write("UPDATE run SET files = ? WHERE name = ?", json.dumps(files), run)

    def _copy(self, run: str, name: str, steps: int, settings: Mapping[str, Any], files: Sequence[str]) -> None:
        with self._store.writing():
            self._add_run(name, settings, files)
            copy = "INSERT INTO step SELECT ?, number, phase, prompt, step FROM step WHERE run = ? AND number < ?"
            self._store.write(copy, name, run, steps)

    def _turn(
        self, turns: Turns, prompt: Prompt, run: str, settings: Mapping[str, Any], files: Sequence[str]
    ) -> Generator[Prompt, Reply, Prompt | Reading]:
        """One step: its reply from the record or from the driver, and what the loop makes of it."""
        fingerprint = _fingerprint(prompt)
        row = self._store.row("SELECT prompt, step FROM step WHERE run = ? AND number = ?", run, prompt.index)
        with self._store.errors():
            reply = replace(_step(row[1]).reply, recorded=True) if row else None
        if row and row[0] != fingerprint:
            raise _mismatch(run, prompt)
        try:
            outcome: Reply | MemAgentError = yield replace(prompt, recorded=reply)
        except MemAgentError as error:
            outcome = error
        state = advance(turns, outcome)
        step = state.after if isinstance(state, Prompt) else next(iter(state.steps[prompt.index :]), None)
        if reply is None and step and not (isinstance(state, Reading) and state.error):  # an answer that is none is asked for again
            try:
                with self._store.writing():
                    if not self._store.row("SELECT 1 FROM run WHERE name = ?", run):
                        self._add_run(run, settings, files)
                    self._store.write("INSERT INTO step VALUES (?, ?, ?, ?, ?)", run, prompt.index, prompt.phase, fingerprint, _text(step))
            except JournalError as error:
                return state.failed(error) if isinstance(state, Reading) else _ended(turns, error)
        return state

    def _add_run(
        self, name: str, settings: Mapping[str, Any], files: Sequence[str], parent: str | None = None, parent_step: int | None = None
    ) -> None:
        row = (name, json.dumps(settings), parent, parent_step, datetime.now(UTC).isoformat(), json.dumps(files))
        self._store.write("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?)", *row)

    def _compare(self, run: str, settings: Mapping[str, Any]) -> bool:
        """Whether there is such a run.

        Raises:
            JournalMismatch: it has other settings.
        """
        row = self._store.row("SELECT settings FROM run WHERE name = ?", run)
        with self._store.errors():
            changes = list(_changes(_compared(json.loads(row[0])), json.loads(json.dumps(_compared(settings))))) if row else []
        if changes:
            raise JournalMismatch(
                f"run {run} was begun with other settings: {'; '.join(changes)}. Use those again, or read under another name (run=...). "
                "Nothing in the journal was changed"
            )
        return row is not None

    def _unknown(self, run: str) -> NoReturn:
        raise UsageError(f"{self.path} holds no run {run!r}")

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Journal], tuple[Path]]:
        return Journal, (self.path,)

    def __repr__(self) -> str:
        return f"<Journal {self.path}>"


def settings_of(question: str, model: str, identity: Mapping[str, Any], budgets: Budgets, prompts: PromptSet) -> dict[str, Any]:
    """What tells one reading from another, but for the document."""
    return {"question": question, "model": model, "backend": dict(identity), "budgets": asdict(budgets), "prompts": asdict(prompts)}


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the address of the server: it may have moved."""
    return {**settings, "backend": {**settings.get("backend", {}), "base_url": None}}


def _checked(run: Any) -> str:
    """The name of a run."""
    if not isinstance(run, str) or not 1 <= len(run) <= 200 or not run.isprintable():
        raise UsageError(f"a run's name has 1 to 200 printable characters, {str(run)[:40]!r} does not")
    return run


def _mismatch(run: str, prompt: Prompt) -> JournalMismatch:
    return JournalMismatch(
        f"the document is not the one that run {run} read: step {prompt.index} has another text now (or another tokenizer cuts it, or another "
        "version of this package). Give the document as it was, or read this one under another name (run=...). Nothing in the journal was changed"
    )


def _ended(turns: Turns, error: MemAgentError) -> Reading:
    """What the loop has read until `error`."""
    state = advance(turns, error)
    if isinstance(state, Reading):
        return state
    raise AssertionError("a loop ends with the error that is thrown in")


def _changes(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """What is different, by name."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _changes(old.get(key), new.get(key), key if name in ("", "budgets", "backend") else f"{name}.{key}")
    elif old != new:
        yield f"{name} was {_shortened(old)}, is {_shortened(new)}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]}..."


def _edited(step: Step, memory: str) -> Step:
    return replace(step, memory=memory, outcome="updated", cut=False, reply=replace(step.reply, edited=memory))


def _fingerprint(prompt: Prompt) -> str:
    """A hash of all that the model is asked: question, chunk, templates, and the memory that every step before has left."""
    return _digest([prompt.phase, prompt.max_tokens, [[message.role, message.content] for message in prompt.messages]])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _text(step: Step) -> str:
    return json.dumps(_STEP.dump_python(step))  # with \\u escapes, which hold lone surrogates too


def _step(text: str) -> Step:
    return _STEP.validate_python(json.loads(text))
