"""The page of a reading in a real browser, where Chromium and its driver are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import browser, find, needs_browser, press
from helpers.readings import MARKUP, make_cited_reading, make_long_reading, make_reading
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from memagent_integrations import Reading
from memagent_integrations.trace import save_trace

__all__ = ["browser"]  # a fixture

pytestmark = [needs_browser, pytest.mark.heavy]


@pytest.fixture
def opened(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[object]:
    def show(reading: Reading) -> webdriver.Chrome:
        save_trace(reading, tmp_path / "page.html")
        browser.get((tmp_path / "page.html").as_uri())
        chunks = sum(step.phase == "memory" for step in reading.steps)
        wait = WebDriverWait(browser, 20)  # the driver may still see the previous page
        wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "#steps li")) == chunks)
        return browser

    yield show
    assert browser.get_log("browser") == [], "nothing failed, and nothing was blocked"  # type: ignore[no-untyped-call]


def title(browser: webdriver.Chrome) -> str:
    return find(browser, "#step h2")[0].text


def test_the_last_memory_is_shown_with_what_changed(opened: object) -> None:
    browser = opened(make_reading())  # type: ignore[operator]
    assert find(browser, "#question")[0].text == "Who has the key?"
    assert find(browser, "#answer")[0].text == "Anna."
    assert title(browser) == "Memory after chunk 4"
    assert find(browser, "ins")[0].text == "It rains"
    assert "4 chunks" in find(browser, "#totals")[0].text
    find(browser, "#steps button")[2].click()
    changes = [element.text.strip() for element in (*find(browser, "del"), *find(browser, "ins"))]
    assert changes == ["the key.", "no key!"]
    assert "text-1, characters" in find(browser, ".facts")[0].text


def test_keys_and_links(opened: object) -> None:
    browser = opened(make_reading())  # type: ignore[operator]
    press(browser, "k")
    press(browser, Keys.ARROW_UP)
    assert title(browser) == "Memory after chunk 2"
    press(browser, "j")
    assert title(browser) == "Memory after chunk 3"
    assert browser.current_url.endswith("#3")
    assert find(browser, "del")
    press(browser, "d")
    assert not find(browser, "del")
    press(browser, "d")


def test_a_statement_names_its_place_and_links_to_the_chunk(opened: object) -> None:
    browser = opened(make_cited_reading())  # type: ignore[operator]
    texts = [element.text for element in find(browser, "#statements > li")]
    assert texts == [
        "Anna: 3rd of May\nchunk 2: tale.pdf, page 5, characters 0 to 50",
        "Key under the red stone\nchunk 1: tale.pdf, page iv, characters 0 to 50",
        "Zebras sing.\nno passage found",
    ]
    find(browser, "#statements a")[1].click()
    wait = WebDriverWait(browser, 20, ignored_exceptions=[StaleElementReferenceException])
    wait.until(lambda _: title(browser) == "Memory after chunk 1")


def test_search(opened: object) -> None:
    browser = opened(make_reading())  # type: ignore[operator]
    press(browser, "/")
    search = browser.switch_to.active_element
    search.send_keys("HAS THE KEY")
    assert len(find(browser, "#steps li")) == 2
    assert find(browser, "mark")[0].text == "has the key"
    search.send_keys("?")
    assert find(browser, "#none")
    search.send_keys(Keys.ESCAPE)
    assert len(find(browser, "#steps li")) == 4


def test_nothing_from_a_document_or_model_runs(opened: object) -> None:
    browser = opened(make_reading([MARKUP] * 3, MARKUP, MARKUP))  # type: ignore[operator]
    assert find(browser, "#question")[0].text.startswith("</script><script>alert(1)")
    assert not browser.find_elements(By.TAG_NAME, "img")
    browser.execute_script("return document.title")  # type: ignore[no-untyped-call] # raises if an alert is open
    assert "alert(1)" in find(browser, ".memory")[0].text


@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_its_width(opened: object, width: int) -> None:
    long = ["A_long_word_without_a_space_" * 30, "Anna has the key. " * 40]
    browser = opened(make_reading(long))  # type: ignore[operator]
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")  # type: ignore[no-untyped-call]
    assert find(browser, "#step .memory")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_two_thousand_steps_do_not_lag(opened: object) -> None:
    browser = opened(make_long_reading())  # type: ignore[operator]
    assert len(browser.find_elements(By.CSS_SELECTOR, "#steps li")) == 2000
    took = browser.execute_script(  # type: ignore[no-untyped-call]
        "const begun = performance.now();"
        "for (let n = 0; n < 20; n++) document.dispatchEvent(new KeyboardEvent('keydown', {key: 'k'}));"
        "document.body.offsetHeight;"
        "return (performance.now() - begun) / 20"
    )
    assert took < 100, "milliseconds from one step to the next"
