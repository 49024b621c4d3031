"""Published figures, shown beside those that are measured in the same way.

Source: MemAgent, arXiv:2507.02259: RULER-HotpotQA, accuracy in percent, 128 questions for each length; lengths are
numbers of paragraphs. The setup is that of its code (BytedTsinghua-SIA/MemAgent, taskutils/memory_eval).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from memagent_integrations.prompts import PromptSet

PARAGRAPHS = (50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600)
"""About 7K, 14K, 28K, 56K, 112K, 224K, 448K, 896K, 1.75M and 3.5M tokens."""
RULER_HQA = "ruler_hqa_published"
"""The task with the questions of the published figures."""
_ANY_QUESTIONS = {"ruler_hqa": RULER_HQA}  # tasks with other questions of the same kind
_SETUP = MappingProxyType(
    {
        "prompts": "reference 4650a9643483",
        "temperature": 0.7,
        "top_p": 0.95,
        "chunk_tokens": 5000,
        "memory_tokens": 1024,
        "output_tokens": 1024,
    }
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published figure: `mean` is from 0 to 1, `n` the number of questions.

    `metric` and `setup` are how it was measured; `setup` has the names that the settings of results have.
    """

    task: str
    length: int
    reader: str
    mean: float
    n: int
    metric: str
    setup: Mapping[str, Any] = field(repr=False)

    def fits(self, task: str, length: int) -> bool:
        """Return whether the figure belongs to a task at a length, or to one with other questions of the same kind."""
        return length == self.length and self.task in (task, _ANY_QUESTIONS.get(task))

    def differences(self, task: str, metric: str | None, settings: Mapping[str, Any]) -> str:
        """Return in what a measurement differs; "" where a score of it can be compared with the figure.

        `metric` and `settings` are those of the results; what they do not tell differs.
        """
        return "; ".join(self._differences(task, metric, settings))

    def _differences(self, task: str, metric: str | None, settings: Mapping[str, Any]) -> Iterator[str]:
        if task != self.task:
            yield f"questions of {self.task}, here of {task}"
        if metric != self.metric:
            yield f"metric {self.metric}, here {metric or 'not known'}"
        here = {**settings, **settings.get("backend", {}), **settings.get("budgets", {})}
        if "output_tokens" in here:
            here["output_tokens"] = here["output_tokens"] or 1024  # the default of an answer
        for name, value in self.setup.items():
            if here.get(name) != value:
                yield f"{name} {value}, here {here.get(name, 'not known')}"


def prompts_named(prompts: PromptSet) -> str:
    """Return a name for prompts that were read from a file, which tells their templates apart."""
    texts = "\0".join((prompts.text("memory"), prompts.text("answer"), prompts.empty_memory))
    return f"{prompts.name} {hashlib.sha256(texts.encode()).hexdigest()[:12]}"


_FIGURES = {
    "RL-MemoryAgent-14B": (83.6, 82.0, 84.4, 80.5, 76.6, 81.3, 75.0, 77.3, 76.6, 78.1),
    "RL-MemoryAgent-7B": (82.0, 79.7, 78.9, 77.3, 79.7, 72.7, 74.2, 76.6, 75.8, 71.1),
}

PUBLISHED = [
    Published(
        task=RULER_HQA,
        length=length,
        reader=reader,
        mean=percent / 100,
        n=128,
        metric="memagent_sub_em",
        setup=_SETUP,
    )
    for reader, row in _FIGURES.items()
    for length, percent in zip(PARAGRAPHS, row, strict=True)
]
