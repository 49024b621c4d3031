"""Answers that fit a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from memagent_integrations import (
    BackendError,
    Journal,
    JournalMismatch,
    PromptSet,
    Reader,
    Reading,
    ScriptedBackend,
    UsageError,
)
from memagent_integrations.records import Prompt, Reply

DOCUMENT = "The rent is due on the third of the month. " * 40


class Due(BaseModel):
    day: int
    paid: bool = False


FITS = '{"day": 3, "paid": true}'


def script(answer: Any) -> Callable[[Prompt], Any]:
    return lambda prompt: "due on the 3rd" if prompt.phase == "memory" else answer


def reader(answer: Any = FITS, *, output: Any = Due, **settings: Any) -> tuple[Reader, ScriptedBackend]:
    backend = ScriptedBackend(script(answer))
    return Reader(backend, output=output, **({"chunk_tokens": 200, "memory_tokens": 50} | settings)), backend


def test_the_answer_is_json_that_fits_and_becomes_an_object() -> None:
    subject, backend = reader()
    reading = subject.read("When is rent due?", DOCUMENT)
    assert reading.answer == FITS
    assert subject.output is not None
    assert subject.output.parse(reading.answer) == Due(day=3, paid=True)
    assert backend.prompts[-1].schema == Due.model_json_schema()
    assert Reading.from_json(reading.to_json()) == reading


def test_the_schema_appears_in_no_prompt_for_the_memory_and_leaves_the_texts_as_they_are() -> None:
    subject, backend = reader()
    subject.read("When is rent due?", DOCUMENT)
    plain = ScriptedBackend(script("on the 3rd"))
    Reader(plain, chunk_tokens=200, memory_tokens=50).read("When is rent due?", DOCUMENT)
    assert [prompt.messages for prompt in backend.prompts] == [prompt.messages for prompt in plain.prompts]
    assert [prompt.schema is None for prompt in backend.prompts] == [True] * (len(backend.prompts) - 1) + [False]
    assert all(prompt.schema is None for prompt in plain.prompts)


async def test_the_answer_fits_in_every_way_of_reading() -> None:
    subject, _ = reader()
    *_, streamed = subject.stream("When?", DOCUMENT)
    *_, astreamed = [event async for event in subject.astream("When?", DOCUMENT)]
    memory = subject.memorize("When?", DOCUMENT).memory
    readings = [
        streamed,
        astreamed,
        await subject.aread("When?", DOCUMENT),
        subject.answer("When?", memory),
        await subject.aanswer("When?", memory),
        *subject.read_many([("When?", DOCUMENT)]),
        *await subject.aread_many([("When?", DOCUMENT)]),
    ]
    assert {reading.answer for reading in readings if isinstance(reading, Reading)} == {FITS}
    assert len(readings) == 7


@pytest.mark.parametrize("output", [Due, Due.model_json_schema()], ids=["class", "schema"])
@pytest.mark.parametrize("answer", ["on the 3rd", '{"day": "third"}', "{}", '{"day": 3', "[3]", "null"])
def test_an_answer_that_does_not_fit_is_a_backend_error(answer: str, output: Any) -> None:
    subject, _ = reader(answer, output=output)
    with pytest.raises(BackendError, match="does not fit the schema of output") as caught:
        subject.read("When is rent due?", DOCUMENT)
    assert not caught.value.retryable
    assert caught.value.reading is not None
    assert caught.value.reading.answer is None
    assert caught.value.reading.memory == "due on the 3rd"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(text='{"day": 3', finish_reason="length"), "raise output_tokens"),
        (Reply(text="{", finish_reason="content_filter"), "content filter withheld"),
        (Reply(text="", finish_reason="stop"), "the model gave no answer"),
        (Reply(text="<think>{}", finish_reason="stop"), "the model gave no answer"),
    ],
)
def test_an_answer_that_ends_early_says_why(reply: Reply, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        reader(reply)[0].read("When?", DOCUMENT)


def test_a_whole_answer_at_the_limit_of_the_output_is_an_answer() -> None:
    assert reader(Reply(text=FITS, finish_reason="length"))[0].read("When?", DOCUMENT).answer == FITS


@pytest.mark.parametrize(
    "reply",
    [
        FITS,
        f"\n {FITS} \n",
        f"<think>What day? {{1}}</think>\n{FITS}",
        f"<thinking>[a]</thinking><think>b</think> {FITS}",
        f"What day is it?</think>\n\n{FITS}",
        f"```json\n{FITS}\n```",
        f"<think>b</think>\n```JSON\n{FITS}```\n",
        f"What day?</think>```\n{FITS}\n```",
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thinking_before_the_answer_and_a_fence_around_it_are_removed_also_from_a_stream(reply: str, size: int) -> None:
    class Pieces(ScriptedBackend):
        def stream(self, prompt: Prompt) -> Any:
            whole = self.complete(prompt)
            yield from (whole.text[start : start + size] for start in range(0, len(whole.text), size))
            yield whole

    subject = Reader(Pieces(script(reply)), output=Due)
    assert subject.read("When?", DOCUMENT).answer == FITS
    pieces = [event for event in subject.stream("When?", DOCUMENT) if isinstance(event, str)]
    assert "".join(pieces) == FITS


def test_what_looks_like_thinking_or_a_tag_in_a_string_of_the_answer_stays() -> None:
    text = json.dumps({"day": 3, "note": "<think>a</think> <memory> </thinking>  b \\boxed{4}"})
    schema = {"type": "object", "properties": {"day": {"type": "integer"}, "note": {"type": "string"}}}
    subject, _ = reader(text, output=schema)
    assert subject.read("When?", DOCUMENT).answer == text
    assert "".join(event for event in subject.stream("When?", DOCUMENT) if isinstance(event, str)) == text


def test_a_stream_yields_the_json_as_it_comes() -> None:
    pieces = [event for event in reader()[0].stream("When?", DOCUMENT) if isinstance(event, str)]
    assert len(pieces) > 5
    assert "".join(pieces) == FITS


def test_a_backend_that_keeps_to_no_schema_is_refused_at_once() -> None:
    plain = ScriptedBackend([], structured=False)
    with pytest.raises(UsageError, match=r"scripted cannot keep .* answer_model: openai:NAME.* LangChain.* LlamaIndex"):
        Reader(plain, output=Due)
    with pytest.raises(UsageError, match="scripted cannot keep"):
        Reader(ScriptedBackend([]), answer_model=plain, output=Due)
    with pytest.raises(UsageError, match="scripted cannot keep"):
        Reader(ScriptedBackend([]), output=Due).changed(backend=plain)
    notes = ScriptedBackend(["a note"], structured=False)
    assert Reader(notes, answer_model=ScriptedBackend([FITS]), output=Due).read("When?", "text").answer == FITS


def test_prompts_that_ask_for_a_box_are_refused_with_a_schema() -> None:
    boxed = PromptSet.default(answer_format="boxed")
    with pytest.raises(UsageError, match=r"boxed.*prompts.changed\(answer=...\)"):
        Reader(ScriptedBackend([]), prompts=boxed, output=Due)
    Reader(ScriptedBackend([]), prompts=boxed.changed(answer=PromptSet.default().answer), output=Due)


@pytest.mark.parametrize("output", [int, "Due", {"type": "string"}, Due(day=3)])
def test_an_output_that_is_no_object_is_refused_at_once(output: Any) -> None:
    with pytest.raises(UsageError, match="output has to be"):
        Reader(ScriptedBackend([]), output=output)


def test_the_tokens_of_the_schema_count_in_the_plan() -> None:
    plain, _ = reader(output=None)
    structured, backend = reader()
    more = structured.plan("When?", DOCUMENT).prompt_tokens - plain.plan("When?", DOCUMENT).prompt_tokens
    assert more == backend.count(json.dumps(Due.model_json_schema()))


def test_a_recorded_answer_is_the_json_and_the_schema_is_part_of_the_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.db")
    subject, backend = reader(f"<think>...</think>{FITS}", journal=journal)
    reading = subject.read("When?", DOCUMENT, run="one")
    calls = len(backend.prompts)
    assert reader(journal=journal)[0].read("When?", DOCUMENT, run="one") == reading
    assert journal.reading("one") == reading
    assert reading.answer == FITS
    assert len(backend.prompts) == calls
    with pytest.raises(JournalMismatch, match="output"):
        reader(journal=journal, output=None)[0].read("When?", DOCUMENT, run="one")
    stricter = Due.model_json_schema() | {"required": ["day", "paid"]}
    with pytest.raises(JournalMismatch, match=r"output\.required"):
        reader(journal=journal, output=stricter)[0].read("When?", DOCUMENT, run="one")


def test_a_document_read_with_a_named_memory_gives_no_answer_of_another_form(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.db")
    memory = journal.memory("rent")
    plain, _ = reader("on the 3rd", output=None, journal=journal)
    assert plain.read("When?", DOCUMENT, memory=memory).answer == "on the 3rd"
    subject, _ = reader(journal=journal)
    with pytest.raises(UsageError, match=r"does not fit the schema .* reader.answer\(question, memory.text\)"):
        subject.read("When?", DOCUMENT, memory=memory)
    assert subject.answer("When?", memory.text).answer == FITS
    assert subject.read("When?", DOCUMENT[:1000], memory=memory).answer == FITS
    assert subject.read("When?", DOCUMENT[:1000], memory=memory).answer == FITS, "it was read with this schema"


def test_an_answer_that_does_not_fit_is_asked_for_again_when_the_run_is_resumed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.db")
    subject, _ = reader("on the 3rd", journal=journal)
    with pytest.raises(BackendError, match="does not fit"):
        subject.read("When?", DOCUMENT, run="one")
    again, backend = reader(journal=journal)
    assert again.read("When?", DOCUMENT, run="one").answer == FITS
    assert [prompt.phase for prompt in backend.prompts] == ["answer"]
