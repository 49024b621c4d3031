"""Readings that start from the memory that another reading has left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from helpers.carried import PARTS, QUESTION, WHOLE, carried_reader, shown_memories

from memagent_integrations import BackendError, Journal, UsageError
from memagent_integrations.errors import JournalMismatch
from memagent_integrations.records import Prompt

JOINED = carried_reader().read(QUESTION, WHOLE)


def test_documents_in_a_row_leave_what_their_join_leaves() -> None:
    reader, memory = carried_reader(), ""
    assert [chunk.text for part in PARTS for chunk in reader.chunks(part)] == [
        chunk.text for chunk in reader.chunks(WHOLE)
    ], "each part is a whole number of chunks"
    for part in PARTS:
        reading = reader.read(QUESTION, part, memory=memory)
        memory = reading.memory
    assert (reading.memory, reading.answer) == (JOINED.memory, JOINED.answer)
    assert len(JOINED.memory.split()) == len(JOINED.steps) - 1 > 20


async def test_every_way_of_reading_starts_from_the_memory_that_it_is_given() -> None:
    async def pieces() -> AsyncIterator[str]:
        yield PARTS[1]

    before = carried_reader().read(QUESTION, PARTS[0]).memory
    expected = carried_reader().read(QUESTION, PARTS[1], memory=before)
    assert expected.steps[0].memory_before == before
    assert expected.memory.startswith(before)
    reader = carried_reader()
    assert list(reader.stream(QUESTION, PARTS[1], memory=before))[-1] == expected
    assert await reader.aread(QUESTION, PARTS[1], memory=before) == expected
    assert await reader.aread(QUESTION, pieces(), memory=before) == expected
    assert [event async for event in reader.astream(QUESTION, pieces(), memory=before)][-1] == expected
    jobs: list[Any] = [(QUESTION, PARTS[1], before), (QUESTION, PARTS[1])]
    for readings in (reader.read_many(jobs), await reader.aread_many(jobs)):
        assert readings == [expected, carried_reader().read(QUESTION, PARTS[1])]


async def test_a_memory_that_cannot_be_started_from_costs_no_call() -> None:
    class Source:
        fetched = 0

        async def __aiter__(self) -> AsyncIterator[str]:
            Source.fetched += 1
            yield PARTS[0]

    reader = carried_reader(memory_tokens=50)
    for memory, message in [
        ("word " * 60, "the memory has 61 tokens, its budget is 50"),
        (7, "has to be text"),
        (None, "has to be text"),
        (b"text", "has to be text"),
    ]:
        wrong: Any = memory
        with pytest.raises(UsageError, match=message):
            reader.read(QUESTION, PARTS[0], memory=wrong)
        with pytest.raises(UsageError, match=message):
            list(reader.stream(QUESTION, PARTS[0], memory=wrong))
        with pytest.raises(UsageError, match=message):
            await reader.aread(QUESTION, Source(), memory=wrong)
    first, second = reader.read_many([(QUESTION, PARTS[0], "word " * 60), (QUESTION, PARTS[0])])
    assert isinstance(first.error, UsageError)
    assert second.answer
    assert len(reader.backend.prompts) == len(second.steps)  # type: ignore[attr-defined]
    assert Source.fetched == 0


@pytest.mark.parametrize("jobs", [[(QUESTION,)], [(QUESTION, "text", "memory", 4)], [(QUESTION, "text", 5)]])
async def test_jobs_of_another_form_are_refused(jobs: Any) -> None:
    with pytest.raises(UsageError):
        carried_reader().read_many(jobs)
    with pytest.raises(UsageError):
        await carried_reader().aread_many(jobs)


def test_a_run_that_starts_from_another_memory_is_another_run(tmp_path: Path) -> None:
    with Journal(tmp_path / "runs.db") as journal:
        for memory in ("", "one", "two", "one"):
            carried_reader(journal).read(QUESTION, PARTS[0], memory=memory)
        assert len(journal.runs()) == 3
        carried_reader(journal).read(QUESTION, PARTS[0], memory="one", run="mine")
        with pytest.raises(JournalMismatch, match="memory: 'one', now 'two'"):
            carried_reader(journal).read(QUESTION, PARTS[0], memory="two", run="mine")


@pytest.mark.parametrize("step", range(3))
def test_a_reading_that_was_interrupted_starts_again_from_its_own_memory(tmp_path: Path, step: int) -> None:
    plain = carried_reader().read(QUESTION, PARTS[0], memory="before")
    with Journal(tmp_path / "runs.db") as journal:

        def broken(prompt: Prompt) -> Any:
            return BackendError("the server went away") if prompt.index == step else None

        with pytest.raises(BackendError):
            carried_reader(journal, broken).read(QUESTION, PARTS[0], memory="before", run="mine")
        assert journal.reading("mine").memory == (plain.steps[step - 1].memory if step else "before")
        branch = journal.edit("mine", 0, memory="corrected") if step else None
        reader = carried_reader(journal)
        assert reader.read(QUESTION, PARTS[0], run="mine") == plain, "the name is enough"
        assert shown_memories(reader)[0] == (["before"] + [one.memory for one in plain.steps])[step]
        if branch:
            reading = carried_reader(journal).read(QUESTION, PARTS[0], run=branch)
            assert reading.steps[0].memory_before == "before"
            assert reading.memory == plain.memory.replace(plain.steps[0].memory, "corrected")
