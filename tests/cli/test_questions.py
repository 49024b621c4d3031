"""`memagent read` with several questions: one pass, and an answer under each question."""

from __future__ import annotations

import json
import os
import pty
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import CHUNKED, CHUNKS, DOCUMENT, QUESTION, SlowAtSecond, at, process, prompts, reply, run
from helpers.loopback import Loopback, chat
from helpers.terminal import written_to

from memagent_integrations import Journal, Reading

pytestmark = pytest.mark.heavy
TIDE = "Who noted the tide?"
BOTH = ("-q", QUESTION, "-q", TIDE)
FACT = "The code of the north gate is 7319."


def answers(prompt: str) -> str:
    """A model that knows two questions."""
    if TIDE not in prompt:
        return reply(prompt)
    return "The harbour master noted it." if "<section>" in prompt else "The harbour master."


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback(chat(answers)) as running:
        yield running


def test_each_answer_stands_under_its_question(server: Loopback, document: Path) -> None:
    done = run("read", *BOTH, document, *at(server), *CHUNKED)
    assert (done.exit_code, done.stdout) == (
        0,
        f"==> {QUESTION} <==\nIt is 7319.\n\n==> {TIDE} <==\nThe harbour master.\n",
    )
    assert len(prompts(server)) == 2 * (CHUNKS + 1)
    lines = done.stderr.splitlines()
    steps = [f"question {n} of 2: {what}" for n in (1, 2) for what in [*(f"chunk {c + 1}" for c in range(4)), "answer"]]
    assert sorted(lines[:-1]) == sorted(steps)
    assert lines[-1].startswith(f"answered 2 questions in {2 * (CHUNKS + 1)} calls and 0:")


def test_one_question_is_answered_as_ever(server: Loopback, document: Path) -> None:
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "It is 7319.\n", "")


def test_quiet(server: Loopback, document: Path) -> None:
    done = run("read", *BOTH, document, *at(server), *CHUNKED, "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")


def test_all_questions_pass_a_section_together(document: Path) -> None:
    """No reply about a section comes before both questions have asked about it."""
    both = threading.Barrier(2)
    met: list[str] = []

    def together(prompt: str) -> str:
        if "<section>" in prompt:
            both.wait(30)
            met.append(prompt.split("<section>")[1].split("</section>")[0])
        return answers(prompt)

    with Loopback(chat(together)) as server:
        assert run("read", *BOTH, document, *at(server), *CHUNKED).exit_code == 0
    assert len(met) == 2 * CHUNKS
    assert met[::2] == met[1::2]


def test_several_files_are_read_once_for_all(server: Loopback, document: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("The second file.")
    done = run("read", *BOTH, document, other, *at(server), *CHUNKED, "--json")
    for line in done.stdout.splitlines():
        spans = [step.span for step in Reading.from_json(line).steps if step.span]
        assert {source.document_id for span in spans for source in span.sources} == {str(document), str(other)}


def test_standard_input_is_read_once_for_all(server: Loopback) -> None:
    done = run("read", *BOTH, "-", *at(server), *CHUNKED, stdin=DOCUMENT)
    assert done.stdout == f"==> {QUESTION} <==\nIt is 7319.\n\n==> {TIDE} <==\nThe harbour master.\n"


def test_json_is_one_reading_on_each_line(server: Loopback, document: Path) -> None:
    done = run("read", *BOTH, document, *at(server), *CHUNKED, "--json")
    readings = [Reading.from_json(line) for line in done.stdout.splitlines()]
    assert [(one.question, one.answer) for one in readings] == [
        *((QUESTION, "It is 7319."), (TIDE, "The harbour master.")),
    ]


def test_citations_follow_each_answer(server: Loopback, document: Path) -> None:
    lines = run("read", *BOTH, document, *at(server), *CHUNKED, "--citations").stdout.splitlines()
    start = DOCUMENT.index(FACT)
    assert lines[:6] == [
        f"==> {QUESTION} <==",
        "It is 7319.",
        "",
        f"[1] {document}, characters {start:,}-{start + len(FACT):,}",
        f"    {FACT}",
        "",
    ]
    assert lines[6:9] == [f"==> {TIDE} <==", "The harbour master.", ""]
    assert lines[9].startswith("[1] ")


def test_plan(server: Loopback, document: Path) -> None:
    done = run("read", *BOTH, document, *at(server), *CHUNKED, "--plan")
    assert done.stdout.startswith(f"questions: 2\nchunks: {CHUNKS}\ncalls: {2 * (CHUNKS + 1)}\n")
    both = json.loads(run("read", *BOTH, document, *at(server), *CHUNKED, "--plan", "--json").stdout)
    each = [
        json.loads(run("read", "-q", question, document, *at(server), *CHUNKED, "--plan", "--json").stdout)
        for question in (QUESTION, TIDE)
    ]
    assert both["document_tokens"] == each[0]["document_tokens"] == each[1]["document_tokens"]
    for name in ("calls", "prompt_tokens", "completion_tokens"):
        assert both[name] == each[0][name] + each[1][name]
    assert not prompts(server), "a plan calls no model"


def test_a_journal_records_each_question(server: Loopback, document: Path, tmp_path: Path) -> None:
    arguments = ("read", *BOTH, document, *at(server), *CHUNKED, "--journal", tmp_path / "runs.db")
    first = run(*arguments)
    calls = len(prompts(server))
    assert run(*arguments).stdout == first.stdout
    assert len(prompts(server)) == calls, "the second time nothing is asked"
    with Journal(tmp_path / "runs.db") as journal:
        assert sorted(recorded.question for recorded in journal.runs()) == sorted([QUESTION, TIDE])


def test_all_start_from_the_same_text(server: Loopback, document: Path) -> None:
    run("read", *BOTH, document, *at(server), *CHUNKED, "--memory-text", "The gate is red.")
    assert sum("The gate is red." in prompt for prompt in prompts(server)) == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--stream"], "side by side"),
        (["--watch"], "a memory of its own"),
        (["--trace", "trace.json"], "--json writes that of each question"),
        (["--journal", "runs.db", "--run", "mine"], "a name of its own"),
        (["--journal", "runs.db", "--memory", "mine"], "--memory-text can be given"),
    ],
)
def test_what_is_for_one_question_is_refused(
    server: Loopback, document: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
) -> None:
    monkeypatch.chdir(document.parent)
    done = run("read", *BOTH, document, *at(server), *options)
    name = options[-1] if len(options) == 1 else options[-2]
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"memagent: {name} is for a single question (-q): ")
    assert why in done.stderr
    assert not server.requests
    assert list(document.parent.iterdir()) == [document]


