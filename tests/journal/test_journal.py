from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.fuzz import one_in
from helpers.loopback import Loopback, chat
from hypothesis import given
from hypothesis import strategies as st

from memagent_integrations import BackendError, Journal, PromptSet, Reader, RunPaused, ScriptedBackend, UsageError
from memagent_integrations.errors import JournalError, JournalMismatch
from memagent_integrations.records import Prompt, Reading, Step

DOCUMENT = "".join(f"Line {n} of a document that is long enough. " for n in range(100))  # five chunks of 220
CHUNKS = 5
QUESTION = "Why?"


def notes(prompt: Prompt) -> str:
    """Write the memory before into each memory, so that a wrong one shows in all later ones."""
    before = prompt.messages[0].content.rpartition("<memory>\n")[2].partition("\n")[0]
    return f"{prompt.phase} {prompt.index} after [{before[:60]}]"


def reader(journal: Any, script: Any = notes, **options: Any) -> Reader:
    return Reader(
        ScriptedBackend(script, batch_size=options.pop("batch_size", 1)),
        **({"chunk_tokens": 220, "memory_tokens": 60, "journal": journal} | options),
    )


def calls(subject: Reader) -> list[int]:
    assert isinstance(subject.backend, ScriptedBackend)
    return [prompt.index for prompt in subject.backend.prompts]


def broken_at(step: int) -> Any:
    return lambda prompt: (
        BackendError("the server went away", retryable=True) if prompt.index == step else notes(prompt)
    )


