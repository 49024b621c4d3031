from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model of `carry_a_fact`, with random weights; tests do not change it."""
    from helpers.tiny_trainer import model_of  # needs torch, which not every test of this folder does

    return model_of(tmp_path_factory.mktemp("model"), 0)
