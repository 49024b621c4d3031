"""An append-only record of readings, many in one SQLite file: what was read once is not read again.

Every step is committed before the next call starts. A reading that is begun again is the same loop, fed with the recorded replies in place
of calls, until it comes to a step that is not there. Nothing recorded is ever changed: an edit makes a new run, a branch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sqlite3
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from memagent_integrations.errors import JournalError, JournalMismatch, MemAgentError, UsageError
from memagent_integrations.loop import Turns, advance
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Prompt, Reading, Reply, Step
from memagent_integrations.settings import check_int

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


class RunInUse(JournalError):
    """The run is being read, here or in another process."""


class Journal:
    """The journal in a file, which is made if it is not there. Processes and threads may share it, but not a run that is being read.

    With `readonly` it can be looked at, also where nothing may be written.

    Raises:
        JournalError: the file cannot be opened or written, is damaged, or is no journal.
    """

    def __init__(self, path: str | Path, *, readonly: bool = False) -> None:
        if not isinstance(path, str | Path):
            raise UsageError(f"the journal has to be a file's name, not {type(path).__name__}")
        self._lock = threading.RLock()
        with self._errors(path):
            self.path = Path(path).resolve()  # the lock goes by the file, whatever it is called, and wherever the process goes
            mode = f"?mode={'ro' if readonly else 'rwc'}"
            if readonly and not self.path.with_name(f"{self.path.name}-wal").exists():
                mode += "&immutable=1"  # nobody writes: then not even the folder has to be writable
            self._database = sqlite3.connect(self.path.as_uri() + mode, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
        try:
            with self._errors():
                self._prepare(readonly=readonly)
                found = self.path.stat()
                self._file = found.st_dev, found.st_ino
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
            return [self._run(row) for row in rows]

    @staticmethod
    def _run(row: tuple[Any, ...]) -> Run:
        name, text, parent, parent_step, created, steps, finished = row
        settings = json.loads(text)
        return Run(
            name=name,
            question=settings["question"],
            model=settings["model"],
            steps=steps,
            finished=bool(finished),
            created=datetime.fromisoformat(created),
            parent=parent,
            parent_step=parent_step,
        )

    def reading(self, run: str) -> Reading:
        """What is recorded of a run. If it is not finished, the reading has an `error` that says so.

        Raises:
            UsageError: there is no such run.
        """
        settings = self.settings(run)
        with self._errors():
            rows = self._database.execute("SELECT step FROM step WHERE run = ? ORDER BY number", (run,)).fetchall()
            steps = tuple(_step(text) for (text,) in rows)
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
        settings = self.settings(run)
        with self._errors():
            return PromptSet(**settings["prompts"])

    def edit(self, run: str, step: int, *, memory: str, name: str | None = None) -> str:
        """Make a branch of a run in which the memory after `step` is `memory`; returns its name.

        The branch has the steps before, and that step with the new memory, taken as it is; reading the document under the branch's name goes on
        from there. The run itself stays as it is.

        Raises:
            UsageError: there is no such run or step, the memory is empty, or `name` is taken.
        """
        if not isinstance(memory, str) or not memory.strip():
            raise UsageError("the memory is empty; write what it is to hold")
        check_int(least=0, step=step)
        name = name and _checked(name)
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
            edited = replace(old, memory=memory, outcome="updated", cut=False, reply=replace(old.reply, edited=memory))
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

        `settings` are those of the reading (`settings_of`). Without `run` the name is made from them and from the first chunk, so that the same
        reading finds its own record again; a document that goes on differently gets a run of its own, which begins with the steps that both
        have. A run that was named has to have these settings and this document: else, and when the journal fails, the reading ends with
        a `JournalMismatch` or a `JournalError`.
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
                            mine = self._claim(run, base, names, last, state, settings, alone)
                    state = yield from self._turn(turns, state, mine or str(last), settings)
                return state
        except (JournalError, UsageError) as error:
            return _ended(turns, error)

    def _named(self, run: str, settings: Mapping[str, Any]) -> list[str]:
        self._compare(run, settings)
        return [run]

    def _numbered(self, base: str) -> list[str]:
        """The runs with an automatic name: `base`, and more with a number where documents begin alike."""
        with self._errors():
            found = self._database.execute("SELECT name FROM run WHERE name = ? OR name GLOB ?", (base, f"{base}-[0-9]*")).fetchall()
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
        with self._errors():
            row = self._database.execute("SELECT prompt FROM step WHERE run = ? AND number = ?", (run, prompt.index)).fetchone()
        return row[0] if row else None

    def _claim(
        self, run: str | None, base: str, names: list[str], last: str | None, prompt: Prompt, settings: Mapping[str, Any], alone: ExitStack
    ) -> str:
        """The run to go on with, locked until `alone` ends: the one that was named, one that ends here, or a new one."""
        if run is not None:
            return alone.enter_context(self._alone(run))
        new = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
        for name in itertools.chain(names, new):
            with suppress(RunInUse), ExitStack() as trial:
                trial.enter_context(self._alone(name))
                known = self._compare(name, settings)
                if known and (name not in names or self._prompt(name, prompt) not in (None, _fingerprint(prompt))):
                    continue
                if not known and last:
                    self._copy(last, name, prompt.index, settings)
                alone.push(trial.pop_all())
                return name
        raise AssertionError("there is always another number")

    def _copy(self, run: str, name: str, steps: int, settings: Mapping[str, Any]) -> None:
        with self._writing():
            self._add_run(name, settings)
            copy = "INSERT INTO step SELECT ?, number, phase, prompt, step FROM step WHERE run = ? AND number < ?"
            self._database.execute(copy, (name, run, steps))

    def _turn(self, turns: Turns, prompt: Prompt, run: str, settings: Mapping[str, Any]) -> Generator[Prompt, Reply, Prompt | Reading]:
        """One step: its reply from the record or from the driver, and what the loop makes of it."""
        with self._errors():
            row = self._database.execute("SELECT prompt, step FROM step WHERE run = ? AND number = ?", (run, prompt.index)).fetchone()
            reply = _step(row[1]).reply if row else None
        if row and row[0] != _fingerprint(prompt):
            raise _mismatch(run, prompt)
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

    def _record(self, run: str, prompt: Prompt, step: Step, settings: Mapping[str, Any]) -> None:
        with self._writing():
            if not self._database.execute("SELECT 1 FROM run WHERE name = ?", (run,)).fetchone():
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
            changes = list(_changes(_compared(json.loads(row[0])), json.loads(json.dumps(_compared(settings))))) if row else []
        if changes:
            raise JournalMismatch(
                f"run {run} was begun with other settings: {'; '.join(changes)}. Use those again, or read under another name (run=...). "
                "Nothing in the journal was changed"
            )
        return row is not None

    @contextmanager
    def _alone(self, run: str) -> Iterator[str]:
        """The run, which no other process or thread reads meanwhile; the system frees the lock of a process that dies."""
        folder, process = self.path.with_name(f"{self.path.name}-locks"), os.getpid()
        lock = FileLock(folder / f"{_digest(run)[:32]}.lock", thread_local=False)  # a loop is run by one thread after another
        try:
            folder.mkdir(exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout as error:
            raise RunInUse(f"run {run} is being read already, here or in another process; wait for it, or read under another name") from error
        except OSError as error:
            raise JournalError(f"cannot lock {run} in {folder}: {error.strerror or error}") from error
        try:
            yield run
        finally:
            if os.getpid() == process:  # a forked child has a copy of this generator, but not the lock
                with suppress(OSError):  # while the lock is held, so that nobody is left with a lock on a file that is gone
                    Path(lock.lock_file).unlink()
                lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction: all of it is on the disk in the end, or nothing."""
        with self._lock, self._errors():
            self._look()
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # a failed write has rolled back already
                    self._database.execute("ROLLBACK")
                raise

    def _look(self) -> None:
        """See that the file is still the one that was opened: what is written to a file that is gone is lost."""
        try:
            found = self.path.stat()
        except OSError:
            found = None
        if not found or (found.st_dev, found.st_ino) != self._file:
            raise JournalError(f"the journal {self.path} has been removed or replaced; open it again")

    @contextmanager
    def _errors(self, path: str | Path | None = None) -> Iterator[None]:
        path = path or self.path
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise JournalError(f"another process has written to the same run in {path}; begin again to go on from there") from error
        except (sqlite3.Error, sqlite3.Warning, OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise JournalError(f"the journal {str(path)!r} cannot be used: {type(error).__name__}: {error}") from error

    def _prepare(self, *, readonly: bool) -> None:
        """See that the file is a journal, or make it one."""
        database = self._database
        database.execute("PRAGMA foreign_keys = ON")
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (owner,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if (tables or owner) and owner != _OURS:
            raise JournalError(f"{self.path} is a database of another program; give a file of its own")
        if readonly and not owner:
            raise JournalError(f"{self.path} is no journal")
        if version > _VERSION:
            raise JournalError(f"{self.path} was written by a newer version of this package (format {version}); update the package")
        if readonly:
            return
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        if not owner:
            found = self.path.stat()
            self._file = found.st_dev, found.st_ino
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


def _fingerprint(prompt: Prompt) -> str:
    """A hash of all that the model is asked: question, chunk, templates, and the memory that every step before has left."""
    return _digest([prompt.phase, prompt.max_tokens, [[message.role, message.content] for message in prompt.messages]])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _text(step: Step) -> str:
    return json.dumps(_STEP.dump_python(step))  # with \\u escapes, which hold lone surrogates too


def _step(text: str) -> Step:
    return _STEP.validate_python(json.loads(text))