PLAIN = Reader(ScriptedBackend(notes), chunk_tokens=220, memory_tokens=60).read(QUESTION, DOCUMENT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def test_the_document_has_several_chunks() -> None:
    assert len(PLAIN.steps) == CHUNKS + 1


@pytest.mark.parametrize("step", range(CHUNKS + 1))
def test_a_reading_goes_on_where_it_was_interrupted(file: Path, step: int) -> None:
    with pytest.raises(BackendError):
        reader(file, broken_at(step)).read(QUESTION, DOCUMENT)
    subject = reader(file)
    assert subject.read(QUESTION, DOCUMENT) == PLAIN
    assert calls(subject) == list(range(step, CHUNKS + 1))
    again = reader(file)
    assert again.read(QUESTION, DOCUMENT) == PLAIN
    assert calls(again) == [], "a complete reading costs nothing"


async def test_all_ways_of_reading_go_on_alike(file: Path) -> None:
    async def stream() -> AsyncIterator[str]:
        for start in range(0, len(DOCUMENT), 100):
            yield DOCUMENT[start : start + 100]

    def fresh(n: int) -> Reader:
        shutil.copy(file, target := file.with_name(f"{n}.db"))
        return reader(target, batch_size=4 if n == 3 else 1)

    with Journal(file) as journal, pytest.raises(BackendError):
        reader(journal, broken_at(3)).read(QUESTION, DOCUMENT)
    subjects = [fresh(n) for n in range(6)]
    *events, last = subjects[0].stream(QUESTION, DOCUMENT)
    assert last == await subjects[1].aread(QUESTION, DOCUMENT) == PLAIN
    assert [event async for event in subjects[2].astream(QUESTION, stream())] == [*events, last]
    assert subjects[3].read_many([(QUESTION, DOCUMENT)]) == [PLAIN]
    assert await subjects[4].aread_many([(QUESTION, stream())]) == [PLAIN]
    steps: list[int] = []
    subjects[5].read(QUESTION, DOCUMENT, progress=lambda step: steps.append(step.index))
    assert steps == list(range(CHUNKS + 1)), "recorded steps are reported too"
    for subject in subjects:
        assert calls(subject) == [3, 4, 5]
        *again, reading = subject.stream(QUESTION, DOCUMENT)
        assert "".join(event for event in again if isinstance(event, str)) == PLAIN.answer == reading.answer  # type: ignore[union-attr]
        assert calls(subject) == [3, 4, 5]


def test_runs_are_told_apart_by_question_settings_prompts_and_document(file: Path) -> None:
    with Journal(file) as journal:
        for settings_, question, document in [
            ({}, QUESTION, DOCUMENT),
            ({}, "Who?", DOCUMENT),
            ({}, QUESTION, "Another " + DOCUMENT),
            ({"chunk_tokens": 300}, QUESTION, DOCUMENT),
            ({"layout": "memory-first"}, QUESTION, DOCUMENT),
        ]:
            reader(journal, **settings_).read(question, document)
        assert len(journal.runs()) == 5
        assert all(run.finished and run.model == "scripted" and run.steps >= 4 for run in journal.runs())


@pytest.mark.parametrize(
    ("changed", "question", "document", "message"),
    [
        ({}, QUESTION, DOCUMENT[:3000] + "x" + DOCUMENT[3000:], "step 3 has another text now"),
        ({}, QUESTION, DOCUMENT[: len(DOCUMENT) // 2], "has another text now"),
        ({"chunk_tokens": 300}, QUESTION, DOCUMENT, "chunk_tokens: 220, now 300"),
        ({"memory_tokens": 70}, QUESTION, DOCUMENT, "memory_tokens: 60, now 70"),
        ({}, "Who?", DOCUMENT, r"question: 'Why\?', now 'Who\?'"),
        (
            {"layout": "memory-first"},
            QUESTION,
            DOCUMENT,
            "prompts.name: 'section-first', now 'memory-first'; prompts.update: 'A long document",
        ),
    ],
)
def test_what_changed_is_named_and_the_journal_is_left_alone(
    file: Path, changed: dict[str, Any], question: str, document: str, message: str
) -> None:
    with Journal(file) as journal:
        with pytest.raises(BackendError):
            reader(journal, broken_at(4)).read(QUESTION, DOCUMENT, run="mine")
        before = journal.reading("mine")
        subject = reader(journal, **changed)
        with pytest.raises(JournalMismatch, match=message):
            subject.read(question, document, run="mine")
        assert calls(subject) == []
        assert journal.reading("mine").steps == before.steps
        assert reader(journal).read(QUESTION, DOCUMENT, run="mine") == PLAIN


@pytest.mark.parametrize("batch_size", [1, 3])
def test_documents_that_begin_alike_have_runs_of_their_own(file: Path, batch_size: int) -> None:
    ends = [DOCUMENT + f"It ends in {place}. " * 60 for place in ("Rome", "Oslo", "Bern")]
    plain = [
        Reader(ScriptedBackend(notes), chunk_tokens=220, memory_tokens=60).read(QUESTION, document) for document in ends
    ]
    with Journal(file) as journal:
        subject = reader(journal)
        assert [subject.read(QUESTION, document) for document in ends] == plain
        assert len(calls(subject)) < sum(len(reading.steps) for reading in plain), (
            "what they have in common is read once"
        )
        again = reader(journal, batch_size=batch_size)
        assert [again.read(QUESTION, document) for document in reversed(ends)] == plain[::-1]
        assert again.read_many([(QUESTION, document) for document in ends]) == plain
        assert calls(again) == []
        assert len(journal.runs()) == 3
    fresh = reader(file.with_name("many.db"), batch_size=batch_size)
    assert fresh.read_many([(QUESTION, document) for document in ends]) == plain


@pytest.mark.parametrize("batch_size", [1, 4])
async def test_equal_jobs_are_read_once(file: Path, batch_size: int) -> None:
    subject = reader(file, batch_size=batch_size)
    assert subject.read_many([(QUESTION, DOCUMENT), ("Who?", DOCUMENT), (QUESTION, DOCUMENT)]) == [
        PLAIN,
        subject.read("Who?", DOCUMENT),
        PLAIN,
    ]
    assert len(calls(subject)) == 2 * (CHUNKS + 1)
    other = reader(file.with_name("other.db"), batch_size=batch_size)
    assert await other.aread_many([(QUESTION, DOCUMENT)] * 50) == [PLAIN] * 50
    assert len(calls(other)) == CHUNKS + 1


async def test_a_reading_that_is_over_has_let_go_of_its_run(file: Path) -> None:
    """Even while the traceback is still referenced, as in an except block or in a notebook."""
    begun = threading.Event()

    def slow(prompt: Prompt) -> str:
        begun.set()
        release.wait(10)
        return notes(prompt)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Journal(file) as journal:
        try:
            reader(journal).read(QUESTION, DOCUMENT, progress=interrupt)
        except KeyboardInterrupt:
            assert reader(journal).read(QUESTION, DOCUMENT) == PLAIN
        for batch_size in (1, 3):
            try:
                reader(journal, lambda prompt: 1 / 0, batch_size=batch_size).read_many(
                    [("1?", DOCUMENT), ("2?", DOCUMENT)]
                )
            except ZeroDivisionError:
                assert all(
                    reading.answer for reading in reader(journal).read_many([("1?", DOCUMENT), ("2?", DOCUMENT)])
                )
            journal.delete(next(run.name for run in journal.runs() if run.question == "1?"))
            journal.delete(next(run.name for run in journal.runs() if run.question == "2?"))
        release = threading.Event()
        task = asyncio.create_task(reader(journal, slow).aread("cancelled?", DOCUMENT))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            release.set()
            assert (await reader(journal).aread("cancelled?", DOCUMENT)).answer


def test_an_answer_that_is_none_is_asked_for_again(file: Path) -> None:
    with pytest.raises(BackendError, match="no answer"):
        reader(file, lambda prompt: "<think>hm" if prompt.phase == "answer" else notes(prompt)).read(QUESTION, DOCUMENT)
    subject = reader(file)
    assert subject.read(QUESTION, DOCUMENT) == PLAIN
    assert calls(subject) == [CHUNKS]


def test_a_run_is_read_by_one_at_a_time(file: Path) -> None:
    with Journal(file) as journal, Journal(file) as other:
        events = reader(journal).stream(QUESTION, DOCUMENT, run="mine")
        next(events)
        for subject in (reader(journal), reader(other)):
            with pytest.raises(JournalError, match="is being read already"):
                subject.read(QUESTION, DOCUMENT, run="mine")
        assert reader(other).read("Who?", DOCUMENT).answer, "other runs are not held up"
        with pytest.raises(JournalError, match="is being read already"):
            journal.delete("mine")
        events.close()  # type: ignore[attr-defined]
        assert reader(other).read(QUESTION, DOCUMENT, run="mine") == PLAIN


def test_an_unnamed_run_that_is_being_read_is_no_obstacle(file: Path) -> None:
    """Two documents that begin alike differ only later, or not at all: until then both have their own run."""
    with Journal(file) as journal:
        events = reader(journal).stream(QUESTION, DOCUMENT)
        next(events)
        assert reader(journal).read(QUESTION, DOCUMENT) == PLAIN
        *_, last = events
        assert last == PLAIN
        assert len(journal.runs()) == 2
        again = reader(journal)
        assert again.read(QUESTION, DOCUMENT) == PLAIN
        assert calls(again) == []


def test_a_cancelled_reading_lets_go_of_its_run(file: Path) -> None:
    async def cancelled() -> None:
        subject = reader(file)
        async with aclosing(subject.astream(QUESTION, DOCUMENT)) as events:
            async for _ in events:
                break

    asyncio.run(cancelled())
    assert reader(file).read(QUESTION, DOCUMENT) == PLAIN


def test_many_readings_share_a_journal(file: Path) -> None:
    jobs = [(f"question {n}", DOCUMENT) for n in range(20)]
    interrupted = reader(
        file, lambda prompt: BackendError("refused") if "question 7" in prompt.messages[0].content else notes(prompt)
    )
    assert [number for number, reading in enumerate(interrupted.read_many(jobs)) if reading.error] == [7]
    subject = reader(file)
    assert all(reading.answer for reading in subject.read_many(jobs))
    assert len(calls(subject)) == CHUNKS + 1


def test_a_person_edits_the_memory_and_reads_on(file: Path) -> None:
    with Journal(file) as journal:
        reader(journal).read(QUESTION, DOCUMENT, run="mine")
        branch = journal.edit("mine", 2, memory="the code is 7319")
        assert branch == "mine.1"
        subject = reader(journal)
        reading = subject.read(QUESTION, DOCUMENT, run=branch)
        assert calls(subject) == [3, 4, 5]
        assert reading.steps[:2] == PLAIN.steps[:2]
        assert (reading.steps[2].memory, reading.steps[2].reply.edited) == ("the code is 7319", "the code is 7319")
        assert reading.steps[2].reply.text == PLAIN.steps[2].reply.text, "what the model wrote is kept beside it"
        assert "the code is 7319" in reading.steps[3].memory
        assert journal.reading(branch) == reading
        assert journal.reading("mine") == PLAIN, "nothing recorded is changed"
        assert journal.edit("mine", 2, memory="another") == "mine.2"
        assert journal.edit(branch, 4, memory="deeper", name="deep") == "deep"
        branches = {run.name: (run.parent, run.parent_step, run.finished) for run in journal.runs()}
        assert branches == {
            "mine": (None, None, True),
            "mine.1": ("mine", 2, True),
            "mine.2": ("mine", 2, False),
            "deep": ("mine.1", 4, False),
        }
        for run, step, memory, name in [
            ("mine", 9, "x", None),
            ("mine", 5, "x", None),
            ("nobody", 0, "x", None),
            ("mine", 1, " ", None),
            ("mine", 1, "x", "deep"),
        ]:
            with pytest.raises(UsageError):
                journal.edit(run, step, memory=memory, name=name)
        journal.delete("mine")
        assert journal.reading(branch) == reading, "a branch has all of its own steps"


@pytest.mark.parametrize(
    "memory",
    [
        "No change: the tide was high",
        "<think>the key is 7</think>",
        "(empty: nothing noted yet)",
        "7 <think> 8",
        "<memory>\\nkey\\n</memory>",
        " 7 ",
    ],
)
@pytest.mark.parametrize("boxed", [False, True])
def test_an_edited_memory_is_what_the_model_gets(file: Path, memory: str, boxed: bool) -> None:
    prompts = PromptSet.default(no_change=True, answer_format="boxed" if boxed else "text")
    with Journal(file) as journal:
        reader(journal, prompts=prompts).read(QUESTION, DOCUMENT, run="mine")
        branch = journal.edit("mine", 2, memory=memory)
        assert journal.reading(branch).steps[2].memory == memory
        subject = reader(journal, prompts=prompts)
        assert subject.read(QUESTION, DOCUMENT, run=branch).steps[2].memory == memory
        assert prompts.harmless(memory) in subject.backend.prompts[0].messages[0].content  # type: ignore[attr-defined]


def test_an_edited_memory_beyond_its_budget_is_refused(file: Path) -> None:
    with Journal(file) as journal:
        reader(journal).read(QUESTION, DOCUMENT, run="mine")
        branch = journal.edit("mine", 2, memory="word " * 99)
        with pytest.raises(
            UsageError, match=r"the edited memory of step 2 has 99 tokens, its budget is 60|has 1[0-9][0-9] tokens"
        ):
            reader(journal).read(QUESTION, DOCUMENT, run=branch)


def test_a_streamed_answer_after_an_edit_hides_the_thinking(file: Path) -> None:
    opened = lambda prompt: f"secret</think>{'noted' if prompt.phase == 'memory' else 'it is so'}"  # noqa: E731
    with Journal(file) as journal:
        reader(journal, opened).read(QUESTION, DOCUMENT, run="mine")
        branch = journal.edit("mine", CHUNKS - 1, memory="mine")
        events = reader(journal, opened).stream(QUESTION, DOCUMENT, run=branch)
        assert "".join(event for event in events if isinstance(event, str)) == "it is so"


def test_other_sampling_or_another_model_is_another_run(file: Path) -> None:
    class Warm(ScriptedBackend):
        identity: ClassVar[dict[str, Any]] = {"temperature": 0.7, "base_url": "http://one"}  # type: ignore[misc]

    with Journal(file) as journal:
        reader(journal).read(QUESTION, DOCUMENT, run="mine")
        warm = Reader(Warm(notes), chunk_tokens=220, memory_tokens=60, journal=journal)
        with pytest.raises(JournalMismatch, match=r"temperature: None, now 0.7"):
            warm.read(QUESTION, DOCUMENT, run="mine")
        assert warm.read(QUESTION, DOCUMENT) == PLAIN
        Warm.identity = {"temperature": 0.7, "base_url": "http://two"}
        assert warm.read(QUESTION, DOCUMENT) == PLAIN, "a server that has moved is the same one"
        assert len(calls(warm)) == CHUNKS + 1
        assert len(journal.runs()) == 2


def test_a_journal_is_its_file_whatever_it_is_called(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "sub").mkdir()
    file.with_name("link.db").symlink_to(file)
    monkeypatch.chdir(file.parent)
    with Journal("runs.db") as here:
        monkeypatch.chdir("sub")
        with Journal("../runs.db") as there, Journal("../link.db") as link, pickle.loads(pickle.dumps(here)) as copy:
            events = reader(here).stream(QUESTION, DOCUMENT, run="mine")
            next(events)
            for other in (there, link, copy):
                with pytest.raises(JournalError, match="is being read already"):
                    reader(other).read(QUESTION, DOCUMENT, run="mine")
            events.close()  # type: ignore[attr-defined]
    assert not list((file.parent / "sub").iterdir())
    monkeypatch.chdir(file.parent)
    with Journal(":memory:") as memory:
        assert memory.path.is_file()


def test_a_journal_that_is_removed_while_it_is_read(file: Path) -> None:
    events = reader(file).stream(QUESTION, DOCUMENT)
    next(events)
    file.unlink()
    with pytest.raises(JournalError, match="removed or replaced"):
        list(events)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE run SET settings = '{oops'",
        "UPDATE run SET settings = '{}'",
        "UPDATE run SET settings = '[]'",
        "UPDATE run SET created = 'x'",
        "UPDATE step SET step = '{}'",
        "UPDATE step SET step = 'oops'",
        "UPDATE run SET settings = json_set(settings, '$.budgets.later', 1)",
        "UPDATE run SET settings = json_set(settings, '$.prompts.later', 1)",
    ],
)
def test_a_damaged_record_is_a_journal_error(file: Path, damage: str) -> None:
    with Journal(file) as journal:
        reader(journal).read(QUESTION, DOCUMENT, run="mine")
        journal._store._database.execute(damage)
        failed = 0
        for attempt in (
            journal.runs,
            lambda: journal.reading("mine"),
            lambda: journal.prompts("mine"),
            lambda: reader(journal).read(QUESTION, DOCUMENT, run="mine"),
            lambda: journal.edit("mine", 1, memory="m"),
        ):
            try:
                attempt()
            except JournalError:
                failed += 1
        assert failed


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "x" * 201, "\ud800", 5, True, b"x", Path("x")])
def test_names_that_a_run_may_not_have(file: Path, name: Any) -> None:
    with Journal(file) as journal:
        with pytest.raises(UsageError, match="a run's name has 1 to 200 printable characters"):
            reader(journal).read(QUESTION, DOCUMENT, run=name)
        assert journal.runs() == []
        reader(journal).read(QUESTION, DOCUMENT, run="mine")
        if name:
            with pytest.raises(UsageError, match="a run's name"):
                journal.edit("mine", 1, memory="m", name=name)


