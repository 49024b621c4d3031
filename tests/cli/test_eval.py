"""The command line of the evaluation: what it writes, shows and refuses, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import process
from helpers.command_line import run as memagent
from helpers.loopback import Loopback, Response, chat
from typer.testing import Result

pytestmark = pytest.mark.heavy

NEEDLE = re.compile(r"magic \w+ for \S+ is: (\d+)")
SIZES = (
    *("--tokenizer", "approximate", "--window", "2048"),
    *("--chunk-tokens", "500", "--memory-tokens", "60", "--output-tokens", "60"),
)


def answer(prompt: str) -> str | Response:
    needle = NEEDLE.search(prompt)
    return needle[1] if needle else "nothing of it"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return tmp_path


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback(chat(answer, window=4096)) as running:
        yield running


def call(*arguments: str) -> Result:
    return memagent("eval", *arguments)


def run(server: Loopback, *arguments: str, base_url: str = "") -> Result:
    return call(*command(base_url or f"{server.url}/v1"), *arguments)


def command(base_url: str) -> list[str]:
    return ["run", "--model", "openai:m", f"--base-url={base_url}", *SIZES, "-o", "out.jsonl"]


def calls(server: Loopback) -> int:
    return len(server.bodies("/v1/chat/completions"))


def test_a_run_is_told_written_and_not_done_twice(server: Loopback, folder: Path) -> None:
    arguments = ("-t", "niah_single_1@1500", "-r", "memagent", "-r", "cut", "--samples", "2")
    done = run(server, *arguments)
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        f"niah_single_1 1500 {reader} {number}: {score}"
        for number in (0, 1)
        for reader, score in (("memagent", "0.00"), ("cut", "1.00"))
    ]
    before = calls(server)
    again = run(server, *arguments)
    assert (again.exit_code, again.stdout, again.stderr, calls(server)) == (0, done.stdout, "", before)
    assert call("report", "out.jsonl").output == done.stdout
    header = json.loads((folder / "out.jsonl").read_text().splitlines()[0])
    assert (header["made"]["model"], header["made"]["window"]) == ("openai:m", 2048)


def test_a_report_is_a_table_and_pictures(server: Loopback, folder: Path) -> None:
    run(server, "-t", "niah_single_1@1500", "-r", "memagent", "-r", "cut", "--samples", "2")
    done = call("report", "out.jsonl", "--against", "cut", "--output", "report")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "| cut - memagent |" in done.stdout
    assert {path.name for path in (folder / "report").iterdir()} == {
        *("accuracy.png", "cost.png", "per_answer.png", "depths.png", "survival.png"),
        *("table.csv", "table.md"),
    }
    assert (folder / "report" / "table.md").read_text() == done.stdout
    refused = call("report", "out.jsonl", "--output", "out.jsonl")
    assert (refused.exit_code, refused.stderr) == (2, "memagent: cannot write 'out.jsonl': File exists\n")


def test_a_report_tells_the_price_of_a_right_answer(server: Loopback, folder: Path) -> None:
    run(server, "-t", "niah_single_1@1500", "-r", "cut", "--samples", "1")
    usage = json.loads((folder / "out.jsonl").read_text().splitlines()[1])["usage"]
    price = (usage["prompt_tokens"] * 2 + usage["completion_tokens"] * 8) / 1e6
    done = call("report", "out.jsonl", "--prompt-price", "2", "--completion-price", "8")
    assert done.exit_code == 0, done.stderr
    heading, table = done.stdout.split("\n\n## ")[-1].split("\n\n")
    assert heading == "For each right answer"
    assert table.splitlines()[-1].endswith(f"| {price:.3g} |")
    for refused in (
        ["--prompt-price", "2"],
        ["--cached-price", "1"],
        ["--prompt-price", "-2", "--completion-price", "1"],
    ):
        assert call("report", "out.jsonl", *refused).exit_code == 2


def test_a_document_that_does_not_fit_is_told(server: Loopback, folder: Path) -> None:
    done = run(server, "-t", "niah_single_1@1500,9000", "-r", "whole", "--samples", "1")
    assert done.exit_code == 0, done.stderr
    fits, too_long = sorted(done.stderr.splitlines())  # the one that makes no call may be told first
    assert fits == "niah_single_1 1500 whole 0: 1.00"
    assert too_long.startswith("niah_single_1 9000 whole 0: too long: the document has more than the ")
    assert "too long" in done.stdout


def test_lengths_and_examples_as_in_ruler(server: Loopback, folder: Path) -> None:
    done = run(server, "-t", "vt@1500", "-r", "cut", "--samples", "1", "--length-of", "prompt", "--example")
    assert done.exit_code == 0, done.stderr
    header, result = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert (header["made"]["length_of"], header["made"]["example"]) == ("prompt", True)
    assert "An example" in result["question"]
    assert 900 < result["details"]["document_tokens"] < 1300
    refused = run(server, "-t", "ruler_hqa@4", "--data", ".", "--length-of", "prompt", "-o", "other.jsonl")
    assert refused.exit_code == 2


def test_what_is_secret_in_an_address_is_not_written(
    server: Loopback, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"{server.url}/v1?key=hidden".replace("//", "//user:secret@")
    monkeypatch.setattr(sys, "argv", ["memagent", "eval", *command(address)])
    done = run(server, "-t", "vt@1500", "-r", "cut", "--samples", "1", base_url=address)
    assert done.exit_code == 0, done.stderr
    written = (folder / "out.jsonl").read_text()
    header, _ = written.splitlines()
    assert json.loads(header)["noted"]["command"][:2] == ["eval", "run"]
    assert header.count(server.url) == 2  # in the backend's identity and in the command
    assert not re.search("secret|hidden", written)


def test_ctrl_c_keeps_the_samples_under_way(folder: Path) -> None:
    under_way, go_on = threading.Event(), threading.Event()

    def slow(prompt: str) -> str | Response:
        under_way.set()
        assert go_on.wait(60)
        return answer(prompt)

    with Loopback(chat(slow, window=4096)) as server:
        arguments = ["eval", *command(f"{server.url}/v1"), "-t", "niah_single_1@1000", "-r", "cut", "--samples", "9"]
        running = process(*arguments, text=True)
        assert under_way.wait(60)
        running.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for the sample
            running.wait(0.5)
        go_on.set()
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, "memagent: interrupted\n")
    assert [json.loads(line)["score"] for line in (folder / "out.jsonl").read_text().splitlines()[1:]] == [1.0]


def test_an_error_of_a_server_is_one_harmless_line() -> None:
    refused = Response(status=400, body={"error": {"message": "no \x1b[31mred\nand [bold]"}})
    with Loopback(chat([refused], window=4096)) as server:
        done = run(server, "-t", "vt@1500", "-r", "cut", "--samples", "1")
    assert done.exit_code == 0
    assert re.fullmatch(r"vt 1500 cut 0: failed: .* no \ufffd\[31mred and \[bold\]\n", done.stderr)
    assert re.search(r"\| cut +\| 0.0 +\| 0-79 +\| 1 +\| 1 +\|", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-t vt@", "lengths are whole numbers, as in vt@4096,32768, not ''"),
        ("-t vt@1k", "lengths are whole numbers"),
        (f"-t vt@{'9' * 5000}", "lengths are whole numbers"),
        ("-t vt@-5", "length has to be a whole number of at least 1, not -5"),
        ("-t vt -l 0", "length has to be a whole number of at least 1, not 0"),
        ("-t magic@100", "unknown task 'magic'"),
        ("-t jsonl:own@12", "cannot read 'own@12'"),
        ("-t vt@1500 --samples 99999999", "samples has to be a whole number"),
        ("-t vt@1500 --data none", "the data folder 'none' is not a folder"),
        ("-t vt@1500 -t niah_single_1@5 --samples 50", "niah_single_1 needs a length of at least"),
        ("-t vt@1500 -o .", "cannot write '.'"),
        ("-t vt@1500 -r cut:3", "cut takes no options"),
    ],
    ids=lambda value: value[:44],
)
def test_wrong_arguments(server: Loopback, arguments: str, message: str) -> None:
    done = run(server, *arguments.split(), *([] if "-r" in arguments else ["-r", "cut"]))
    assert done.exit_code == 2
    assert message in done.stderr.splitlines()[-1]
    assert calls(server) <= 2, "the first samples show what is wrong"
