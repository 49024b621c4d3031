from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import vllm_env

FOLDER = "MEMAGENT_VLLM_MODEL"
MAX_RANK = 16
WARNINGS = [  # of vLLM itself and of the torch that it pins
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
]


def pytest_configure(config: pytest.Config) -> None:
    for line in WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where they cannot run."""
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def missing() -> str | None:
    """Return why these tests cannot run, or None."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:  # without an origin it is this folder
        return "vLLM is not installed here; scripts/test --vllm makes an environment for it"
    return None if os.environ.get(FOLDER) else f"{FOLDER} has to name the model's folder; scripts/test --vllm makes it"


@pytest.fixture(scope="session")
def model() -> Path:
    return Path(os.environ[FOLDER])


@pytest.fixture(scope="session")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of "smollm2" that takes LoRA adapters of up to `MAX_RANK`: it needs half a minute."""
    more = ["--enable-lora", "--max-lora-rank", MAX_RANK, "--logprobs-mode", "processed_logprobs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        with vllm_env.server(model, log=tmp_path_factory.mktemp("server") / "log", more=more) as running:
            yield running


@pytest.fixture(scope="session", autouse=True)
def small_machine() -> Iterator[None]:
    """Give vLLM as much memory and as many threads as a small CPU machine has."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_env.environment().items():
            patch.setenv(name, value)
        yield
