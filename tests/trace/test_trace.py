from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.command_line import run
from helpers.readings import MARKUP, make_cited_reading, make_long_reading, make_reading
from hypothesis import given
from hypothesis import strategies as st

from memagent_integrations import BackendError, Journal, Reader, Reading, ScriptedBackend, UsageError
from memagent_integrations.changes import difference
from memagent_integrations.trace import page, save_trace


def data(html: str) -> dict[str, object]:
    """Return the data that the page holds."""
    scripts = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    result: dict[str, object] = json.loads(scripts[0])
    return result


WORDS = st.lists(st.sampled_from(["a", "b", " ", "\n", "word", "中", "  x"])).map("".join)


@pytest.mark.fuzz
@given(old=WORDS, new=WORDS)
def test_a_difference_holds_both_texts(old: str, new: str) -> None:
    parts = list(difference(old, new))
    assert re.sub(r"\s", "", "".join(text for sign, text in parts if sign <= 0)) == re.sub(r"\s", "", old)
    assert "".join(text for sign, text in parts if sign >= 0) == new
    if old == new:
        assert all(sign == 0 for sign, _ in parts)


def test_differences_are_of_words() -> None:
    assert list(difference("Anna has the key.", "Anna has no key.")) == [
        (0, "Anna has "),
        (-1, "the "),
        (1, "no "),
        (0, "key."),
    ]


def test_the_page_shows_where_each_statement_of_the_final_memory_came_from() -> None:
    reading = make_cited_reading()
    assert len(reading.steps) == 3
    assert data(page(reading))["statements"] == [
        {"text": "Anna: 3rd of May", "places": [[1, "tale.pdf#page=5", "5", 0, 50]]},
        {"text": "Key under the red stone", "places": [[0, "tale.pdf#page=iv", "iv", 0, 50]]},
        {"text": "Zebras sing.", "places": []},
    ]


def test_the_page_holds_the_reading_and_nothing_from_elsewhere() -> None:
    html = page(make_reading())
    shown = data(html)
    assert shown["question"] == "Who has the key?"
    assert shown["answer"] == "Anna."
    assert len(shown["steps"]) == 4  # type: ignore[arg-type]
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//|@import|url\(", html)
    assert "default-src 'none'" in html


def test_no_text_is_markup() -> None:
    html = page(make_reading([MARKUP] * 3, MARKUP, MARKUP))
    assert html.count("<script") == 2
    assert "<img" not in html
    assert data(html)["question"] == MARKUP
    assert "<title>&lt;/script&gt;" in html


def test_a_reading_that_failed_has_a_page_too() -> None:
    backend = ScriptedBackend(["one", BackendError("the server went away")])
    with pytest.raises(BackendError) as caught:
        Reader(backend, chunk_tokens=60).read("q", "A few words. " * 60)
    assert caught.value.reading is not None
    assert data(page(caught.value.reading))["error"] == "the server went away"


def test_two_thousand_steps_are_one_page_of_reasonable_size() -> None:
    html = page(make_long_reading())
    assert len(data(html)["steps"]) == 2000  # type: ignore[arg-type]
    assert len(html) < 3 * sum(len(step.memory) for step in make_long_reading().steps)


def test_on_the_command_line(tmp_path: Path) -> None:
    reading = make_reading()
    reading.save(tmp_path / "trace.json")
    assert run("trace", tmp_path / "trace.json", "-o", tmp_path / "page.html").exit_code == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page(reading)
    result = run("trace", tmp_path / "trace.json", "-o", tmp_path / "trace.json")
    assert (result.exit_code, "would overwrite the reading" in result.stderr) == (2, True)
    assert Reading.from_json((tmp_path / "trace.json").read_text()) == reading
    with Journal(tmp_path / "runs.db") as journal:
        Reader(ScriptedBackend(["m", "a"]), journal=journal).read("q", "text", run="mine")
    assert run("trace", "mine", "--journal", tmp_path / "runs.db", "-o", tmp_path / "run.html").exit_code == 0
    assert data((tmp_path / "run.html").read_text(encoding="utf-8"))["question"] == "q"
    (tmp_path / "other.json").write_text("{}")
    for args in (["none.json"], [tmp_path / "other.json"], ["nobody", "--journal", tmp_path / "runs.db"], ["a\0b"]):
        result = run("trace", *args, "-o", tmp_path / "x.html")
        assert (result.exit_code, result.stdout) == (2, "")
    with pytest.raises(UsageError, match="cannot write"):
        save_trace(reading, tmp_path / "none" / "page.html")
