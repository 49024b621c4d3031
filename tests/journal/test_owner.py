"""What a journal writes is for its owner alone; paths that are none, and pauses of another clock, are handled."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent_integrations import Journal, Reader, ScriptedBackend, UsageError, save_trace
from memagent_integrations.errors import JournalError, RunPaused

DOCUMENT = "Some words of a long document. " * 60


@pytest.fixture(autouse=True)
def open_to_all() -> Iterator[None]:
    """New files are for everybody, unless who makes them says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_journal_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "runs.db"
    modes: dict[str, int] = {}

    def answer(_: object) -> str:
        modes.update({path.name: mode(path) for path in tmp_path.rglob("*")})
        return "a note"

    with Reader(ScriptedBackend(answer), chunk_tokens=250, journal=file) as reader:
        reading = reader.read("Why?", DOCUMENT)
    assert {modes.pop(name) for name in ("runs.db", "runs.db-wal", "runs.db-shm")} == {0o600}
    assert modes.pop("runs.db-locks") == 0o700
    reading.save(tmp_path / "reading.json")
    save_trace(reading, tmp_path / "page.html")
    assert (mode(tmp_path / "reading.json"), mode(tmp_path / "page.html")) == (0o600, 0o600)


def test_a_journal_that_is_shared_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "runs.db"
    Journal(file)._store.close()
    file.chmod(0o660)
    with Reader(ScriptedBackend(["a note", "the answer"]), journal=file) as reader:
        reader.read("Why?", "Because.")
    assert mode(file) == 0o660


@pytest.mark.parametrize("name", ["", " ", "loop", "a\0b", "\ud800", "folder", "folder/none/runs.db"])
def test_journals_that_cannot_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for open_journal in (Journal, lambda path: Reader(ScriptedBackend([]), journal=path)):
        with pytest.raises((UsageError, JournalError), match="the journal"):
            open_journal(name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("stamp", ["2999-01-01T00:00:00.000000+00:00", "1999-01-01T00:00:00.000000+00:00", "soon"])
@pytest.mark.parametrize("run", ["mine", None])
def test_a_pause_of_another_clock_ends_one_reading(run: str | None, stamp: str, tmp_path: Path) -> None:
    file, answers = tmp_path / "runs.db", ["one", "two", "the answer"]

    def answer(_: object) -> str:
        if len(answers) == 2:
            with Journal(file) as journal:
                journal.pause(journal.runs()[0].name)
            database = sqlite3.connect(file)
            database.execute("UPDATE run SET paused = ?", (stamp,))
            database.commit()
            database.close()
        return answers.pop(0)

    with Reader(ScriptedBackend(answer), chunk_tokens=250, journal=file) as reader:
        with pytest.raises(RunPaused):
            reader.read("Why?", DOCUMENT, run=run)
        assert reader.read("Why?", DOCUMENT, run=run).answer == "the answer"
    with Journal(file) as journal:
        assert not journal.runs()[0].paused
