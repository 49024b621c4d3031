"""Many questions about one document."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memagent_integrations import (
    BackendError,
    Journal,
    Limits,
    MemAgentError,
    Reader,
    Reading,
    ScriptedBackend,
    Step,
    UsageError,
)
from memagent_integrations.reader.sharing import ChunkReader, SharedChunks
from memagent_integrations.records import Chunk, Prompt, Span
from memagent_integrations.schedule import AHEAD

QUESTIONS = [f"question {number}?" for number in range(5)]
WAYS = ("threads", "one thread", "batches", "tasks", "one task")
SIZES: dict[str, Any] = {"chunk_tokens": 70, "memory_tokens": 50}


def question_of(prompt: Prompt) -> str:
    return prompt.messages[0].content.partition("<question>\n")[2].partition("\n")[0]


def script(prompt: Prompt) -> str:
    return f"note {prompt.index} for {question_of(prompt)}" if prompt.phase == "memory" else question_of(prompt).upper()


def lines(number: int = 60, taken: list[int] | None = None) -> Iterator[str]:
    for line in range(number):
        if taken is not None:
            taken.append(line)
        yield f"line {line} of the one document\n"


async def alines(number: int = 60) -> AsyncIterator[str]:
    for line in lines(number):
        yield line


def reader(way: str, script: Callable[[Prompt], Any] = script, **settings: Any) -> Reader:
    sizes = {"batch_size": 4} if way == "batches" else {"concurrency": 1 if way.startswith("one") else 4}
    return Reader(ScriptedBackend(script, **sizes), **SIZES, **settings)


def ask(way: str, subject: Reader, questions: list[str], document: Any, **options: Any) -> list[Reading]:
    if way.endswith(("task", "tasks")):
        return asyncio.run(subject.aask(questions, document, **options))
    return subject.ask(questions, document, **options)


def asked(subject: Reader) -> list[tuple[int, str]]:
    assert isinstance(subject.backend, ScriptedBackend)
    return [(prompt.index, question_of(prompt)) for prompt in subject.backend.prompts]


@pytest.mark.parametrize("way", WAYS)
def test_all_questions_read_what_one_would_have_read(way: str) -> None:
    taken: list[int] = []
    readings = ask(way, reader(way), QUESTIONS, lines(taken=taken))
    assert taken == list(range(60))
    alone = [reader(way).read(question, lines()) for question in QUESTIONS]
    assert readings == alone
    assert [reading.answer for reading in readings] == [question.upper() for question in QUESTIONS]


@pytest.mark.parametrize("way", ["one thread", "batches", "one task"])
def test_questions_advance_section_by_section(way: str) -> None:
    subject = reader(way)
    ask(way, subject, QUESTIONS[:4], lines())
    calls = asked(subject)
    assert calls == sorted(calls)
    assert len(calls) > 30


@pytest.mark.parametrize("is_async", [False, True])
def test_an_iterator_of_any_length_is_never_kept(is_async: bool) -> None:
    """The text has 9 MB, a chunk 250 kB."""

    class Short(ScriptedBackend):
        def count(self, text: str) -> int:
            return len(text) // 1000

    def document() -> Iterator[str]:
        return ("x" * 999 + " " for _ in range(9_000))

    def peak(questions: list[str]) -> int:
        subject = Reader(Short(lambda prompt: "note", concurrency=2), chunk_tokens=250, memory_tokens=50)
        subject.backend.prompts = Forgetful()  # type: ignore[attr-defined]
        tracemalloc.start()
        readings = ask("tasks" if is_async else "threads", subject, questions, document())
        assert {len(reading.steps) > 36 for reading in readings} == {True}
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return memory

    assert peak(["a?", "b?"]) < 5_000_000


class Forgetful(list[Prompt]):
    def append(self, prompt: Prompt) -> None:
        """Keep no prompt."""


@pytest.mark.parametrize("way", WAYS)
def test_questions_that_fail_leave_the_others(way: str) -> None:
    def failing(prompt: Prompt) -> str | MemAgentError:
        if question_of(prompt) == QUESTIONS[1] and prompt.index == 2:
            return BackendError("refused")
        return script(prompt)

    questions = [*QUESTIONS[:3], "", "word " * 2000, "question 0?"]
    readings = ask(way, reader(way, failing), questions, lines())
    assert [type(reading.error).__name__ for reading in readings] == [
        *("NoneType", "BackendError", "NoneType"),
        *("QuestionError", "QuestionError", "NoneType"),
    ]
    assert len(readings[1].steps) == 2
    assert readings[0] == readings[5]


@pytest.mark.parametrize("way", WAYS)
def test_a_document_that_breaks_off_fails_for_all(way: str) -> None:
    def broken() -> Iterator[str]:
        yield from lines(30)
        raise OSError("gone")

    readings = ask(way, reader(way), QUESTIONS, broken())
    assert {str(reading.error) for reading in readings} == {"reading the document failed: OSError: gone"}
    assert len({len(reading.steps) for reading in readings}) == 1


async def test_an_async_iterator_is_read_once_for_all() -> None:
    readings = await reader("tasks").aask(QUESTIONS, alines())
    assert readings == reader("threads").ask(QUESTIONS, lines())
    assert [type(reading.error) for reading in reader("threads").ask(QUESTIONS[:2], alines())] == [UsageError] * 2


@pytest.mark.parametrize("way", WAYS)
def test_progress_names_the_question(way: str) -> None:
    seen: list[tuple[int, Step]] = []
    readings = ask(way, reader(way), QUESTIONS, lines(), progress=lambda number, step: seen.append((number, step)))
    for number, reading in enumerate(readings):
        assert tuple(step for job, step in seen if job == number) == reading.steps


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_ask_goes_on_from_the_journal(way: str, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stopping(prompt: Prompt) -> str:
        if prompt.index == 3:
            raise Stopped
        return script(prompt)

    with pytest.raises(Stopped):
        ask(way, reader(way, stopping, journal=tmp_path / "runs.db"), QUESTIONS, lines())
    resumed = reader(way, journal=tmp_path / "runs.db")
    readings = ask(way, resumed, QUESTIONS, lines())
    assert [reading.answer for reading in readings] == [question.upper() for question in QUESTIONS]
    steps = sum(len(reading.steps) for reading in readings)
    assert steps - 5 * 3 <= len(asked(resumed)) <= steps - 2 * 3  # at least one place's questions had three steps each
    again = reader(way, journal=tmp_path / "runs.db")
    assert [reading.answer for reading in ask(way, again, QUESTIONS, lines())] == [q.upper() for q in QUESTIONS]
    assert not asked(again)
    with Journal(tmp_path / "runs.db") as journal:
        assert not any(run.active for run in journal.runs())


@pytest.mark.parametrize("way", ["one thread", "one task"])
def test_waiting_for_other_questions_is_no_part_of_a_readings_time(way: str) -> None:
    """Each question takes 0.15 s, and all of them 1.8 s."""

    def slow(prompt: Prompt) -> str:
        time.sleep(0.03)
        return script(prompt)

    questions = [f"question {number}?" for number in range(12)]
    readings = ask(way, reader(way, slow, limits=Limits(run_timeout=1.2)), questions, lines(36))
    assert [reading.error for reading in readings] == [None] * 12
    assert {len(reading.steps) for reading in readings} == {5}


def test_a_question_that_is_held_up_bounds_the_others() -> None:
    """The others stop `AHEAD` sections after the one that hangs, and go on when it does."""
    release, reached = threading.Event(), Counter[str]()

    def hanging(prompt: Prompt) -> str:
        question = question_of(prompt)
        reached[question] = max(reached[question], prompt.index)
        if question == "a?" and prompt.index == 1:
            assert release.wait(10)
            assert reached["b?"] <= 1 + AHEAD
        elif question == "b?" and prompt.index == AHEAD + 1:
            release.set()
        return "note"

    readings = Reader(ScriptedBackend(hanging), **SIZES).ask(["a?", "b?"], lines(4 * 12 * AHEAD))
    assert min(len(reading.steps) for reading in readings) > 2 * AHEAD


class Caching(ScriptedBackend):
    """A backend that notes which calls of a section begin before the first piece of a reply about it."""

    caches_prefixes = True

    def __init__(self, fails: type[MemAgentError] | None = None, *, breaks_off: bool = False) -> None:
        super().__init__(script, concurrency=8)
        self.early, self.led, self.known = Counter[str](), 0, set[str]()
        self.fails, self.breaks_off = fails, breaks_off

    def stream(self, prompt: Prompt) -> Any:
        self.led += 1
        section = self.begin(prompt)
        if self.fails:
            raise self.fails("no streams")
        if self.breaks_off:
            return
        reply = self.complete(prompt)
        time.sleep(0.005)
        self.known.add(section)
        yield reply.text
        time.sleep(0.005)
        yield reply

    def complete(self, prompt: Prompt) -> Any:
        if prompt.phase == "memory" and self.begin(prompt) not in self.known:
            self.early[self.begin(prompt)] += 1
        return super().complete(prompt)

    def begin(self, prompt: Prompt) -> str:
        return prompt.messages[0].content.partition("<question>")[0]


@pytest.mark.parametrize("way", ["threads", "tasks"])
def test_the_first_call_about_a_section_goes_ahead_of_the_others(way: str) -> None:
    backend = Caching()
    readings = ask(way, Reader(backend, layout="section-shared", **SIZES), QUESTIONS, lines())
    assert readings == Reader(ScriptedBackend(script), layout="section-shared", **SIZES).ask(QUESTIONS, lines())
    sections = len(readings[0].steps) - 1
    assert backend.led == sections
    assert backend.early == dict.fromkeys(backend.known, 1)


@pytest.mark.parametrize("way", ["threads", "tasks"])
@pytest.mark.parametrize("problem", [{"fails": BackendError}, {"breaks_off": True}], ids=str)
def test_a_first_call_that_cannot_be_streamed_is_made_as_the_others(way: str, problem: dict[str, Any]) -> None:
    backend = Caching(**problem)
    readings = ask(way, Reader(backend, layout="section-shared", **SIZES), QUESTIONS, lines())
    assert [reading.answer for reading in readings] == [question.upper() for question in QUESTIONS]


def test_calls_whose_prompts_do_not_begin_alike_go_at_once() -> None:
    backend = Caching()
    Reader(backend, **SIZES).ask(QUESTIONS, lines())
    assert not backend.led


async def test_what_cannot_be_awaited_is_no_progress() -> None:
    async def progress(number: int, step: Step) -> None: ...

    with pytest.raises(UsageError, match="no coroutine"):
        await reader("tasks").aask(QUESTIONS, lines(), progress=progress)  # type: ignore[arg-type]


def test_equal_paths_are_one_document_and_equal_jobs_one_run(tmp_path: Path) -> None:
    file = tmp_path / "document.txt"
    file.write_text("".join(lines()))
    reading = reader("threads", journal=tmp_path / "runs.db")
    one, other = reading.read_many([("Why?", file), ("Why?", Path(str(file)))])
    assert one == other
    assert isinstance(reading.backend, ScriptedBackend)
    assert len(reading.backend.prompts) == len(one.steps)


def test_no_questions() -> None:
    assert reader("threads").ask([], lines()) == []
    assert asyncio.run(reader("tasks").aask([], lines())) == []


@pytest.mark.parametrize("questions", ["Why?", 7, None])
async def test_questions_that_are_no_list(questions: Any) -> None:
    with pytest.raises(UsageError, match="questions has to be a list of texts"):
        reader("threads").ask(questions, "text")
    with pytest.raises(UsageError, match="questions has to be a list of texts"):
        await reader("threads").aask(questions, "text")


def chunk(index: int) -> Chunk:
    return Chunk(span=Span(index=index, start=index, end=index + 1, tokens=1), text=str(index))


def test_chunks_are_dropped_when_all_have_read_them() -> None:
    shared = SharedChunks(map(chunk, range(100)), 3)
    first, second, third = (ChunkReader(shared) for _ in range(3))
    for _ in range(10):
        next(first)
    assert shared.kept == 10
    for _ in range(4):
        next(second)
    assert shared.kept == 10
    third.close()
    assert shared.kept == 6
    second.close()
    assert shared.kept == 0
    assert [one.span.index for one in first] == list(range(10, 100))
    assert list(first) == list(second) == []
    assert shared.kept == 0
