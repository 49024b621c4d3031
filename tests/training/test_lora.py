"""LoRA layers in one operation: what they compute is PEFT's, forward and backward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_gguf import make_folder, torch, transformers
from helpers.tiny_model import PEFT_WARNS

pytestmark = [pytest.mark.heavy, PEFT_WARNS]
peft = pytest.importorskip("peft")
from memagent_integrations.training import lora  # noqa: E402

IDS = torch.arange(3, 43).reshape(2, 20)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = make_folder(tmp_path_factory.mktemp("model"), "qwen2")  # whose query, key and value have a bias
    return transformers.AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)


def adapted(base: Any, **settings: Any) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(0)
    for name, weights in model.named_parameters():
        if "lora_" in name:
            weights.data.normal_(std=0.1)
    return model.eval()


def computed(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return the logits and the gradients of what learns."""
    logits = model(input_ids=IDS).logits
    logits.square().mean().backward()
    return logits.detach(), {name: weights.grad for name, weights in model.named_parameters() if weights.requires_grad}


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"lora_dropout": 0.5}])
def test_values_and_gradients_are_those_of_peft(base: Any, settings: dict[str, Any]) -> None:
    plain, fused = adapted(base, **settings), adapted(base, **settings)
    lora.fuse(fused)
    (logits, gradients), (same_logits, same_gradients) = computed(plain), computed(fused)
    torch.testing.assert_close(same_logits, logits, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == same_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(same_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_an_adapter_that_is_switched_off_does_nothing(base: Any) -> None:
    model = adapted(base)
    lora.fuse(model)
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, base(input_ids=IDS).logits)
