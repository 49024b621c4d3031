"""The web application in a real browser: a run is followed, paused, edited, and gone on with as a branch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.browser import browser, find, needs_browser, press
from helpers.serving import CHUNKS, PATIENCE, HeldModel, until
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from memagent_integrations import Journal, RunPaused
from memagent_integrations.serve import Server

__all__ = ["browser"]  # a fixture

pytestmark = [needs_browser, pytest.mark.heavy]
HOSTILE = (
    "</textarea></script><script>document.title = 'taken'</script>"
    "<img src=x onerror=\"document.title = 'taken'\"> Berta has it."
)


@pytest.fixture
def page(browser: webdriver.Chrome, server: Server) -> Iterator[webdriver.Chrome]:
    browser.get("about:blank")
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    browser.get(server.url)
    yield browser
    errors = [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]  # type: ignore[no-untyped-call]
    browser.get("about:blank")
    assert errors == [], "nothing failed, and nothing was blocked"


def wait(page: webdriver.Chrome, condition: Callable[[], Any]) -> Any:
    return WebDriverWait(page, PATIENCE, ignored_exceptions=(IndexError,)).until(lambda _: condition())


def text(page: webdriver.Chrome, selector: str) -> str:
    return " ".join(element.text for element in find(page, selector))


def click(page: webdriver.Chrome, label: str) -> None:
    def buttons() -> list[WebElement]:
        return [button for button in find(page, "button.act") if button.text == label and button.is_enabled()]

    wait(page, buttons)[0].click()


def test_a_run_is_followed_paused_edited_and_gone_on_with(
    page: webdriver.Chrome, server: Server, read: Callable[..., Any], model: HeldModel, journal: Journal
) -> None:
    wait(page, lambda: "no runs" in text(page, "#question"))
    assert server.token not in page.current_url, "a link that is passed on holds no token"
    model.hold()
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        for chunk in (1, 2, 3):
            model.passes.release()
            wait(page, lambda chunk=chunk: f"Memory after chunk {chunk}" in text(page, "#step h2"))
            assert f"reading · {chunk} chunks" in text(page, "#state")
        press(page, "k")
        assert "Memory after chunk 2" in text(page, "#step h2")
        model.passes.release()
        wait(page, lambda: "reading · 4 chunks" in text(page, "#state"))
        assert "Memory after chunk 2" in text(page, "#step h2"), "a new step does not replace an earlier one on display"
        click(page, "Pause")
        until(lambda: journal.run("first").paused)
        model.passes.release()
        with pytest.raises(RunPaused):
            reading.result()
    wait(page, lambda: "paused · 5 chunks" in text(page, "#state"))
    model.let_through()

    click(page, "Edit the memory")
    area = find(page, "#memory")[0]
    assert area.get_property("value") == "Note 2. Anna has the key."
    area.send_keys(Keys.CONTROL, "a")
    area.send_keys(HOSTILE)
    calls = len(model.prompts)
    click(page, "Continue with this memory")
    wait(page, lambda: "finished" in text(page, "#state"))
    assert text(page, "#answer") == "Anna."
    assert "run=first.1" in page.current_url
    assert len(model.prompts) - calls == CHUNKS + 1 - 2
    assert "Berta has it." in model.prompts[calls]
    find(page, "#steps button")[1].click()
    assert "<img src=x" in text(page, "#step .memory")
    assert "by a person" in text(page, ".facts")
    assert page.title == "Who has the key?"
    assert page.find_elements(By.CSS_SELECTOR, "img") == []

    page.execute_script("document.getElementById('runs').focus()")  # from now on the list stays as it is
    Select(find(page, "#runs")[0]).select_by_value("first")
    wait(page, lambda: "paused" in text(page, "#state"))
    click(page, "Resume")
    wait(page, lambda: "finished" in text(page, "#state"))
    click(page, "Branch from here")
    wait(page, lambda: "run=first.2" in page.current_url and "finished" in text(page, "#state"))
    assert [(run.name, run.parent) for run in journal.runs()] == [
        ("first", None),
        ("first.1", "first"),
        ("first.2", "first"),
    ]


def test_editing_is_not_disturbed_by_what_comes(
    page: webdriver.Chrome, read: Callable[..., Any], model: HeldModel
) -> None:
    model.hold()
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        model.passes.release(2)
        wait(page, lambda: "reading · 2 chunks" in text(page, "#state"))
        click(page, "Edit the memory")
        find(page, "#memory")[0].send_keys(" jjkk/d")
        model.passes.release(100)
        wait(page, lambda: "finished" in text(page, "#state"))
        assert str(find(page, "#memory")[0].get_property("value")).endswith(" jjkk/d")
        find(page, "#steps button")[0].click()
        assert "Memory after chunk 1" in text(page, "#step h2")
        find(page, "#steps button")[1].click()
        click(page, "Edit the memory")
        assert str(find(page, "#memory")[0].get_property("value")).endswith(" jjkk/d"), "a draft is kept"
        click(page, "Cancel")
        assert "Memory after chunk 2" in text(page, "#step h2")
        reading.result()


def test_what_goes_wrong_is_shown(
    page: webdriver.Chrome, server: Server, read: Callable[..., Any], model: HeldModel, journal: Journal
) -> None:
    read()
    journal.edit("first", 1, memory="another note")
    model.broken = True
    page.get(f"{server.address}/?run=first.1#token={server.token}")
    click(page, "Resume")
    wait(page, lambda: "out of order" in text(page, "#note"))
    wait(page, lambda: "unfinished" in text(page, "#state"))
    page.get_log("browser")  # type: ignore[no-untyped-call]


def test_without_the_token_nothing_is_shown(page: webdriver.Chrome, server: Server, read: Callable[..., Any]) -> None:
    read()
    page.execute_script("sessionStorage.clear()")  # type: ignore[no-untyped-call]
    page.get(server.address)
    wait(page, lambda: "open the address that memagent serve wrote" in text(page, "#note"))
    assert "Anna" not in text(page, "body")
    page.get_log("browser")  # type: ignore[no-untyped-call]  # of the refusals


def test_a_server_that_is_gone_is_told(browser: webdriver.Chrome, journal: Journal, read: Callable[..., Any]) -> None:
    read()
    server = Server(journal, lambda records, run: pytest.fail("no run is resumed here"))
    thread = threading.Thread(target=server.run)
    thread.start()
    browser.get(server.url)
    wait(browser, lambda: "finished" in text(browser, "#state"))
    server.stop()
    thread.join()
    wait(browser, lambda: "is memagent serve still running?" in text(browser, "#note"))
    browser.get("about:blank")
    browser.get_log("browser")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_a_phone_and_a_desk(page: webdriver.Chrome, read: Callable[..., Any], width: int) -> None:
    read()
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    wait(page, lambda: "finished" in text(page, "#state"))
    assert page.execute_script("return document.documentElement.scrollWidth") <= width  # type: ignore[no-untyped-call]
    click(page, "Edit the memory")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width  # type: ignore[no-untyped-call]
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
