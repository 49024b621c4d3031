"""The tests that docs/security.md names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_the_tests_that_hold_the_promises_exist() -> None:
    named = re.findall(r"`(tests/[^`]+)::(\w+)`", PAGE)
    assert len(named) > 20
    for file, name in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{file} has no {name}"


def test_every_promise_names_a_test() -> None:
    promises = PAGE.partition("## What is promised\n")[2].partition("\n## ")[0].split("\n**")[1:]
    assert len(promises) >= 8
    assert all("::test_" in promise for promise in promises)