def test_arguments_of_a_wrong_kind(file: Path) -> None:
    for journal in (5, b"x"):
        with pytest.raises(UsageError, match="has to be a file's name"):
            reader(journal)
    with Journal(file) as records:
        reader(records).read(QUESTION, DOCUMENT, run="mine")
        for step, memory in [(10**30, "x"), (-1, "x"), ("1", "x"), (1, 5)]:
            with pytest.raises(UsageError):
                records.edit("mine", step, memory=memory)  # type: ignore[arg-type]


def test_a_journal_can_be_looked_at_where_nothing_may_be_written(file: Path) -> None:
    reader(file).read(QUESTION, DOCUMENT, run="mine")
    file.parent.chmod(0o555)
    try:
        with Journal(file, readonly=True) as journal:
            assert journal.reading("mine") == PLAIN
            assert [run.name for run in journal.runs()] == ["mine"]
            with pytest.raises(JournalError, match="readonly"):
                journal.edit("mine", 1, memory="m")
    finally:
        file.parent.chmod(0o755)
    empty = file.with_name("empty.db")
    empty.touch()
    with pytest.raises(JournalError, match="is no journal"):
        Journal(empty, readonly=True)
    assert empty.stat().st_size == 0


def test_what_is_recorded_can_be_seen_while_it_is_read(file: Path) -> None:
    with Journal(file) as journal, Journal(file) as onlooker:
        for event in reader(journal).stream(QUESTION, DOCUMENT, run="mine"):
            if isinstance(event, Reading):
                break
            if not isinstance(event, str):
                assert onlooker.reading("mine").steps[-1] == event, "a step is recorded before it is reported"
        assert onlooker.reading("mine") == PLAIN
        (run,) = onlooker.runs()
        assert run.finished
        with pytest.raises(UsageError, match="holds no run 'nobody'"):
            onlooker.reading("nobody")
        with pytest.raises(UsageError, match="holds no run 'nobody'"):
            onlooker.delete("nobody")
        unfinished = onlooker.edit("mine", 1, memory="m")
        assert "is not finished" in str(onlooker.reading(unfinished).error)
        assert str(file) in repr(onlooker)


