from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "long_stream.py"


def peak_mb(tokens: int) -> float:
    command = [sys.executable, str(BENCHMARK), "--one", "--tokens", str(tokens)]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert measured["calls"] > tokens // 5000
    return float(measured["peak_mb"])


def test_a_stream_of_millions_of_tokens_needs_no_more_memory() -> None:
    assert peak_mb(3_500_000) - peak_mb(35_000) < 64
