"""The published setup of RULER-HQA, and where published figures stand beside a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.keys_task import SETTINGS, Answers
from helpers.samples import count, text

from memagent_integrations import UsageError
from memagent_integrations.evaluation import harness, report
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.published import PUBLISHED, prompts_named
from memagent_integrations.evaluation.results import Results
from memagent_integrations.evaluation.tasks import load
from memagent_integrations.prompts import PromptSet

SETUP = {
    "prompts": PUBLISHED[0].setup["prompts"],
    "backend": {"temperature": 0.7, "top_p": 0.95},
    "budgets": {"chunk_tokens": 5000, "memory_tokens": 1024, "output_tokens": None},
}
DEV = [
    {"context": [["B", ["Second. ", " It is."]], ["A", ["First."]]]},
    {"context": [["A", ["First."]], ["C", ["Third"]]]},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hotpotqa").mkdir()
    rows = [
        {
            "context": " Document 1:\nAnn was born in Rome.\n",
            "input": " Where? ",
            "answers": ["Rome"],
            "num_docs": 50,
            "index": 7,
        },
        {"context": "Document 1:\nOslo", "input": "Who?", "answers": ["Ann"], "num_docs": 50, "index": 9},
    ]
    write(tmp_path, "eval_50.json", rows)
    return tmp_path


def write(folder: Path, name: str, content: Any) -> None:
    (folder / "hotpotqa" / name).write_text(json.dumps(content), "utf-8")


def run(folder: Path, say: Any, settings: dict[str, Any] = SETUP) -> Results:
    results = Results(folder / "results.jsonl", {**SETTINGS, **settings})
    todo = harness.jobs([load("ruler_hqa_published", Data(folder))], ["mine"], 2)
    todo = [job for job in todo if job.length == 50]
    harness.evaluate(todo, {"mine": Answers(say)}, results, seed=0, count=count)
    return results


def test_the_questions_are_those_of_the_files(folder: Path) -> None:
    task = load("ruler_hqa_published", Data(folder))
    assert (task.metric, task.unit, task.size, task.answer_tokens) == ("memagent_sub_em", "paragraphs", 128, None)
    sample = task.make(50, 3, 0, count)
    assert (sample.question, sample.answers) == ("Where?", ("Rome",))
    assert text(sample) == "Document 1:\nAnn was born in Rome."
    assert sample.details == {"index": 7, "paragraphs": 50}
    with pytest.raises(UsageError, match="number"):
        task.make(50, 0, 2, count)
    with pytest.raises(UsageError, match=r"no hotpotqa/eval_100\.json in the data folder"):
        task.make(100, 0, 0, count)
    with pytest.raises(UsageError, match="no data folder"):
        load("ruler_hqa_published", Data()).make(50, 0, 0, count)


def test_long_documents_are_put_together_from_numbers(folder: Path) -> None:
    row = {"context": [2, 0, 1], "input": "Who?", "answers": ["Ann"]}
    write(folder, "eval_12800.json", [row, {**row, "context": [3]}])
    write(folder, "hotpotqa_dev.json", DEV)
    task = load("ruler_hqa_published", Data(folder))
    assert text(task.make(12_800, 0, 0, count)) == (
        "Document 1:\nC\nThird\n\nDocument 2:\nA\nFirst.\n\nDocument 3:\nB\nSecond.  It is."
    )
    with pytest.raises(UsageError, match="no paragraph 3"):
        text(task.make(12_800, 0, 1, count))


@pytest.mark.parametrize("content", [{"a": 1}, [], [1], [{"input": "Q", "answers": ["A"], "context": [True]}]])
def test_files_of_another_form(folder: Path, content: Any) -> None:
    write(folder, "eval_50.json", content)
    with pytest.raises(UsageError, match=r"eval_50\.json"):
        load("ruler_hqa_published", Data(folder)).make(50, 0, 0, count)


def test_figures_of_the_same_setup_stand_in_the_table(folder: Path) -> None:
    results = run(folder, lambda sample: f"So the answer is {sample.answers[0]}.")
    table = report.rows(results, results.settings)
    assert [(row.reader, row.mean, row.n, row.differs) for row in table] == [
        ("mine", 1.0, 2, ""),
        ("RL-MemoryAgent-14B", 0.836, 128, ""),
        ("RL-MemoryAgent-7B", 0.82, 128, ""),
    ]
    assert "##" not in report.markdown(table)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"backend": {"temperature": 0.0, "top_p": 0.95}}, "temperature 0.7, here 0.0"),
        ({"backend": {"temperature": 0.7}}, "top_p 0.95, here not known"),
        ({"prompts": "section-first"}, f"prompts {SETUP['prompts']}, here section-first"),
        ({"budgets": {**SETUP["budgets"], "output_tokens": 64}}, "output_tokens 1024, here 64"),
    ],
)
def test_figures_of_another_setup_stand_apart(folder: Path, change: dict[str, Any], said: str) -> None:
    results = run(folder, lambda sample: "x", {**SETUP, **change})
    table = report.rows(results, results.settings)
    assert {row.differs for row in table} == {"", said}
    measured, heading = report.markdown(table).split("\n\n## ")
    assert "(published)" not in measured
    assert f"They differ in: {said}.\n" in heading
    assert heading.count("(published)") == 2


def test_empty_outputs_are_left_out_as_there(folder: Path) -> None:
    def say(sample: Any) -> str:
        if sample.question == "Who?":
            raise ValueError("the model gave no answer")
        return "the answer is Rome"

    results = run(folder, say)
    (row, *_) = report.rows(results, results.settings)
    assert (row.mean, row.n, row.failed) == (1.0, 1, 1)


def test_prompts_of_two_files_have_two_names() -> None:
    prompts = PromptSet.default()
    assert (
        prompts_named(prompts) == prompts_named(PromptSet.default()) != prompts_named(PromptSet.default(no_change=True))
    )
