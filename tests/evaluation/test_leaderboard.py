"""The page of results, as it is written."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.board import TASK, make_cut, make_result, write_results
from helpers.command_line import run
from helpers.readings import MARKUP, make_reading

from memagent_integrations import UsageError
from memagent_integrations.evaluation import leaderboard, report
from memagent_integrations.evaluation.leaderboard import Leaderboard
from memagent_integrations.evaluation.results import Result, Results


class Tables(HTMLParser):
    """Takes the texts of the cells of a page's tables, row by row, and the names of all attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.attributes: set[str] = set()
        self._in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] = f"{self.tables[-1][-1][-1]} {data}".strip()


def page(*results: Result, against: str | None = None) -> str:
    board = Leaderboard()
    for result in results:
        board.add(result)
    kept = [result for _, result in sorted({result.key: result for result in results}.items())]
    compared = report.compared(kept, against) if against else ()
    return board.page(kept, report.rows(kept), {"model": "m", "budgets": {"chunk_tokens": 60}}, compared)


def groups(html: str) -> list[dict[str, Any]]:
    """Return the samples that the page holds, those of each group with all that is behind them."""
    found = re.findall(r'<script type="application/json" id="g\d+">(.*?)</script>', html, re.DOTALL)
    unpacked = [json.loads(group) for group in found]
    for group in unpacked:
        for sample in group["samples"]:
            sample[-1] = json.loads(zlib.decompress(base64.b64decode(sample[-1])))
    return unpacked


def test_the_tables_hold_scores_costs_and_facts_without_the_script() -> None:
    html = page(*map(make_result, range(4)), *map(make_cut, range(4)), against="memagent")
    scores, figures, per_answer, survival, comparisons, published, samples = Tables(html).tables
    assert [row[0] for row in scores] == ["reader", "cut", "memagent"]
    assert [" ".join(row[1].split()) for row in scores] == ["50", "100.0 51 to 100", "0.0 0 to 49"]
    rows = [dict(zip(figures[0], row, strict=True)) for row in figures[1:]]
    assert [(row["reader"], row["score"], row["n"], row["prompt"]) for row in rows] == [
        ("cut", "100.0", "4", "900"),
        ("memagent", "0.0", "4", "900"),
    ]
    assert [(row["facts noted, %"], row["facts kept, %"]) for row in rows] == [("", ""), ("100", "0")]
    assert per_answer[1:] == [
        [TASK, "50", "cut", "100.0", "4 of 4", "970", "2.5"],
        [TASK, "50", "memagent", "0.0", "0 of 4", "", ""],
    ]
    assert survival[0] == ["reader", "0", "1", "2"]
    assert [" ".join(cell.split()) for cell in survival[1]] == ["memagent", "100 of 4", "100 of 4", "0 of 4"]
    assert comparisons[1][:4] == [TASK, "50", "memagent - cut", "-100.0"]
    assert {row[2] for row in published[1:]} == {f"RL-MemoryAgent-{size}B (published)" for size in (7, 14)}
    assert "metric memagent_sub_em, here sub_em" in html
    assert samples[0][:2] == ["sample", "score"]


def test_every_reading_is_behind_its_score() -> None:
    html = page(make_result(3), make_result(7), make_cut(3))
    assert set(re.findall(r'href="#(g\d+)"', html)) == {"g0", "g1"}
    cut, memagent = groups(html)
    assert (cut["task"], cut["length"], cut["reader"]) == (TASK, 50, "cut")
    assert [sample[0] for sample in memagent["samples"]] == [3, 7]
    number, score, answer, gold, why, facts, whole = memagent["samples"][0]
    assert (number, score, answer, gold) == (3, 0.0, "Nobody.", "Anna | Anna Lee")
    assert (why, facts) == ("lost after 2 chunks", "0 of 1")
    reading = make_reading()
    assert [step["memory"] for step in whole["steps"]] == [step.memory for step in reading.steps[:-1]]
    assert (whole["question"], whole["golds"]) == ("Who has the key?", ["Anna", "Anna Lee"])
    assert whole["facts"] == [["The key is Anna's.", 0, 0, 2, False]]
    assert cut["samples"][0][-1]["steps"] == []


