"""Load benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.samples import Task
from memagent_integrations.evaluation.tasks import (
    articles,
    babilong,
    chains,
    cloze,
    counting,
    files,
    hqa_files,
    needles,
    paragraphs,
    prose,
)

_FAMILIES: dict[str, Callable[[str, Data], Task]] = {
    name: family.load
    for family in (needles, chains, counting, paragraphs, hqa_files, babilong, prose, cloze, articles, files)
    for name in family.NAMES
}
NAMES = tuple(_FAMILIES)
"""The names that `load` accepts, besides files."""
FILE = files.PREFIX
"""The prefix of a task name that goes on with the path of a jsonl file of question, answers and context."""

TRAINING = (
    *paragraphs.TRAINING,
    *babilong.TRAINING,
    *needles.TRAINING,
    *chains.TRAINING,
    *prose.TRAINING,
    *cloze.TRAINING,
    *articles.TRAINING,
)
"""The tasks for training: no other task asks their questions."""


def load(name: str, data: Data) -> Task:
    """Return the task of this name, after reading its data.

    Raises:
        UsageError: there is no such task, or its data are missing or invalid.
        MissingExtra: a package that the task needs is not installed.
    """
    if name.startswith(FILE):
        return files.load(name, data)
    if name not in _FAMILIES:
        raise UsageError(f"unknown task {name!r}; the tasks are {', '.join(NAMES)} and {FILE}PATH")
    return _FAMILIES[name](name, data)
