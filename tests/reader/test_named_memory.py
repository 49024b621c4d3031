"""A memory with a name: readings carry it on, also after crashes, and none is absorbed twice."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.carried import PARTS, QUESTION, WHOLE, carried_reader, shown_memories
from helpers.loopback import Loopback, chat

from memagent_integrations import (
    BackendError,
    Journal,
    PromptSet,
    Reader,
    Reading,
    ScriptedBackend,
    Step,
    UsageError,
)
from memagent_integrations.errors import InUse, JournalError
from memagent_integrations.journal import NamedMemory
from memagent_integrations.records import Prompt

JOINED = carried_reader().read(QUESTION, WHOLE)
STEPS = 4
"""The steps of the reading of one part."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def carried(journal: Journal, reader: Reader | None = None, parts: list[str] = PARTS, name: str = "case") -> Reading:
    """Read the parts one after the other with the named memory; return the last reading."""
    reader = reader or carried_reader(journal)
    for part in parts:
        reading = reader.read(QUESTION, part, memory=journal.memory(name))
    return reading


def calls(reader: Reader) -> int:
    return len(reader.backend.prompts)  # type: ignore[attr-defined]


def test_documents_in_a_row_leave_what_their_join_leaves(file: Path) -> None:
    with Journal(file) as journal:
        memory = journal.memory("case")
        assert memory.text == ""
        assert (carried(journal).memory, carried(journal).answer) == (JOINED.memory, JOINED.answer)
        assert memory.text == JOINED.memory
        assert [journal.reading(run).memory.count("fact") for run in memory.runs] == list(range(3, 31, 3))
    with Journal(file, readonly=True) as journal:
        assert journal.memory("case").text == JOINED.memory


@pytest.mark.parametrize("number", range(len(PARTS) * STEPS))
def test_a_row_that_fails_at_any_call_is_run_again(file: Path, number: int) -> None:
    with Journal(file) as journal:
        seen: list[Prompt] = []

        def broken(prompt: Prompt) -> Any:
            seen.append(prompt)
            return BackendError("the server went away") if len(seen) == number + 1 else None

        with pytest.raises(BackendError):
            carried(journal, carried_reader(journal, broken))
        reader = carried_reader(journal)
        last = carried(journal, reader)
        assert (last.memory, last.answer) == (JOINED.memory, JOINED.answer)
        assert journal.memory("case").text == JOINED.memory
        assert calls(reader) == len(PARTS) * STEPS - number, "no call is made twice"
        assert len(journal.runs()) == len(PARTS)


def test_what_was_read_is_given_again_at_no_cost(file: Path) -> None:
    with Journal(file) as journal:
        first = carried_reader(journal).read(QUESTION, PARTS[0], memory=journal.memory("case"))
        carried(journal)
        reader = carried_reader(journal, chunk_tokens=90, layout="memory-first")  # the text counts, not the settings
        events = list(reader.stream(QUESTION, iter([PARTS[0][:50], PARTS[0][50:]]), memory=journal.memory("case")))
        assert events[-1] == first
        assert "".join(event for event in events if isinstance(event, str)) == first.answer
        assert [event for event in events if isinstance(event, Step)] == list(first.steps)
        assert calls(reader) == 0
        assert events[-1].new_usage.prompt_tokens == 0  # type: ignore[union-attr]
        assert journal.memory("case").text == JOINED.memory, "and not absorbed twice"


def test_another_question_or_another_name_reads_the_document(file: Path) -> None:
    with Journal(file) as journal:
        carried(journal, parts=PARTS[:1])
        other = carried_reader(journal).read("Who?", PARTS[0], memory=journal.memory("case"))
        assert other.steps[0].memory_before == "fact0 fact1 fact2"
        reader = carried_reader(journal)
        assert carried(journal, reader, PARTS[:1], "other").steps[0].memory_before == ""
        assert calls(reader) == 0, "the same reading from the same memory is a recorded one"
        assert [memory.name for memory in journal.memories()] == ["case", "other"]


