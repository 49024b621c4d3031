"""RULER-HQA from the files of its authors, with the questions of the published figures (MemAgent, arXiv:2507.02259).

`eval_N.json` holds 128 questions, those that a model of 7B parameters could not answer without reading, each with a
document of N paragraphs. The data set BytedTsinghua-SIA/hotpotqa on the Hugging Face hub has the files. Those of 12,800
paragraphs and more name paragraphs by their number in the sorted list of all paragraphs of `hotpotqa_dev.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from memagent_integrations import files
from memagent_integrations.checks import check_int
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.published import PARAGRAPHS, RULER_HQA
from memagent_integrations.evaluation.rows import Row, pairs, string, strings
from memagent_integrations.evaluation.samples import Sample, Task
from memagent_integrations.evaluation.tasks.settings import in_pieces
from memagent_integrations.tokens import Counter

NAMES = (RULER_HQA,)
_QUESTIONS = 128
_FOLDER = "hotpotqa"  # of the data set on the hub, and of the data folder


def load(name: str, data: Data) -> Task:
    """Return the task; a file is read when its first sample is made, and held until that of another length is."""

    @lru_cache(maxsize=1)
    def questions(length: int) -> Sequence[Row]:
        path = data.file(f"{_FOLDER}/eval_{length}.json")
        return [_checked(row, f"{path}, row {number}") for number, row in enumerate(_array(path))]

    @lru_cache(maxsize=1)
    def paragraphs() -> Sequence[str]:
        path = data.file(f"{_FOLDER}/hotpotqa_dev.json")
        return sorted(
            {text for number, row in enumerate(_array(path)) for text in _paragraphs(row, f"{path}, row {number}")}
        )

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        check_int(length=length)
        check_int(least=0, seed=seed)
        rows = questions(length)
        check_int(least=0, most=len(rows) - 1, number=number)
        row, where = rows[number], f"{name}/{length}/{number}"

        def document() -> Iterator[str]:
            context = row["context"]
            if isinstance(context, str):
                yield from in_pieces(context.strip())
                return
            for position, index in enumerate(context, start=1):
                if not 0 <= index < len(paragraphs()):
                    raise UsageError(f"{where}: hotpotqa_dev.json has no paragraph {index}")
                yield f"Document {position}:\n{paragraphs()[index]}" + ("\n\n" if position < len(context) else "")

        return Sample(
            id=where,
            question=string(row, "input", where).strip(),
            answers=strings(row, "answers", where),
            document=document,
            details={"index": row.get("index"), "paragraphs": row.get("num_docs")},
        )

    return Task(name=name, metric="memagent_sub_em", make=make, unit="paragraphs", lengths=PARAGRAPHS, size=_QUESTIONS)


def _array(path: Path) -> list[Any]:
    try:
        rows = json.loads(files.read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error})") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} has to be a JSON array of objects")
    return rows


def _checked(row: Row, where: str) -> Row:
    string(row, "input", where)
    strings(row, "answers", where)
    context = row.get("context")
    if not isinstance(context, list) or not context or not all(type(index) is int for index in context):
        string(row, "context", where)
    return row


def _paragraphs(row: Row, where: str) -> Iterator[str]:
    for title, sentences in pairs(row, "context", where):
        yield f"{title}\n{''.join(sentences)}"
