"""The commands that docs/evaluation.md gives for published setups, run as they stand there, with less to do."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import run as memagent
from helpers.data import DATA
from helpers.loopback import Loopback, chat

from memagent_integrations.evaluation.published import PUBLISHED, RULER_HQA

pytestmark = pytest.mark.heavy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"
NEEDLE = re.compile(r"magic \w+ for (\S+) is: (\S+)\.")
TEMPLATES = {"TEMPLATE": "{prompt} {memory} {chunk}", "TEMPLATE_FINAL": "{prompt} {memory}, and say it"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return tmp_path


def command(number: int, changes: dict[str, list[str]]) -> list[str]:
    """Return the arguments of a command on the page, with other values for some of its options."""
    section = PAGE.read_text("utf-8").partition("### Published setups\n")[2].partition("\n### ")[0]
    fence = re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[number]
    shell = f"memagent() {{ printf '%s\\n' \"$@\"; }}\n{fence}"
    expanded = subprocess.run(["bash", "-c", shell], check=True, capture_output=True, text=True).stdout.splitlines()
    kept = []
    options = iter(expanded)
    for option in options:
        if option in changes:
            next(options)
        else:
            kept.append(option)
    assert len(kept) < len(expanded)
    return kept + [argument for option, values in changes.items() for value in values for argument in (option, value)]


def results(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, *lines = map(json.loads, path.read_text("utf-8").splitlines())
    return header["made"], lines


def test_ruler_hqa_as_published(folder: Path) -> None:
    (folder / "data" / "hotpotqa").mkdir(parents=True)
    (folder / "recurrent.py").write_text("".join(f"{name} = {text!r}\n" for name, text in TEMPLATES.items()))
    for paragraphs in (50, 200):
        filler = "The harbour master noted the tide of the day. " * 40 * paragraphs
        rows = [
            {"context": f"Document 1:\n{filler}It is {7000 + n}.", "input": "Which?", "answers": [str(7000 + n)]}
            for n in range(128)
        ]
        (folder / "data" / "hotpotqa" / f"eval_{paragraphs}.json").write_text(json.dumps(rows))

    def reads(prompt: str) -> str:
        code = re.search(r"7\d\d\d", prompt)
        return f"So the answer is {code[0]}." if code else "nothing yet"

    with Loopback(chat(reads, window=8192)) as server:
        changes = {"--base-url": [f"{server.url}/v1"], "--samples": ["1"]}
        done = memagent(*command(0, changes), "--tokenizer", "approximate")
        bodies = server.bodies("/v1/chat/completions")
    assert done.exit_code == 0, done.stderr
    assert {(body["temperature"], body["top_p"], body["max_tokens"]) for body in bodies} == {(0.7, 0.95, 1024)}
    settings, lines = results(folder / "published.jsonl")
    assert [(line["task"], line["length"], line["score"]) for line in lines] == [
        (RULER_HQA, 50, 1.0),
        (RULER_HQA, 200, 1.0),
    ]
    assert 2 < lines[0]["calls"] < lines[1]["calls"] == len(bodies) - lines[0]["calls"]
    # Nothing but the templates, which are not ours to keep here, keeps the published figures out of the table.
    differs = PUBLISHED[0].differences(RULER_HQA, lines[0]["metric"], settings)
    assert differs == f"prompts {PUBLISHED[0].setup['prompts']}, here {settings['prompts']}"


@pytest.mark.skipif(not DATA.is_dir(), reason="no data sets here")
def test_ruler_as_published(folder: Path) -> None:
    def reads(prompt: str) -> str:
        question = prompt.partition("</question>")[0]
        return ", ".join(value for key, value in NEEDLE.findall(prompt) if key in question) or "nothing of it"

    with Loopback(chat(reads, window=2560)) as server:
        changes = {
            "--base-url": [f"{server.url}/v1"],
            "--data": [str(DATA)],
            "--samples": ["1"],
            "--length": ["2048"],
            "--window": [str(2048 + 512)],
        }
        done = memagent(*command(1, changes), "--tokenizer", "approximate")
        bodies = server.bodies("/v1/chat/completions")
    assert done.exit_code == 0, done.stderr
    assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.0, 128)}
    settings, lines = results(folder / "ruler.jsonl")
    assert (settings["length_of"], settings["example"], settings["window"]) == ("prompt", True, 2560)
    assert len({line["task"] for line in lines}) == len(lines) == 13
    assert [line["error"] for line in lines] == [None] * 13
    assert {line["score"] for line in lines if line["task"].startswith("niah")} == {1.0}
    assert {line["task"] for line in lines if "An example" in line["question"]} == {"vt", "cwe"}
