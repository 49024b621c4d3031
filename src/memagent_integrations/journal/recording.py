"""A loop that is recorded: it gets the replies of a run where a journal has them, and its other steps are written down."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from memagent_integrations.errors import InUse, JournalError, JournalMismatch, MemAgentError, RunPaused, UsageError
from memagent_integrations.journal.store import Store
from memagent_integrations.loop import Turns, advance, exchange, step_made
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Prompt, Reading, Reply, Step

OURS = 0x4D454D41  # "MEMA", in the header of the file
VERSION = 2
SCHEMA = """
CREATE TABLE run (
    name TEXT PRIMARY KEY,
    settings TEXT NOT NULL,
    files TEXT NOT NULL,
    parent TEXT,
    parent_step INTEGER,
    created TEXT NOT NULL,
    paused TEXT
);
CREATE TABLE step (
    run TEXT NOT NULL REFERENCES run (name) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    phase TEXT NOT NULL,
    prompt TEXT NOT NULL,
    step TEXT NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID
"""
_STEP = TypeAdapter(Step)


def settings_of(
    question: str, model: str, identity: Mapping[str, Any], budgets: Budgets, prompts: PromptSet
) -> dict[str, Any]:
    """What tells one reading from another, but for the document."""
    return {
        "question": question,
        "model": model,
        "backend": dict(identity),
        "budgets": asdict(budgets),
        "prompts": asdict(prompts),
    }


def recorded(turns: Turns, store: Store, settings: Mapping[str, Any], run: str | None, files: Sequence[str]) -> Turns:
    """The loop `turns`, recorded as `Journal.recorded` says."""
    with closing(turns):
        state = advance(turns, None)
        if isinstance(state, Reading):  # it failed before the first call
            return state
        try:
            with ExitStack() as alone:
                return (yield from _Recording(turns, store, settings, run, files, alone).turns(state))
        except (JournalError, UsageError) as error:
            return _ended(turns, error)


class _Recording:
    """One loop, and the run that it is recorded in: the one that was named, or one with an automatic name.

    `base` is the automatic name; there are more with a number where documents begin alike. As long as replies are there, no run is chosen:
    `names` are those that have all of them so far, and `last` is one of those that had the last one.
    """

    def __init__(
        self,
        turns: Turns,
        store: Store,
        settings: Mapping[str, Any],
        run: str | None,
        files: Sequence[str],
        alone: ExitStack,
    ) -> None:
        self._turns, self._store, self._settings, self._named, self._files, self._alone = (
            turns,
            store,
            settings,
            run,
            files,
            alone,
        )
        self._begun = now()
        self._last: str | None = None

    def turns(self, state: Prompt | Reading) -> Turns:
        """Run the loop from its first prompt on."""
        if self._named is not None:
            names, base = [checked_name(self._named)], ""
            self._compare(self._named)
        elif isinstance(state, Prompt):
            base = _digest([_compared(self._settings), _fingerprint(state)])[:16]
            found = self._store.rows("SELECT name FROM run WHERE name = ? OR name GLOB ?", base, f"{base}-[0-9]*")
            names = sorted(name for (name,) in found)
        mine = None  # the run that is written
        while isinstance(state, Prompt):
            asked = _fingerprint(state)
            if mine is None:
                having = self._going_on(names, state, asked)
                names = list(having)
                self._last = next((name for name in names if having[name]), None) or self._last
                if not any(having.values()):  # a call has to be made: from here on nobody else may
                    mine = self._claim(base, names, state)
            state = yield from self._turn(state, asked, mine)
        return state

    def _going_on(self, names: list[str], prompt: Prompt, asked: str) -> dict[str, bool]:
        """Those of the runs that have this prompt next (True), or nothing yet (False)."""
        found = {name: self._prompt(name, prompt) for name in names}
        fitting = {name: there is not None for name, there in found.items() if there in (None, asked)}
        if self._named is not None and not fitting:
            raise _mismatch(self._named, prompt)
        return fitting

    def _prompt(self, run: str, prompt: Prompt) -> str | None:
        """The fingerprint that is recorded in the place of this prompt."""
        row = self._store.row("SELECT prompt FROM step WHERE run = ? AND number = ?", run, prompt.index)
        return row[0] if row else None

    def _claim(self, base: str, names: list[str], prompt: Prompt) -> str:
        """The run to go on with, locked until the reading ends: the one that was named, one that ends here, or a new one."""
        if self._named is not None:
            return self._begin(self._alone.enter_context(self._store.lock(self._named)))
        new = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
        for name in itertools.chain(names, new):
            with suppress(InUse), ExitStack() as trial:
                trial.enter_context(self._store.lock(name))
                known = self._compare(name)
                if known and (
                    name not in names or self._prompt(name, prompt)
                ):  # it has gone on meanwhile, perhaps to elsewhere
                    continue
                if not known and self._last:
                    self._copy(self._last, name, prompt.index)
                self._alone.push(trial.pop_all())
                return self._begin(name)
        raise AssertionError("there is always another number")

    def _begin(self, run: str) -> str:
        """The run, which is begun or read on: a pause from before is over, and its files may have moved."""
        with self._store.writing():
            row = self._store.row("SELECT EXISTS (SELECT 1 FROM step WHERE run = name) FROM run WHERE name = ?", run)
            if row is None:
                add_run(self._store, run, self._settings, self._files)
            elif not row[0]:
                self._store.write("UPDATE run SET settings = ? WHERE name = ?", json.dumps(self._settings), run)
            self._store.write("UPDATE run SET paused = NULL WHERE name = ? AND paused < ?", run, self._begun)
            if self._files:
                self._store.write("UPDATE run SET files = ? WHERE name = ?", json.dumps(self._files), run)
        return run

    def _copy(self, run: str, name: str, steps: int) -> None:
        with self._store.writing():
            add_run(self._store, name, self._settings, self._files)
            copy = "INSERT INTO step SELECT ?, number, phase, prompt, step FROM step WHERE run = ? AND number < ?"
            self._store.write(copy, name, run, steps)

    def _turn(self, prompt: Prompt, asked: str, mine: str | None) -> Generator[Prompt, Reply, Prompt | Reading]:
        """One step: its reply from the record or from the driver, and what the loop makes of it."""
        run = mine or str(self._last)
        row = self._store.row("SELECT prompt, step FROM step WHERE run = ? AND number = ?", run, prompt.index)
        with self._store.errors():
            reply = replace(step_from(row[1]).reply, recorded=True) if row else None
        if row and row[0] != asked:
            raise _mismatch(run, prompt)
        if reply is None and self._store.row("SELECT 1 FROM run WHERE name = ? AND paused IS NOT NULL", run):
            raise RunPaused(f"run {run} was paused after {prompt.index} steps; read again to resume")
        state = advance(self._turns, (yield from exchange(replace(prompt, recorded=reply))))
        step = step_made(state, prompt)
        if (
            reply is None and step and not (isinstance(state, Reading) and state.error)
        ):  # an answer that is none is asked for again
            try:
                with self._store.writing():
                    self._store.write(
                        "INSERT INTO step VALUES (?, ?, ?, ?, ?)", run, prompt.index, prompt.phase, asked, step_to(step)
                    )
            except JournalError as error:
                return state.failed(error) if isinstance(state, Reading) else _ended(self._turns, error)
        return state

    def _compare(self, run: str) -> bool:
        """Whether there is such a run.

        Raises:
            JournalMismatch: it has other settings.
        """
        row = self._store.row(
            "SELECT settings, EXISTS (SELECT 1 FROM step WHERE run = name) FROM run WHERE name = ?", run
        )
        with self._store.errors():  # a run without steps may still change
            changes = (
                list(_changes(_compared(json.loads(row[0])), json.loads(json.dumps(_compared(self._settings)))))
                if row and row[1]
                else []
            )
        if changes:
            raise JournalMismatch(
                f"run {run} was begun with other settings: {'; '.join(changes)}. Use those again, or read under another name "
                "(run=, --run, memagent_run). Nothing in the journal was changed"
            )
        return row is not None


def add_run(
    store: Store,
    name: str,
    settings: Mapping[str, Any],
    files: Sequence[str],
    parent: str | None = None,
    parent_step: int | None = None,
) -> None:
    """Write a run that has no steps yet, in a transaction."""
    row = (name, json.dumps(settings), json.dumps(files), parent, parent_step, now(), None)
    store.write("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?)", *row)


def checked_name(run: Any) -> str:
    """The name of a run.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(run, str) or not 1 <= len(run) <= 200 or not run.isprintable():
        raise UsageError(f"a run's name has 1 to 200 printable characters, {str(run)[:40]!r} does not")
    return run


def now() -> str:
    """The time as a journal writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def step_to(step: Step) -> str:
    """A step as JSON."""
    return json.dumps(_STEP.dump_python(step))  # with \\u escapes, which hold lone surrogates too


def step_from(text: str) -> Step:
    """The step that `step_to` wrote."""
    return _STEP.validate_python(json.loads(text))


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the address of the server: it may have moved."""
    return {**settings, "backend": {**settings.get("backend", {}), "base_url": None}}


def _mismatch(run: str, prompt: Prompt) -> JournalMismatch:
    return JournalMismatch(
        f"the document is not the one that run {run} read: step {prompt.index} has another text now (or another tokenizer cuts it, or another "
        "version of this package). Give the document as it was, or read this one under another name (run=, --run, memagent_run). Nothing in the "
        "journal was changed"
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
            yield from _changes(
                old.get(key), new.get(key), key if name in ("", "budgets", "backend") else f"{name}.{key}"
            )
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
