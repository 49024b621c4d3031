"""Lengths and ids that the tasks share."""

from __future__ import annotations

from collections.abc import Iterator

from memagent_integrations.checks import check_int

RULER_LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288)
TRAINING_LENGTHS = (1_024, 2_048, 4_096)
RULER_ANSWER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""The most tokens of an answer in RULER (arXiv:2404.06654), by the beginning of a task's name. With more, an answer
that lists candidates would hold the gold one."""


_PIECE = 1 << 16  # characters


def in_pieces(text: str) -> Iterator[str]:
    """Yield a long text in pieces."""
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def sample_id(name: str, length: int, seed: int, number: int) -> str:
    """Return the id of a sample.

    Raises:
        UsageError: a number is not a whole number, or too small.
    """
    check_int(length=length)
    check_int(least=0, seed=seed, number=number)
    return f"{name}/{length}/{seed}/{number}"
