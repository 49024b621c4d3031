"""A real browser for tests of pages, where Chromium and its driver are installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

REQUIRED = os.environ.get("MEMAGENT_TEST_BROWSER") == "required"
"""Whether a browser that is missing is a failure: scripts/test --ci has installed it."""

needs_browser = pytest.mark.skipif(
    not (REQUIRED or (shutil.which("chromium") and shutil.which("chromedriver"))),
    reason="there is no Chromium with its driver; Debian: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,900"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def find(browser: webdriver.Chrome, selector: str) -> list[WebElement]:
    """Return the elements that can be seen."""
    return [element for element in browser.find_elements(By.CSS_SELECTOR, selector) if element.is_displayed()]


def press(browser: webdriver.Chrome, key: str) -> None:
    browser.find_element(By.TAG_NAME, "body").send_keys(key)