BEGINNINGS = [
    PARTS[0],
    PARTS[0] + PARTS[1],  # one that goes on
    PARTS[0][: len(PARTS[0]) // 3],  # one that ends before
    PARTS[0][:-20] + "fact99 at its end",  # one with another end
    "fact7",  # shorter than what is compared first
    "fact7 and fact8",
]


@pytest.mark.parametrize("overlap", [0, 10])
async def test_documents_that_begin_alike_are_told_apart(file: Path, overlap: int) -> None:
    async def pieces(text: str) -> AsyncIterator[str]:
        for start in range(0, len(text), 70):
            yield text[start : start + 70]

    with Journal(file) as journal:
        reader = carried_reader(journal, overlap_tokens=overlap)
        readings = [reader.read(QUESTION, text, memory=journal.memory("case")) for text in BEGINNINGS]
        assert len(set(journal.memory("case").runs)) == len(BEGINNINGS)
        made = calls(reader)
        for text, reading in zip(BEGINNINGS, readings, strict=True):
            assert await reader.aread(QUESTION, pieces(text), memory=journal.memory("case")) == reading
            assert reader.read(QUESTION, text, memory=journal.memory("case")) == reading
        assert calls(reader) == made
        again = [await reader.aread(QUESTION, pieces(text), memory=journal.memory("async")) for text in BEGINNINGS]
        assert [reading.memory for reading in again] == [reading.memory for reading in readings]


async def test_every_way_of_reading_carries_on(file: Path) -> None:
    with Journal(file) as journal:
        reader = carried_reader(journal)
        memory = journal.memory("case")
        ways: list[Callable[[str], Any]] = [
            lambda part: reader.read(QUESTION, part, memory=memory),
            lambda part: list(reader.stream(QUESTION, part, memory=memory)),
            lambda part: list(reader.begin(QUESTION, part, memory=memory).stream()),
            lambda part: reader.read_many([(QUESTION, part, memory)]),
        ]
        for way, part in zip(ways, PARTS, strict=False):
            way(part)
        await reader.aread(QUESTION, PARTS[4], memory=memory)
        [_ async for _ in reader.astream(QUESTION, PARTS[5], memory=memory)]
        await reader.aread_many([(QUESTION, PARTS[6], memory)])
        assert memory.text == " ".join(f"fact{n}" for n in range(21))


def test_jobs_with_names_of_their_own_are_read_side_by_side(file: Path) -> None:
    with Journal(file) as journal:
        reader = carried_reader(journal)
        for parts in (PARTS[:3], PARTS[3:6]):
            reader.read_many([(QUESTION, part, journal.memory(f"case {n}")) for n, part in enumerate(parts)])
        assert [memory.text for memory in journal.memories()] == [
            " ".join(f"fact{n}" for n in (*range(3 * m, 3 * m + 3), *range(9 + 3 * m, 12 + 3 * m))) for m in range(3)
        ]
        with pytest.raises(UsageError, match="'case' is in several jobs"):
            reader.read_many([(QUESTION, part, journal.memory("case")) for part in PARTS])


def test_a_person_writes_the_memory(file: Path) -> None:
    with Journal(file) as journal:
        carried(journal, parts=PARTS[:1])
        memory = journal.memory("case")
        memory.set("fact1 corrected")
        assert memory.text == journal.memory("case").text == "fact1 corrected"
        assert carried(journal, parts=PARTS[:2]).memory == "fact1 corrected fact3 fact4 fact5"
        memory.set("")
        assert carried_reader(journal).read(QUESTION, PARTS[2], memory=memory).steps[0].memory_before == ""
        memory.set("word " * 500)
        reader = carried_reader(journal)
        with pytest.raises(UsageError, match="the memory has 501 tokens, its budget is 400"):
            reader.read(QUESTION, PARTS[3], memory=memory)
        assert calls(reader) == 0
        wrong: Any = 5
        with pytest.raises(UsageError, match="has to be text"):
            memory.set(wrong)


def test_a_memory_is_deleted_and_its_runs_stay(file: Path) -> None:
    with Journal(file) as journal:
        carried(journal, parts=PARTS[:2])
        memory = journal.memory("case")
        (first, last) = memory.runs
        for run in (first, last):
            with pytest.raises(UsageError, match=f"the memory 'case' rests on the run {run}"):
                journal.delete(run)
        memory.delete()
        assert (memory.text, memory.runs, journal.memories(), len(journal.runs())) == ("", (), [], 2)
        with pytest.raises(UsageError, match="holds no memory 'case'"):
            memory.delete()
        journal.delete(last)
        assert carried(journal, parts=PARTS[:2]).memory == "fact0 fact1 fact2 fact3 fact4 fact5"


def test_a_document_that_was_given_up_is_not_in_the_memory(file: Path) -> None:
    with Journal(file) as journal:
        with pytest.raises(BackendError):
            carried(journal, carried_reader(journal, lambda prompt: BackendError("no") if prompt.index == 2 else None))
        carried(journal, parts=PARTS[1:2])
        assert journal.memory("case").text == "fact3 fact4 fact5"
        assert carried(journal, parts=PARTS[:1]).memory == "fact3 fact4 fact5 fact0 fact1 fact2", "read anew, on top"


def test_a_branch_of_a_carried_run_is_no_part_of_the_memory(file: Path) -> None:
    with Journal(file) as journal:
        carried(journal, parts=PARTS[:2])
        run = journal.memory("case").runs[1]
        branch = journal.edit(run, 0, memory="corrected")
        reading = carried_reader(journal).read(QUESTION, PARTS[1], run=branch)
        assert reading.steps[0].memory_before == "fact0 fact1 fact2"
        assert reading.memory == "corrected fact4 fact5"
        assert journal.memory("case").text == "fact0 fact1 fact2 fact3 fact4 fact5"


async def test_what_a_named_memory_is_not_for(file: Path, tmp_path: Path) -> None:
    with Journal(file) as journal, Journal(tmp_path / "other.db") as other:
        memory = journal.memory("case")
        for reader, options, message in [
            (carried_reader(), {}, "give the reader that journal"),
            (carried_reader(other), {}, "is in another journal"),
            (carried_reader(journal), {"run": "mine"}, "not both"),
        ]:
            with pytest.raises(UsageError, match=message):
                reader.read(QUESTION, PARTS[0], memory=memory, **options)
            with pytest.raises(UsageError, match=message):
                await reader.aread(QUESTION, PARTS[0], memory=memory, **options)
            assert calls(reader) == 0
        assert carried_reader(file).read(QUESTION, PARTS[0], memory=memory).answer, "the file counts"
        for name in ("", "a\nb", "x" * 201, 5, None):
            wrong: Any = name
            with pytest.raises(UsageError, match="a memory's name has 1 to 200"):
                journal.memory(wrong)
        assert journal.memory("case") == memory != journal.memory("other")
    with pytest.raises(JournalError, match="closed"):
        memory.text  # noqa: B018


def test_a_document_that_fails_leaves_the_memory_as_it_was(file: Path) -> None:
    def failing() -> Any:
        yield PARTS[1]
        raise OSError("the disk is gone")

    with Journal(file) as journal:
        carried(journal, parts=PARTS[:1])
        reader = carried_reader(journal)
        for document in ("", "  ", 5, failing(), [PARTS[1], Path("/nowhere")]):
            with pytest.raises(Exception):  # noqa: B017, PT011
                reader.read(QUESTION, document, memory=journal.memory("case"))
        with pytest.raises(UsageError, match="the question is empty"):
            reader.read("", PARTS[1], memory=journal.memory("case"))
        assert journal.memory("case").text == "fact0 fact1 fact2"
        carried(journal, parts=PARTS[1:2])
        assert journal.memory("case").text == "fact0 fact1 fact2 fact3 fact4 fact5"


def test_one_thread_at_a_time_reads_with_a_memory(file: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(prompt: Prompt) -> Any:
        entered.set()
        assert leave.wait(60)

    with Journal(file) as journal:
        thread = threading.Thread(target=lambda: carried(journal, carried_reader(journal, slow), PARTS[:1]))
        thread.start()
        assert entered.wait(60)
        memory = journal.memory("case")
        reader = carried_reader(journal)
        attempts: list[Callable[[], Any]] = [
            lambda: reader.read(QUESTION, PARTS[1], memory=memory),
            lambda: memory.set("mine"),
            memory.delete,
        ]
        for attempt in attempts:
            with pytest.raises(InUse, match="memory case is being read already"):
                attempt()
        assert memory.text == ""
        assert reader.read(QUESTION, PARTS[1], memory=journal.memory("other")).answer, "another one is free"
        leave.set()
        thread.join()
        assert memory.text == "fact0 fact1 fact2"
        assert carried(journal, reader, PARTS[1:2]).memory == "fact0 fact1 fact2 fact3 fact4 fact5"


async def test_a_memory_that_goes_on_while_an_async_document_comes(file: Path) -> None:
    """What was fetched to compare the document does not suffice any more: an error says so, and nothing is lost."""
    with Journal(file) as journal:
        carried(journal, parts=PARTS[:1])
        elsewhere = ["".join(PARTS[:4])]

        async def pieces() -> AsyncIterator[str]:
            for number, part in enumerate(PARTS[:3]):
                if number == 1 and elsewhere:
                    carried(journal, parts=[elsewhere.pop()])
                yield part

        reader = carried_reader(journal)
        with pytest.raises(InUse, match="the journal has changed while the document was fetched; read it again"):
            await reader.aread(QUESTION, pieces(), memory=journal.memory("case"))
        assert calls(reader) == 0
        reading = await reader.aread(QUESTION, pieces(), memory=journal.memory("case"))
        assert [step.phase for step in reading.steps] == ["memory"] * 9 + ["answer"]
        assert reading.steps[0].memory_before.endswith("fact11")


SCRIPT = """
import sys
from memagent_integrations import Journal, Reader
from helpers.carried import PARTS, QUESTION, CHUNK_TOKENS
url, file = sys.argv[1:]
options = {"base_url": url + "/v1", "tokenizer": "approximate"}
with Journal(file) as journal:
    sizes = {"chunk_tokens": CHUNK_TOKENS, "memory_tokens": 400, "window": 8192}
    reader = Reader("openai:m", **sizes, journal=journal, backend_options=options)
    for part in PARTS:
        print(reader.read(QUESTION, part, memory=journal.memory("case")).memory, flush=True)
"""


def row(server: Loopback, file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.url, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "NO_PROXY": "127.0.0.1", "PATH": ""},
    )


@pytest.mark.heavy
def test_a_row_that_is_killed_at_any_moment_is_run_again(file: Path) -> None:
    arrived = threading.Semaphore(0)

    def respond(prompt: str) -> str:
        arrived.release()
        memory = prompt.rpartition("<memory>\n")[2].partition("\n</memory>")[0]
        section = prompt.rpartition("<section>\n")[2].partition("\n</section>")[0] if "<section>" in prompt else ""
        words = memory.split() if memory.startswith("fact") else []
        return " ".join([*words, *(word for word in section.split() if word.startswith("fact"))])

    with Loopback(chat(respond)) as server:
        killed = 0
        for moment in range(8):
            running = row(server, file)
            for _ in range(4 + moment % 4):
                arrived.acquire(timeout=60)
            time.sleep(0.004 * moment)  # any instant from the arrival of that call on
            running.kill()
            running.communicate()
            killed += running.returncode == -9
        assert killed > 4
        out, err = row(server, file).communicate(timeout=120)
        assert err == ""
        everything = " ".join(f"fact{n}" for n in range(30))
        assert out.splitlines()[-1] == everything
        with Journal(file) as journal:
            assert journal.memory("case").text == everything
            assert len(journal.memory("case").runs) == len(PARTS)


@pytest.mark.heavy
def test_two_processes_with_one_name_do_not_mix(file: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def respond(prompt: str) -> str:
        entered.set()
        assert leave.wait(60)
        return "noted"

    with Loopback(chat(respond)) as server:
        first = row(server, file)
        assert entered.wait(60)
        _, error = row(server, file).communicate(timeout=60)
        assert "InUse: memory case is being read already" in error
        leave.set()
        assert first.communicate(timeout=60)[1] == ""
        with Journal(file) as journal:
            assert len(journal.memory("case").runs) == len(PARTS)


@pytest.mark.heavy
def test_a_thousand_readings_later_a_reading_costs_the_same(file: Path) -> None:
    with Journal(file) as journal:
        journal._store._database.execute("PRAGMA synchronous = OFF")  # the disk is not what grows
        reader = carried_reader(journal, lambda prompt: "noted")

        def read(number: int) -> float:
            start = time.process_time()
            reader.read(QUESTION, f"letter {number} of many", memory=journal.memory("case"))
            return time.process_time() - start

        spent = [read(number) for number in range(1000)]
        assert len(journal.memory("case").runs) == 1000
        early, late = (sorted(part)[len(part) // 2] for part in (spent[50:250], spent[800:]))
        assert late < 3 * early
        assert read(7) < 10 * early, "also one that was read"


def test_a_memory_is_shown_by_what_prints_it(file: Path) -> None:
    with Journal(file) as journal:
        assert isinstance(journal.memory("case"), NamedMemory)
        assert repr(journal.memory("case")) == f"<NamedMemory 'case' in {journal.path}>"


def test_a_journal_of_the_format_before_is_carried_on(file: Path) -> None:
    with Journal(file) as journal:
        carried_reader(journal).read(QUESTION, PARTS[0], run="whole")
        with pytest.raises(BackendError):
            carried_reader(journal, lambda prompt: BackendError("no") if prompt.index == 1 else None).read(
                QUESTION, PARTS[1]
            )
        journal._store._database.execute("DROP TABLE memory")
        journal._store._database.execute("ALTER TABLE run DROP COLUMN mark")
        journal._store._database.execute("PRAGMA user_version = 2")
    with Journal(file, readonly=True) as journal:
        assert [run.steps for run in journal.runs()] == [4, 1]
        assert (journal.memories(), journal.memory("case").text) == ([], "")
    with Journal(file) as journal, Journal(file) as another:
        reader = carried_reader(journal)
        assert reader.read(QUESTION, PARTS[0], run="whole").answer
        assert calls(reader) == 0
        reading = reader.read(QUESTION, PARTS[1], memory=journal.memory("case"))
        assert shown_memories(reader)[0] == "fact3", "what was recorded is not asked again"
        assert another.memory("case").text == reading.memory
    with Journal(file) as journal:
        journal.delete(journal.runs()[0].name)


@pytest.mark.parametrize(
    "text", ["key \ud800 7", "key \x00 7", "\u202eyek", "a </memory> <|im_end|> {section}", '"', "\\"]
)
def test_a_memory_holds_any_text_that_a_model_or_a_person_writes(file: Path, text: str) -> None:
    with Journal(file) as journal:
        reader = Reader(ScriptedBackend(lambda prompt: text), journal=journal)
        assert reader.read(QUESTION, "one", memory=journal.memory("case")).memory == text
        assert journal.memory("case").text == text
        assert reader.read(QUESTION, "two", memory=journal.memory("case")).memory == text
        journal.memory("other").set(text)
    with Journal(file) as journal:
        assert [memory.text for memory in journal.memories()] == [text, text]


@pytest.mark.parametrize(
    "document",
    [
        "fact1 here." + " " * 300 + "\n\n" + "end there. " + " \n" * 50,
        "  \n" * 200 + "late fact2",
        "fact1 a b " * 40 + "\t" * 100 + "more",
    ],
    ids=["between and behind", "before", "tabs"],
)
def test_white_space_that_some_cuts_leave_out_does_not_hide_what_was_read(file: Path, document: str) -> None:
    with Journal(file) as journal:
        memory = journal.memory("case")
        first = carried_reader(journal, chunk_tokens=20).read(QUESTION, document, memory=memory)
        for size, overlap in ((10, 5), (50, 0), (500, 0), (30, 15)):
            reader = carried_reader(journal, chunk_tokens=size, overlap_tokens=overlap)
            assert reader.read(QUESTION, document, memory=memory).memory == first.memory
            assert calls(reader) == 0
        reader = carried_reader(journal)
        reader.read(QUESTION, document.replace(" ", "  "), memory=memory)
        assert calls(reader) > 0, "it is another document"


JSON_ANSWER = '{"note": "<think>a</think> <memory>"}'
JSON_SCHEMA = {"type": "object", "properties": {"note": {"type": "string"}}}


@pytest.mark.parametrize(
    ("settings", "reply", "answer"),
    [
        ({"output": JSON_SCHEMA}, JSON_ANSWER, JSON_ANSWER),
        ({"prompts": PromptSet.default(answer_format="boxed")}, r"so \boxed{7}", "7"),
    ],
    ids=["JSON", "boxed"],
)
async def test_what_was_read_is_streamed_as_it_was_answered(file: Path, settings: Any, reply: str, answer: str) -> None:
    with Journal(file) as journal:
        memory = journal.memory("case")
        broken = {"broken": lambda prompt: reply if prompt.phase == "answer" else None}
        carried_reader(journal, **broken, **settings).read(QUESTION, PARTS[0], memory=memory)
        for again in (carried_reader(journal, **settings), carried_reader(journal)):
            texts = [event for event in again.stream(QUESTION, PARTS[0], memory=memory) if isinstance(event, str)]
            assert "".join(texts) == answer
            events = [event async for event in again.astream(QUESTION, PARTS[0], memory=memory)]
            assert "".join(event for event in events if isinstance(event, str)) == answer
            assert calls(again) == 0
