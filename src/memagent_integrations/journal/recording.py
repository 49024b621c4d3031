"""The recorded loop: it takes replies from the journal where there are any, and records all other steps."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from memagent_integrations.errors import InUse, JournalError, JournalMismatch, MemAgentError, RunPaused, UsageError
from memagent_integrations.files import differences
from memagent_integrations.journal.settings import settings_from_json
from memagent_integrations.journal.store import Store
from memagent_integrations.loop import Turns, advance, exchange, step_made
from memagent_integrations.ownership import is_marked, mark
from memagent_integrations.records import Prompt, Reading, Reply, Step

_STEP = TypeAdapter(Step)


def recorded(
    turns: Turns,
    store: Store,
    settings: Mapping[str, Any],
    run: str | None,
    files: Sequence[str],
    complete: Callable[[str, Reading], None] | None,
) -> Turns:
    """Return the loop `turns`, recorded as `Journal.recorded` says."""
    with closing(turns):
        state = advance(turns, None)
        if isinstance(state, Reading):  # it failed before the first call
            return state
        try:
            with ExitStack() as locks:
                recording = _Recording(turns, store, settings, run, files, locks)
                reading = yield from recording.turns(state)
        except (JournalError, UsageError) as error:
            return _ended(turns, error)
        try:
            if complete and not reading.error:
                complete(recording.run, reading)
        except MemAgentError as error:
            return reading.failed(error)
        return reading


class _Recording:
    """One loop and the run that records it: the run that the caller named, or one with an automatic name.

    An automatic name is a digest, with a number behind it where several documents begin alike. While every
    reply comes from the journal, no run is chosen yet: any run that has recorded all prompts so far may turn
    out to be the right one. `run` is its name, once the loop has ended.
    """

    run = ""

    def __init__(
        self,
        turns: Turns,
        store: Store,
        settings: Mapping[str, Any],
        run: str | None,
        files: Sequence[str],
        locks: ExitStack,
    ) -> None:
        self._turns, self._store, self._locks = turns, store, locks
        self._settings, self._named, self._files = settings, run, files
        self._paused: dict[str, str] = {}  # the requests to pause that were there before this reading
        self._last: str | None = None  # a run that has recorded the prompt before

    def turns(self, first: Prompt) -> Turns:
        """Drive the loop from its first prompt on."""
        self._paused = dict(self._store.rows("SELECT name, paused FROM run WHERE paused IS NOT NULL"))
        names, base = self._candidates(first)
        run = None  # the run that is written to, once it is chosen
        state: Prompt | Reading = first
        while isinstance(state, Prompt):
            fingerprint = _fingerprint(state)
            if run is None:
                candidates = self._matching(names, state, fingerprint)
                names = list(candidates)
                self._last = next((name for name in names if candidates[name]), None) or self._last
                if not any(candidates.values()):  # a call has to be made: from here on nobody else may write to the run
                    run = self._claim(base, names, state)
            state = yield from self._turn(state, fingerprint, run)
        self.run = run or str(self._last)
        return state

    def _candidates(self, first: Prompt) -> tuple[list[str], str]:
        """Return the runs that may be the one to read on, and the automatic name ("" if the caller named the run)."""
        if self._named is not None:
            name = checked_name(self._named)
            self._compare(name)
            return [name], ""
        base = _digest([_compared(self._settings), _fingerprint(first)])[:16]
        rows = self._store.rows("SELECT name FROM run WHERE name = ? OR name GLOB ?", base, f"{base}-[0-9]*")
        return sorted(name for (name,) in rows), base

    def _matching(self, names: list[str], prompt: Prompt, fingerprint: str) -> dict[str, bool]:
        """Return the runs that have recorded this prompt next (True), or nothing from here on (False)."""
        prints = {name: self._recorded_fingerprint(name, prompt) for name in names}
        matching = {name: known is not None for name, known in prints.items() if known in (None, fingerprint)}
        if self._named is not None and not matching:
            raise _mismatch(self._named, prompt)
        return matching

    def _recorded_fingerprint(self, run: str, prompt: Prompt) -> str | None:
        """Return the fingerprint that a run has recorded at this prompt's number."""
        row = self._store.row("SELECT prompt FROM step WHERE run = ? AND number = ?", run, prompt.index)
        return row[0] if row else None

    def _claim(self, base: str, names: list[str], prompt: Prompt) -> str:
        """Lock the run to continue until the reading ends: the named run, one that ends here, or a new one."""
        if self._named is not None:
            return self._begin(self._locks.enter_context(self._store.lock(self._named)))
        new = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
        for name in itertools.chain(names, new):
            with suppress(InUse), ExitStack() as lock:
                lock.enter_context(self._store.lock(name))
                exists = self._compare(name)
                # it may have been read on since it was looked up, perhaps with another document
                if exists and (name not in names or self._recorded_fingerprint(name, prompt)):
                    continue
                if not exists and self._last:
                    self._copy(self._last, name, prompt.index)
                self._locks.push(lock.pop_all())
                return self._begin(name)
        raise AssertionError("there is always another number")

    def _begin(self, run: str) -> str:
        """Create the run or prepare it for more steps: an old pause request is over, server and files may have moved.

        What the run names from here on is what this reading was given, so it is the caller's own.
        """
        with self._store.writing():
            row = self._store.row("SELECT settings, files, mark FROM run WHERE name = ?", run)
            if row is None:
                add_run(self._store, run, self._settings, self._files)
            else:
                kept = row[1] if not self._files and is_own(*row) else json.dumps(self._files)
                named = (json.dumps(self._settings), kept)
                self._store.write(
                    "UPDATE run SET settings = ?, files = ?, mark = ? WHERE name = ?", *named, mark(*named), run
                )
            old = self._paused.get(run)  # not by the time in it, which another clock may have given
            self._store.write("UPDATE run SET paused = NULL WHERE name = ? AND paused = ?", run, old)
        return run

    def _copy(self, run: str, name: str, steps: int) -> None:
        """Make a run `name` that begins with the first `steps` steps of `run`."""
        with self._store.writing():
            add_run(self._store, name, self._settings, self._files)
            copy = "INSERT INTO step SELECT ?, number, phase, prompt, step FROM step WHERE run = ? AND number < ?"
            self._store.write(copy, name, run, steps)

    def _turn(
        self, prompt: Prompt, fingerprint: str, claimed: str | None
    ) -> Generator[Prompt, Reply, Prompt | Reading]:
        """Do one step: get its reply from the record or from the driver, advance the loop, record the step."""
        run = claimed or str(self._last)
        row = self._store.row("SELECT prompt, step FROM step WHERE run = ? AND number = ?", run, prompt.index)
        with self._store.errors():
            reply = replace(step_from_json(row[1]).reply, recorded=True) if row else None
        if row and row[0] != fingerprint:
            raise _mismatch(run, prompt)
        if reply is None and self._store.row("SELECT 1 FROM run WHERE name = ? AND paused IS NOT NULL", run):
            raise RunPaused(f"run {run} was paused after {prompt.index} steps; read again to resume")
        state = advance(self._turns, (yield from exchange(replace(prompt, recorded=reply))))
        step, failed = step_made(state, prompt), isinstance(state, Reading) and state.error is not None
        if reply is None and step and not failed:  # a reply that holds no answer is not recorded, but asked for again
            try:
                with self._store.writing():
                    phase = step.outcome if step.outcome == "insufficient" else step.phase
                    values = (run, prompt.index, phase, fingerprint, step_to_json(step))
                    self._store.write("INSERT INTO step VALUES (?, ?, ?, ?, ?)", *values)
            except JournalError as error:
                return state.failed(error) if isinstance(state, Reading) else _ended(self._turns, error)
        return state

    def _compare(self, run: str) -> bool:
        """Return whether the run exists.

        Raises:
            JournalMismatch: it has other settings.
        """
        query = "SELECT settings, EXISTS (SELECT 1 FROM step WHERE run = name) FROM run WHERE name = ?"
        row = self._store.row(query, run)
        changes = ""
        if row and row[1]:  # the settings of a run without steps may still change
            with self._store.errors():
                then, settings = settings_from_json(row[0]), json.loads(json.dumps(self._settings))
                changes = differences(dict(_flat(_compared(then))), dict(_flat(_compared(settings))))
        if changes:
            raise JournalMismatch(
                f"run {run} was begun with other settings: {changes}. Use those again, or read under another name "
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
    *,
    own: bool = True,
) -> None:
    """Write a run that has no steps yet, inside a transaction; `own`: what it names, the caller has named."""
    named = (json.dumps(settings), json.dumps(files))
    row = (name, *named, parent, parent_step, now(), None, mark(*named) if own else None)
    store.write("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *row)


def is_own(settings: str, files: str, mark: str | None) -> bool:
    """Return whether a run, as the journal has it, was recorded by this user on this machine."""
    return isinstance(settings, str) and isinstance(files, str) and is_marked(mark, settings, files)


def checked_name(name: Any, of: str = "run") -> str:
    """Return the name of a run, or of something else, unchanged.

    Raises:
        UsageError: it cannot have this name.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable():
        raise UsageError(f"a {of}'s name has 1 to 200 printable characters, {str(name)[:40]!r} does not")
    return name


def now() -> str:
    """Return the time as a journal writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def step_to_json(step: Step) -> str:
    """Return a step as JSON."""
    return json.dumps(_STEP.dump_python(step))  # with \\u escapes, which hold lone surrogates too


def step_from_json(text: str) -> Step:
    """Return the step that `step_to_json` wrote.

    Raises:
        ValueError: the text is no such step.
    """
    try:
        return _STEP.validate_python(json.loads(text))
    except RecursionError as error:
        raise ValueError("a step is nested too deeply") from error


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the addresses of the servers, which may have moved."""
    backends = {
        name: {**settings[name], "base_url": None} for name in ("backend", "answer_backend") if name in settings
    }
    return {"backend": {"base_url": None}, **settings, **backends}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings, nested ones too, under names like "budgets.chunk_tokens"."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _mismatch(run: str, prompt: Prompt) -> JournalMismatch:
    return JournalMismatch(
        f"the document is not the one that run {run} read: step {prompt.index} has another text now (or another "
        "tokenizer cuts it, or another version of this package). Give the document as it was, or read this one under "
        "another name (run=, --run, memagent_run). Nothing in the journal was changed"
    )


def _ended(turns: Turns, error: MemAgentError) -> Reading:
    """End the loop with an error; return what it has read."""
    state = advance(turns, error)
    if isinstance(state, Reading):
        return state
    raise AssertionError("a loop ends with the error that is thrown in")


def _fingerprint(prompt: Prompt) -> str:
    """Hash all that the model is asked: question, chunk, templates, and the memory that every step before has left."""
    return _digest([prompt.phase, prompt.max_tokens, [[message.role, message.content] for message in prompt.messages]])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
