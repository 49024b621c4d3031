"""The loop of a reading with all that goes around it: its record in a journal, its limits, its spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from memagent_integrations.calls import limited
from memagent_integrations.documents import file_paths
from memagent_integrations.errors import BackendError, JournalError, MemAgentError, UsageError
from memagent_integrations.journal import Journal, NamedMemory
from memagent_integrations.journal.memories import Search
from memagent_integrations.loop import Turns, failing, replayed
from memagent_integrations.reader.setup import Setup
from memagent_integrations.records import Chunk, Reading
from memagent_integrations.schedule import Waiting
from memagent_integrations.telemetry import traced

Memory = str | NamedMemory
"""What a reading starts from."""


def turns_of_reading(
    setup: Setup,
    journal: Journal | None,
    question: str,
    source: Iterable[Chunk],
    document: Any,
    memory: Memory = "",
    run: str | None = None,
    waiting: Waiting | None = None,
) -> Turns:
    """Return the loop of a whole reading, which the journal records if there is one; `waiting` counts its pauses."""
    if not isinstance(memory, str | NamedMemory):
        raise UsageError(f"the memory has to be text or a journal's NamedMemory, not {type(memory).__name__}")
    if journal:
        return _watched(setup, _recorded(setup, journal, question, source, file_paths(document), memory, run), waiting)
    if run is not None:
        raise UsageError("run names a reading in a journal; give the reader one (journal=...)")
    if isinstance(memory, NamedMemory):
        raise UsageError("a named memory is kept in its journal; give the reader that journal (journal=...)")
    return _watched(setup, setup.loop(question, source, memory=memory), waiting)


def turns_of_part(setup: Setup, question: str, source: Iterable[Chunk] | None, **part: Any) -> Turns:
    """Return the loop of a part: updates of the memory, or without a source the answer.

    Raises:
        UsageError: the setup has what takes the whole reading: it looks passages up, reads segments side by side, or
            reads once more.
    """
    of_whole = {"lookup": setup.lookup, 'strategy="parallel"': setup.parallel_segments, "reread": setup.reread}
    if setting := next((name for name, value in of_whole.items() if value), None):
        raise UsageError(
            f"{setting} takes the whole reading (read, stream, begin, read_many): a reading in parts does not have the "
            "whole text; leave it out"
        )
    return _watched(setup, setup.loop(question, source, answering=source is None, **part))


def _watched(setup: Setup, turns: Turns, waiting: Waiting | None = None) -> Turns:
    turns = limited(turns, setup.model.calls.limits.run_timeout, waiting)
    return traced(turns, model=setup.model.backend.name, answer_model=setup.answer_name, budgets=setup.budgets)


def _recorded(
    setup: Setup,
    journal: Journal,
    question: str,
    source: Iterable[Chunk],
    files: Sequence[str],
    memory: Memory,
    run: str | None,
) -> Turns:
    """Return the loop of a reading, recorded. A run that is continued starts from its own memory if none is given."""
    if isinstance(memory, NamedMemory):
        return (yield from _carried(setup, journal, question, source, files, memory, run))
    try:
        memory = memory or (journal.starting_memory(run) if run is not None else "")
    except MemAgentError as error:
        return (yield from setup.loop(question, failing(error)))
    turns = setup.loop(question, source, memory=memory)
    return (yield from journal.recorded(turns, setup.settings(question, memory), run, files))


def _carried(
    setup: Setup,
    journal: Journal,
    question: str,
    source: Iterable[Chunk],
    files: Sequence[str],
    memory: NamedMemory,
    run: str | None,
) -> Turns:
    """Carry a named memory on, or give again what was read with it; nobody else reads with it meanwhile."""
    with ExitStack() as locked:
        try:
            if memory.journal_path != journal.path:
                raise UsageError(f"the memory {memory.name!r} is in another journal, {memory.journal_path}")
            if run is not None:
                raise UsageError("a named memory finds its runs by the document; give run or a named memory, not both")
            locked.enter_context(memory.lock())
            search = memory.search(question)
            source, known = _compared(source, search)
            if known:
                return (yield from replayed(_fitting(setup, memory, journal.reading(known))))
            start = setup.checked_memory(memory.text)
        except MemAgentError as error:
            return (yield from setup.loop(question, failing(error)))
        turns = setup.loop(question, source, memory=start)
        settings = setup.settings(question, start)
        return (yield from journal.recorded(turns, settings, files=files, complete=search.leave))


def _compared(source: Iterable[Chunk], search: Search) -> tuple[Iterator[Chunk], str | None]:
    """Return the chunks, and the run that has read them if there is one."""
    taken, rest = list[Chunk](), iter(source)
    try:
        for chunk in rest:
            taken.append(chunk)
            if not search.more(chunk):
                break
        else:
            return iter(taken), search.run()
    except JournalError:
        raise
    except MemAgentError as error:  # of the document: for the loop, in its place
        rest = failing(error)
    return chain(taken, search.rest(rest)), None


def _fitting(setup: Setup, memory: NamedMemory, reading: Reading) -> Reading:
    """Return a reading that was recorded, after checking that its answer is one for this reader.

    Raises:
        UsageError: it does not fit the schema of the answer.
    """
    try:
        if setup.output and reading.answer is not None:
            setup.output.parse(reading.answer)
    except BackendError as error:
        raise UsageError(
            f"the document was read with the memory {memory.name!r} before, for an answer that does not fit the schema "
            "now given as output; ask again from the memory alone: reader.answer(question, memory.text)"
        ) from error
    return reading
