"""A parallel reading: segments side by side, merged in order, and in every other way a reading like any other."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.ways import HOW, read

from memagent_integrations import (
    BackendError,
    ContextOverflow,
    Journal,
    Limits,
    MemAgentQueryEngine,
    MemAgentReader,
    Reader,
    Reading,
    ScriptedBackend,
    Step,
    UsageError,
)
from memagent_integrations.errors import EmptyDocument, NoMemory
from memagent_integrations.evaluation.diagnostics import cause, traces
from memagent_integrations.evaluation.samples import Fact, Sample
from memagent_integrations.records import Prompt

QUESTION = "Which keys are there?"
KEYS = [str(number) for number in range(100, 120)]
DOCUMENT = "\n\n".join(f"Key {key} is at the gate of the town, they say.\n" + "It rained all day. " * 8 for key in KEYS)
SETTINGS: dict[str, Any] = {"chunk_tokens": 60, "memory_tokens": 300}
SEGMENTS = 4
CALLS = len(KEYS) + SEGMENTS - 1 + 1


def noting(prompt: Prompt) -> str:
    """Note the keys of the section, of the notes and of the memory: an answer with all has read and merged all."""
    text = prompt.messages[-1].content
    keys = dict.fromkeys(re.findall(r"Key (\d{3}) is", text))
    return " ".join(f"Key {key} is here." for key in keys) if prompt.phase == "memory" else " ".join(keys)


def reader(script: Callable[[Prompt], Any] = noting, *, concurrency: int = SEGMENTS, **settings: Any) -> Reader:
    backend = ScriptedBackend(script, concurrency=concurrency)
    return Reader(backend, **{**SETTINGS, "strategy": "parallel", "segments": SEGMENTS, **settings})


def prompts(reader: Reader) -> list[Prompt]:
    backend = reader.backend
    assert isinstance(backend, ScriptedBackend)
    return backend.prompts


def holds_all(reading: Reading) -> bool:
    return sorted(str(reading.answer).split()) == KEYS


@pytest.mark.parametrize("how", HOW)
def test_every_way_to_read_gives_the_same_reading(how: str) -> None:
    reading, expected = read(reader(), how, QUESTION, DOCUMENT), reader().read(QUESTION, DOCUMENT)
    assert holds_all(reading)
    assert reading.steps == expected.steps
    assert [step.index for step in reading.steps] == list(range(CALLS))
    assert reading.memory == reading.steps[-1].memory


def test_the_steps_are_those_of_the_segments_in_turn_then_the_merges_then_the_answer() -> None:
    reading = reader().read(QUESTION, DOCUMENT)
    spans = [step.span for step in reading.steps if step.span]
    assert [span.segment for span in spans if not span.merge] == [0, 1, 2, 3] * 5
    assert [span.segment for span in spans if span.merge] == [1, 2, 3]
    assert sorted(span.index for span in spans if not span.merge) == list(range(20))
    for segment in range(SEGMENTS):
        own = [step for step in reading.steps if step.span and step.span.segment == segment and not step.span.merge]
        assert [step.memory_before for step in own] == ["", *(step.memory for step in own[:-1])]
        assert [step.span.index for step in own if step.span] == list(range(segment * 5, segment * 5 + 5))
    merges = [step for step in reading.steps if step.span and step.span.merge]
    assert "103" in merges[0].memory_before
    assert [key in merges[0].memory for key in ("100", "105", "110")] == [True, True, False]
    assert (merges[-1].span.start, merges[-1].span.end) == (  # type: ignore[union-attr]
        min(span.start for span in spans if span.segment == 3),
        len(DOCUMENT),
    )


@pytest.mark.parametrize("how", ["read", "aread", "stream", "read_many", "aread_many"])
def test_the_prompts_of_a_round_are_asked_side_by_side(how: str) -> None:
    together = threading.Barrier(SEGMENTS)

    def waiting(prompt: Prompt) -> str:
        if prompt.index < 20:
            together.wait(timeout=5)  # until all four are asked
        return noting(prompt)

    assert holds_all(read(reader(waiting), how, QUESTION, DOCUMENT))


def test_a_batch_backend_computes_a_round_together() -> None:
    sizes = []

    class Batches(ScriptedBackend):
        def complete_batch(self, prompts: Any) -> Any:
            sizes.append(len(prompts))
            return super().complete_batch(prompts)

    backend = Batches(noting, batch_size=3)
    readings = Reader(backend, **SETTINGS, strategy="parallel", segments=4).read_many(
        [(QUESTION, DOCUMENT), ("Q?", "x")]
    )
    assert holds_all(readings[0])
    assert max(sizes) == 3


def test_every_statement_is_cited_from_its_segment() -> None:
    reading = reader().read(QUESTION, DOCUMENT)
    quotes = {citation.quote(DOCUMENT) for citation in reading.citations}
    assert quotes == {f"Key {key} is at the gate of the town, they say." for key in KEYS}
    assert Reading.from_json(reading.to_json()) == reading
    assert Reading.from_json(reading.to_json()).citations == reading.citations


def test_a_plan_knows_the_merges() -> None:
    planned, reading = reader().plan(QUESTION, DOCUMENT), reader().read(QUESTION, DOCUMENT)
    assert planned.calls == CALLS == len(reading.steps)
    assert reading.usage.prompt_tokens <= planned.prompt_tokens  # type: ignore[operator]


@pytest.mark.parametrize(("segments", "calls"), [(1, 21), (8, 28), (50, 40)])
def test_any_number_of_segments_reads_all(segments: int, calls: int) -> None:
    reading = reader(segments=segments).read(QUESTION, iter([DOCUMENT]))
    assert holds_all(reading)
    assert len(reading.steps) == calls


def test_what_is_no_text_fails_before_the_first_call() -> None:
    reading = reader()
    with pytest.raises(EmptyDocument):
        reading.read(QUESTION, "")
    with pytest.raises(UsageError, match="question"):
        reading.read("", DOCUMENT)
    with pytest.raises(UsageError):
        reading.read(QUESTION, [DOCUMENT, object()])  # at its very end
    assert prompts(reading) == []


async def test_an_async_stream_is_read() -> None:
    async def pages() -> Any:
        for start in range(0, len(DOCUMENT), 300):
            yield DOCUMENT[start : start + 300]
            await asyncio.sleep(0)

    assert holds_all(await reader().aread(QUESTION, pages()))


@pytest.mark.parametrize("failing", [0, 6, 19, 21, 23])
@pytest.mark.parametrize("how", ["read", "aread"])
def test_a_reading_that_failed_goes_on_where_it_was(tmp_path: Path, failing: int, how: str) -> None:
    def broken(prompt: Prompt) -> Any:
        return BackendError("down") if prompt.index == failing else noting(prompt)

    with Journal(tmp_path / "journal.db") as journal:
        with pytest.raises(BackendError, match="down") as caught:
            read(reader(broken, journal=journal), how, QUESTION, DOCUMENT)
        assert caught.value.reading is not None
        assert len(caught.value.reading.steps) == failing
        resumed = reader(journal=journal)
        reading = read(resumed, how, QUESTION, DOCUMENT)
        assert reading.steps == reader().read(QUESTION, DOCUMENT).steps
        assert len(prompts(resumed)) == CALLS - failing
        (run,) = journal.runs()
        assert run.finished
        assert journal.reading(run.name).citations == reading.citations
        assert journal.settings(run.name)["segments"] == SEGMENTS
        assert reader(journal=journal, segments=2).read(QUESTION, DOCUMENT).memory != ""
        assert len(journal.runs()) == 2


def test_an_interrupted_round_loses_no_recorded_step(tmp_path: Path) -> None:
    def interrupted(prompt: Prompt) -> Any:
        if prompt.index == 9:
            raise KeyboardInterrupt
        return noting(prompt)

    with Journal(tmp_path / "journal.db") as journal:
        with pytest.raises(KeyboardInterrupt):
            reader(interrupted, journal=journal).read(QUESTION, DOCUMENT)
        resumed = reader(journal=journal)
        assert holds_all(resumed.read(QUESTION, DOCUMENT))
        assert len(prompts(resumed)) == CALLS - 8


def test_an_empty_reply_is_asked_for_again_and_a_lost_section_is_told() -> None:
    def empty(prompt: Prompt) -> str:
        return "" if prompt.index == 5 else noting(prompt)

    settings: dict[str, Any] = {"limits": Limits(empty_retries=2)}
    skipping = reader(empty, on_lost_section="skip", **settings)
    reading = skipping.read(QUESTION, DOCUMENT)
    assert [prompt.again for prompt in prompts(skipping) if prompt.index == 5] == [False, True, True]
    assert [span.index for span in reading.lost_sections] == [6]
    assert reading.warnings[0].startswith("sections lost: 1 of 20")
    assert reading.steps[5].reply.tries == 3
    with pytest.raises(NoMemory, match="section 7 is lost"):
        reader(empty, **settings).read(QUESTION, DOCUMENT)


def test_a_merge_that_is_lost_is_told() -> None:
    def empty(prompt: Prompt) -> str:
        return "" if prompt.index == 21 else noting(prompt)

    with pytest.raises(NoMemory, match="the memory of segment 3 is lost"):
        reader(empty).read(QUESTION, DOCUMENT)
    reading = reader(empty, on_lost_section="skip").read(QUESTION, DOCUMENT)
    assert [(span.segment, span.merge) for span in reading.lost_sections] == [(2, True)]


def test_memories_that_stayed_empty_are_not_merged() -> None:
    def sparse(prompt: Prompt) -> str:
        text = prompt.messages[-1].content
        return noting(prompt) if "Key 107" in text else "NO UPDATE NEEDED"

    reading = reader(sparse).read(QUESTION, DOCUMENT)
    assert len(reading.steps) == 21
    assert reading.memory == "Key 109 is here. Key 108 is here. Key 107 is here."
    assert len(reading.citations) == 3
    begun = reader(sparse).begin(QUESTION, DOCUMENT)
    *_, last = begun.stream()
    assert last == reading


def test_the_first_segment_starts_from_the_memory_that_is_given(tmp_path: Path) -> None:
    reading = reader().read(QUESTION, DOCUMENT, memory="Key 999 is here.")
    assert str(reading.answer).split().count("999") == 1
    with Journal(tmp_path / "journal.db") as journal:
        assert (
            reader(journal=journal).read(QUESTION, DOCUMENT, memory=journal.memory("keys")).answer
            == reader().read(QUESTION, DOCUMENT).answer
        )
        carried = reader(journal=journal).read(QUESTION, "Key 999 is here too.", memory=journal.memory("keys"))
        assert {"999", "100", "119"} <= set(str(carried.answer).split())


def test_the_doors_and_a_look_up_read_in_parallel() -> None:
    settings: dict[str, Any] = {**SETTINGS, "strategy": "parallel", "segments": 2, "lookup": 1}
    backend = ScriptedBackend(noting)
    answer = MemAgentReader(backend, **settings).invoke({"question": "Which Key is 107?", "context": DOCUMENT})
    assert sorted(answer.text.split()) == KEYS
    assert "<passages>\nKey 107" in backend.prompts[-1].messages[-1].content
    engine = MemAgentQueryEngine.from_documents(DOCUMENT, ScriptedBackend(noting), **settings)
    assert sorted(str(engine.query(QUESTION)).split()) == KEYS


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_readings_side_by_side_make_no_more_calls_than_the_backend_takes(how: str) -> None:
    changed, running, most = threading.Lock(), 0, 0

    def busy(prompt: Prompt) -> str:
        nonlocal running, most
        with changed:
            running += 1
            most = max(most, running)
        time.sleep(0.005)  # a call takes time
        with changed:
            running -= 1
        return noting(prompt)

    jobs = [(QUESTION, f"{DOCUMENT} {number}") for number in range(6)]
    parallel = reader(busy, concurrency=SEGMENTS)
    readings = parallel.read_many(jobs) if how == "sync" else await parallel.aread_many(jobs)
    assert all(map(holds_all, readings))
    assert most <= SEGMENTS


def test_a_reader_may_be_changed_to_read_in_sequence() -> None:
    changed = reader().changed(strategy="sequential")
    assert len(changed.read(QUESTION, DOCUMENT).steps) == len(KEYS) + 1


async def test_many_questions_about_one_document_are_read_in_parallel() -> None:
    questions = [f"Which key is number {number}?" for number in range(5)]
    for readings in (reader().ask(questions, DOCUMENT), await reader().aask(questions, DOCUMENT)):
        assert all(map(holds_all, readings))
    batches = Reader(ScriptedBackend(noting, batch_size=4), **SETTINGS, strategy="parallel", segments=3)
    assert all(map(holds_all, batches.ask(questions, iter([DOCUMENT]))))


def test_events_of_a_stream_come_in_order() -> None:
    events = list(reader().stream(QUESTION, DOCUMENT))
    assert [event.index for event in events if isinstance(event, Step)] == list(range(CALLS))
    assert isinstance(events[-1], Reading)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "fast"}, "strategy has to be"),
        ({"segments": 0}, "segments has to be a whole number"),
        ({"segments": True}, "segments has to be a whole number"),
        ({"strategy": "sequential", "segments": 2}, "segments are those of strategy"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reader(**settings)


def test_merges_that_do_not_fit_are_told_before_the_first_call() -> None:
    narrow = Reader(ScriptedBackend(noting, window=800), **SETTINGS, output_tokens=100, strategy="parallel")
    with pytest.raises(ContextOverflow):
        narrow.read(QUESTION, DOCUMENT)
    assert prompts(narrow) == []
    assert holds_all(narrow.changed(memory_tokens=200).read(QUESTION, DOCUMENT))


def test_a_reading_in_parts_refuses_it() -> None:
    with pytest.raises(UsageError, match="takes the whole reading"):
        reader().memorize(QUESTION, DOCUMENT)


def test_facts_are_followed_through_their_segment_and_the_merges() -> None:
    fact = Fact(text="Key 107 is at the gate of the town, they say.", keys=("107",), depth=0.35)
    sample = Sample(id="s", question=QUESTION, answers=("107",), document=lambda: iter([DOCUMENT]), facts=(fact,))
    (trace,) = traces(reader().read(QUESTION, DOCUMENT), sample)
    assert trace.held == (True,) * (3 + 3)  # its chunk and two more of its segment, three merges

    def forgetting(prompt: Prompt) -> str:
        return noting(prompt).replace("Key 107 is here.", "") if prompt.index >= 20 else noting(prompt)

    lost = reader(forgetting).read(QUESTION, DOCUMENT)
    assert cause(lost, traces(lost, sample)) == "lost after 3 chunks"
