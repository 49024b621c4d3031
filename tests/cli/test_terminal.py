"""What reaches a terminal: text, whoever wrote it, and the commands of our own displays alone."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from helpers.command_line import CHUNKED, PROGRAM, QUESTION, SlowAtSecond, at, run
from helpers.loopback import Loopback, Response, chat
from helpers.terminal import ORDERS, assert_harmless, written_to

from memagent_integrations import Journal, Reader, ScriptedBackend, cli
from memagent_integrations.cli.streams import console, printable, safe_stderr

SCRIPT = """
import json, logging, sys, warnings
from memagent_integrations.cli import app, read
whole = read._read

def noisy(reader, question, files, start, progress, output):
    progress.begin(None)
    for word in ("logged", "warned", "printed", "raised"):
        text = f"{word} {question}"
        if word == "logged":
            logging.getLogger("some.library").warning(text)
        elif word == "warned":
            warnings.simplefilter("always")
            warnings.warn(text)
        elif word == "printed":
            print(text, file=sys.stderr)
        else:
            raise RuntimeError(text)

for number, arguments in enumerate(json.loads(sys.stdin.read())):
    print(f"\\n=== {number}", flush=True)
    read._read = noisy if "--noisy" in arguments else whole
    try:
        app([argument for argument in arguments if argument != "--noisy"])
    except SystemExit as end:
        print(f"\\nexit code {end.code}", flush=True)
"""
NAMES = (
    *("read", "stream", "json", "citations", "watch", "an error of the server", "a file that is missing"),
    *("a bar", "a screen", "an option", "a command", "list", "show", "export", "edit", "resume", "an unknown run"),
    *("memories list", "memories show", "plan"),
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a terminal gets of each command, all of them in one process with no other output."""
    folder = tmp_path_factory.mktemp("terminal")
    file, journal, answer = folder / f"{ORDERS}.txt", folder / "runs.db", f"It is {ORDERS}."
    file.write_text(f"The code of the north gate is {ORDERS}.")
    refusal = Response(status=400, body={"error": {"message": f"refused {ORDERS}"}})
    with (
        Loopback(chat([f"The code is {ORDERS}.", answer] * 9)) as server,
        Loopback(chat(lambda prompt: refusal)) as refusing,
    ):
        hostile_journal(journal, file)
        read = ["read", "-q", QUESTION, str(file), *at(server)]
        noisy = ["read", "-q", ORDERS, str(file), *at(server), "--noisy"]
        here = ["--journal", str(journal)]
        commands = [
            *(read, [*read, "--stream"], [*read, "--json"], [*read, "--citations"], [*read, "--watch"]),
            ["read", "-q", QUESTION, str(file), *at(refusing)],
            ["read", "-q", QUESTION, f"{file}x", *at(server)],
            *(noisy, [*noisy, "--watch"], [f"--{ORDERS}"], [ORDERS]),
            *(["runs", "list", *here], ["runs", "show", ORDERS, *here], ["runs", "export", ORDERS, *here]),
            ["runs", "edit", ORDERS, "--step", "0", "--memory", "m", *here],
            ["runs", "resume", ORDERS, *here],
            ["runs", "show", f"no {ORDERS}", *here],
            ["memories", "list", *here],
            ["memories", "show", "gate", *here],
            [*read, "--plan"],
        ]
        terminal, end = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        running = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=end,
            stderr=end,
            env=environment | {"TERM": "xterm-256color", "NO_PROXY": "127.0.0.1"},
        )
        os.close(end)
        assert running.stdin
        running.stdin.write(json.dumps(commands).encode())
        running.stdin.close()
        output = written_to(terminal).decode(errors="replace")
        running.wait(60)
    _, *parts = output.replace("\r\n", "\n").split("\n=== ")
    return dict(zip(NAMES, (part.partition("\n")[2] for part in parts), strict=True))


def hostile_journal(path: Path, file: Path) -> None:
    """A journal whose names, models and texts hold orders."""
    with Journal(path) as journal:
        reader = Reader(ScriptedBackend([f"a memory {ORDERS}", f"an answer {ORDERS}"] * 2), journal=journal)
        reader.read(f"a question {ORDERS}", file, run="mine")
        reader.read(f"a question {ORDERS}", file, memory=journal.memory("gate"))
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE run SET name = ? WHERE name = 'mine'", (ORDERS,))
        database.execute("UPDATE step SET run = ? WHERE run = 'mine'", (ORDERS,))
        database.execute("UPDATE run SET settings = json_set(settings, '$.model', ?)", (f"openai:{ORDERS}",))
        database.commit()


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_gets_no_orders(shown: dict[str, str], name: str) -> None:
    assert "[31mred" in shown[name] or name == "plan", "the text is there"
    assert_harmless(shown[name])


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["a bar", "a screen"])
def test_what_others_write_meanwhile_is_shown(shown: dict[str, str], name: str) -> None:
    """A display may not take it away, and what is a defect of this program has its traceback."""
    after = shown[name].rpartition("\x1b[?1049l")[2]
    for word in ("logged", "warned", "printed", "RuntimeError: raised"):
        assert f"{word} \ufffd[31mred" in after
    assert "exit code 1" in after