def test_any_text_is_recorded_as_it_is(file: Path) -> None:
    odd = "\ud800 \x00 \u2028 中 \\u0041 🙂"
    with pytest.raises(BackendError):
        reader(file, lambda prompt: odd if prompt.index < 2 else BackendError("gone")).read(QUESTION + odd, DOCUMENT)
    with Journal(file) as journal:
        (run,) = journal.runs()
        assert run.question == QUESTION + odd
        assert journal.reading(run.name).memory == odd.strip()


def test_files_that_are_no_journal(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    (tmp_path / "text.txt").write_text("some text " * 1000)
    before = foreign.read_bytes()
    for path, message in [
        (foreign, "of another program"),
        (tmp_path / "text.txt", "not a database"),
        (tmp_path, "is a folder"),
        (Path("a\0b"), "null|NUL"),
    ]:
        with pytest.raises(JournalError, match=message):
            Journal(path)
    assert foreign.read_bytes() == before
    with Journal(tmp_path / "new.db") as journal:
        journal._store._database.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match="another version of this package"):
        Journal(tmp_path / "new.db")


def test_a_truncated_journal_is_an_error_and_not_a_shorter_one(file: Path) -> None:
    with Journal(file) as journal:
        reader(journal).read(QUESTION, DOCUMENT)
    content = file.read_bytes()
    for size in (len(content) // 2, len(content) - 4096, 100):
        file.write_bytes(content[:size])
        with pytest.raises(JournalError, match=r"malformed|not a database"), Journal(file) as journal:
            reader(journal).read(QUESTION, DOCUMENT)


def test_a_full_disk_loses_no_step(file: Path) -> None:
    with Journal(file) as journal:
        pages = journal._store._database.execute("PRAGMA page_count").fetchone()[0]
        journal._store._database.execute(f"PRAGMA max_page_count = {pages + 3}")
        subject = reader(journal, lambda prompt: notes(prompt) + " " + "word " * 40)
        with pytest.raises(JournalError, match="full") as caught:
            subject.read(QUESTION, DOCUMENT * 10)
        assert caught.value.reading is not None
        kept = len(journal.reading(journal.runs()[0].name).steps)
        assert 0 < kept == len(subject.backend.prompts) - 1  # type: ignore[attr-defined]
        journal._store._database.execute("PRAGMA max_page_count = 100000")
        assert reader(journal, lambda prompt: notes(prompt) + " " + "word " * 40).read(QUESTION, DOCUMENT * 10).answer


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_journal_that_cannot_be_written(file: Path) -> None:
    Journal(file).close()
    file.chmod(0o444)
    file.parent.chmod(0o555)
    try:
        with pytest.raises(JournalError, match=r"readonly|unable"), Journal(file) as journal:
            reader(journal).read(QUESTION, DOCUMENT)
    finally:
        file.parent.chmod(0o755)


@pytest.mark.heavy
def test_two_processes_make_one_journal(file: Path) -> None:
    script = f"from memagent_integrations.journal import Journal\nfor _ in range(20): Journal({str(file)!r}).close()"
    running = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(4)]
    assert [process.communicate()[1] for process in running] == [b""] * 4
    Journal(file).close()


