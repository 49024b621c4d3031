"""Tasks whose documents have lengths of their own.

LongBench's question answering (arXiv:2308.14508), and any jsonl file of question, answers and context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memagent_integrations.checks import check_int
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.references import Reference, references
from memagent_integrations.evaluation.samples import Sample, Task
from memagent_integrations.evaluation.tasks.settings import in_pieces
from memagent_integrations.files import check_regular
from memagent_integrations.tokens import Counter

_BRIEF = "Answer as briefly as you can, in a few words, and explain nothing."
_ALONE = "Reply with nothing but the answer."
_UNANSWERABLE = (
    'Reply "unanswerable" if the text does not answer it; a question for yes or no is answered by "yes", "no" or '
    '"unanswerable".'
)


@dataclass(frozen=True, kw_only=True)
class _Set:
    """A set of LongBench: what its prompt asks of an answer, and the most tokens of one."""

    request: str
    answer_tokens: int


_SETS = {
    "longbench_narrativeqa": _Set(request=_BRIEF, answer_tokens=128),
    "longbench_qasper": _Set(request=f"{_BRIEF} {_UNANSWERABLE}", answer_tokens=128),
    "longbench_multifieldqa_en": _Set(request=_ALONE, answer_tokens=64),
    "longbench_hotpotqa": _Set(request=_ALONE, answer_tokens=32),
    "longbench_2wikimqa": _Set(request=_ALONE, answer_tokens=32),
    "longbench_musique": _Set(request=_ALONE, answer_tokens=32),
}
NAMES = tuple(_SETS)
PREFIX = "jsonl:"


def load(name: str, data: Data) -> Task:
    """Return the task of a LongBench set or, for "jsonl:PATH", of a file.

    Raises:
        UsageError: the path is not UTF-8 text, so that results could not name the task.
    """
    if name != name.encode("utf-8", "replace").decode():
        raise UsageError(f"the path of {name!r} is not UTF-8 text; give the file another name")
    if name.startswith(PREFIX):
        file = Path(name.removeprefix(PREFIX))
        check_regular(file)
        return _task(name, references(file))
    chosen = _SETS[name]
    task = _task(name, data.longbench(name.removeprefix("longbench_")), f" {chosen.request}")
    return replace(task, metric="longbench_f1", answer_tokens=chosen.answer_tokens)


def _task(name: str, rows: Sequence[Reference], request: str = "") -> Task:
    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        check_int(least=0, length=length, seed=seed)
        check_int(least=0, most=len(rows) - 1, number=number)
        index = Permutation(len(rows), f"{name}/{seed}")[number]
        row = rows[index]
        question, answers, facts, metric = row.question, row.answers, row.facts, row.metric

        def document() -> Iterator[str]:
            text = rows[index].context  # read again, so that a sample does not hold it
            yield from in_pieces(text)

        return Sample(
            id=f"{name}/{seed}/{number}",
            question=question + request,
            answers=answers,
            document=document,
            facts=facts,
            superseded=row.superseded,
            oracle="\n\n".join(fact.text for fact in facts),
            details={"row": index},
            metric=metric,
        )

    return Task(name=name, metric="f1", make=make, unit=None, size=len(rows))
