"""The journal on the command line: `memagent read --journal`, `memagent runs`."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from helpers.command_line import CHUNKED, CHUNKS, QUESTION, at, process, prompts, reply, run
from helpers.loopback import Loopback, Response, chat
from typer.testing import Result

from memagent_integrations import Journal, Reader, Reading, ScriptedBackend

pytestmark = pytest.mark.heavy


class Moody:
    """An endpoint whose call number `gone_at` fails."""

    def __init__(self) -> None:
        self.calls, self.gone_at = 0, 0
        self.at_call: Callable[[int], object] = lambda number: None

    def __call__(self, prompt: str) -> str | Response:
        self.calls += 1
        self.at_call(self.calls)
        if self.calls == self.gone_at:
            return Response(status=400, body={"error": {"message": "out of order"}})
        return reply(prompt)


@pytest.fixture
def moody() -> Moody:
    return Moody()


@pytest.fixture
def server(moody: Moody) -> Iterator[Loopback]:
    with Loopback(chat(moody)) as running:
        yield running


def read(server: Loopback, document: Path, *options: object) -> Result:
    return run("read", "-q", QUESTION, document, *at(server), *CHUNKED, *options)


@pytest.mark.parametrize(
    ("options", "recorded"),
    [((), False), (("--run", "north gate; date"), False), (("--run", "north gate; date"), True)],
)
def test_an_interruption_says_how_to_go_on(
    server: Loopback,
    document: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    recorded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a command that a shell takes as it is meant, in whatever folder."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    journal = tmp_path / "my journal.db"
    if recorded:
        assert read(server, document, "--journal", journal, *options).exit_code == 0
    monkeypatch.setattr("memagent_integrations.cli.read._read", interrupted)
    done = run("read", "-q", QUESTION, document, *at(server), "--journal", journal, *options, "--quiet")
    how = f"memagent runs resume 'north gate; date' --journal '{journal}'" if recorded else "the same command"
    assert (done.exit_code, done.stderr) == (130, f"memagent: interrupted; {how} goes on from here\n")


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    with Journal(tmp_path / "my journal.db") as journal:
        Reader(ScriptedBackend(["a memory", "an answer"]), journal=journal).read(QUESTION, "text", run="gate")
        journal.edit("gate", 0, memory="another", name="north gate; date")
        error = str(journal.reading("north gate; date").error)
    assert f"(memagent runs resume 'north gate; date' --journal '{journal.path}')" in error


def test_an_interrupted_reading_is_resumed(server: Loopback, moody: Moody, document: Path, tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    moody.gone_at = 3
    done = read(server, document, "--journal", journal, "--run", "gate")
    assert done.exit_code == 3
    done = run("runs", "list", "--journal", journal)
    assert [line.split("\t")[:3] for line in done.stdout.splitlines()] == [
        ["run", "steps", "state"],
        ["gate", "2", "unfinished"],
    ]
    calls = len(prompts(server))
    done = run("runs", "resume", "gate", document, "--journal", journal, "--base-url", f"{server.url}/v1")
    assert (done.exit_code, done.stdout) == (0, "It is 7319.\n")
    assert len(prompts(server)) - calls == CHUNKS + 1 - 2
    assert f"chunk 1 of {CHUNKS}" in done.stderr
    calls = len(prompts(server))
    for again in (("--stream",), ()):
        done = read(server, document, "--journal", journal, "--run", "gate", *again)
        assert done.stdout == "It is 7319.\n"
    assert len(prompts(server)) == calls, "a complete reading costs nothing"
    assert "finished" in run("runs", "list", "--journal", journal).stdout


def test_another_model_answers_and_a_run_is_resumed_with_both(
    server: Loopback, moody: Moody, document: Path, tmp_path: Path
) -> None:
    journal = ("--journal", tmp_path / "journal.db")
    moody.gone_at = 2
    with Loopback(chat(lambda prompt: "It is seven three one nine.")) as answers:
        address = ("--answer-base-url", f"{answers.url}/v1")
        options = ("--answer-model", "openai:large", *address, "--temperature", "0.5", *journal, "--run", "gate")
        assert read(server, document, *options).exit_code == 3
        assert prompts(answers) == []
        done = run("runs", "resume", "gate", *journal, "--json")
        reading = Reading.from_json(done.stdout)
        assert (reading.answer, reading.answer_model) == ("It is seven three one nine.", "openai:large")
        [body] = answers.bodies("/v1/chat/completions")
        assert (body["model"], body["temperature"]) == ("large", 0.5)
        assert len(prompts(server)) == CHUNKS + 1
    done = read(server, document, "--answer-base-url", "http://127.0.0.1:9/v1")
    assert (done.exit_code, "give that too" in done.stderr) == (2, True)


def test_a_run_is_shown_exported_edited_and_deleted(server: Loopback, document: Path, tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    whole = Reading.from_json(read(server, document, "--journal", journal, "--run", "gate", "--json").stdout)
    shown = run("runs", "show", "gate", "--journal", journal).stdout
    assert f"question: {QUESTION}" in shown
    assert shown.count("-- step") == CHUNKS
    assert "Nothing of the gate yet." in shown
    assert shown.endswith("answer: It is 7319.\n")
    assert Reading.from_json(run("runs", "export", "gate", "--journal", journal).stdout) == whole
    assert run("runs", "export", "gate", "--journal", journal, "-o", tmp_path / "out.json").stdout == ""
    assert Reading.from_json((tmp_path / "out.json").read_text()) == whole
    edit = ("runs", "edit", "gate", "--journal", journal)
    edited = run(*edit, "--step", CHUNKS - 1, "--memory", "-", stdin="Nobody knows the code.")
    assert edited.stdout == "gate.1\n"
    assert "is not finished" in run("runs", "show", "gate.1", "--journal", journal).stdout
    done = run("runs", "resume", "gate.1", document, "--journal", journal, "--base-url", f"{server.url}/v1", "--json")
    assert json.loads(done.stdout)["answer"] == "The memory does not say."
    assert run(*edit, "--step", 0, "--memory", "m", "--as", "mine").stdout == "mine\n"
    assert run("runs", "delete", "gate", "--journal", journal).exit_code == 0
    with Journal(journal) as records:
        assert {entry.name: entry.parent for entry in records.runs()} == {"gate.1": "gate", "mine": "gate"}


def test_a_reading_is_paused_and_goes_on_with_its_own_files(
    server: Loopback, moody: Moody, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "runs.db"
    moody.at_call = lambda number: number == 2 and run("runs", "pause", "gate", "--journal", journal)
    done = read(server, document, "--journal", journal, "--run", "gate")
    assert (done.exit_code, done.stdout) == (5, "")
    assert done.stderr.splitlines()[-1] == "memagent: run gate was paused after 2 steps; read again to resume"
    assert run("runs", "list", "--journal", journal).stdout.splitlines()[1].split("\t")[:3] == ["gate", "2", "paused"]
    monkeypatch.chdir(tmp_path)
    done = run("runs", "resume", "gate", "--journal", journal)
    assert (done.exit_code, done.stdout) == (0, "It is 7319.\n")
    lines = done.stderr.splitlines()
    assert [line.rpartition(", ")[2] for line in lines[:2]] == ["recorded", "recorded"]
    assert f"in {CHUNKS + 1 - 2} calls" in lines[-1]
    assert lines[-1].endswith("2 steps were recorded")
    assert "is finished" in run("runs", "pause", "gate", "--journal", journal).stderr
    recorded = ("--journal", journal, "--run", "piped")
    piped = run("read", "-q", QUESTION, "-", *at(server), *CHUNKED, *recorded, stdin=document.read_bytes())
    assert piped.exit_code == 0
    assert "runs resume piped FILE" in run("runs", "resume", "piped", "--journal", journal).stderr


def test_a_run_of_a_model_made_in_python_is_not_resumed_here(document: Path, tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    Reader(ScriptedBackend(["a memory", "an answer"]), journal=journal).read(QUESTION, document, run="mine")
    with Journal(journal) as records:
        records.edit("mine", 0, memory="another")
    done = run("runs", "resume", "mine.1", "--journal", journal)
    assert done.exit_code == 2
    assert "scripted, a model that was made in Python" in done.stderr


def test_time_limits(server: Loopback, moody: Moody, document: Path) -> None:
    moody.at_call = lambda number: threading.Event().wait(0.5 if number == 2 else 0)
    done = read(server, document, "--call-timeout", 0.2)
    assert (done.exit_code, done.stdout) == (0, "It is 7319.\n"), "it was repeated"
    moody.calls = 0
    done = read(server, document, "--run-timeout", 0.2)
    assert done.exit_code == 3
    assert "took more than its 0.2 s (run_timeout)" in done.stderr


def test_the_memory_is_watched(server: Loopback, document: Path) -> None:
    done = read(server, document, "--watch")
    assert done.exit_code == 0
    assert "    Nothing of the gate yet." in done.stderr.splitlines()
    assert "    The code is 7319." in done.stderr.splitlines()


def test_a_journal_is_served(server: Loopback, document: Path, tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    read(server, document, "--journal", journal, "--run", "gate")
    serving = process("serve", "--journal", journal)
    try:
        assert serving.stdout
        address, _, token = str(serving.stdout.readline().decode()).strip().partition("/#token=")
        runs = httpx.get(f"{address}/api/runs", headers={"Authorization": f"Bearer {token}"}).json()
        assert [entry["name"] for entry in runs] == ["gate"]
    finally:
        serving.send_signal(signal.SIGINT)
        _, err = serving.communicate(timeout=30)
    assert (serving.returncode, err) == (0, b"")
    assert "there is no journal" in run("serve", "--journal", tmp_path / "none.db").stderr


def test_nothing_gives_orders_to_the_terminal(tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    reader = Reader(ScriptedBackend(["\x1b[2Jmemory", "\x1b[2Janswer"]), journal=journal)
    reader.read("\x1b[2J\tquestion", "text", run="mine")
    for args in (("runs", "list"), ("runs", "show", "mine")):
        shown = run(*args, "--journal", journal).stdout
        assert "\x1b" not in shown
        assert "question" in shown


def test_what_goes_wrong(server: Loopback, document: Path, tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    read(server, document, "--journal", journal, "--run", "gate")
    question, here = ("read", "-q", QUESTION, document, *at(server)), ("--journal", journal)
    edit = ("runs", "edit", "gate")
    for args, message in [
        ((*question, "--run", "x"), "give --journal too"),
        (
            ("read", "-q", "Who?", document, *at(server), *CHUNKED, *here, "--run", "gate"),
            "question: 'What is the code of the north gate?', now 'Who?'",
        ),
        ((*question, "--journal", document), "not a database"),
        (("runs", "list", "--journal", tmp_path / "none.db"), "there is no journal"),
        (("runs", "show", "nobody", *here), "holds no run"),
        ((*edit, "--step", 99, "--memory", "x", *here), "has no memory after step 99"),
        (("runs", "resume", "nobody", document, *here), "holds no run"),
        (("runs", "export", "gate", *here, "-o", journal), "would overwrite the journal"),
        (("trace", "gate", *here, "-o", journal), "would overwrite the journal"),
        ((*question, *here, "--trace", journal), "would overwrite the journal"),
        ((*question, *here, "--run", ""), "a run's name"),
        ((*edit, "--step", 10**20, "--memory", "x", *here), "step has to be"),
    ]:
        done = run(*args)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("trace", ["runs.db", "../{folder}/runs.db", "link.db", "runs.db-wal"])
def test_a_trace_is_not_written_over_a_journal_that_does_not_exist_yet(
    trace: str, server: Loopback, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.db").symlink_to("runs.db")
    file = trace.format(folder=tmp_path.name)
    done = run("read", "-q", QUESTION, document, *at(server), "--journal", tmp_path / "runs.db", "--trace", file)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "would overwrite the journal" in done.stderr
    assert not prompts(server)