def test_a_journal_of_ones_own_stays_open(file: Path) -> None:
    with Journal(file) as journal:
        with reader(journal) as subject:
            subject.read(QUESTION, DOCUMENT)
        assert journal.runs()
    with reader(file) as subject:
        assert subject.journal is not None
    with pytest.raises(JournalError, match="closed"):
        subject.journal.runs()
    with pytest.raises(UsageError, match="give the reader one"):
        reader(None).read(QUESTION, DOCUMENT, run="mine")


def test_settings_come_back_as_they_were(file: Path) -> None:
    prompts = PromptSet.default(no_change=True, answer_format="boxed")
    with Journal(file) as journal:
        reader(journal, prompts=prompts).read(QUESTION, DOCUMENT, run="mine")
        assert journal.prompts("mine") == prompts
        assert journal.settings("mine")["budgets"]["chunk_tokens"] == 220
        json.dumps(journal.settings("mine"))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, CHUNKS + 1), st.integers(0, 3)),
        st.tuples(st.just("edit"), st.integers(0, CHUNKS - 1), st.integers(0, 3)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@pytest.mark.fuzz
@one_in(3)
@given(actions=ACTIONS)
def test_any_sequence_of_crash_resume_edit_and_branch(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]]
) -> None:
    """Each run ends like one that was never interrupted and had the same edits; no step of it is called twice."""
    path = tmp_path_factory.mktemp("journal") / "runs.db"
    journal, edits, called = Journal(path), {"run": {}}, {"run": []}  # type: ignore[var-annotated]

    def read(name: str, stop: int) -> Reading | None:
        subject = reader(journal, broken_at(stop))
        try:
            return subject.read(QUESTION, DOCUMENT, run=name)
        except BackendError:
            return None
        finally:
            called[name] += [index for index in calls(subject) if index != stop]

    def expected(changes: dict[int, str]) -> Reading:
        def script(prompt: Prompt) -> str:
            return changes.get(prompt.index) or notes(prompt)

        return Reader(ScriptedBackend(script), chunk_tokens=220, memory_tokens=60).read(QUESTION, DOCUMENT)

    for action, step, pick in actions:
        name = list(edits)[pick % len(edits)]
        if action == "reopen":
            journal.close()
            journal = Journal(path)
        elif action == "read":
            read(name, step)
        elif name in {run.name for run in journal.runs() if run.steps > step}:
            branch = journal.edit(name, step, memory=f"edited {len(edits)}")
            edits[branch] = {at: text for at, text in edits[name].items() if at < step} | {step: f"edited {len(edits)}"}
            called[branch] = list(range(step + 1))
    for name, changes in edits.items():
        reading = read(name, 99)
        assert reading is not None
        assert [s.memory for s in reading.steps] == [s.memory for s in expected(changes).steps]
        assert reading.answer == expected(changes).answer
        assert sorted(called[name]) == list(range(CHUNKS + 1))
    journal.close()


