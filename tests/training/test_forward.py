"""What rollouts share is computed once, and the gradients are those of the plain computation."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from helpers.tiny_model import PEFT_WARNS  # noqa: E402
from hypothesis import example, given  # noqa: E402
from hypothesis import settings as hypothesis  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from memagent_integrations.backends.prefixes import Bundle, bundles, whole  # noqa: E402
from memagent_integrations.training import forward  # noqa: E402
from memagent_integrations.training.batches import deal  # noqa: E402
from memagent_integrations.training.conversations import Sampled  # noqa: E402
from memagent_integrations.training.forward import cannot_share, forwards, scores  # noqa: E402

pytestmark = [PEFT_WARNS, pytest.mark.heavy]

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def model_of(kind: str, *, lora: bool, **more: Any) -> Any:
    torch.manual_seed(1)
    config, cls = KINDS[kind]
    model = cls(config(**SMALL, max_position_embeddings=512, initializer_range=0.2, **more))
    if lora:
        model = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
        )
    return model.eval()


def row(prompt: list[int], output: list[int]) -> Sampled:
    return Sampled(
        text="", prompt_ids=array("i", prompt), output_ids=array("i", output), logprobs=array("f", [0.0] * len(output))
    )


def rollouts(seed: int) -> list[Sampled]:
    """Groups of conversations that begin alike, with memories and replies of any length, and some that are alone."""
    drawn = random.Random(seed)

    def ids(least: int, most: int) -> list[int]:
        return [drawn.randrange(97) for _ in range(drawn.randint(least, most))]

    rows = []
    for _ in range(drawn.randint(1, 4)):
        section = ids(64, 120)
        rows += [row(section + ids(1, 30), ids(1, 25)) for _ in range(drawn.randint(1, 6))]
    rows += [row([*section, 5], ids(1, 9)) for _ in range(2)]  # the same prompt twice, as before the first memory
    drawn.shuffle(rows)
    return rows


def gradients(model: Any, rows: list[Sampled], plan: list[Bundle], tokens: int) -> torch.Tensor:
    model.zero_grad()
    weights = {number: random.Random(number).uniform(-1, 1) for number in range(len(rows))}
    for part in forwards(model, rows, plan, temperature=0.8, tokens=tokens):
        worth = torch.cat(
            [torch.full((length,), weights[number]) for number, length in zip(part.rows, part.lengths, strict=True)]
        )
        (part.logprobs.exp() * worth).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad])


@pytest.mark.parametrize("tokens", [1, 100, 10_000])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_the_plain_computation(kind: str, lora: bool, tokens: int) -> None:
    model = model_of(kind, lora=lora)
    for seed in range(5):
        rows = rollouts(seed)
        plan = bundles([one.prompt_ids for one in rows])
        assert sum(bundle.saved() for bundle in plan) > 0
        shared, plain = gradients(model, rows, plan, tokens), gradients(model, rows, [whole(rows)], 10_000)
        assert float((shared - plain).norm() / plain.norm()) < 1e-4


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_log_probabilities_are_those_of_each_row_alone(kind: str, lora: bool) -> None:
    model, rows = model_of(kind, lora=lora), rollouts(7)
    every = scores(model, rows, bundles([one.prompt_ids for one in rows]), temperature=0.5, tokens=200)
    for one, logprobs in zip(rows, every, strict=True):
        ids = torch.tensor([[*one.prompt_ids, *one.output_ids]])
        logits = model(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1] / 0.5
        alone = torch.log_softmax(logits, -1).gather(-1, ids[0, len(one.prompt_ids) :, None])[:, 0]
        assert logprobs.tolist() == pytest.approx(alone.tolist(), abs=1e-4)


def test_a_part_keeps_to_its_tokens_but_takes_one_row_at_least() -> None:
    model, rows = model_of("llama", lora=False), rollouts(3)
    plan = bundles([one.prompt_ids for one in rows])
    shared = {number: bundle.shared for bundle in plan for number in bundle.rows}
    sizes = []
    with torch.no_grad():
        for part in forwards(model, rows, plan, temperature=1.0, tokens=250):
            common = shared[part.rows[0]]
            own = max(len(rows[number].prompt_ids) + len(rows[number].output_ids) - common for number in part.rows)
            assert len(part.rows) == 1 or common + len(part.rows) * own <= 250
            sizes.append(len(part.rows))
    assert max(sizes) > 1


def test_probabilities_in_slices_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = model_of("llama", lora=False), rollouts(9)
    once = gradients(model, rows, [whole(rows)], 10_000)
    monkeypatch.setattr(forward, "_PROBABILITIES_AT_ONCE", 1)
    assert torch.allclose(gradients(model, rows, [whole(rows)], 10_000), once, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_plain_attention_can_share(kind: str) -> None:
    assert cannot_share(model_of(kind, lora=True)) is None


def test_a_model_without_keys_and_values_cannot_share() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=2))
    assert cannot_share(model)


def test_a_model_that_sees_a_part_of_the_text_cannot_share() -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))
    assert "a part of the text" in str(cannot_share(model))


def test_gradient_checkpointing_rules_sharing_out() -> None:
    model = model_of("llama", lora=False)
    model.activation_checkpointing_enable()
    assert "checkpointing" in str(cannot_share(model))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12), st.integers(1, 5))
@example([[0] * 6, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]], 1)  # the one in the middle is the longest
@hypothesis(max_examples=300)
def test_bundles_hold_every_row_once_and_share_what_is_equal(prompts: list[list[int]], least: int) -> None:
    rows = [array("i", prompt) for prompt in prompts]
    bundled = bundles(rows, least=least)
    assert sorted(number for bundle in bundled for number in bundle.rows) == list(range(len(rows)))
    for bundle in bundled:
        assert len({tuple(rows[number][: bundle.shared]) for number in bundle.rows}) == 1
        if bundle.shared:
            assert len(bundle.rows) > 1
            assert all(least <= bundle.shared < len(rows[number]) <= 2 * bundle.shared for number in bundle.rows)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_rows_are_dealt_into_as_many_parts_as_there_are_updates(parts: int, share: bool) -> None:
    rows = rollouts(11) + rollouts(12)
    dealt = deal(rows, parts, share=share)
    assert len(dealt) == parts
    assert sorted(number for part in dealt for bundle in part for number in bundle.rows) == list(range(len(rows)))
    assert dealt == deal(rows, parts, share=share)
    loads = [
        sum(len(rows[number].output_ids) + len(rows[number].prompt_ids) for bundle in part for number in bundle.rows)
        for part in dealt
    ]
    if parts == 3:
        assert max(loads) < 1.5 * min(loads)


def test_the_gradient_of_the_whole_batch_is_the_sum_of_those_of_its_parts() -> None:
    model, rows = model_of("llama", lora=False), rollouts(5)
    once = gradients(model, rows, [whole(rows)], 10_000)
    parts = sum(gradients(model, rows, part, 10_000) for part in deal(rows, 4, share=True) if part)
    assert float((parts - once).norm() / once.norm()) < 1e-4