def test_a_pipe_gets_lines_of_a_table_and_data_as_it_is(tmp_path: Path) -> None:
    journal, file = tmp_path / "runs.db", tmp_path / "a.txt"
    file.write_text("a text")
    hostile_journal(journal, file)
    for what in ("runs", "memories"):
        done = run(what, "list", "--journal", journal)
        assert_harmless(done.stdout.replace("\t", ""))
        assert {line.count("\t") for line in done.stdout.splitlines()} == {6 if what == "runs" else 2}
    assert run("memories", "show", "gate", "--journal", journal).stdout == f"a memory {ORDERS}".strip() + "\n"
    assert (
        json.loads(run("runs", "export", ORDERS, "--journal", journal).stdout)["answer"]
        == f"an answer {ORDERS}".strip()
    )
    assert_harmless(run("runs", "show", ORDERS, "--journal", journal).stdout)


@pytest.mark.heavy
def test_ctrl_c_on_a_terminal(document: Path, tmp_path: Path) -> None:
    """While the memory is watched and the model is at its second chunk."""
    slow = SlowAtSecond()
    terminal, end = pty.openpty()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(end, termios.TIOCSCTTY, 0)

    with Loopback(chat(slow)) as server, ThreadPoolExecutor() as pool:
        journal = tmp_path / "runs.db"
        arguments = ["read", "-q", QUESTION, document, *at(server), *CHUNKED, "--watch", "--journal", journal]
        running = subprocess.Popen(
            [*PROGRAM, *map(str, arguments)],
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            preexec_fn=prepare,
            env=os.environ | {"TERM": "xterm-256color", "NO_PROXY": "127.0.0.1"},
        )
        os.close(end)
        output = pool.submit(written_to, terminal)
        assert slow.reached.wait(60)
        os.write(terminal, b"\x03")
        code = running.wait(60)
        slow.over.set()
    before, _, after = output.result().decode().rpartition("\x1b[?1049l")
    assert "\x1b[?1049h" in before
    assert "\x1b[?7h" in after, "lines are wrapped again"
    assert after.endswith("memagent: interrupted; the same command goes on from here\r\n")
    assert code == 130
    with Journal(journal) as steps:
        assert [each.steps for each in steps.runs()] == [1]


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1"}])
def test_tables_and_displays_are_for_terminals_alone(
    tmp_path: Path, forced: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in forced.items():
        monkeypatch.setenv(name, value)
    with Journal(tmp_path / "runs.db"):
        pass
    assert run("runs", "list", "--journal", tmp_path / "runs.db").stdout.startswith("run\tsteps\tstate\t")
    assert not console().is_terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\r\nb\n\tc", "a\nb\n\tc"),
        ("a\rb\r", "a\ufffdb\ufffd"),
        ("\u0645\u06cc\u200c\u062f\u0627\u0646\u0645 \U0001f469\u200d\U0001f52c 中文\u3000\xa0e\u0301", None),
        ("".join(map(chr, [*range(9), *range(11, 32), *range(127, 160)])), "\ufffd" * 63),
        ("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029", "\ufffd" * 14),
        ("\ud800\ufff9\U000e0041\ue000", "\ufffd" * 4),
    ],
)
def test_printable(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)


def test_a_bar_of_another_library_is_drawn_over_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with safe_stderr():
        sys.stderr.write("\rloading 1\r2")
        sys.stderr.write("\rloading 2\n")
    assert capsys.readouterr().err == "\rloading 1\ufffd2\rloading 2\n"


def test_all_output_goes_through_one_module() -> None:
    """`streams` writes, and `tables` draws on standard output what it has made printable.

    The package itself tells of Ctrl-C while `streams` is imported.
    """
    found = set()
    for file in Path(cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                *("print", "typer.echo", "typer.secho", "Console", "sys.stdout.write", "sys.stderr.write"),
            ):
                found.add((file.stem, ast.unparse(node.func)))
    assert found == {
        *(("streams", "typer.echo"), ("streams", "Console"), ("tables", "Console")),
        ("__init__", "sys.stderr.write"),
    }
