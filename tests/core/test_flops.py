"""The cost of readings in floating-point operations, beside the counter of torch and the published ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memagent_integrations.errors import UsageError
from memagent_integrations.flops import LENGTHS, ModelSize, costs
from memagent_integrations.records import Budgets

QWEN = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def config(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def test_the_published_ratios() -> None:
    """8K is 1; 32K is 4 against 16, 128K 16 against 256, 1M 125 against 15,625."""
    by_length = {cost.tokens: (cost.windows, cost.windows**2) for cost in costs(ModelSize(), Budgets(), LENGTHS)}
    assert by_length[8_000] == (1, 1)
    assert by_length[32_000] == (4, 16)
    assert by_length[128_000] == (16, 256)
    assert by_length[1_000_000] == (125, 15_625)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_ratios_are_those_of_the_attention_that_is_counted(length: int) -> None:
    [cost] = costs(ModelSize(), Budgets(), [length])
    assert ModelSize().attention_flops(length) == cost.windows**2 * ModelSize().attention_flops(8_000)


def test_a_reading_is_linear_and_full_attention_tends_to_the_square() -> None:
    one, ten, hundred = costs(ModelSize(), Budgets(), [1_000_000, 10_000_000, 100_000_000])
    assert ten.loop / one.loop == pytest.approx(10, rel=0.01)
    assert hundred.loop / ten.loop == pytest.approx(10, rel=0.001)
    assert 85 < ten.full / one.full < hundred.full / ten.full < 100


def test_the_calls_are_those_of_the_chunks_and_the_answer() -> None:
    budgets = Budgets(chunk_tokens=1000, overlap_tokens=100)
    assert [cost.calls for cost in costs(ModelSize(), budgets, [1, 1000, 1001, 1900, 1901])] == [2, 2, 3, 3, 4]


def test_the_parts_of_a_reading_add_up() -> None:
    size, budgets = ModelSize(layers=2), Budgets(chunk_tokens=100, memory_tokens=30, question_tokens=20)
    [cost] = costs(size, budgets, [250])
    update, last, answer = size.flops(20 + 30 + 100 + 30, 30), size.flops(20 + 30 + 50 + 30, 30), 20 + 30 + 1024
    assert cost.loop == 2 * update + last + size.flops(answer, 1024)
    assert cost.full == size.flops(20 + 250 + 1024, 1024)


@pytest.mark.heavy
def test_torch_counts_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode  # after the check that torch is here

    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 200,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="eager"))
    size = ModelSize.from_config(config(tmp_path, sizes))
    for tokens, written in ((40, 1), (90, 7)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros((1, tokens), dtype=torch.long), logits_to_keep=written)
        hidden = size.attention_flops(tokens)  # torch multiplies what the mask then hides, too
        assert counter.get_total_flops() == size.flops(tokens, written) + hidden


def test_sizes_from_a_config(tmp_path: Path) -> None:
    assert ModelSize.from_config(config(tmp_path, QWEN)) == ModelSize() == ModelSize.from_config(tmp_path)
    assert ModelSize.from_config(config(tmp_path, {"text_config": QWEN | {"head_dim": 64}})).head == 64
    without = {name: value for name, value in QWEN.items() if name != "num_key_value_heads"}
    assert ModelSize.from_config(config(tmp_path, without)).kv_heads == 28


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not the config.json of a model like Llama"),
        ("[]", "is not the config.json of a model like Llama"),
        ('{"n_embd": 768}', "num_hidden_layers"),
        (json.dumps(QWEN | {"num_experts": 8}), "mixture of experts"),
        (json.dumps(QWEN | {"hidden_size": "many"}), "hidden_size"),
        (json.dumps(QWEN | {"num_attention_heads": 0}), "num_attention_heads"),
        (json.dumps(QWEN | {"num_hidden_layers": True}), "num_hidden_layers"),
        (json.dumps(QWEN | {"num_attention_heads": 9999}), "head has to be"),
    ],
)
def test_what_is_no_config(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=problem):
        ModelSize.from_config(file)


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        ModelSize.from_config(tmp_path / "nothing.json")


def test_a_length_that_is_none() -> None:
    with pytest.raises(UsageError, match="tokens has to be a whole number"):
        costs(ModelSize(), Budgets(), [0])