def test_a_journal_travels_as_its_file(file: Path) -> None:
    with Journal(file) as journal:
        reader(journal).read(QUESTION, DOCUMENT, run="mine")
    with pickle.loads(pickle.dumps(journal)) as again:
        assert again.reading("mine") == PLAIN


@pytest.mark.parametrize("at", [0, 1])
def test_a_pause_while_recorded_steps_are_given_is_kept(file: Path, at: int) -> None:
    with Journal(file) as journal:
        with pytest.raises(BackendError):
            reader(journal, broken_at(3)).read(QUESTION, DOCUMENT, run="mine")

        def pause(step: Step) -> None:
            if step.index == at:
                journal.pause("mine")

        subject = reader(journal)
        with pytest.raises(RunPaused, match="was paused after 3 steps"):
            subject.read(QUESTION, DOCUMENT, run="mine", progress=pause)
        assert calls(subject) == []
        assert journal.run("mine").state == "paused"
        assert subject.read(QUESTION, DOCUMENT, run="mine") == PLAIN


def test_a_run_is_there_when_it_begins(file: Path) -> None:
    with Journal(file) as journal:
        states: list[str] = []

        def script(prompt: Prompt) -> Any:
            states.append(journal.run("mine").state)
            return BackendError("the server went away", retryable=True)

        with pytest.raises(BackendError):
            reader(journal, script).read(QUESTION, DOCUMENT, run="mine")
        assert states == ["reading"]
        assert (journal.run("mine").state, journal.run("mine").steps, journal.reading("mine").steps) == (
            "unfinished",
            0,
            (),
        )
        assert reader(journal).read("Who?", DOCUMENT, run="mine").question == "Who?", (
            "until the first step its settings may change"
        )
        assert journal.run("mine").question == "Who?"


