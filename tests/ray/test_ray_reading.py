"""Datasets of questions and documents on a local Ray with two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

ray = pytest.importorskip("ray.data", reason="Ray is not installed")

from helpers import ray_workers  # noqa: E402 - after the check that Ray is here
from helpers.loopback import Loopback, chat  # noqa: E402
from helpers.ray_workers import IN_FLIGHT, Gates, answers, local_ray  # noqa: E402

from memagent_integrations import Journal, Limits, Reading, UsageError  # noqa: E402
from memagent_integrations.ray import read_dataset  # noqa: E402

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray warns of its own settings
]
NO_SERVER: dict[str, Any] = {
    "backend_options": {"base_url": "http://127.0.0.1:9/v1", "api_key": "none", "tokenizer": "approximate"},
    "limits": Limits(max_retries=0),
}


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with local_ray():
        yield


def answered(rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return sorted((row["id"], row["answer"]) for row in rows)


def test_a_killed_worker_loses_no_row_and_no_step(tmp_path: Path) -> None:
    number = 24
    model = Gates(deadly=number * 3)
    rows = ray_workers.read(model, number, tmp_path)
    assert len(model.killed) == 1
    assert answered(rows) == answers(number), "all answers, none twice"
    assert model.repeated <= IN_FLIGHT, "only calls whose reply was not recorded are made again"
    [file] = (tmp_path / "journals").glob("*.db")
    with Journal(file, readonly=True) as journal:
        assert len(journal.runs()) == number
        assert sum(run.steps for run in journal.runs()) == len(model.calls)
        assert all(run.finished for run in journal.runs())

    again = Gates()
    assert answered(ray_workers.read(again, number, tmp_path)) == answers(number)
    assert not again.calls, "the whole job run again asks nothing"


def test_a_document_of_several_rows_is_read_once_and_any_reply_is_a_value(tmp_path: Path) -> None:
    def load(text: str) -> str:
        (tmp_path / uuid4().hex).touch()
        return text

    with Loopback(chat(lambda prompt: "It is \ud800 here.")) as server:
        options: dict[str, Any] = {**NO_SERVER["backend_options"], "base_url": f"{server.url}/v1"}
        dataset = ray.from_items([{"question": f"Who is {n}?", "document": "The text."} for n in range(5)])
        dataset = dataset.repartition(1)
        rows = read_dataset(dataset, "openai:tiny", load=load, window=8192, backend_options=options).take_all()
    assert [row["answer"] for row in rows] == ["It is \ufffd here."] * 5
    assert len(list(tmp_path.iterdir())) == 1


def test_a_row_that_fails_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The text.", encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    jobs = [("Who?", "text.txt"), ("Who?", "empty.txt"), ("Who?", "gone.txt"), ("Who?", None), (None, "text.txt")]
    dataset = ray.from_items([{"question": question, "file": file} for question, file in jobs])
    options = {"document": "file", "readings": True, "prefix": "memagent_", **NO_SERVER}
    rows = read_dataset(dataset, "openai:tiny", load=lambda name: tmp_path / name, window=8192, **options).take_all()
    kinds = {(row["question"], row["file"]): row["memagent_error_type"] for row in rows}
    assert len(rows) == len(jobs)
    errors = ["BackendError", "EmptyDocument", "UsageError", "UsageError", "QuestionError"]
    assert kinds == dict(zip(jobs, errors, strict=True))
    for row in rows:
        assert row["memagent_answer"] is None
        assert str(Reading.from_json(row["memagent_reading"]).error) == row["memagent_error"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"question": "q"}, "has no column 'q', but question, document, answer"),
        ({}, "has a column 'answer' already; give another prefix="),
        ({"prefix": "x_", "batch_size": 0}, "batch_size has to be"),
        ({"prefix": "x_", "concurrency": 0}, "concurrency has to be"),
        ({"prefix": "x_", "concurrency": (2, 1)}, "concurrency has to be"),
        ({"prefix": "x_", "concurrency": (1, 2, 3)}, "concurrency has to be"),
        ({"prefix": "x_", "journal": "runs.db"}, "journal_dir in place of journal"),
        ({"prefix": "x_", "chunk_size": 5}, "did you mean chunk_tokens"),
        ({"prefix": "x_", "model": Gates()}, "the model has to be a name"),
        ({"dataset": [{"question": "Who?", "document": "The text."}]}, "ray.data.from_items makes one"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_read(arguments: dict[str, Any], problem: str) -> None:
    dataset = ray.from_items([{"question": "Who?", "document": "The text.", "answer": "She."}])
    with pytest.raises(UsageError, match=problem):
        read_dataset(**{"dataset": dataset, "model": "openai:tiny"} | arguments)
