"""A reading in two parts: the memory is made where it is begun, the answer is asked for where it is consumed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from memagent_integrations import BackendError, Limits, Reader, ScriptedBackend, UsageError
from memagent_integrations.errors import InUse
from memagent_integrations.journal import Journal
from memagent_integrations.records import Prompt, Reading, Step

DOCUMENT = "Some words of a long document. " * 60


def backend() -> ScriptedBackend:
    return ScriptedBackend(lambda prompt: "so it is" if prompt.phase == "answer" else f"note {prompt.index}")


def reader(model: ScriptedBackend, **settings: object) -> Reader:
    return Reader(model, chunk_tokens=100, memory_tokens=30, **settings)  # type: ignore[arg-type]


async def pages() -> AsyncIterator[str]:
    yield DOCUMENT


def test_the_answer_is_not_asked_for_before_it_is_consumed() -> None:
    model, whole = backend(), backend()
    steps: list[Step] = []
    unanswered = reader(model).begin("Why?", DOCUMENT, progress=steps.append)
    assert {prompt.phase for prompt in model.prompts} == {step.phase for step in steps} == {"memory"}
    *events, reading = unanswered.stream()
    assert [event for event in events if isinstance(event, str)] == ["so", " it", " is"]
    assert reading == reader(whole).read("Why?", DOCUMENT)
    assert [prompt.messages for prompt in model.prompts] == [prompt.messages for prompt in whole.prompts]


def test_the_answer_comes_in_another_event_loop_after_the_first_has_ended() -> None:
    subject = reader(backend())

    async def consume() -> list[object]:
        return [event async for event in unanswered.astream()]

    for document in (DOCUMENT, pages()):
        unanswered = asyncio.run(subject.abegin("Why?", document))
        *events, reading = asyncio.run(consume())
        assert isinstance(reading, Reading)
        assert (reading.answer, [event for event in events if isinstance(event, str)]) == (
            "so it is",
            ["so", " it", " is"],
        )


def test_the_answer_comes_in_another_thread() -> None:
    unanswered = reader(backend()).begin("Why?", DOCUMENT)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend(unanswered.stream()))
    thread.start()
    thread.join()
    assert isinstance(seen[-1], Reading)


def test_both_parts_are_one_run_of_the_journal(tmp_path: Path) -> None:
    model = backend()
    with reader(model, journal=tmp_path / "runs.db") as subject:
        journal = subject.journal
        assert journal
        unanswered = subject.begin("Why?", DOCUMENT, run="one")
        assert journal.run("one").state == "reading"
        with pytest.raises(InUse):
            subject.read("Why?", DOCUMENT, run="one")
        list(unanswered.stream())
        assert journal.run("one").finished
        calls = len(model.prompts)
        *texts, _, reading = subject.begin("Why?", DOCUMENT, run="one").stream()
        assert (texts, reading) == (["so it is"], journal.reading("one"))
        assert len(model.prompts) == calls


def test_a_reading_that_is_dropped_frees_its_run(tmp_path: Path) -> None:
    with Journal(tmp_path / "runs.db") as journal:
        unanswered = reader(backend(), journal=journal).begin("Why?", DOCUMENT, run="one")
        del unanswered
        assert journal.run("one").state == "unfinished"


def test_the_time_until_the_answer_is_asked_for_is_not_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[tuple[str, float]] = []

    def script(prompt: Prompt) -> str:
        deadlines.append((prompt.phase, prompt.deadline or 0.0))
        return "so"

    unanswered = reader(ScriptedBackend(script), limits=Limits(run_timeout=1000.0)).begin("Why?", DOCUMENT)
    monkeypatch.setattr("time.monotonic", lambda clock=time.monotonic: clock() + 5000.0)
    list(unanswered.stream())
    assert deadlines[-1][1] - deadlines[0][1] == pytest.approx(5000.0, abs=1.0)


async def test_errors_of_each_part_come_where_it_runs() -> None:
    def failing(phase: str) -> Reader:
        return reader(ScriptedBackend(lambda p: BackendError("down") if p.phase == phase else "so"))

    with pytest.raises(BackendError, match="down"):
        failing("memory").begin("Why?", DOCUMENT)
    with pytest.raises(BackendError, match="down"):
        await failing("memory").abegin("Why?", DOCUMENT)
    with pytest.raises(UsageError, match="question"):
        reader(backend()).begin("", DOCUMENT)
    unanswered = failing("answer").begin("Why?", DOCUMENT)
    with pytest.raises(BackendError, match="down") as caught:
        list(unanswered.stream())
    assert caught.value.reading
    assert caught.value.reading.memory == "so"
    later = await failing("answer").abegin("Why?", DOCUMENT)
    with pytest.raises(BackendError, match="down"):
        [event async for event in later.astream()]
