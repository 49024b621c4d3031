"""`memagent read --citations`: the places that the answer rests on, behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import CHUNKED, DOCUMENT, QUESTION, at, reply, run
from helpers.loopback import Loopback, chat

pytestmark = pytest.mark.heavy
FACT = "The code of the north gate is 7319."


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback(chat(reply)) as running:
        yield running


def place(name: object) -> str:
    """The line that names the place of the fact."""
    start = DOCUMENT.index(FACT)
    return f"[1] {name}, characters {start:,}-{start + len(FACT):,}"


@pytest.mark.parametrize("options", [(), ("--stream",)])
def test_the_places_follow_the_answer(server: Loopback, document: Path, options: tuple[str, ...]) -> None:
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--citations", *options)
    assert done.stdout.splitlines() == ["It is 7319.", "", place(document), f"    {FACT}"]


def test_json_holds_them(server: Loopback, document: Path) -> None:
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--citations", "--json")
    [citation] = json.loads(done.stdout)["citations"]
    assert DOCUMENT[citation["start"] : citation["end"]] == FACT


def test_of_standard_input_what_the_model_noted_is_shown(server: Loopback) -> None:
    done = run("read", "-q", QUESTION, "-", *at(server), *CHUNKED, "--citations", stdin=DOCUMENT)
    assert done.stdout.splitlines()[2:] == [
        f"[1] text-1, characters {DOCUMENT.index(FACT):,}-{DOCUMENT.index(FACT) + len(FACT):,}",
        "    The code is 7319.",
    ]


def test_a_document_sends_no_commands_to_the_terminal(server: Loopback, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("The code of the north gate\x1b[31m is\u202e 7319.", encoding="utf-8")
    done = run("read", "-q", QUESTION, file, *at(server), "--citations")
    assert "\x1b" not in done.stdout
    assert "7319" in done.stdout.splitlines()[-1]


def test_resuming_shows_them_too(server: Loopback, document: Path, tmp_path: Path) -> None:
    journal = ("--journal", tmp_path / "runs.db")
    run("read", "-q", QUESTION, document, *at(server), *CHUNKED, *journal, "--run", "mine")
    done = run("runs", "resume", "mine", document, *journal, "--citations", "--base-url", f"{server.url}/v1")
    assert done.stdout.splitlines()[-1] == f"    {FACT}"
