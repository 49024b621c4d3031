"""It learns: a small model, warmed up by a careless reader, learns from reward alone to carry a fact, and goes on at any length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from carry_a_fact import experiment  # noqa: E402


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The experiment runs on one thread; the tests after it on as many as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_policy_learns_to_carry_a_fact_and_noise_teaches_it_nothing(tmp_path: Path) -> None:
    told = experiment(tmp_path, 0, steps=50, control=50, held=256, long=128)
    assert told["trained"] >= told["warm start"] + 0.2
    assert told["trained p"] < 0.01
    assert told["control, last batch"] <= told["warm start"] + 0.05
    assert abs(told["64 times as long"] - told["trained"]) <= 0.05
