"""A small model learns from reward alone to carry a fact, and keeps carrying it at 64 times the length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import carry_a_fact  # noqa: E402

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads, which the experiment sets to one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the task small: nine facts, two in a chunk. With more in a chunk some seeds need more batches."""
    for name, size in {"KEYS": 3, "VALUES": 3, "FACTS": 2, "CHUNKS": 5}.items():
        monkeypatch.setattr(carry_a_fact, name, size)


def test_a_policy_learns_to_carry_a_fact_and_noise_teaches_it_nothing(tmp_path: Path) -> None:
    results = carry_a_fact.experiment(
        tmp_path,
        4,
        steps=36,
        control=10,
        held=256,
        long=32,
        readings=1000,
        warm_batch=48,
        settings=carry_a_fact.SETTINGS | {"questions": 12, "evaluate_every": 36},
    )
    assert results["trained"] >= results["warm start"] + 0.2
    assert results["trained p"] < 0.01
    assert results["control, last batch"] <= results["warm start"] + 0.05
    assert abs(results["64 times as long"] - results["trained"]) <= 0.05
