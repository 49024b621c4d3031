"""The journal on the command line: `memagent read --journal`, `memagent runs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loopback import Loopback, Response, chat
from test_cli import CHUNKED, CHUNKS, QUESTION, at, document, no_keys, prompts, reply, run

from memagent_integrations import Journal, Reader, Reading, ScriptedBackend

__all__ = ["document", "no_keys"]  # fixtures


class Moody:
    """An endpoint that goes away at one call, and comes back."""

    def __init__(self) -> None:
        self.calls, self.gone_at = 0, 0

    def __call__(self, prompt: str) -> str | Response:
        self.calls += 1
        return Response(status=400, body={"error": {"message": "out of order"}}) if self.calls == self.gone_at else reply(prompt)


@pytest.fixture
def moody() -> Moody:
    return Moody()


@pytest.fixture
def server(moody: Moody) -> object:
    with Loopback(chat(moody)) as running:
        yield running


def read(server: Loopback, document: Path, *more: object) -> object:
    return run("read", "-q", QUESTION, document, *at(server), *CHUNKED, *more)


def test_an_interrupted_reading_is_resumed(server: Loopback, moody: Moody, document: Path, tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    moody.gone_at = 3
    done = read(server, document, "--journal", journal, "--run", "gate")
    assert done.exit_code == 3
    done = run("runs", "list", "--journal", journal)
    assert [line.split("\t")[:3] for line in done.stdout.splitlines()] == [["run", "steps", "state"], ["gate", "2", "unfinished"]]
    asked = len(prompts(server))
    done = run("runs", "resume", "gate", document, "--journal", journal, "--base-url", f"{server.url}/v1")
    assert (done.exit_code, done.stdout) == (0, "It is 7319.\n")
    assert len(prompts(server)) - asked == CHUNKS + 1 - 2
    assert f"chunk 1 of {CHUNKS}" in done.stderr
    asked = len(prompts(server))
    for again in (("--stream",), ()):
        done = read(server, document, "--journal", journal, "--run", "gate", *again)
        assert done.stdout == "It is 7319.\n"
    assert len(prompts(server)) == asked, "a complete reading costs nothing"
    assert "finished" in run("runs", "list", "--journal", journal).stdout


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
    edited = run("runs", "edit", "gate", "--step", CHUNKS - 1, "--memory", "-", "--journal", journal, stdin="Nobody knows the code.")
    assert edited.stdout == "gate.1\n"
    assert "is not finished" in run("runs", "show", "gate.1", "--journal", journal).stdout
    done = run("runs", "resume", "gate.1", document, "--journal", journal, "--base-url", f"{server.url}/v1", "--json")
    assert json.loads(done.stdout)["answer"] == "The memory does not say."
    assert run("runs", "edit", "gate", "--step", 0, "--memory", "m", "--as", "mine", "--journal", journal).stdout == "mine\n"
    assert run("runs", "delete", "gate", "--journal", journal).exit_code == 0
    with Journal(journal) as records:
        assert {entry.name: entry.parent for entry in records.runs()} == {"gate.1": "gate", "mine": "gate"}


def test_nothing_gives_orders_to_the_terminal(tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    Reader(ScriptedBackend(["\x1b[2Jmemory", "\x1b[2Janswer"]), journal=journal).read("\x1b[2J\tquestion", "text", run="mine")
    for args in (("runs", "list"), ("runs", "show", "mine")):
        shown = run(*args, "--journal", journal).stdout
        assert "\x1b" not in shown
        assert "question" in shown


def test_what_goes_wrong(server: Loopback, document: Path, tmp_path: Path) -> None:
    journal = tmp_path / "runs.db"
    read(server, document, "--journal", journal, "--run", "gate")
    for args, code, said in [
        (("read", "-q", QUESTION, document, *at(server), "--run", "x"), 2, "give --journal too"),
        (("read", "-q", "Who?", document, *at(server), *CHUNKED, "--journal", journal, "--run", "gate"), 2, "question was"),
        (("read", "-q", QUESTION, document, *at(server), "--journal", document), 2, "not a database"),
        (("runs", "list", "--journal", tmp_path / "none.db"), 2, "there is no journal"),
        (("runs", "show", "nobody", "--journal", journal), 2, "holds no run"),
        (("runs", "edit", "gate", "--step", 99, "--memory", "x", "--journal", journal), 2, "has no memory after step 99"),
        (("runs", "resume", "nobody", document, "--journal", journal), 2, "holds no run"),
        (("runs", "export", "gate", "--journal", journal, "-o", journal), 2, "would overwrite the journal"),
        (("trace", "gate", "--journal", journal, "-o", journal), 2, "would overwrite the journal"),
        (("read", "-q", QUESTION, document, *at(server), "--journal", journal, "--trace", journal), 2, "would overwrite the journal"),
        (("read", "-q", QUESTION, document, *at(server), "--journal", journal, "--run", ""), 2, "a run's name"),
        (("runs", "edit", "gate", "--step", 10**20, "--memory", "x", "--journal", journal), 2, "step has to be"),
    ]:
        done = run(*args)
        assert (done.exit_code, done.stdout) == (code, "")
        assert said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "none.db").exists()
