"""The benchmark of the citations, small: the needles in Python's manual in place of essays and books."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]


def test_the_needle_is_cited_after_sections_that_have_nothing_to_do_with_it(tmp_path: Path) -> None:
    text = "\n".join(topics.values())
    for name in ("paul_graham/all.txt", "books/all.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    script = [sys.executable, ROOT / "benchmarks" / "citations.py", "--data", tmp_path, "--documents", "30"]
    done = subprocess.run([*script, "--sections", "0", "40"], check=True, capture_output=True, text=True)
    results = json.loads(done.stdout)
    for sections in (0, 40):
        together = results[f"{sections} irrelevant sections"]["together"]
        assert together["all"] >= 0.95
        assert together["first"] >= 0.95
        assert together["precise"] >= 0.9
        assert together["median characters"] < 400
