"""A reply that holds nothing is asked for again; what is lost all the same is told, and never passed off as read."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memagent_integrations import BackendError, Journal, Limits, Reader, Reading, ScriptedBackend, UsageError
from memagent_integrations.errors import NoMemory
from memagent_integrations.records import Prompt, Reply, Step, Usage

QUESTION = "Which numbers are there?"
SECTIONS = [f"Line {number} of the book says {number * 7}." for number in range(4)]
DOCUMENT = "\n\n".join(SECTIONS)
EMPTY = {
    "empty": "",
    "space": " \n\t",
    "thinking": "<think>hm</think>",
    "open thinking": "<think>hm",
    "zero width": "\u200b\u2060",
    "tags": "<memory></memory>",
    "thinking apart": Reply(text="", reasoning="hm", finish_reason="length"),
}
WITHHELD = Reply(text="", finish_reason="content_filter")
WAYS = ("read", "aread", "stream", "astream", "whole", "read_many", "in batches", "aread_many", "begin", "abegin")
USED = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=0)


def noting(prompt: Prompt) -> str:
    """Repeat the memory and add the section's number: an answer with all numbers has read all sections."""
    text = prompt.messages[-1].content
    memory = re.findall(r"\d+", text.partition("<memory>")[2].partition("</memory>")[0])
    section = re.findall(r"says (\d+)", text.partition("<section>")[2])
    return " ".join([*memory, *section]) or "none"


class Backend(ScriptedBackend):
    """Notes all numbers, and replies to call number N (from 0) with `instead[N]`."""

    def __init__(self, instead: dict[int, Any] | None = None, **options: Any) -> None:
        self.instead = instead or {}
        super().__init__(self.line, **options)

    def line(self, prompt: Prompt) -> Any:
        line = self.instead.get(len(self.prompts) - 1, noting(prompt))
        return line if isinstance(line, BackendError) else self.reply(line)

    def reply(self, line: str | Reply) -> Reply:
        return replace(line if isinstance(line, Reply) else Reply(text=line), usage=USED, seconds=1.0)

    @property
    def asked(self) -> list[int]:
        """The numbers of the steps, in the order of the calls."""
        return [prompt.index for prompt in self.prompts]


def reader(backend: ScriptedBackend, **settings: Any) -> Reader:
    return Reader(backend, **({"chunk_tokens": 10, "memory_tokens": 40} | settings))


async def run(way: str, subject: Reader) -> tuple[Reading, list[Step], str]:
    """Return the reading, the steps that were reported, and the answer's streamed text."""
    steps: list[Step] = []
    texts: list[str] = []

    def on_job(number: int, step: Step) -> None:
        steps.append(step)

    def take(event: Any) -> None:
        (texts if isinstance(event, str) else steps).append(event)

    if way == "read":
        reading = subject.read(QUESTION, DOCUMENT, progress=steps.append)
    elif way == "aread":
        reading = await subject.aread(QUESTION, DOCUMENT, progress=steps.append)
    elif way in ("stream", "whole"):
        *events, reading = subject.stream(QUESTION, DOCUMENT, whole=way == "whole")  # type: ignore[misc, assignment]
        list(map(take, events))
    elif way == "astream":
        *events, reading = [event async for event in subject.astream(QUESTION, DOCUMENT)]  # type: ignore[misc, assignment]
        list(map(take, events))
    elif way == "aread_many":
        (reading,) = await subject.aread_many([(QUESTION, DOCUMENT)], progress=on_job)
    elif way == "begin":
        unanswered = subject.begin(QUESTION, DOCUMENT, progress=steps.append)
        *events, reading = unanswered.stream()  # type: ignore[misc, assignment]
        list(map(take, events))
    elif way == "abegin":
        later = await subject.abegin(QUESTION, DOCUMENT, progress=steps.append)
        *events, reading = [event async for event in later.astream()]  # type: ignore[misc, assignment]
        list(map(take, events))
    else:
        (reading,) = subject.read_many([(QUESTION, DOCUMENT)], progress=on_job)
    if reading.error and "many" not in way and way != "in batches":
        raise AssertionError("an error is raised")
    return reading, steps, "".join(texts)


@pytest.mark.parametrize("call", [0, 2, 4], ids=["first section", "a section", "answer"])
@pytest.mark.parametrize("way", WAYS)
async def test_an_empty_reply_is_asked_for_again(way: str, call: int) -> None:
    backend = Backend({call: "", call + 1: "\u200b"}, batch_size=4 if way == "in batches" else 1)
    reading, steps, text = await run(way, reader(backend))
    assert (reading.answer, reading.lost_sections, reading.warnings) == ("0 7 14 21", (), ())
    assert backend.asked == sorted([0, 1, 2, 3, 4, call, call])
    assert [step.reply.tries for step in reading.steps] == [3 if n == call else 1 for n in range(5)]
    assert backend.prompts[call].messages == backend.prompts[call + 2].messages
    assert [step.index for step in steps] == [0, 1, 2, 3, 4], "each step is reported once"
    assert [step.reply.seconds for step in reading.steps] == [3.0 if n == call else 1.0 for n in range(5)]
    assert reading.usage == Usage(prompt_tokens=7 * 7, completion_tokens=7 * 3, cached_tokens=0)
    if "stream" in way or "begin" in way:
        assert text == "0 7 14 21", "nothing of the empty replies is shown"