def test_a_failure_says_why_and_of_two_results_the_later_counts() -> None:
    failed = make_result(error="the server went away", answer=None, reading=None, traces=(), passing=True)
    [group] = groups(page(failed))
    assert group["samples"][0][2:5] == ["", "Anna | Anna Lee", "failed: the server went away"]
    [group] = groups(page(failed, make_result()))
    assert [sample[2] for sample in group["samples"]] == ["Nobody."]


def test_prices_are_on_the_page(tmp_path: Path) -> None:
    file = write_results(tmp_path / "out.jsonl", make_cut())
    prices = ("--prompt-price", "2", "--completion-price", "10")
    assert run("eval", "report", file, "--html", tmp_path / "page.html", *prices).exit_code == 0
    _, _, (head, row), *_ = Tables((tmp_path / "page.html").read_text("utf-8")).tables
    assert (head[-1], row[-1]) == ("cost", "0.0025")


def test_documents_that_are_too_long_are_told() -> None:
    whole = make_cut(answer=None, error="does not fit", too_long=True)
    scores, figures, *_ = Tables(page(whole, make_result())).tables
    assert [row[1].split()[:2] for row in scores[1:]] == [["0.0", "0"], ["too", "long"]]
    assert dict(zip(figures[0], figures[1], strict=True))["too long"] == "1"


def test_a_long_answer_is_whole_behind_its_row() -> None:
    [group] = groups(page(make_result(answer="word " * 200)))
    assert len(group["samples"][0][2]) < 200
    assert group["samples"][0][-1]["answer"] == "word " * 200


def test_no_text_is_markup_and_nothing_comes_from_elsewhere() -> None:
    hostile = make_result(
        reading=make_reading([MARKUP] * 3, MARKUP, MARKUP),
        **dict.fromkeys(("task", "reader", "answer", "question", "cause", "metric"), MARKUP),
        answers=(MARKUP,),
        details={MARKUP: MARKUP},
    )
    html = page(hostile, make_cut())
    assert html.count("<script") == 3
    assert "<img" not in html
    assert "default-src 'none'" in html
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//|@import|url\(|connect-src", html)
    assert not [name for name in Tables(html).attributes if name == "style" or name.startswith("on")]
    assert groups(html)[0]["samples"][0][-1]["question"] == MARKUP


def test_a_page_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard, "_MOST_BYTES", 100)
    with pytest.raises(UsageError, match="of fewer results"):
        page(make_result())


def test_on_the_command_line(tmp_path: Path) -> None:
    first = write_results(tmp_path / "first.jsonl", make_result(), make_cut())
    again = write_results(tmp_path / "again.jsonl", make_cut(answer="Anna again"))
    html = tmp_path / "page.html"
    done = run("eval", "report", first, again, "--html", html, "--against", "cut")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [group["samples"][0][2] for group in groups(html.read_text("utf-8"))] == ["Anna again", "Nobody."]
    assert "scripted" in html.read_text("utf-8")
    before = first.read_bytes()
    refused = run("eval", "report", first, "--html", first)
    assert (refused.exit_code, "would overwrite the results" in refused.stderr) == (2, True)
    assert first.read_bytes() == before
    assert run("eval", "report", first, "--html", tmp_path / "none" / "page.html").exit_code == 2


def test_a_run_without_results_has_a_page(tmp_path: Path) -> None:
    empty = write_results(tmp_path / "empty.jsonl")
    assert run("eval", "report", empty, "--html", tmp_path / "page.html").exit_code == 0
    assert "There are no results yet." in (tmp_path / "page.html").read_text("utf-8")


def test_a_file_is_read_with_its_readings(tmp_path: Path) -> None:
    file = write_results(tmp_path / "out.jsonl", make_result(), make_cut())
    seen: list[Result] = []
    assert [result.reading for result in Results(file, on_result=seen.append)] == [None, None]
    assert [result.reading for result in seen] == [make_reading(), None]
