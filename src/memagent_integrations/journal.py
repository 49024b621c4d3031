"""An append-only record of readings, many in one SQLite file: what was read once is not read again.

Every step is committed before the next call starts. A reading that is begun again is the same loop, fed with the recorded replies in place
of calls, until it comes to a step that is not there. Nothing recorded is ever changed: an edit makes a new run, a branch.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from memagent_integrations.errors import JournalError, JournalMismatch, MemAgentError, UsageError
from memagent_integrations.loop import Turns, advance
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Prompt, Reading, Reply, Step

_OURS = 0x4D454D41  # "MEMA", in the header of the file
_VERSION = 1
_SCHEMA = """
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
) WITHOUT ROWID;
"""
_STEP = TypeAdapter(Step)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recorded reading, as `Journal.runs` lists it. `steps` counts those recorded; a branch knows its `parent` and the step it left it at."""

    name: str
    question: str
    model: str
    steps: int
    finished: bool
    created: datetime
    parent: str | None = None
    parent_step: int | None = None


class Journal:
    """The journal in a file, which is made if it is not there. Processes and threads may share it, but not a run that is being read.

    Raises:
        JournalError: the file cannot be opened or written, is damaged, or is no journal.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        with self._errors():
            self._database = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
        try:
            with self._errors():
                self._prepare()
        except BaseException:
            self._database.close()
            raise

    def runs(self) -> list[Run]:
        """The recorded runs, oldest first."""
        with self._errors():
            rows = self._database.execute(
                "SELECT name, settings, parent, parent_step, created, count(number), ifnull(max(phase = 'answer'), 0)"
                " FROM run LEFT JOIN step ON run = name GROUP BY name ORDER BY created, name"
            ).fetchall()
        found = []
        for name, text, parent, parent_step, created, steps, finished in rows:
            settings = json.loads(text)
            found.append(
                Run(
                    name=name,
                    question=settings["question"],
                    model=settings["model"],
                    steps=steps,
                    finished=bool(finished),
                    created=datetime.fromisoformat(created),
                    parent=parent,
                    parent_step=parent_step,
                )
            )
        return found

    def reading(self, run: str) -> Reading:
        """What is recorded of a run. If it is not finished, the reading has an `error` that says so.

        Raises:
            UsageError: there is no such run.
        """
        settings = self.settings(run)
        with self._errors():
            rows = self._database.execute("SELECT step FROM step WHERE run = ? ORDER BY number", (run,)).fetchall()
            steps = tuple(_step(text) for (text,) in rows)
        answered = bool(steps) and steps[-1].phase == "answer"
        return Reading(
            question=settings["question"],
            answer=self.prompts(run).parse_answer(steps[-1].reply.text) if answered else None,
            memory=steps[-1].memory if steps else "",
            steps=steps,
            model=settings["model"],
            budgets=Budgets(**settings["budgets"]),
            error=None if answered else MemAgentError(f"the run {run} is not finished; read the document again with this journal to go on"),
        )

    def settings(self, run: str) -> dict[str, Any]:
        """What a run was begun with: question, model, budgets, prompts, as JSON.

        Raises:
            UsageError: there is no such run.
        """
        with self._errors():
            row = self._database.execute("SELECT settings FROM run WHERE name = ?", (run,)).fetchone()
        if row is None:
            raise UsageError(f"{self.path} holds no run {run!r}")
        settings: dict[str, Any] = json.loads(row[0])
        return settings

    def prompts(self, run: str) -> PromptSet:
        """The prompts that a run was begun with."""
        return PromptSet(**self.settings(run)["prompts"])

    def edit(self, run: str, step: int, *, memory: str, name: str | None = None) -> str:
        """Make a branch of a run in which the memory after `step` is `memory`; returns its name.

        The branch has the steps before, and that step with the new memory as its reply; reading the document under the branch's name goes on
        from there. The run itself stays as it is.

        Raises:
            UsageError: there is no such run or step, the memory is empty, or `name` is taken.
        """
        if not memory.strip():
            raise UsageError("the memory is empty; write what it is to hold")
        settings = self.settings(run)
        with self._writing():
            rows = self._database.execute("SELECT number, phase, prompt, step FROM step WHERE run = ? AND number <= ?", (run, step)).fetchall()
            if not rows or rows[-1][:2] != (step, "memory"):
                raise UsageError(f"the run {run} has no memory after step {step}")
            taken = {found for (found,) in self._database.execute("SELECT name FROM run")}
            name = name or next(f"{run}.{number}" for number in range(1, len(taken) + 2) if f"{run}.{number}" not in taken)
            if name in taken:
                raise UsageError(f"there is a run {name!r} already")
            *before, (number, phase, prompt, text) = rows
            old = _step(text)
            edited = replace(
                old, memory=memory, outcome="updated", cut=False, reply=replace(old.reply, text=memory, reasoning="", finish_reason="edited")
            )
            self._add_run(name, settings, run, step)
            for row in (*before, (number, phase, prompt, _text(edited))):
                self._database.execute("INSERT INTO step VALUES (?, ?, ?, ?, ?)", (name, *row))
        return name

    def delete(self, run: str) -> None:
        """Remove a run and its steps. Its branches stay; each has all of its own steps.

        Raises:
            UsageError: there is no such run.
            JournalError: it is being read.
        """
        self.settings(run)
        with self._alone(run), self._writing():
            self._database.execute("DELETE FROM run WHERE name = ?", (run,))

    def recorded(self, turns: Turns, settings: Mapping[str, Any], run: str | None = None) -> Turns:
        """The loop `turns`, which gets the replies of a run where they are recorded, and whose other steps are recorded.

        `settings` are those of the reading: question, model, budgets, prompts. Without `run` its name is made from them and from the first
        chunk, so that the same reading finds its own record again. Document and settings have to be those of the record: else, and when
        the journal fails, the reading ends with a `JournalMismatch` or a `JournalError`.
        """
        state = advance(turns, None)
        if isinstance(state, Reading):  # it failed before the first call
            return state
        name = run or _digest([settings, _fingerprint(state)])[:16]
        try:
            with self._alone(name):
                begun = self._compare(name, settings)
                while isinstance(state, Prompt):
                    state = yield from self._turn(turns, state, name, None if begun else settings)
                    begun = True
                return state
        except JournalError as error:
            return _ended(turns, error)

    def _turn(self, turns: Turns, prompt: Prompt, run: str, settings: Mapping[str, Any] | None) -> Generator[Prompt, Reply, Prompt | Reading]:
        """One step: its reply from the record or from the driver, and what the loop makes of it. `settings` are those of a run to begin."""
        reply = self._reply(run, prompt)
        try:
            outcome: Reply | MemAgentError = yield replace(prompt, recorded=reply)
        except MemAgentError as error:
            outcome = error
        state = advance(turns, outcome)
        step = state.after if isinstance(state, Prompt) else next(iter(state.steps[prompt.index :]), None)
        if reply is None and step and not (isinstance(state, Reading) and state.error):  # an answer that is none is asked for again
            try:
                self._record(run, prompt, step, settings)
            except JournalError as error:
                return state.failed(error) if isinstance(state, Reading) else _ended(turns, error)
        return state

    def _reply(self, run: str, prompt: Prompt) -> Reply | None:
        """The recorded reply to a prompt, which has to be the one that was recorded."""
        with self._errors():
            row = self._database.execute("SELECT prompt, step FROM step WHERE run = ? AND number = ?", (run, prompt.index)).fetchone()
        if row is None:
            return None
        if row[0] != _fingerprint(prompt):
            raise JournalMismatch(
                f"the document is not the one that run {run} read: step {prompt.index} has another text now. Give the document as it was, or read "
                "this one under another name (run=...). Nothing in the journal was changed"
            )
        return _step(row[1]).reply

    def _record(self, run: str, prompt: Prompt, step: Step, settings: Mapping[str, Any] | None) -> None:
        with self._writing():
            if settings is not None:
                self._add_run(run, settings)
            row = (run, prompt.index, prompt.phase, _fingerprint(prompt), _text(step))
            self._database.execute("INSERT INTO step VALUES (?, ?, ?, ?, ?)", row)

    def _add_run(self, name: str, settings: Mapping[str, Any], parent: str | None = None, parent_step: int | None = None) -> None:
        row = (name, json.dumps(settings), parent, parent_step, datetime.now(UTC).isoformat())
        self._database.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?)", row)

    def _compare(self, run: str, settings: Mapping[str, Any]) -> bool:
        """Whether there is such a run.

        Raises:
            JournalMismatch: it has other settings.
        """
        with self._errors():
            row = self._database.execute("SELECT settings FROM run WHERE name = ?", (run,)).fetchone()
        if row and (changes := list(_changes(json.loads(row[0]), json.loads(json.dumps(settings))))):
            raise JournalMismatch(
                f"run {run} was begun with other settings: {'; '.join(changes)}. Use those again, or read under another name (run=...). "
                "Nothing in the journal was changed"
            )
        return row is not None

    @contextmanager
    def _alone(self, run: str) -> Iterator[None]:
        """No other process or thread reads this run; the system frees the lock of a process that dies."""
        folder = self.path.with_name(f"{self.path.name}-locks")
        lock = FileLock(folder / f"{_digest(run)[:32]}.lock", thread_local=False)  # a loop is run by one thread after another
        try:
            folder.mkdir(exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout as error:
            raise JournalError(f"run {run} is being read already, here or in another process; wait for it, or read under another name") from error
        except OSError as error:
            raise JournalError(f"cannot lock {run} in {folder}: {error.strerror or error}") from error
        try:
            yield
        finally:
            with suppress(OSError):  # while the lock is held, so that nobody is left with a lock on a file that is gone
                Path(lock.lock_file).unlink()
            lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction: all of it is on the disk in the end, or nothing."""
        with self._lock, self._errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # a failed write has rolled back already
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise JournalError(f"another process has written to the same run in {self.path}; begin again to go on from there") from error
        except (sqlite3.Error, sqlite3.Warning, ValidationError, ValueError, KeyError) as error:
            raise JournalError(f"the journal {self.path} cannot be used: {error}") from error

    def _prepare(self) -> None:
        """See that the file is a journal, or make it one."""
        database = self._database
        database.execute("PRAGMA foreign_keys = ON")
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (owner,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if (tables or owner) and owner != _OURS:
            raise JournalError(f"{self.path} is a database of another program; give a file of its own")
        if version > _VERSION:
            raise JournalError(f"{self.path} was written by a newer version of this package (format {version}); update the package")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        if not owner:
            with self._writing():
                if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:  # another process may have been first
                    for statement in _SCHEMA.split(";"):
                        database.execute(statement)
                    database.execute(f"PRAGMA application_id = {_OURS}")
                    database.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Journal], tuple[Path]]:
        return Journal, (self.path,)

    def __del__(self) -> None:
        if database := getattr(self, "_database", None):
            database.close()

    def __repr__(self) -> str:
        return f"<Journal {self.path}>"


def settings_of(question: str, model: str, budgets: Budgets, prompts: PromptSet) -> dict[str, Any]:
    """What tells one reading from another, but for the document."""
    return {"question": question, "model": model, "budgets": asdict(budgets), "prompts": asdict(prompts)}


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
            yield from _changes(old.get(key), new.get(key), key if name in ("", "budgets") else f"{name}.{key}")
    elif old != new:
        yield f"{name} was {_shortened(old)}, is {_shortened(new)}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]}..."


def _fingerprint(prompt: Prompt) -> str:
    """A hash of all that the model is asked: question, chunk, templates, and the memory that every step before has left."""
    return _digest([prompt.phase, prompt.max_tokens, [[message.role, message.content] for message in prompt.messages]])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _text(step: Step) -> str:
    return json.dumps(_STEP.dump_python(step))  # with \\u escapes, which hold lone surrogates too


def _step(text: str) -> Step:
    return _STEP.validate_python(json.loads(text))