@pytest.mark.heavy
def test_a_run_is_resumed_with_all_that_it_was_begun_with(file: Path) -> None:
    with Loopback(chat(["a note"])) as server:
        options = {
            "base_url": f"{server.url}/v1",
            "tokenizer": "approximate",
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
        }
        with Reader(
            "openai:m",
            chunk_tokens=100,
            memory_tokens=60,
            window=2000,
            journal=file,
            backend_options=options,
            lookup=1,
            strategy="parallel",
            segments=2,
        ) as subject:
            planned = subject.plan(QUESTION, DOCUMENT)
            whole = subject.read(QUESTION, DOCUMENT, run="mine")
        with Journal(file) as journal:
            branch = journal.edit("mine", 1)
        with Reader.from_run(file, branch, window=2000) as resumed:
            assert resumed.plan(QUESTION, DOCUMENT) == planned
            assert resumed.read(QUESTION, DOCUMENT, run=branch).answer == whole.answer
        assert server.bodies("/v1/chat/completions")[-1]["top_p"] == 0.9


def test_an_empty_log_of_writes_does_not_keep_a_journal_from_being_read(tmp_path: Path) -> None:
    """A process that found the disk full leaves one; then SQLite has no room for the file that it needs beside it."""
    with Journal(tmp_path / "runs.db") as journal:
        reader(journal).read("Who?", "Ann left.", run="r")
    (tmp_path / "runs.db-wal").touch()
    with Journal(tmp_path / "runs.db", readonly=True) as journal:
        assert [run.name for run in journal.runs()] == ["r"]
        assert not (tmp_path / "runs.db-shm").exists()


def test_a_full_disk_is_asked_about(tmp_path: Path) -> None:
    with Journal(tmp_path / "runs.db") as journal:
        journal._store.write("CREATE TABLE more (text)")
        journal._store.write("PRAGMA max_page_count = 1")
        with pytest.raises(JournalError, match="is the disk full"), journal._store.errors():
            journal._store.write("INSERT INTO more VALUES (zeroblob(100000))")
        with pytest.raises(JournalError, match=r"syntax error|incomplete input") as caught, journal._store.errors():
            journal._store.write("SELECT")
        assert "is the disk full" not in str(caught.value)
