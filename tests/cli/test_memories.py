"""Memories that carry on, on the command line: `memagent read --memory`, `--memory-text`, `memagent memories`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import CHUNKED, QUESTION, at, prompts, run
from helpers.loopback import Loopback, chat
from typer.testing import Result

from memagent_integrations import Journal, Reading

pytestmark = pytest.mark.heavy


def strung(prompt: str) -> str:
    """Note the code words of the section behind those of the memory; answer with the memory."""
    memory = prompt.rpartition("<memory>\n")[2].partition("\n</memory>")[0]
    words = [] if memory.startswith("(empty") else memory.split()
    section = prompt.rpartition("<section>\n")[2].partition("\n</section>")[0] if "<section>" in prompt else ""
    return " ".join([*words, *(word for word in section.split() if word.startswith("code"))])


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback(chat(strung)) as running:
        yield running


@pytest.fixture
def letters(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text(f"the word is code{number} here")
    return files


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def read(server: Loopback, letter: Path, *options: object, stdin: str | None = None) -> Result:
    return run("read", "-q", QUESTION, letter, *at(server), *CHUNKED, "--quiet", *options, stdin=stdin)


def test_letters_are_read_under_one_name(server: Loopback, letters: list[Path], journal: Path) -> None:
    named = ("--journal", journal, "--memory", "flat 7")
    answers = [read(server, letter, *named).stdout for letter in letters]
    assert answers == ["code0\n", "code0 code1\n", "code0 code1 code2\n"]
    made = len(prompts(server))
    assert [read(server, letter, *named).stdout for letter in letters] == answers
    assert read(server, letters[1], *named, "--stream").stdout == answers[1]
    assert len(prompts(server)) == made, "a second time costs nothing"
    other = read(server, letters[2], "--journal", journal, "--memory", "flat 8", "--json")
    assert Reading.from_json(other.stdout).memory == "code2"
    listed = run("memories", "list", "--journal", journal).stdout
    assert listed == "memory\treadings\ttext\nflat 7\t3\tcode0 code1 code2\nflat 8\t1\tcode2\n"


def test_a_text_to_start_from(server: Loopback, letters: list[Path], journal: Path) -> None:
    assert read(server, letters[0], "--memory-text", "code9").stdout == "code9 code0\n"
    assert read(server, letters[0], "--memory-text", "-", stdin="code8\n").stdout == "code8 code0\n"
    recorded = ("--journal", journal, "--run", "mine")
    assert read(server, letters[0], *recorded, "--memory-text", "code7").stdout == "code7 code0\n"
    assert read(server, letters[0], *recorded).stdout == "code7 code0\n"
    resumed = run("runs", "resume", "mine", "--journal", journal, "--base-url", f"{server.url}/v1", "--quiet")
    assert resumed.stdout == "code7 code0\n"
    assert "\n-- starts from\ncode7\n" in run("runs", "show", "mine", "--journal", journal).stdout
    done = read(server, letters[0], *recorded, "--memory-text", "code6")
    assert (done.exit_code, "memory: 'code7', now 'code6'" in done.stderr) == (2, True)
    done = read(server, letters[0], "--memory-text", "word " * 90)
    assert (done.exit_code, "its budget is 60" in done.stderr) == (2, True)


def test_a_person_shows_sets_and_deletes_a_memory(server: Loopback, letters: list[Path], journal: Path) -> None:
    named = ("--journal", journal, "--memory", "flat 7")
    read(server, letters[0], *named)
    assert run("memories", "show", "flat 7", "--journal", journal).stdout == "code0\n"
    assert run("memories", "set", "flat 7", "--text", "-", "--journal", journal, stdin="code5\n").exit_code == 0
    assert read(server, letters[1], *named).stdout == "code5 code1\n"
    assert read(server, letters[0], *named).stdout == "code0\n", "what was read stays read"
    assert run("memories", "delete", "flat 7", "--journal", journal).exit_code == 0
    for command in ("show", "delete"):
        done = run("memories", command, "flat 7", "--journal", journal)
        assert (done.exit_code, "holds no memory 'flat 7'" in done.stderr) == (2, True)
    assert read(server, letters[1], *named).stdout == "code1\n"


def test_what_goes_wrong(server: Loopback, letters: list[Path], journal: Path) -> None:
    recorded = ("--journal", journal)
    for options, message in [
        (("--memory", "m"), "give --journal too"),
        ((*recorded, "--memory", "m", "--run", "r"), "it excludes --run and --memory-text"),
        ((*recorded, "--memory", "m", "--memory-text", "t"), "it excludes --run and --memory-text"),
        ((*recorded, "--memory", "a\nb"), "a memory's name has"),
        ((*recorded, "--memory", ""), "a memory's name has"),
    ]:
        done = read(server, letters[0], *options)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
    done = run("read", "-q", QUESTION, "-", *at(server), "--memory-text", "-", stdin="text")
    assert (done.exit_code, "once only" in done.stderr) == (2, True)
    assert prompts(server) == []
    done = run("memories", "list", "--journal", journal.with_name("none.db"))
    assert (done.exit_code, "there is no journal" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "command", [["memories", "set", "flat 7", "--text"], ["runs", "edit", "one", "--step", 0, "--memory"]]
)
def test_a_text_from_standard_input_is_utf_8(
    server: Loopback, letters: list[Path], journal: Path, command: list[object]
) -> None:
    read(server, letters[0], "--journal", journal, "--run", "one")
    done = run(*command, "-", "--journal", journal, stdin=b"caf\xe9")
    assert done.exit_code == 2
    assert "standard input is not UTF-8" in done.stderr
    assert run(*command, "-", "--journal", journal, stdin="\ufeffcafé".encode()).exit_code == 0
    with Journal(journal) as opened:
        texts = [opened.memory("flat 7").text] + [opened.reading(each.name).memory for each in opened.runs()]
    assert "café" in texts
