"""A policy that training saved, run by transformers, by vLLM in this process, and by a vLLM server with the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from memagent_integrations import Reader
from memagent_integrations.policies import Policy
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Reading

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("gguf")

from memagent_integrations.training import export  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CPU = {"dtype": "float32", "enforce_eager": True, "window": 2048}
QUESTION = "What did the harbour master note?"
DOCUMENT = "The harbour master noted the tide and the wind. " * 12


@pytest.fixture(scope="module")
def name(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a policy with an adapter of random weights, large enough to change the text."""
    config = peft.LoraConfig(r=12, lora_alpha=24, target_modules=LINEAR, task_type="CAUSAL_LM")
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    trained: Any = peft.get_peft_model(base, config)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, weights in trained.named_parameters():
            if "lora_" in key:
                weights.copy_(torch.randn(weights.shape, generator=random) * 0.06)
    budgets = Budgets(chunk_tokens=80, memory_tokens=16, output_tokens=16)
    policy = Policy(model=f"transformers:{model}", prompts=PromptSet.default(), budgets=budgets)
    folder = tmp_path_factory.mktemp("policy") / "reader"
    export.save(trained, None, folder, policy=policy, figures=export.Figures(data="nothing: random weights", steps=0))
    return f"policy:{folder}"


def read(name: str, **options: Any) -> Reading:
    reader = Reader(name, backend_options=options)
    with reader.backend:
        return reader.read(QUESTION, DOCUMENT)


@pytest.fixture(scope="module")
def expected(name: str) -> list[str]:
    return texts(read(name, device="cpu", dtype="float32"))


def texts(reading: Reading) -> list[str]:
    return [step.reply.text for step in reading.steps]


def test_transformers_and_vllm_say_the_same(name: str, model: Path, expected: list[str]) -> None:
    assert texts(read(name, model=f"vllm:{model}", **CPU)) == expected
    assert len(expected) > 2
    assert texts(read(name, device="cpu", dtype="float32", adapter=None)) != expected


def test_a_server_says_the_same(name: str, url: str, expected: list[str]) -> None:
    adapter = Path(name.removeprefix("policy:")) / "adapter"
    loading = {"lora_name": "reader", "lora_path": str(adapter)}
    httpx.post(f"{url}/load_lora_adapter", json=loading, timeout=60).raise_for_status()
    assert texts(read(name, model="openai:reader", base_url=url, temperature=0.0)) == expected
