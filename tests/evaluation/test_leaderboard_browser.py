"""The page of results in a real browser, where Chromium and its driver are installed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.board import TASK, make_cut, make_result, write_results
from helpers.browser import browser, find, needs_browser, press
from helpers.command_line import run
from helpers.readings import MARKUP, make_long_reading, make_reading
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from memagent_integrations.changes import difference
from memagent_integrations.evaluation.results import Result

__all__ = ["browser"]  # a fixture

pytestmark = [needs_browser, pytest.mark.heavy]
Open = Callable[..., webdriver.Chrome]


@pytest.fixture
def opened(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[Open]:
    def show(*results: Result, address: str = "") -> webdriver.Chrome:
        file, page = write_results(tmp_path / "out.jsonl", *results), tmp_path / "page.html"
        assert run("eval", "report", file, "--html", page).exit_code == 0
        browser.get("about:blank")
        browser.get(page.as_uri() + address)
        return browser

    yield show
    assert browser.get_log("browser") == [], "nothing failed, and nothing was blocked"  # type: ignore[no-untyped-call]


def wait(browser: webdriver.Chrome, selector: str) -> None:
    WebDriverWait(browser, 20).until(lambda _: find(browser, selector))


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    return [element.text for element in find(browser, selector)]


def execute(browser: webdriver.Chrome, script: str, *arguments: Any) -> Any:
    return browser.execute_script(script, *arguments)  # type: ignore[no-untyped-call]


def test_from_a_score_to_a_memory_and_back(opened: Open) -> None:
    browser = opened(make_result(0), make_result(12), make_cut(0))
    find(browser, "#board tr[data-reader=memagent] a")[0].click()
    wait(browser, "#list tr")
    assert texts(browser, "#group") == [f"{TASK} · 50 · memagent"]
    assert texts(browser, "#list tr:first-child td") == [
        *("0", "0", "Nobody.", "Anna | Anna Lee", "lost after 2 chunks", "0 of 1")
    ]
    assert not find(browser, "#board")
    find(browser, "#list a")[1].click()
    wait(browser, "#step .memory")
    assert browser.current_url.endswith("#g1/12")
    assert texts(browser, "#question") == ["Who has the key?"]
    assert "read in chunk 1, noted in chunk 1, lost in chunk 3, not in the answer" in texts(browser, "#verdict")[0]
    assert texts(browser, "#step h2") == ["Memory after chunk 4"]
    assert texts(browser, "ins") == ["It rains"]
    press(browser, "k")
    assert [text.strip() for text in texts(browser, "del, ins")] == ["the key.", "no key!"]
    assert browser.current_url.endswith("#g1/12/3")
    browser.find_element(By.LINK_TEXT, "chunk 1").click()
    WebDriverWait(browser, 20).until(lambda _: texts(browser, "#step h2") == ["Memory after chunk 1"])
    find(browser, "#up")[0].click()
    wait(browser, "#list tr")
    find(browser, "#samples header a")[0].click()
    wait(browser, "#board table")
    press(browser, "k")
    assert find(browser, "#board table")


def test_an_address_opens_a_step(opened: Open) -> None:
    browser = opened(make_result(0), make_result(5), address="#g0/5/2")
    wait(browser, "#step .memory")
    assert texts(browser, "#step h2") == ["Memory after chunk 2"]
    execute(browser, "location.hash = '#g0/99'")  # there is none: nothing happens
    execute(browser, "location.hash = '#g9'")
    wait(browser, "#board table")


def test_a_reader_without_a_memory_shows_its_answer(opened: Open) -> None:
    browser = opened(make_cut(4), address="#g0/4")
    wait(browser, "#reading #answer")
    assert texts(browser, "#answer") == ["Anna"]
    assert "no memory" in texts(browser, "#step")[0]
    assert not find(browser, "#steps")


def test_tables_are_sorted_and_filtered(opened: Open) -> None:
    other = [make_result(n, task="vt", length=length, seconds=float(length)) for n, length in enumerate((9, 1000))]
    browser = opened(make_result(0), make_cut(0), *other)
    column = "#board table.sortable tbody tr td:nth-child(2)"
    assert texts(browser, column)[:4] == ["50", "50", "9", "1,000"]
    length = next(button for button in find(browser, "#board th button") if button.text.startswith("length"))
    length.click()
    assert texts(browser, column)[:4] == ["1,000", "50", "50", "9"]
    length.send_keys("\n")  # by key
    assert texts(browser, column)[:4] == ["9", "50", "50", "1,000"]
    assert length.find_element(By.XPATH, "..").get_attribute("aria-sort") == "ascending"
    Select(find(browser, "#by-task")[0]).select_by_visible_text("vt")
    assert set(texts(browser, "#board table.sortable tbody td:first-child")) == {"vt"}
    Select(find(browser, "#by-reader")[0]).select_by_visible_text("cut")
    assert not find(browser, "#board tbody tr")


def test_nothing_from_a_document_or_model_runs(opened: Open) -> None:
    names = dict.fromkeys(("task", "reader", "answer", "question", "cause"), MARKUP)
    reading = make_reading([MARKUP] * 3, MARKUP, MARKUP)
    browser = opened(make_result(0, reading=reading, answers=(MARKUP,), details={MARKUP: MARKUP}, **names))
    find(browser, "#board td a")[0].click()
    wait(browser, "#list tr")
    find(browser, "#list a")[0].click()
    wait(browser, "#step .memory")
    assert not browser.find_elements(By.TAG_NAME, "img")
    execute(browser, "return document.title")  # raises if an alert is open
    for selector in ("#question", "#answer", "#verdict", "#step .memory"):
        assert "alert(1)" in texts(browser, selector)[0]


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("address", ["", "#g1", "#g1/0"])
def test_it_fits_its_width(opened: Open, width: int, address: str) -> None:
    word = "A_long_word_without_a_space_" * 20
    results = [make_result(0, length=length, answer=word, question=word) for length in (50, 1000, 2000, 4000)]
    browser = opened(*results, address=address)
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wait(browser, "#step .memory" if "/" in address else "#list tr" if address else "#board table")
    assert execute(browser, "return document.documentElement.scrollWidth <= innerWidth")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_background(opened: Open, scheme: str) -> None:
    browser = opened(make_result(0), make_cut(0))
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for selector in ("#board h1", ".hint", "td a", "td small", "thead th", "th button"):
        colours = """
            const [node] = [...document.querySelectorAll(arguments[0])].filter((each) => each.offsetHeight);
            let behind = node;
            while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [getComputedStyle(node).color, getComputedStyle(behind).backgroundColor];
        """
        assert contrast(*execute(browser, colours, selector)) >= 4.5, selector  # WCAG 2, level AA
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(first: str, second: str) -> float:
    """Return WCAG's ratio of two colours."""

    def luminance(colour: str) -> float:
        shares = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_tables_need_no_script(opened: Open, browser: webdriver.Chrome) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    opened(make_result(0), make_cut(0))
    assert "100.0" in browser.find_element(By.CSS_SELECTOR, "#board tr[data-reader=cut] a").text
    assert "shown by a script" in browser.find_element(By.CSS_SELECTOR, "#board noscript").text
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_differences_hold_both_texts(opened: Open) -> None:
    browser, dice = opened(make_result(0)), random.Random(0)
    words = ["a", "b ", " ", "\n", "word", "中 ", "  x"]
    pairs = [["".join(dice.choices(words, k=dice.randrange(30))) for _ in range(2)] for _ in range(300)]
    pairs += [["Anna has the key.", "Anna has no key."], ["", ""], ["x " * 3000 + "y", "y " * 3000 + "y"]]
    found = execute(browser, "return arguments[0].map(([old, latest]) => difference(old, latest))", pairs)
    for (old, new), parts in zip(pairs, found, strict=True):
        assert re.sub(r"\s", "", "".join(text for sign, text in parts if sign <= 0)) == re.sub(r"\s", "", old)
        assert "".join(text for sign, text in parts if sign >= 0) == new
        equal = sum(len(text.split()) for sign, text in difference(old, new) if sign == 0)
        assert sum(len(text.split()) for sign, text in parts if sign == 0) >= equal
    assert [tuple(part) for part in found[300]] == list(difference(*pairs[300]))


def test_two_thousand_steps_open(opened: Open) -> None:
    browser = opened(make_result(0, reading=make_long_reading()), address="#g0/0")
    wait(browser, "#step .memory")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#steps li")) == 2000
