"""Training sets: what is left out and why, a file that survives any crash unchanged, and rows that are a task again."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pytest
from helpers import training_set
from helpers.loopback import Loopback, Response, chat
from helpers.training_set import NONE, VT, make, reader
from typer.testing import CliRunner, Result

from memagent_integrations import BackendError, ScriptedBackend, UsageError
from memagent_integrations.cli import app
from memagent_integrations.errors import ContextOverflow
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.evaluation.tasks import load
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.training import data as sets
from memagent_integrations.training.data import EASY, HARD, KNOWN, Filters, TrainingSet, build, made_with
from memagent_integrations.training.mixture import Drawn, Mixture, Part


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def capitals(folder: Path, number: int = 12) -> Mixture:
    """Questions Q0, Q1, ...: the answer to Qn is An, and the document says so."""
    rows: list[dict[str, object]] = [
        {
            "question": f"What is Q{n}?",
            "answers": [f"A{n}"],
            "context": f"Q{n} is A{n}. " + "Nothing else. " * 40,
            "metric": "em",
        }
        for n in range(number)
    ]
    return Mixture(parts=(Part(name=f"jsonl:{write(folder / 'capitals.jsonl', rows)}"),))


def number_of(prompt: Prompt) -> int:
    """The number of the question in a prompt."""
    return int(prompt.messages[0].content.split("What is Q")[1].split("?")[0])


def closed(prompt: Prompt) -> bool:
    return "from what you know" in prompt.messages[0].content


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def questions(path: Path) -> list[int]:
    return [int(row["question"].removeprefix("What is Q").removesuffix("?")) for row in rows_of(path)]


# what is in it


def test_rows_are_those_that_the_mixture_draws(tmp_path: Path) -> None:
    model = reader(lambda prompt: "unused")
    state = make(tmp_path / "set.jsonl", VT, model, 5, seed=3)
    assert (state.position, state.rows, sum(state.left_out.values())) == (5, 5, 0)
    for position, row in enumerate(rows_of(tmp_path / "set.jsonl")):
        drawn = VT.draw(position, seed=3, share=1, data=Data(), count=model.backend.count)
        assert row == {
            "question": drawn.sample.question,
            "answers": list(drawn.sample.answers),
            "metric": "string_match_all",
            "task": "vt",
            "length": drawn.length,
            "facts": [{"text": fact.text, "depth": fact.depth, "keys": list(fact.keys)} for fact in drawn.sample.facts],
            "context": "".join(drawn.sample.document()),
        }


def test_the_file_is_a_task_with_the_metric_and_facts_of_each_row(tmp_path: Path) -> None:
    make(
        tmp_path / "set.jsonl",
        Mixture(parts=(*VT.parts, *capitals(tmp_path).parts)),
        reader(lambda prompt: "unused"),
        6,
    )
    task = load(f"jsonl:{tmp_path / 'set.jsonl'}", Data())
    samples = [task.make(0, 0, number, lambda text: len(text)) for number in range(6)]
    by_metric = {sample.metric: sample for sample in samples}
    assert set(by_metric) == {"em", "string_match_all"}
    chain, single = by_metric["string_match_all"], by_metric["em"]
    assert [fact.text.split()[0] for fact in chain.facts] == ["VAR"] * 5
    assert chain.oracle.count("VAR") == 9
    assert (task.score(" ".join(chain.answers), chain), task.score(chain.answers[0], chain)) == (1.0, 0.2)
    assert (task.score(single.answers[0], single), task.score(f"It is {single.answers[0]}", single)) == (1.0, 0.0)
    assert task.score(task.gold(chain), chain) == task.score(task.gold(single), single) == 1.0
    again = Mixture(parts=(Part(name=task.name),))
    assert len({again.draw(n, seed=0, share=1, data=Data(), count=len).sample.question for n in range(6)}) == 6


def test_states_that_were_superseded_are_in_the_file_too(tmp_path: Path) -> None:
    states = tuple(Fact(text=f"Ann moved to {town}.", depth=0, keys=(town,)) for town in ("Bonn", "Rome"))
    document = " ".join(state.text for state in states)
    sample = Sample(
        id="s",
        question="Where?",
        answers=("Rome",),
        document=lambda: iter([document]),
        facts=states[1:],
        superseded=states[:1],
    )
    into = TrainingSet(tmp_path / "set.jsonl", {})
    with into.writing():
        into.add(0, Drawn(task=Task(name="own", metric="em", make=lambda *_: sample), length=0, sample=sample), None)
    again = load(f"jsonl:{tmp_path / 'set.jsonl'}", Data()).make(0, 0, 0, ScriptedBackend([]).count)
    assert (again.facts, again.superseded) == (states[1:], states[:1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"metric": "exact"}, "there is no metric 'exact'; the metrics are em, "),
        ({"metric": 7}, "'metric'"),
        ({"facts": [{"text": "C", "deep": 1}]}, "facts: 1 depth: "),
        ({"facts": [{"text": "X", "depth": 0}]}, "the fact 'X' does not stand in the context"),
    ],
)
def test_a_row_with_a_metric_or_facts_that_are_none(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    path = write(tmp_path / "own.jsonl", [{"question": "Q", "answers": "A", "context": "C"} | changed])
    with pytest.raises(UsageError, match=rf"own\.jsonl, line 1: .*{message}"):
        load(f"jsonl:{path}", Data())


def test_a_document_is_written_piece_by_piece(tmp_path: Path) -> None:
    mixture, model = Mixture(parts=(Part(name="vt", lengths=(1_000_000,)),)), reader(lambda prompt: "unused")
    into = TrainingSet(tmp_path / "set.jsonl", {})
    tracemalloc.start()
    try:
        build(into, mixture, rows=1, seed=0, data=Data(), reader=model, filters=NONE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert into.path.stat().st_size > 3_000_000
    assert peak < 1 << 20
    assert model.backend.count(rows_of(into.path)[0]["context"]) == pytest.approx(1_000_000, rel=0.02)


# what is left out


def test_what_the_model_knows_is_left_out(tmp_path: Path) -> None:
    tries = {n: numbers() for n in range(12)}

    def script(prompt: Prompt) -> str:
        assert closed(prompt)
        assert "Nothing else" not in prompt.messages[0].content, "the document is not shown"
        n = number_of(prompt)
        attempt = next(tries[n])
        right = n % 3 == 0 or (n % 3 == 1 and attempt == 1)  # at once, at the second try, never
        return f"\\boxed{{a{n}}}" if right else "No idea"

    reported: list[tuple[str, str | None]] = []
    state = make(
        tmp_path / "set.jsonl",
        capitals(tmp_path),
        reader(script),
        12,
        Filters(without_context=2),
        on_question=lambda drawn, reason, state: reported.append((drawn.sample.question, reason)),
    )
    assert sorted(questions(tmp_path / "set.jsonl")) == [2, 5, 8, 11]
    assert state.left_out == {KNOWN: 8, EASY: 0, HARD: 0}
    assert [next(tries[n]) for n in range(12)] == [1, 2, 2] * 4, "who knows is not asked again"
    assert len(reported) == 12
    assert {question for question, reason in reported if reason == KNOWN} == {
        f"What is Q{n}?" for n in range(12) if n % 3 != 2
    }


def test_what_is_too_easy_or_too_hard_is_left_out(tmp_path: Path) -> None:
    answers = {n: numbers() for n in range(12)}

    def script(prompt: Prompt) -> str:
        n = number_of(prompt)
        if prompt.phase == "memory":
            return f"Q{n} is A{n}." if f"Q{n} is A{n}" in prompt.messages[0].content else "nothing"
        attempt = next(answers[n])
        return (
            f"\\boxed{{A{n}}}" if attempt < n % 5 else ("" if attempt == 3 else "\\boxed{wrong}")
        )  # 0 to 4 of 4 are right

    state = make(
        tmp_path / "set.jsonl",
        capitals(tmp_path, 10),
        reader(script),
        10,
        Filters(without_context=0, between=(0.25, 1), tries=4),
    )
    assert sorted(questions(tmp_path / "set.jsonl")) == [2, 3, 7, 8], "both bounds are excluded"
    assert state.left_out == {KNOWN: 0, EASY: 2, HARD: 4}
    assert (state.position, state.rows) == (10, 4), "each question stood there once"


def test_both_filters_ask_no_more_than_they_need(tmp_path: Path) -> None:
    model = reader(
        lambda prompt: f"\\boxed{{A{number_of(prompt)}}}" if closed(prompt) and number_of(prompt) < 6 else "\\boxed{x}"
    )
    make(tmp_path / "set.jsonl", capitals(tmp_path), model, 12, Filters(without_context=1, between=(0, 1), tries=2))
    backend: Any = model.backend
    assert {number_of(prompt) for prompt in backend.prompts if not closed(prompt)} == set(range(6, 12))


def test_a_set_of_which_nothing_is_kept_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "PATIENCE", 20)

    def knows(prompt: Prompt) -> str:
        value = prompt.messages[0].content.split("value ")[1][:5]
        names = {one.sample.question: one.sample.answers for one in drawn}
        return next(" ".join(answers) for question, answers in names.items() if value in question)

    drawn = [VT.draw(position, seed=0, share=1, data=Data(), count=ScriptedBackend([]).count) for position in range(24)]
    with pytest.raises(UsageError, match=r"of the last 20 questions none was kept \(20 known without the document\)"):
        make(tmp_path / "set.jsonl", VT, reader(knows), 3, Filters(without_context=1))


def test_a_model_that_fails_is_no_filter(tmp_path: Path) -> None:
    for error in (BackendError("down", retryable=True), BackendError("no such model"), ContextOverflow("too long")):
        for filters in (Filters(), Filters(without_context=0, between=(0, 1))):
            with pytest.raises(type(error), match=str(error)):
                make(tmp_path / "set.jsonl", VT, reader(lambda prompt, error=error: error), 3, filters)  # type: ignore[misc]
            (tmp_path / "set.jsonl.state.json").unlink()


def test_a_failure_does_not_wait_for_the_other_calls(tmp_path: Path) -> None:
    hanging, left = threading.Event(), threading.Event()

    def script(prompt: Prompt) -> Any:
        if number_of(prompt) % 2:
            hanging.set()
            left.wait(60)
        return BackendError("gone") if hanging.wait(60) else ""

    try:
        with pytest.raises(BackendError, match="gone"):
            make(tmp_path / "set.jsonl", capitals(tmp_path), reader(script, concurrency=12), 3, Filters())
        assert hanging.is_set()
    finally:
        left.set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"without_context": -1}, "without_context"),
        ({"tries": 0}, "tries"),
        ({"between": (0.5, 1.5)}, "keep_between"),
        ({"between": (1, 0)}, "nothing lies between 1 and 0"),
    ],
)
def test_filters_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Filters(**settings)


# a file that goes on


@pytest.mark.heavy
def test_killed_three_times_it_is_the_same_file(tmp_path: Path) -> None:
    def start(path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, training_set.__file__, str(path)])

    assert start(tmp_path / "whole.jsonl").wait() == 0
    path, rng, had = tmp_path / "killed.jsonl", random.Random(3), 0
    for _ in range(3):
        process, enough = start(path), had + rng.randrange(3, 8)
        while process.poll() is None and (path.read_bytes().count(b"\n") if path.exists() else 0) < enough:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was killed before its end"
        had = path.read_bytes().count(b"\n")
    assert start(path).wait() == 0
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert path.read_bytes().count(b"\n") == 40
    states = [json.loads((tmp_path / f"{name}.jsonl.state.json").read_bytes()) for name in ("killed", "whole")]
    assert states[0] == states[1]
    assert states[0]["left_out"][KNOWN] > 5


def test_what_was_half_written_is_made_anew(tmp_path: Path) -> None:
    path, model = tmp_path / "set.jsonl", reader(lambda prompt: "none")
    make(path, VT, model, 6)
    whole = path.read_bytes()
    for number, torn in enumerate(
        (b'{"question": "half', whole.splitlines(keepends=True)[-1])
    ):  # a part of a row; a row that the state does not count
        path = tmp_path / f"{number}.jsonl"
        make(path, VT, model, 4)
        path.write_bytes(path.read_bytes() + torn)
        make(path, VT, model, 6)
        assert path.read_bytes() == whole


def test_a_set_grows_and_a_full_one_asks_nothing(tmp_path: Path) -> None:
    model = reader(lambda prompt: "none")
    make(tmp_path / "small.jsonl", VT, model, 3, Filters())
    make(tmp_path / "large.jsonl", VT, model, 8, Filters())
    make(tmp_path / "small.jsonl", VT, model, 8, Filters())
    assert (tmp_path / "small.jsonl").read_bytes() == (tmp_path / "large.jsonl").read_bytes()
    silent = reader(lambda prompt: BackendError("asked"))
    assert make(tmp_path / "small.jsonl", VT, silent, 8, Filters()).rows == 8
    assert make(tmp_path / "small.jsonl", VT, silent, 2, Filters()).rows == 8


@pytest.mark.parametrize("options", [{"concurrency": 1}, {"concurrency": 7}, {"batch_size": 3}, {"batch_size": 64}])
def test_batches_make_the_file_that_single_calls_make(tmp_path: Path, options: dict[str, int]) -> None:
    def script(prompt: Prompt) -> str:
        n = number_of(prompt)
        return f"\\boxed{{A{n}}}" if n % 4 == 0 or (n % 2 and not closed(prompt)) else "\\boxed{x}"

    mixture = capitals(tmp_path, 30)
    state = make(tmp_path / "none.jsonl", mixture, reader(script, **options), 30, Filters(between=(0, 1), tries=1))
    assert (state.position, state.rows, state.left_out) == (30, 0, {KNOWN: 8, EASY: 15, HARD: 7})
    state = make(tmp_path / "some.jsonl", mixture, reader(script, **options), 9, Filters(without_context=1))
    order = [mixture.draw(n, seed=0, share=1, data=Data(), count=len).sample.question for n in range(30)]
    expected = [n for n in (int(question.removeprefix("What is Q").removesuffix("?")) for question in order) if n % 4][
        :9
    ]
    assert questions(tmp_path / "some.jsonl") == expected
    assert state.position == order.index(f"What is Q{expected[-1]}?") + 1


def test_other_settings_want_another_file(tmp_path: Path) -> None:
    path, model = tmp_path / "set.jsonl", reader(lambda prompt: "none")
    make(path, VT, model, 2)
    with pytest.raises(UsageError, match=r"made with other settings \(seed: 0, now 1\); give another file"):
        make(path, VT, model, 3, seed=1)
    with pytest.raises(UsageError, match=r"other settings \(filters: "):
        make(path, VT, model, 3, Filters(without_context=1))
    with pytest.raises(UsageError, match=r"other settings \(mixture: "):
        make(path, Mixture(parts=(Part(name="vt", lengths=(300,)),)), model, 3)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    path, beside, model = tmp_path / "set.jsonl", tmp_path / "set.jsonl.state.json", reader(lambda prompt: "none")
    path.write_text("mine\n")
    with pytest.raises(UsageError, match=r"set\.jsonl\.state\.json, which would say how it was made, is not"):
        make(path, VT, model, 2)
    assert path.read_text() == "mine\n"
    path.unlink()
    make(path, VT, model, 2)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match="is shorter than when it was left"):
        make(path, VT, model, 3)
    beside.write_text("{")
    with pytest.raises(UsageError, match=r"does not say how set\.jsonl was made"):
        make(path, VT, model, 3)
    with pytest.raises(UsageError, match="cannot write"):
        make(tmp_path, VT, model, 1)


def test_two_do_not_write_one_file(tmp_path: Path) -> None:
    path, model = tmp_path / "set.jsonl", reader(lambda prompt: "none")
    settings = made_with(VT, 0, model, NONE)
    late = TrainingSet(path, settings)
    with TrainingSet(path, settings).writing(), pytest.raises(UsageError, match="is being written by another run"):
        make(path, VT, model, 2)
    make(path, VT, model, 2)
    build(late, VT, rows=3, seed=0, data=Data(), reader=model, filters=NONE)  # it was opened before the other wrote
    assert len({row["question"] for row in rows_of(path)}) == len(rows_of(path)) == 3


# the command


def train(*args: object) -> Result:
    return CliRunner().invoke(app, ["train", "data", *map(str, args)])


@pytest.fixture
def mixture_file(tmp_path: Path) -> Path:
    capitals(tmp_path)
    path = tmp_path / "mixture.toml"
    path.write_text(f'[[task]]\nname = "jsonl:{tmp_path / "capitals.jsonl"}"\n', encoding="utf-8")
    return path


@pytest.mark.heavy
def test_the_command_makes_a_set_and_goes_on_with_it(
    tmp_path: Path, mixture_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    fails = [False]

    def reply(prompt: str) -> str | Response:
        if fails[0]:
            return Response(status=400, body={"error": {"message": "no such model"}})
        n = int(prompt.split("What is Q")[1].split("?")[0])
        return f"\\boxed{{A{n}}}" if n < 4 and "what you know" in prompt else "no idea"

    out = tmp_path / "set.jsonl"
    with Loopback(chat(reply)) as server:
        at = ["--model", "openai:tiny", "--base-url", f"{server.url}/v1", "--tokenizer", "approximate"]
        done = train(mixture_file, "-o", out, "--rows", 3, "--without-context", 1, *at)
        assert done.exit_code == 0, done.stderr
        assert f"{out}: 3 rows of " in done.stdout
        assert all(body["temperature"] == 1 for body in server.bodies("/v1/chat/completions"))
        fails[0] = True
        failed = train(mixture_file, "-o", out, "--rows", 8, "--without-context", 1, *at)
        assert (failed.exit_code, len(rows_of(out))) == (3, 3)
        assert "no such model" in failed.stderr
        fails[0] = False
        done = train(mixture_file, "-o", out, "--rows", 100, "--without-context", 1, *at)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.endswith("set.jsonl: 8 rows of 12 questions: 4 known without the document\n")
    assert sorted(questions(out)) == list(range(4, 12))
    assert "row 8" in done.stderr
    assert "jsonl:" in done.stderr


@pytest.mark.heavy
def test_the_command_keeps_what_lies_between(
    tmp_path: Path, mixture_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    answers = {n: numbers() for n in range(12)}

    def reply(prompt: str) -> str:
        n = int(prompt.split("What is Q")[1].split("?")[0])
        if "<section>" in prompt:
            return "noted"
        return f"\\boxed{{A{n}}}" if next(answers[n]) < n % 3 else "\\boxed{x}"

    out = tmp_path / "set.jsonl"
    with Loopback(chat(reply)) as server:
        at = [
            "--model",
            "openai:tiny",
            "--base-url",
            f"{server.url}/v1",
            "--tokenizer",
            "approximate",
            "--quiet",
            "--chunk-tokens",
            400,
        ]
        done = train(
            mixture_file, "-o", out, "--rows", 12, "--without-context", 0, "--keep-between", 0, 1, "--tries", 2, *at
        )
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    assert "4 rows of 12 questions: 4 too easy, 4 too hard" in done.stdout
    assert sorted(n % 3 for n in questions(out)) == [1] * 4


def test_what_is_wrong_is_told_before_a_model_is_loaded(tmp_path: Path, mixture_file: Path) -> None:
    out, nowhere = tmp_path / "set.jsonl", ["--model", "transformers:nowhere"]
    broken = tmp_path / "broken.toml"
    broken.write_text('[[task]]\nname = "ruler_hqa"\nlengths = [4]\nwieght = 2\n', encoding="utf-8")
    for args, message in (
        ((broken, "-o", out, "--rows", 3), "there is no key 'wieght' in task 1"),
        ((mixture_file, "-o", out, "--rows", 3, "--data", tmp_path / "none"), "is not a folder"),
        ((mixture_file, "-o", out, "--rows", 3, "--keep-between", 1, 0), "nothing lies between"),
    ):
        failed = train(*args, *nowhere)
        assert (failed.exit_code, failed.stdout) == (2, "")
        assert message in failed.stderr
    assert not out.exists()
    assert "data" in CliRunner().invoke(app, ["train", "--help"]).stdout


def test_a_reply_of_thinking_is_judged_by_its_answer(tmp_path: Path) -> None:
    def script(prompt: Prompt) -> Reply:
        return Reply(text=f"<think>It may be B or A{number_of(prompt)}.</think>A{number_of(prompt)}")

    assert make(tmp_path / "set.jsonl", capitals(tmp_path), reader(script), 3, Filters()).left_out[KNOWN] == 12
