"""Where the data sets of the tests are, if they are on this machine."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