def test_an_empty_question_is_refused_before_the_others_are_asked(server: Loopback, document: Path) -> None:
    done = run("read", "-q", QUESTION, "-q", " ", document, *at(server))
    assert (done.exit_code, done.stderr) == (2, "memagent: the question is empty\n")
    assert not server.requests


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_question_that_fails_costs_the_others_nothing(
    server: Loopback, document: Path, options: tuple[str, ...]
) -> None:
    long = "Why? " * 2000
    done = run("read", "-q", long, "-q", TIDE, document, *at(server), *CHUNKED, "--quiet", *options)
    assert done.exit_code == 2
    if options:
        readings = [Reading.from_json(line) for line in done.stdout.splitlines()]
        assert [bool(one.error) for one in readings] == [True, False]
    else:
        assert done.stdout == f"==> {TIDE} <==\nThe harbour master.\n"
    lines = done.stderr.splitlines()
    assert lines[0].startswith("no answer to: Why? Why?")
    assert lines[1].startswith("memagent: the question has ")


def test_a_server_that_is_gone_is_one_error(document: Path) -> None:
    with Loopback(chat(answers)) as server:
        where = at(server)
    done = run("read", *BOTH, document, *where, "--tokenizer", "approximate", "--quiet")
    assert (done.exit_code, done.stdout) == (3, "")
    *questions, error = done.stderr.splitlines()
    assert questions == [f"no answer to: {QUESTION}", f"no answer to: {TIDE}"]
    assert error.startswith("memagent: ")


def test_a_question_sends_no_commands_to_a_terminal(server: Loopback, document: Path) -> None:
    terminal, end = pty.openpty()
    arguments = ("-q", "Who\x1b[31m\nis it?", "-q", TIDE, document, *at(server), "--quiet")
    running = process("read", *arguments, stdout=end)
    os.close(end)
    shown = written_to(terminal).decode()
    running.communicate(timeout=60)
    assert "\x1b" not in shown
    assert "==> Who\ufffd[31m is it? <==" in shown


def test_stopped_it_says_how_to_go_on(document: Path, tmp_path: Path) -> None:
    slow = SlowAtSecond(answers)
    with Loopback(chat(slow)) as server:
        arguments = ("read", *BOTH, document, *at(server), *CHUNKED, "--journal", tmp_path / "runs.db")
        running = process(*arguments)
        assert slow.reached.wait(60)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
        slow.over.set()
        assert (running.returncode, out) == (130, b"")
        assert err.decode().splitlines()[-1] == "memagent: interrupted; the same command goes on from here"
        calls = len(prompts(server))
        assert run(*arguments).exit_code == 0
        assert len(prompts(server)) - calls < 2 * (CHUNKS + 1)
