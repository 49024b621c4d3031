"""`memagent plan`: what a reading would take, its price, and its cost beside full attention."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import CHUNKED, CHUNKS, QUESTION, at, prompts, reply, run
from helpers.loopback import Loopback, chat

pytestmark = pytest.mark.heavy


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Loopback(chat(reply)) as running:
        yield running


def test_a_plan_is_what_the_reading_then_takes(server: Loopback, document: Path) -> None:
    done = run("plan", document, "-q", QUESTION, *at(server), *CHUNKED)
    assert (done.exit_code, done.stderr) == (0, "")
    assert not prompts(server), "a plan calls no model"
    assert done.stdout == run("read", document, "-q", QUESTION, *at(server), *CHUNKED, "--plan").stdout
    planned = dict(line.split(": ") for line in done.stdout.splitlines())
    assert planned["chunks"] == str(CHUNKS)
    reading = json.loads(run("read", document, "-q", QUESTION, *at(server), *CHUNKED, "--json", "--quiet").stdout)
    assert len(reading["steps"]) == int(planned["calls"]) == len(prompts(server))
    used = sum(step["reply"]["usage"]["prompt_tokens"] for step in reading["steps"])
    assert used <= int(planned["prompt tokens"])


def test_a_plan_of_several_questions_is_that_of_all(server: Loopback, document: Path) -> None:
    questions = ("-q", QUESTION, "-q", "Who lost it?")
    done = run("plan", document, *questions, *at(server), *CHUNKED)
    assert done.stdout == run("read", document, *questions, *at(server), *CHUNKED, "--plan").stdout
    planned = dict(line.split(": ") for line in done.stdout.splitlines())
    assert (planned["questions"], planned["calls"]) == ("2", str(2 * (CHUNKS + 1)))
    done = run("plan", document, *questions, *at(server), *CHUNKED, "--flops")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "give -q once" in done.stderr


def test_the_price(server: Loopback, document: Path) -> None:
    prices = ("--prompt-price", "2.5", "--completion-price", "10")
    done = run("plan", document, "-q", QUESTION, *at(server), *CHUNKED, *prices, "--json")
    plan = json.loads(done.stdout)
    assert plan["price"] == (2.5 * plan["prompt_tokens"] + 10 * plan["completion_tokens"]) / 1e6
    assert f"price: {plan['price']}" in run("plan", document, "-q", QUESTION, *at(server), *CHUNKED, *prices).stdout


def test_a_plan_needs_no_key(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    models = ("--model", "openai:gpt-5-mini", "--answer-model", "openai:gpt-5", "--tokenizer", "approximate")
    done = run("plan", document, "-q", QUESTION, *models, *CHUNKED)
    assert (done.exit_code, "document tokens: " in done.stdout) == (0, True), done.stderr


def test_the_published_ratios_in_a_pipe() -> None:
    done = run("plan", "--flops")
    assert done.exit_code == 0
    rows = [line.split("\t") for line in done.stdout.splitlines()[1:]]
    ratios = {row[0]: tuple(row[-2:]) for row in rows}
    assert ratios["8,000"] == ("1", "1")
    assert ratios["32,000"] == ("4", "16")
    assert ratios["128,000"] == ("16", "256")
    assert ratios["1,000,000"] == ("125", "15,625")


def test_the_table_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    printed = [line.split("\t") for line in run("plan", "--flops").stdout.splitlines()]
    assert printed[1:] == [line.split() for line in page.splitlines() if re.match(r"[\d,]+ +\d+ +[\d.]+e", line)]


def test_the_cost_of_the_document_stands_in_the_table(server: Loopback, document: Path, tmp_path: Path) -> None:
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizes), encoding="utf-8")
    arguments = ("plan", document, "-q", QUESTION, *at(server), *CHUNKED, "--flops", "--sizes", config)
    plan = json.loads(run(*arguments, "--json").stdout)
    own = [row for row in plan["flops"] if row["tokens"] == plan["document_tokens"]]
    assert [row["calls"] for row in own] == [CHUNKS + 1]
    assert f"\n{plan['document_tokens']}\t" in run(*arguments).stdout.replace(",", "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "name the files to read, or give --flops"),
        (("-q", "why"), "name the files to read, or give --flops"),
        (("DOCUMENT",), "the question"),
        (("-q", "why", "--flops"), "the files"),
        (("DOCUMENT", "-q", "why", "--prompt-price", "1"), "give both prices"),
        (("--flops", "--prompt-price", "1", "--completion-price", "1"), "name its files"),
        (("DOCUMENT", "-q", "why", "--sizes", "config.json"), "--flops"),
        (("--flops", "--sizes", "nothing.json"), "cannot read 'nothing.json'"),
        (("--flops", "--lookup", "3"), "counts a sequential reading"),
        (("--flops", "--reread", "1"), "counts a sequential reading"),
        (("--flops", "--strategy", "parallel"), "counts a sequential reading"),
        (("--flops", "--chunk-tokens", "0"), "chunk_tokens has to be"),
        (("-", "-q", "why"), "a plan needs a file"),
        (("nothing.txt", "-q", "why"), "there is no such file"),
        (("DOCUMENT", "-q", "why", "--answer-base-url", "http://127.0.0.1:1/v1"), "--answer-model"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(
    document: Path, arguments: tuple[str, ...], problem: str
) -> None:
    done = run("plan", *(document if argument == "DOCUMENT" else argument for argument in arguments))
    assert (done.exit_code, done.stdout) == (2, "")
    assert problem in done.stderr


@pytest.mark.parametrize("price", ["-1", "nan", "inf"])
def test_a_price_that_is_none(server: Loopback, document: Path, price: str) -> None:
    prices = ("--prompt-price", price, "--completion-price", "1")
    done = run("plan", document, "-q", QUESTION, *at(server), *CHUNKED, *prices)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "prompt has to be a number of at least 0" in done.stderr


def test_the_prices_are_those_of_one_model(document: Path) -> None:
    prices = ("--prompt-price", "1", "--completion-price", "1")
    done = run("plan", document, "-q", QUESTION, "--answer-model", "openai:other", *prices)
    assert done.exit_code == 2
    assert "the prices are those of one model" in done.stderr
