from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from memagent_integrations import (
    BackendError,
    Budgets,
    ContextOverflow,
    MemAgentError,
    MissingExtra,
    Reader,
    Reading,
    ScriptedBackend,
    UsageError,
)
from memagent_integrations.records import Usage


@pytest.fixture
def reading() -> Reading:
    backend = ScriptedBackend(["note \x00 中文 \ud800", "", "", "", "the answer"])
    document = ["one two three four five six seven " * 5]
    return Reader(backend, chunk_tokens=20, memory_tokens=20, on_lost_section="skip").read("Why \ud800?", document)


def test_a_reading_survives_json(reading: Reading, tmp_path: Path) -> None:
    clean = Reading.from_json(reading.to_json())
    assert clean.memory == "note \x00 中文 \ufffd"
    assert clean == Reading.from_json(clean.to_json(indent=2))
    assert [step.span for step in clean.steps] == [step.span for step in reading.steps]
    assert clean.budgets == reading.budgets == Budgets(chunk_tokens=20, memory_tokens=20)
    clean.save(tmp_path / "reading.json")
    assert Reading.from_json((tmp_path / "reading.json").read_bytes()) == clean


@pytest.mark.parametrize(
    "error", [BackendError("slow", retryable=True), ContextOverflow("9 > 8"), MissingExtra.extra("torch", "train")]
)
def test_an_error_survives_json_and_pickle(reading: Reading, error: MemAgentError) -> None:
    failed = reading.failed(error)
    for restored in (Reading.from_json(failed.to_json()).error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(restored) is type(error)
        assert str(restored) == str(error)
        assert getattr(restored, "retryable", None) == getattr(error, "retryable", None)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"question": 1}', b"\xff"])
def test_what_is_no_reading(text: str | bytes) -> None:
    with pytest.raises(UsageError, match="not a reading"):
        Reading.from_json(text)


def test_foreign_error_names_make_no_objects(reading: Reading) -> None:
    text = reading.failed(UsageError("x")).to_json().replace('"UsageError"', '"annotations"')
    with pytest.raises(UsageError, match="not a reading"):
        Reading.from_json(text)


def test_unknown_usage_stays_unknown(reading: Reading) -> None:
    some, others = Usage(prompt_tokens=1, completion_tokens=2), Usage(prompt_tokens=3, cached_tokens=4)
    assert some + others == Usage(prompt_tokens=4)
    first, *rest = reading.steps
    without = replace(reading, steps=(replace(first, reply=replace(first.reply, usage=Usage())), *rest))
    assert without.usage == Usage()
    assert reading.seconds == 0


def test_missing_extra_says_how() -> None:
    error = MissingExtra.extra("xllamacpp", "llamacpp")
    assert str(error) == f"xllamacpp is not installed; run: {error.command}"
    assert error.command.endswith("[llamacpp]'")
    assert isinstance(error, ImportError)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "pip install 'memagent-integrations[serve]'"),
        ('{"url": "file://{folder}", "dir_info": {}}', "pip install '{folder}[serve]'"),
        ('{"url": "file://{folder}", "dir_info": {"editable": true}}', "pip install -e '{folder}[serve]'"),
        ('{"url": "file://{folder}/deleted", "dir_info": {}}', "pip install 'memagent-integrations[serve]'"),
        ('{"url": "https://example.org/x.whl", "archive_info": {}}', "pip install 'memagent-integrations[serve]'"),
        ("not JSON", "pip install 'memagent-integrations[serve]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came_from(
    origin: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "memagent_integrations-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: memagent-integrations\nVersion: 0.1.0\n")
    if origin is not None:
        (installed / "direct_url.json").write_text(origin.replace("{folder}", str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert MissingExtra.extra("starlette", "serve").command == expected.replace("{folder}", str(tmp_path))


def test_a_notebook_shows_a_reading_and_runs_nothing_of_it() -> None:
    hostile = "<script>alert(1)</script>"
    reading = Reader(ScriptedBackend([hostile, hostile]), chunk_tokens=60).read(hostile, "some text")
    assert reading._repr_html_().count("&lt;script&gt;") == 3
    assert "<script" not in reading._repr_html_()
    assert "chunk 1: memory updated" in reading._repr_html_()


def test_a_step_in_a_notebook_shows_what_changed() -> None:
    backend = ScriptedBackend(["the <b> gate is 1739", "the <b> gate is 7319", "a & b"])
    reading = Reader(backend, chunk_tokens=5).read("q", "one two three four five six")
    before, after, answer = (step._repr_html_() for step in reading.steps)
    assert ">the &lt;b&gt; gate is 1739</ins>" in before
    assert ">1739</del><ins" in after
    assert ">7319</ins>" in after
    assert "the &lt;b&gt; gate is <del" in after
    assert "a &amp; b" in answer