@pytest.mark.parametrize("line", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("way", ["read", "astream", "in batches"])
async def test_a_section_without_memory_ends_the_reading(way: str, line: Any) -> None:
    backend = Backend({1: line, 2: line, 3: line}, batch_size=4 if way == "in batches" else 1)
    if way == "in batches":
        error = (await run(way, reader(backend)))[0].error
    else:
        with pytest.raises(NoMemory) as caught:
            await run(way, reader(backend))
        error = caught.value
    assert isinstance(error, NoMemory)
    assert error.retryable
    assert str(error).startswith("section 2 is lost: the model ")
    assert 'on_lost_section="skip"' in str(error)
    assert backend.asked == [0, 1, 1, 1]


@pytest.mark.parametrize("line", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("way", WAYS)
async def test_a_section_may_be_skipped_and_is_told(way: str, line: Any) -> None:
    backend = Backend({1: line, 2: line, 3: line}, batch_size=4 if way == "in batches" else 1)
    reading, steps, _ = await run(way, reader(backend, on_lost_section="skip"))
    assert (reading.answer, [step.index for step in steps]) == ("0 14 21", [0, 1, 2, 3, 4])
    (lost,) = reading.lost_sections
    assert SECTIONS[1] in DOCUMENT[lost.start : lost.end]
    (warning,) = reading.warnings
    assert warning.startswith("sections lost: 1 of 4")
    assert f"characters {lost.start}-{lost.end}" in warning
    assert Reading.from_json(reading.to_json()).warnings == reading.warnings
    assert warning in reading.to_json()


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_the_tries_have_a_limit_of_their_own(retries: int) -> None:
    backend = Backend(dict.fromkeys(range(1, 9), ""))
    with pytest.raises(NoMemory) as caught:
        reader(backend, limits=Limits(empty_retries=retries)).read(QUESTION, DOCUMENT)
    assert backend.asked == [0] + [1] * (retries + 1)
    reading = caught.value.reading
    assert reading is not None
    assert (reading.answer, reading.memory, len(reading.lost_sections)) == (None, "0", 1)
    assert reading.usage.prompt_tokens == 7 * (retries + 2), "what was spent in vain is counted"
    assert len(reading.warnings) == 1


def test_an_answer_without_text_is_an_error_after_its_tries() -> None:
    backend = Backend(dict.fromkeys([4, 5, 6], "\u200b"))
    with pytest.raises(BackendError, match="no answer") as caught:
        reader(backend, on_lost_section="skip").read(QUESTION, DOCUMENT)
    assert backend.asked == [0, 1, 2, 3, 4, 4, 4]
    assert caught.value.reading
    assert caught.value.reading.answer is None


@pytest.mark.parametrize("on_lost_section", ["error", "skip"])
def test_what_a_filter_withheld_is_not_asked_for_again(on_lost_section: Any) -> None:
    backend = Backend({1: WITHHELD, 5: WITHHELD})
    subject = reader(backend, on_lost_section=on_lost_section)
    if on_lost_section == "error":
        with pytest.raises(NoMemory, match="section 2 is lost: the server's content filter withheld") as caught:
            subject.read(QUESTION, DOCUMENT)
        assert not caught.value.retryable
    else:
        reading = subject.read(QUESTION, DOCUMENT)
        assert (reading.answer, len(reading.lost_sections)) == ("0 14 21", 1)
    assert backend.asked.count(1) == 1


def test_a_failed_call_between_the_tries_ends_the_reading() -> None:
    backend = Backend({1: "", 2: BackendError("the server is down")})
    with pytest.raises(BackendError, match="the server is down") as caught:
        reader(backend, on_lost_section="skip").read(QUESTION, DOCUMENT)
    assert caught.value.reading
    assert caught.value.reading.memory == "0"


@pytest.mark.parametrize("line", ["", "(empty: nothing noted yet)"], ids=["lost", "nothing noted"])
def test_an_answer_from_an_empty_memory_is_told(line: str) -> None:
    backend = ScriptedBackend(lambda prompt: line if prompt.phase == "memory" else "It says nothing of it.")
    reading = reader(backend, on_lost_section="skip").read(QUESTION, DOCUMENT)
    assert reading.warnings[-1] == "the answer rests on an empty memory: nothing was noted"
    assert len(reading.warnings) == (2 if line == "" else 1)
    assert len(reading.lost_sections) == (4 if line == "" else 0), "to note nothing is not to lose it"
    assert reader(backend).answer(QUESTION, "").warnings == reading.warnings[-1:]
    assert reader(backend).answer(QUESTION, "a note").warnings == ()


def test_a_long_list_of_lost_sections_is_shortened() -> None:
    backend = ScriptedBackend(lambda prompt: "" if prompt.phase == "memory" else "no")
    text = "\n\n".join(SECTIONS * 4)
    (lost, _) = reader(backend, on_lost_section="skip").read(QUESTION, text).warnings
    assert lost.startswith("sections lost: 16 of 16")
    assert (lost.count("-"), lost.endswith(", ...)")) == (5, True)


def test_the_setting_is_checked() -> None:
    with pytest.raises(UsageError, match='on_lost_section has to be "error" or "skip"'):
        reader(Backend(), on_lost_section="ignore")
    with pytest.raises(UsageError, match="on_lost_section"):
        reader(Backend()).changed(on_lost_section="ignore")  # type: ignore[arg-type]


def test_a_changed_reader_may_have_limits_of_its_own() -> None:
    subject = reader(Backend({0: ""}))
    other = subject.changed(limits=Limits(empty_retries=0), on_lost_section="skip")
    assert len(other.read(QUESTION, DOCUMENT).lost_sections) == 1
    assert (subject.calls.limits.empty_retries, other.calls.limits.empty_retries) == (2, 0)


@pytest.mark.parametrize("first", ["error", "skip"])
def test_a_lost_section_in_a_journal(first: Any, tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    backend = Backend({1: "", 2: "", 3: ""})
    subject = reader(backend, journal=journal, on_lost_section=first)
    if first == "error":
        with pytest.raises(NoMemory):
            subject.read(QUESTION, DOCUMENT, run="r")
        assert backend.asked == [0, 1, 1, 1]
        assert Journal(journal).run("r").steps == 1, "what is lost is not recorded, but asked for again"
        for on_lost_section in ("error", "skip"):
            again = Backend()
            reading = reader(again, journal=journal, on_lost_section=on_lost_section).read(QUESTION, DOCUMENT, run="r")
            assert (reading.answer, reading.warnings) == ("0 7 14 21", ())
            assert again.asked == ([1, 2, 3, 4] if on_lost_section == "error" else [])
        return
    before = subject.read(QUESTION, DOCUMENT, run="r")
    assert before.answer == "0 14 21"
    again = Backend()
    assert reader(again, journal=journal, on_lost_section="skip").read(QUESTION, DOCUMENT, run="r") == before
    assert Journal(journal).reading("r").warnings == before.warnings
    with pytest.raises(NoMemory, match="the journal has it so"):
        reader(again, journal=journal).read(QUESTION, DOCUMENT, run="r")
    assert again.prompts == [], "a recorded reply is not asked for again"


@pytest.mark.parametrize("killed_at", range(8))
def test_a_reading_that_stops_between_its_tries_resumes(killed_at: int, tmp_path: Path) -> None:
    empty: dict[int, Any] = {1: "", 2: "", 5: ""}
    plain = reader(Backend(empty)).read(QUESTION, DOCUMENT)
    journal = tmp_path / "runs.db"
    with pytest.raises(BackendError, match="gone"):
        reader(Backend({**empty, killed_at: BackendError("gone")}), journal=journal).read(QUESTION, DOCUMENT)
    reading = reader(Backend({0: ""}), journal=journal).read(QUESTION, DOCUMENT)
    assert (reading.answer, reading.memory, reading.warnings) == (plain.answer, plain.memory, ())


def test_an_edit_finds_a_lost_section_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.db")
    lost = Backend({1: "", 2: "", 3: ""})
    reader(lost, journal=journal, on_lost_section="skip").read(QUESTION, DOCUMENT, run="r")
    branch = journal.edit("r", 1, memory="0 7")
    reading = reader(Backend(), journal=journal).read(QUESTION, DOCUMENT, run=branch)
    assert (reading.answer, reading.lost_sections) == ("0 7 14 21", ())


def nulls(rate: float, seed: int) -> Callable[[Prompt], str]:
    draw = random.Random(seed).random
    return lambda prompt: "" if draw() < rate else noting(prompt)


@pytest.mark.parametrize(
    ("rate", "retries", "on_lost_section"),
    [(0.025, 2, "error"), (0.025, 0, "skip"), (0.2, 2, "skip"), (0.2, 0, "error")],
)
def test_of_a_thousand_readings_with_null_contents_none_is_wrong_in_silence(
    rate: float, retries: int, on_lost_section: Any
) -> None:
    backend = ScriptedBackend(nulls(rate, retries), batch_size=100)
    subject = reader(backend, limits=Limits(empty_retries=retries), on_lost_section=on_lost_section)
    readings = subject.read_many([(QUESTION, DOCUMENT)] * 1000)
    right = [reading for reading in readings if reading.answer == "0 7 14 21"]
    told = [reading for reading in readings if reading.error or reading.lost_sections]
    assert len(right) + len(told) == 1000, "silently wrong"
    assert not any(reading.warnings for reading in right)
    assert len(told) >= (100 if retries == 0 else 10 if rate == 0.2 else 0)
    for reading in told:
        assert reading.warnings or reading.steps[-1].phase == "answer", "told, or the answer was empty"
        if reading.answer:
            noted = reading.answer.removesuffix("none").split()
            assert len(noted) + len(reading.lost_sections) == 4
