"""The harness and its report: every sample once, whatever happens; figures that are what they say."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from helpers.keys_task import SETTINGS, TASK, Answers, answer_slowly, make, right, run
from helpers.processes import PROCESSES

from memagent_integrations import BackendError, MemAgentError, Reading, ScriptedBackend, UsageError
from memagent_integrations.backends.gate import Gate
from memagent_integrations.evaluation import harness, plots, report
from memagent_integrations.evaluation.baselines import make as make_reader
from memagent_integrations.evaluation.diagnostics import FactTrace
from memagent_integrations.evaluation.prices import Prices
from memagent_integrations.evaluation.results import Result, Results, merged
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.records import NO_USAGE, Budgets, Prompt, Reply, Usage


def test_every_sample_is_asked_once_and_scored(tmp_path: Path) -> None:
    readers = {"right": Answers(right), "wrong": Answers(lambda sample: "no idea")}
    reported: list[Result] = []
    results = run(tmp_path / "out" / "results.jsonl", readers, on_result=reported.append, concurrency=3)
    assert sorted(result.key for result in reported) == [result.key for result in results]
    assert [result.key for result in results] == [
        ("niah_test", length, reader, number)
        for length in (100, 200)
        for reader in ("right", "wrong")
        for number in range(4)
    ]
    assert [row.mean for row in report.rows(results)] == [1.0, 0.0, 1.0, 0.0]
    run(tmp_path / "out" / "results.jsonl", readers, concurrency=3)
    assert len(readers["right"].asked) == len(set(readers["right"].asked)) == 8


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = list(run(tmp_path / "results.jsonl", {"right": Answers(right)}))
    assert list(Results(tmp_path / "results.jsonl")) == results
    first = results[0]
    assert (first.question, first.answers, first.calls, first.seconds) == ("Which key?", ("01000",), 2, 0.5)
    assert first.usage == Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=1)
    assert first.facts[0].keys == ("01000",)


def test_an_answer_is_scored_up_to_the_limit_of_its_task(tmp_path: Path) -> None:
    readers = {"short": Answers(right), "long": Answers(lambda sample: f"It may be any of 1 2 3, {sample.answers[0]}.")}
    results = run(tmp_path / "results.jsonl", readers, samples=1, tasks=(replace(TASK, answer_tokens=20),))
    assert [(result.reader, result.score, result.metric) for result in results if result.length == 100] == [
        ("long", 0.0, "string_match_all"),
        ("short", 1.0, "string_match_all"),
    ]
    assert [(result.answer, result.details) for result in results if result.length == 100] == [
        ("It may be any of 1 2", {"answer_tokens": 20}),
        ("It is 01000.", {}),
    ]


def test_a_failure_is_told_apart_and_counts(tmp_path: Path) -> None:
    def say(sample: Sample) -> str:
        if sample.id.endswith("1"):
            raise ValueError("the server went away")
        return right(sample)

    results = run(tmp_path / "results.jsonl", {"weak": Answers(say)})
    (row, _) = report.rows(results)
    assert (row.mean, row.n, row.failed) == (0.75, 4, 1)
    assert [result.error for result in results if result.length == 100] == [None, "the server went away", None, None]


def test_a_failure_that_may_pass_is_tried_again(tmp_path: Path) -> None:
    down = Answers(right, passing=True)
    results = run(tmp_path / "results.jsonl", {"reader": down})
    assert [row.failed for row in report.rows(results)] == [4, 4]
    up = Answers(right)
    results = run(tmp_path / "results.jsonl", {"reader": up})
    assert [(row.failed, row.mean) for row in report.rows(Results(tmp_path / "results.jsonl"))] == [(0, 1.0), (0, 1.0)]
    assert (len(down.asked), len(up.asked)) == (8, 8)


def test_a_run_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    readers = {"right": Answers(right)}

    def on_result(result: Result) -> None:
        if len(readers["right"].asked) >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "results.jsonl", readers, on_result=on_result)
    done = len(list(Results(tmp_path / "results.jsonl")))
    assert 0 < done < 8
    run(tmp_path / "results.jsonl", readers)
    assert len(list(Results(tmp_path / "results.jsonl"))) == 8
    assert len(readers["right"].asked) - 8 <= 2, "at most those under way are done again"


def test_a_line_that_was_not_written_to_its_end_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    whole = list(run(path, {"right": Answers(right)}))
    written = path.read_bytes()
    for cut in (1, 20, 200):
        path.write_bytes(written[:-cut])
        readers = {"right": Answers(right)}
        assert list(run(path, readers)) == whole
        assert len(readers["right"].asked) == 1
        assert path.read_bytes().count(b"\n") == 9
    header = written.index(b"\n")
    for cut in (3, header - 1, header):  # killed at the first line: nothing was done yet
        path.write_bytes(written[:cut])
        assert list(run(path, {"right": Answers(right)})) == whole == list(Results(path))


def test_a_file_of_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run(path, {"right": Answers(right)})
    with pytest.raises(UsageError, match=r"was made with other settings \(seed: 0, now 1\)"):
        Results(path, {**SETTINGS, "seed": 1})
    other = tmp_path / "other.jsonl"
    for text in ('{"a": 1}\n', '{"a": 1}', "a note", '{"made": 1}\n', "\n", "[" * 100_000 + "\n"):
        other.write_text(text)
        with pytest.raises(UsageError, match="is no file of results"):
            Results(other, SETTINGS)
        assert other.read_text() == text
    with pytest.raises(UsageError, match="cannot write"):
        run(tmp_path, {"right": Answers(right)})
    with pytest.raises(UsageError, match="there are no results in"):
        Results(tmp_path / "nothing.jsonl")
    path.write_bytes(path.read_bytes() + b'{"task": 1}\n')
    with pytest.raises(UsageError, match="line 10, is no result"):
        Results(path)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Results(path, SETTINGS).writing(), pytest.raises(UsageError, match="is being written by another run"):
        run(path, {"right": Answers(right)})


def test_what_another_run_wrote_in_the_meantime_is_not_done_again(tmp_path: Path) -> None:
    path, late = tmp_path / "results.jsonl", Answers(right)
    looked = Results(path, SETTINGS), Results(path, {**SETTINGS, "seed": 1})
    whole = list(run(path, {"right": Answers(right)}))
    todo = harness.jobs([TASK], ["right"], 4)
    harness.evaluate(todo, {"right": late}, looked[0], seed=0, count=len)
    assert (list(looked[0]), late.asked) == (whole, [])
    with pytest.raises(UsageError, match="was made with other settings"):
        harness.evaluate(todo, {"right": late}, looked[1], seed=1, count=len)
    assert list(Results(path)) == whole


def test_what_no_file_takes_is_written_all_the_same(tmp_path: Path) -> None:
    results = run(tmp_path / "results.jsonl", {"right": Answers(lambda sample: f"{right(sample)} \ud83d\0")})
    assert [row.mean for row in report.rows(results)] == [1.0, 1.0]
    assert {result.answer for result in Results(tmp_path / "results.jsonl") if result.length == 100} >= {
        "It is 01000. \ufffd\0"
    }


def test_readings_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    backend = ScriptedBackend(lambda prompt: "note \udc00" if prompt.phase == "memory" else "It is 01000.")
    run(path, {"memagent": make_reader("memagent", backend)}, samples=1)
    (first, _) = Results(path)
    line = json.loads(path.read_text().splitlines()[1])
    assert Reading.from_json(json.dumps(line["reading"])).steps[0].memory == "note \ufffd"
    assert (first.reading, first.answer, first.traces[0].read_at) == (None, "It is 01000.", 0)


def test_samples_under_way_are_kept_when_a_run_ends(tmp_path: Path) -> None:
    begun, go_on = threading.Barrier(4), threading.Event()

    def say(sample: Sample) -> str:
        begun.wait(10)
        if sample.id != "01000":
            go_on.wait(10)
        return right(sample)

    def on_result(result: Result) -> None:
        go_on.set()
        raise KeyboardInterrupt

    readers, tasks = {"right": Answers(say)}, (replace(TASK, lengths=(100,)),)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "results.jsonl", readers, tasks=tasks, on_result=on_result, concurrency=4)
    assert [result.score for result in Results(tmp_path / "results.jsonl")] == [1.0] * 4


class Together(ScriptedBackend):
    """Note the size of each batch."""

    batches: list[int]

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        self.batches.append(len(prompts))
        return super().complete_batch(prompts)


def read_together(path: Path, **options: Any) -> tuple[Results, list[int]]:
    """Let 8 samples be read, 4 at a time, by a backend that computes prompts together."""
    backend = Together(lambda prompt: prompt.messages[0].content, batch_size=4, window=4096)
    backend.batches = []
    gate = Gate(8 - len(list(Results(path, SETTINGS))), 4)
    reader = make_reader("cut", gate.gathered(backend), Budgets(output_tokens=500), None, None)
    tasks = (replace(TASK, lengths=(100,)),)
    return run(path, {"cut": reader}, samples=8, tasks=tasks, concurrency=4, gate=gate, **options), backend.batches


def test_a_backend_that_computes_prompts_together_gets_those_of_several_samples(tmp_path: Path) -> None:
    results, batches = read_together(tmp_path / "results.jsonl")
    assert [result.score for result in results] == [1.0] * 8
    assert (sum(batches), max(batches)) == (8, 4)


def test_a_run_that_ends_waits_for_no_batch(tmp_path: Path) -> None:
    def on_result(result: Result) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_together(tmp_path / "results.jsonl", on_result=on_result)
    kept = len(list(Results(tmp_path / "results.jsonl")))
    results, batches = read_together(tmp_path / "results.jsonl")
    assert [result.score for result in results] == [1.0] * 8
    assert 0 < kept == 8 - sum(batches)


def test_a_mistake_in_one_sample_costs_none_of_the_others(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def say(sample: Sample) -> str:
        together.wait(10)
        if sample.id == "01002":
            raise UsageError("no gold passages")
        return right(sample)

    with pytest.raises(UsageError, match="no gold passages"):
        run(tmp_path / "results.jsonl", {"right": Answers(say)}, tasks=(replace(TASK, lengths=(100,)),), concurrency=4)
    assert [result.number for result in Results(tmp_path / "results.jsonl")] == [0, 1, 3]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_run_ends_where_the_server_is_down(tmp_path: Path, concurrency: int) -> None:
    path, down = tmp_path / "results.jsonl", Answers(right, passing=True)
    message = f"{10 * concurrency} samples in a row failed, .* the server is down; the same command"
    with pytest.raises(BackendError, match=message):
        run(path, {"reader": down}, samples=100, concurrency=concurrency)
    assert len(down.asked) <= 12 * concurrency
    up = Answers(right)
    assert [row.mean for row in report.rows(run(path, {"reader": up}, samples=100))] == [1.0, 1.0]
    assert len(up.asked) == 200


def test_samples_are_answered_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def say(sample: Sample) -> str:
        together.wait(10)
        return right(sample)

    results = run(tmp_path / "results.jsonl", {"right": Answers(say)}, concurrency=4)
    assert [row.mean for row in report.rows(results)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": [replace(TASK, lengths=(0,))]}, "length has to be"),
        ({"samples": 0}, "samples has to be"),
        ({"samples": 10**9}, "samples has to be"),
        ({"tasks": [Task(name="none", metric="em", make=make)]}, "the task none needs lengths"),
    ],
)
def test_wrong_jobs(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        harness.jobs(**({"tasks": [TASK], "readers": ["right"], "samples": 2} | arguments))


def test_a_task_of_files_has_as_many_samples_as_there_are() -> None:
    task = Task(name="files", metric="em", make=make, unit=None, size=3)
    keys = [("files", 0, "right", number) for number in range(3)]
    assert [job.key for job in harness.jobs([task], ["right"], 10)] == keys


def test_no_job_is_there_twice_and_the_first_samples_come_first() -> None:
    todo = harness.jobs([replace(TASK, lengths=(100, 200, 100)), TASK], ["one", "two"], 3)
    assert len({job.key for job in todo}) == len(todo) == 2 * 2 * 3
    assert [(job.length, job.reader) for job in todo[:4]] == [(100, "one"), (100, "two"), (200, "one"), (200, "two")]
    assert [job.number for job in todo] == [0, 0, 0, 0, 1, 1, 2, 2, 1, 1, 2, 2]


# killed and begun again


@pytest.mark.heavy
def test_killed_five_times_it_gives_the_same_table(tmp_path: Path) -> None:
    def start(path: Path) -> BaseProcess:
        process = PROCESSES.Process(target=answer_slowly, args=(path,))
        process.start()
        return process

    def finish(process: BaseProcess) -> int | None:
        process.join()
        return process.exitcode

    assert finish(start(tmp_path / "whole.jsonl")) == 0
    path, rng, had = tmp_path / "killed.jsonl", random.Random(3), 0
    for _ in range(5):
        process = start(path)
        enough = had + rng.randrange(20, 60)
        while process.is_alive() and (path.read_bytes().count(b"\n") if path.exists() else 0) < enough:
            time.sleep(0.001)
        process.kill()
        assert finish(process) == -signal.SIGKILL, "it was killed before its end"
        had = path.read_bytes().count(b"\n")
    assert finish(start(path)) == 0
    killed, whole = Results(path), Results(tmp_path / "whole.jsonl")
    assert report.markdown(report.rows(killed)) == report.markdown(report.rows(whole))
    keys = [
        tuple(json.loads(line)[name] for name in ("task", "length", "reader", "number"))
        for line in path.read_text().splitlines()[1:]
    ]
    assert len(keys) == len(set(keys)) == 400, "nothing is done twice"


# the report


def result(reader: str, number: int, score: float, **more: Any) -> Result:
    fields = {"task": "ruler_hqa", "length": 50, "reader": reader, "number": number, "score": score, "answer": "x"}
    return Result(**(fields | more))


def test_a_table_has_error_bars_costs_and_published_figures() -> None:
    usage = Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=None)
    results = [result("memagent", number, float(number < 6), calls=4, usage=usage, seconds=2.0) for number in range(8)]
    table = report.rows(results)
    (row,) = [row for row in table if not row.published]
    assert (row.mean, row.n, row.calls, row.seconds) == (0.75, 8, 4, 2.0)
    assert (row.prompt_tokens, row.cached_tokens) == (1000, None)
    assert row.low is not None
    assert row.high is not None
    assert 0.3 < row.low < 0.75 < row.high < 1
    published = {row.reader: row.mean for row in table if row.published}
    assert published == {"RL-MemoryAgent-14B": 0.836, "RL-MemoryAgent-7B": 0.82}
    text = report.markdown(table)
    assert "| ruler_hqa | 50 " in text
    assert "RL-MemoryAgent-14B (published)" in text
    assert report.rows(results, published=False) == [row]


def test_a_right_answer_has_its_price() -> None:
    usage = Usage(prompt_tokens=3000, completion_tokens=100, cached_tokens=1000)
    results = [result("memagent", number, score, usage=usage, seconds=3.0) for number, score in enumerate((1, 0.5, 0))]
    (row,) = report.rows(results, published=False, prices=Prices(prompt=2.0, completion=8.0, cached=0.5))
    assert (row.right, row.tokens_per_right, row.seconds_per_right) == (1.5, 3 * 3100 / 1.5, 6.0)
    assert row.cost == pytest.approx((2000 * 2 + 1000 * 0.5 + 100 * 8) / 1e6)
    assert row.cost_per_right == pytest.approx(3 * row.cost / 1.5)
    text = report.per_answer([row])
    assert re.search(r"\| 1.5 of 3 +\| 6,200 +\| 6.0 +\| 0.0106 +\|", text)
    (row,) = report.rows(results, published=False, prices=Prices(prompt=2.0, completion=8.0))
    assert row.cost == pytest.approx((3000 * 2 + 100 * 8) / 1e6), "without a price of their own they cost as others"
    (row,) = report.rows(results, published=False)
    assert row.cost is row.cost_per_right is None
    assert "cost" not in report.per_answer([row])


def test_a_reader_has_a_total_over_all_its_tasks() -> None:
    usage = Usage(prompt_tokens=300, completion_tokens=100, cached_tokens=0)
    short = [result("a", number, 1.0, usage=usage, seconds=1.0, calls=2) for number in range(3)]
    long = [result("a", 0, 0.5, length=100, usage=usage, seconds=2.0, calls=6), result("b", 0, 0.0, usage=usage)]
    assert report.totals(short) == [], "one task and length is its own total"
    first, second = report.totals([*short, *long], prices=Prices(prompt=1.0, completion=1.0))
    assert (first.task, first.length, first.reader, first.n, first.right, first.calls) == ("all", 0, "a", 4, 3.5, 3.0)
    assert (first.tokens_per_right, first.seconds_per_right) == (4 * 400 / 3.5, 5 / 3.5)
    assert first.cost_per_right == pytest.approx(4 * 400 / 3.5 / 1e6)
    assert (second.reader, second.right, second.tokens_per_right) == ("b", 0, None)
    assert re.search(r"\| all +\| +\| a +\| 87.5 +\| 3.5 of 4 +\| 457 ", report.per_answer([first]))
    cheap, _ = report.totals([*short, *long], prices=Prices(prompt=0.01, completion=0.01))
    assert report.cells_per_answer([cheap])[0]["cost"] == "0.00000457", "money has no exponents"


def test_what_is_not_known_has_no_price() -> None:
    prices = Prices(prompt=1.0, completion=1.0, cached=0.0)
    (wrong,) = report.rows([result("a", 0, 0.0, usage=NO_USAGE)], published=False, prices=prices)
    assert (wrong.right, wrong.tokens_per_right, wrong.seconds_per_right, wrong.cost_per_right) == (0, None, None, None)
    unknown = Usage(prompt_tokens=5, completion_tokens=None, cached_tokens=None)
    (row,) = report.rows([result("a", 0, 1.0, usage=unknown)], published=False, prices=prices)
    assert (row.cost, row.tokens_per_right, row.cost_per_right) == (None, None, None)
    not_cached = Usage(prompt_tokens=10**6, completion_tokens=0, cached_tokens=None)
    assert prices.cost(not_cached) == 1.0, "the full price where the cache is not known"
    miscounted = Usage(prompt_tokens=5, completion_tokens=10**6, cached_tokens=50)
    assert prices.cost(miscounted) == 1.0, "no price is negative"


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf"), 1e300, True, "1"])
def test_prices_are_numbers(price: Any) -> None:
    with pytest.raises(UsageError, match="completion has to be a number of at least 0"):
        Prices(prompt=1.0, completion=price)


def test_a_document_that_is_too_long_is_no_wrong_answer() -> None:
    long = {"answer": None, "error": "the document has more", "too_long": True}
    results = [result("whole", number, 1.0, calls=1) for number in range(2)]
    results += [result("whole", number, 0.0, **long) for number in (2, 3)]
    results += [result("whole", number, 0.0, length=100, **long) for number in range(4)]
    results += [result("cut", number, 0.0, calls=1) for number in range(4)]
    cut, fits, too_long = report.rows(results, published=False)
    assert (fits.mean, fits.n, fits.failed, fits.too_long, fits.calls) == (1.0, 2, 0, 2, 1.0)
    assert (too_long.mean, too_long.n, too_long.failed, too_long.too_long, too_long.calls) == (None, 0, 0, 4, None)
    assert (cut.mean, cut.n, cut.too_long) == (0.0, 4, 0)
    assert re.search(r"\| too long \| +\| 0 ", report.markdown([too_long]))
    assert "too long" not in report.markdown([cut])
    (comparison,) = report.compared(results, "whole")
    assert (comparison.other, comparison.compared.n) == ("cut", 2)


def test_the_csv_holds_every_figure() -> None:
    table = report.rows([result("memagent", number, 1.0) for number in range(3)])
    read = list(csv.DictReader(io.StringIO(report.as_csv(table))))
    assert [(line["reader"], float(line["mean"]), line["published"]) for line in read] == [
        ("memagent", 1.0, "False"),
        ("RL-MemoryAgent-14B", 0.836, "True"),
        ("RL-MemoryAgent-7B", 0.82, "True"),
    ]


def test_readers_are_compared_on_the_samples_that_both_have() -> None:
    results = [result("a", number, 1.0) for number in range(12)] + [result("b", number, 0.0) for number in range(10)]
    (comparison,) = report.compared(results, "a")
    assert (comparison.other, comparison.compared.n, comparison.compared.difference) == ("b", 10, 1.0)
    assert comparison.compared.p < 0.01
    (same,) = report.compared([result("a", 0, 1.0), result("b", 0, 1.0)], "a")
    assert (same.compared.difference, same.compared.p) == (0.0, 1.0)
    assert "| a - b " in report.comparisons([comparison])
    with pytest.raises(UsageError, match="there are no results of 'c'; there are: a, b"):
        report.compared(results, "c")


def test_of_a_sample_in_two_files_the_last_counts(tmp_path: Path) -> None:
    first = run(tmp_path / "one.jsonl", {"right": Answers(lambda sample: "no")}, samples=1)
    second = run(tmp_path / "two.jsonl", {"right": Answers(right)}, samples=1)
    assert [each.score for each in merged([first, second])] == [1.0, 1.0]


def test_files_that_were_made_with_different_settings_are_not_put_into_one_table(tmp_path: Path) -> None:
    files = [Results(tmp_path / f"{model}.jsonl", SETTINGS | {"model": model}) for model in ("small", "large")]
    for results in files:
        harness.evaluate(harness.jobs([TASK], ["right"], 1), {"right": Answers(right)}, results, seed=0, count=len)
    message = r"large.jsonl' was made with other settings than .*small.jsonl' \(model: 'small', now 'large'\)"
    with pytest.raises(UsageError, match=message):
        merged(files)
    assert merged(files[:1]) == list(files[0])


def test_a_name_is_one_cell() -> None:
    table = report.markdown(report.rows([result("cut", 0, 1.0, task="jsonl:a|b\n| c")]))
    assert table.count("\n") == 2
    assert "| jsonl:a\\|b \\| c |" in table


@pytest.mark.heavy
def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    readers = {"right": Answers(right), "wrong": Answers(lambda sample: "no")}
    results = list(run(tmp_path / "results.jsonl", readers, samples=10))
    table = report.rows(results)
    plots.accuracy(table, tmp_path / "accuracy.png")
    plots.cost(table, tmp_path / "cost.png")
    plots.depths(results, tmp_path / "depths.png")
    fact = Fact(text="The key is 7.", depth=0.5, keys=("7",))
    traced = [
        result("right", number, 1.0, traces=(FactTrace(fact=fact, start=0, read_at=0, held=held, answered=True),))
        for number, held in enumerate(((True, True, False), (True, True), (False,)))
    ]
    plots.survival(traced, tmp_path / "survival.png")
    plots.per_answer(table, tmp_path / "per_answer.png")
    for name in ("accuracy", "cost", "per_answer", "depths", "survival"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    usage = Usage(prompt_tokens=9, completion_tokens=1)
    whole = report.rows([result("cut", 0, 1.0, task="jsonl:$\\no$ {formula}_^", length=0, usage=usage)])
    plots.accuracy(whole, tmp_path / "whole.png")
    plots.cost(whole, tmp_path / "whole.png")
    priced = report.rows(
        [result(f"reader {n}", n, 1.0, usage=usage) for n in range(13)], prices=Prices(prompt=1, completion=1)
    )
    plots.per_answer(priced, tmp_path / "priced.png")
    assert len(set(plots._colours(priced).values())) == 15, "the published two among them"


@pytest.mark.heavy
def test_there_may_be_nothing_to_draw(tmp_path: Path) -> None:
    unknown = Usage(prompt_tokens=None, completion_tokens=None, cached_tokens=None)
    table = report.rows([result("a", 0, 1.0, usage=unknown), result("b", 0, 0.0, usage=NO_USAGE)], published=False)
    for draw in (
        lambda path: plots.accuracy([], path),
        lambda path: plots.cost(table, path),
        lambda path: plots.per_answer(table, path),
        lambda path: plots.depths([], path),
        lambda path: plots.survival([], path),
    ):
        with pytest.raises(plots.NothingToDraw):
            draw(tmp_path / "none.png")
    with pytest.raises(UsageError, match="cannot write"):
        plots.accuracy(report.rows([result("a", 0, 1.0, usage=NO_USAGE)]), tmp_path / "no folder" / "a.png")
