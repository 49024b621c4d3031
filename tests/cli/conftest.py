from __future__ import annotations

from pathlib import Path

import pytest
from helpers.command_line import DOCUMENT


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "log.txt"
    file.write_bytes(DOCUMENT.encode())
    return file
