r"""What published code made of the same inputs: scores and documents, written by `benchmarks/conformance.py`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from helpers.keys_task import TASK, run

from memagent_integrations import ScriptedBackend, UsageError
from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.baselines import make as make_reader
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.official import (
    babilong,
    babilong_golds,
    longbench_f1,
    memagent_boxed_sub_em,
    memagent_sub_em,
    verl_boxed_em,
)
from memagent_integrations.evaluation.samples import Task
from memagent_integrations.evaluation.scoring import METRICS, OF_REPLIES, boxed_em, f1, string_match_part, sub_em
from memagent_integrations.evaluation.tasks.babilong import LABELS

GOLDEN = [json.loads(line) for line in Path(__file__).with_name("official.jsonl").read_text("utf-8").splitlines()]
DOCUMENTS = [json.loads(line) for line in Path(__file__).with_name("documents.jsonl").read_text("utf-8").splitlines()]
OURS = {
    "memagent_sub_em": sub_em,
    "memagent_boxed_sub_em": boxed_em,
    "verl_boxed_em": boxed_em,
    "longbench_f1": f1,
    "babilong": string_match_part,
}


@pytest.mark.parametrize("metric", sorted({row["metric"] for row in GOLDEN}))
def test_scores_are_those_of_the_published_code(metric: str) -> None:
    rows = [row for row in GOLDEN if row["metric"] == metric]
    assert 0.3 < sum(bool(row["score"]) for row in rows) / len(rows) < 0.7
    for row in rows:  # null: the published code gives no score, or ends with an error
        assert METRICS[metric](row["answer"], row["golds"]) == pytest.approx(row["score"] or 0.0, abs=5.1e-5), row
    if metric in OURS:
        assert any(OURS[metric](row["answer"], row["golds"]) != row["score"] for row in rows), (
            "the inputs tell them apart"
        )


@pytest.mark.parametrize("task", sorted({row["task"] for row in DOCUMENTS}))
def test_documents_are_those_of_the_published_code(task: str) -> None:
    for row in DOCUMENTS:
        if row["task"] == task:
            sample = tasks.load(task, Data()).make(row["length"], 0, row["number"], lambda text: len(text.split()))
            text = " ".join("".join(sample.document()).split())
            assert hashlib.sha256(text.encode()).hexdigest() == row["digest"], row


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Therefore, the answer is **Paris**.", 1),
        ("the answer is the city of Paris", 1),
        ("the answer is par", 1),  # the gold contains it
        ("It is Paris", 0),
        ("The answer is Paris", 0),  # the code looks for the words in lower case
        ("the answer is Paris, or the answer is Rome", 0),
        ("<think>the answer is Rome</think> the answer is Paris", 1),
        ("the answer is Paris</think>", 1),  # nothing after the thinking: the whole reply
        ("the answer is", 0),
        ("the answer is !", 1),  # empty once it is normalised, and every text contains that
        ("", 0),
    ],
)
def test_ruler_hqa_takes_what_follows_the_answer_is(reply: str, score: int) -> None:
    assert memagent_sub_em(reply, ["Paris", "Rome"]) == score  # the first gold alone


@pytest.mark.parametrize(
    ("reply", "score"),
    [(r"\boxed{Paris}", 1), (r"\boxed{ar}", 1), (r"\boxed{Rome} \boxed{the Paris}", 1), ("Paris", 0), (r"\boxed{}", 0)],
)
def test_ruler_hqa_boxed_takes_the_box(reply: str, score: int) -> None:
    assert memagent_boxed_sub_em(reply, ["Paris"]) == score


@pytest.mark.parametrize(
    ("reply", "golds", "score"),
    [
        (r"\boxed{the Seine}", ["Seine"], 0),
        (r"\boxed{Seine.}", ["Seine"], 0),
        (r"\boxed{Rhine}", ["Seine", "Rhine"], 1),
        (r"\boxed{Seine}" + "." * 287, ["Seine"], 1),
        (r"\boxed{Seine}" + "." * 288, ["Seine"], 0),  # the last 300 characters have no box
    ],
)
def test_the_reward_keeps_articles_and_looks_at_the_end(reply: str, golds: list[str], score: int) -> None:
    assert verl_boxed_em(reply, golds) == score
    assert boxed_em(reply, golds) == 1  # ours forgives all of that
    assert verl_boxed_em(r"\boxed{S e i n e}", ["seine"]) == 1  # spaces do not count


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The bottle is in the Kitchen. Before that it was in the garden.", 1),
        ("kitchen", 1),
        ("bathroom, bedroom, garden, hallway, kitchen, office", 0),
        ("I think. kitchen", 0),
        ("not in the office but in the kitchen", 1),  # the question mentions the office
        ("", 0),
    ],
)
def test_babilong_wants_the_target_alone(answer: str, score: int) -> None:
    golds = babilong_golds("kitchen", "Where was the milk before the office?", LABELS[3])
    assert golds == ("kitchen", "bathroom", "bedroom", "garden", "hallway")
    assert babilong(answer, golds) == score


def test_longbench_gives_nothing_where_nothing_is_left() -> None:
    assert longbench_f1("A", ["A"]) == 0.0 != f1("A", ["A"])
    assert longbench_f1("the big red dog", ["a red dog ran", "cat"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", sorted({*OURS, *OF_REPLIES}))
def test_golds_are_checked(name: str) -> None:
    with pytest.raises(UsageError, match="gold"):
        METRICS[name]("x", "x")


def test_a_metric_of_replies_gets_the_reply(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda prompt: "note" if prompt.phase == "memory" else r"So \boxed{01000}, I think.")
    boxed = Task(name="boxed", metric="boxed_em", make=TASK.make, lengths=(100,))
    readers = {name: make_reader(name, backend) for name in ("memagent", "cut")}
    results = run(tmp_path / "results.jsonl", readers, samples=1, tasks=(boxed,))
    assert [(result.reader, result.score) for result in results] == [("cut", 1.0), ("memagent", 1.0)]
    outcome = make_reader("cut", ScriptedBackend(["<think>hm</think> x"])).answer(TASK.make(100, 0, 0, len))
    assert (outcome.answer, outcome.reply) == ("x", "<think>hm</think> x")


def test_the_reply_is_for_the_metrics_that_want_it() -> None:
    sample = TASK.make(100, 0, 0, len)
    assert TASK.score("01000", sample, reply="nothing") == 1.0
    boxed = Task(name="boxed", metric="verl_boxed_em", make=TASK.make)
    assert (boxed.score("01000", sample), boxed.score("01000", sample, reply=r"\boxed{01000}")) == (0.0, 1.0)
