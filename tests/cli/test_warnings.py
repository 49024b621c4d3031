"""What was lost is told on standard error, in the page and by `runs show`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import CHUNKED, CHUNKS, PROGRAM, QUESTION, at, prompts, reply, run
from helpers.loopback import Loopback, chat

pytestmark = pytest.mark.heavy


@pytest.fixture
def server() -> Iterator[Loopback]:
    """A model that writes nothing for the section with the code."""
    with Loopback(chat(lambda prompt: "" if "<section>" in prompt and "7319" in prompt else reply(prompt))) as running:
        yield running


@pytest.fixture
def read(server: Loopback, document: Path) -> list[object]:
    return ["read", "-q", QUESTION, document, *at(server), *CHUNKED]


def test_a_lost_section_is_an_error(server: Loopback, read: list[object]) -> None:
    done = run(*read)
    assert (done.exit_code, done.stdout) == (3, "")
    assert f"section {CHUNKS} is lost: the model wrote no memory" in done.stderr
    assert "--on-lost-section skip" in done.stderr
    assert len(prompts(server)) == CHUNKS + 2


@pytest.mark.parametrize("options", [(), ("--quiet",), ("--stream",), ("--json",)], ids=str)
def test_a_section_that_is_skipped_is_told(read: list[object], options: tuple[str, ...]) -> None:
    done = run(*read, "--on-lost-section", "skip", *options)
    warning = f"sections lost: 1 of {CHUNKS}, for which the model wrote no memory"
    assert (done.exit_code, done.stderr.count(f"warning: {warning}")) == (0, 1)
    if "--json" in options:
        assert json.loads(done.stdout)["warnings"][0].startswith(warning)
    else:
        assert done.stdout == "The memory does not say.\n"


def test_an_answer_from_an_empty_memory_is_told(document: Path) -> None:
    with Loopback(chat(lambda prompt: "" if "<section>" in prompt else "No.")) as server:
        done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--on-lost-section", "skip")
    assert f"warning: sections lost: {CHUNKS} of {CHUNKS}" in done.stderr
    assert "warning: the answer rests on an empty memory: nothing was noted" in done.stderr


def test_what_a_journal_holds_is_told_too(read: list[object], tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    assert run(*read, "--journal", journal, "--run", "r").exit_code == 3
    resume = ["runs", "resume", "r", "--journal", journal, "--base-url", read[-len(CHUNKED) - 1]]
    resumed = run(*resume, "--on-lost-section", "skip")
    assert (resumed.exit_code, resumed.stdout) == (0, "The memory does not say.\n")
    assert "warning: sections lost: 1 of" in resumed.stderr
    assert "\nwarning: sections lost: 1 of" in run("runs", "show", "r", "--journal", journal).stdout
    assert run("trace", "r", "--journal", journal, "-o", tmp_path / "r.html").exit_code == 0
    assert "sections lost: 1 of" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_warning_is_a_line_without_its_code(document: Path) -> None:
    command = [*PROGRAM, "plan", "-q", QUESTION, str(document), "--model", "openai:nobodys-model", "--window", "8192"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = [line for line in done.stderr.splitlines() if "estimated" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: the tokens of")
    assert "tokens.py" not in done.stderr
    assert "warnings.warn" not in done.stderr


def test_what_was_cut_off_is_told(document: Path) -> None:
    with Loopback(chat(["many words " * 200])) as server:
        done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--quiet")
    assert done.exit_code == 0
    assert "warning: the answer is cut off at its limit; raise output_tokens" in done.stderr
    assert f"warning: memories cut off at their limit: {CHUNKS} of {CHUNKS}" in done.stderr
