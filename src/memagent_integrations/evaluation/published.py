"""Published figures, shown beside those that are measured.

Source: MemAgent, arXiv:2507.02259: RULER-HotpotQA, accuracy in percent, 128 questions for each length; lengths are
numbers of paragraphs.
"""

from __future__ import annotations

from dataclasses import dataclass

PARAGRAPHS = (50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600)
"""About 7K, 14K, 28K, 56K, 112K, 224K, 448K, 896K, 1.75M and 3.5M tokens."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published figure: `mean` is from 0 to 1, `n` the number of questions."""

    task: str
    length: int
    reader: str
    mean: float
    n: int


_RULER_HQA = {
    "RL-MemoryAgent-14B": (83.6, 82.0, 84.4, 80.5, 76.6, 81.3, 75.0, 77.3, 76.6, 78.1),
    "RL-MemoryAgent-7B": (82.0, 79.7, 78.9, 77.3, 79.7, 72.7, 74.2, 76.6, 75.8, 71.1),
}

PUBLISHED = [
    Published(task="ruler_hqa", length=length, reader=reader, mean=percent / 100, n=128)
    for reader, row in _RULER_HQA.items()
    for length, percent in zip(PARAGRAPHS, row, strict=True)
]
