"""What is computed in bfloat16 learns as in float32, and how much is computed at once follows from the free memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from helpers.tiny_model import PEFT_WARNS  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

from memagent_integrations.backends import transformers as backend  # noqa: E402
from memagent_integrations.backends.prefixes import Bundle, whole  # noqa: E402
from memagent_integrations.errors import UsageError  # noqa: E402
from memagent_integrations.training import forward, memory  # noqa: E402
from memagent_integrations.training.conversations import Sampled  # noqa: E402
from memagent_integrations.training.forward import forwards, padded  # noqa: E402
from memagent_integrations.training.memory import Room, room, sampling_tokens  # noqa: E402
from memagent_integrations.training.optimizer import MasterAdamW  # noqa: E402

pytestmark = [PEFT_WARNS, pytest.mark.heavy]

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def llama(*, lora: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    if lora:
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
    return model.eval()


def granite() -> Any:
    """A model that divides its logits after the head."""
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)).eval()


def conversations(count: int, seed: int = 0) -> list[Sampled]:
    dice = random.Random(seed)

    def ids(tokens: int) -> array[int]:
        return array("i", (dice.randrange(97) for _ in range(tokens)))

    return [
        Sampled(text="", prompt_ids=ids(dice.randint(20, 90)), output_ids=ids(dice.randint(1, 20)), logprobs=array("f"))
        for _ in range(count)
    ]


def plainly(model: Any, row: Sampled) -> torch.Tensor:
    """The log-probabilities of what a row wrote, from all logits of that row alone."""
    ids = torch.tensor([[*row.prompt_ids, *row.output_ids]])
    logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.7
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(row.output_ids.tolist())[:, None])[:, 0]


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@pytest.mark.parametrize("kind", [llama, lambda: llama(lora=True), granite], ids=["llama", "lora", "granite"])
def test_the_head_where_rows_wrote_gives_what_the_whole_head_gives(kind: Callable[[], Any]) -> None:
    model, rows = kind(), conversations(5)
    model.zero_grad()
    found: dict[int, torch.Tensor] = {}
    for part in forwards(model, rows, [whole(rows)], temperature=0.7, tokens=300):
        (part.logprobs**2).sum().backward()
        found |= dict(zip(part.rows, part.logprobs.detach().split(part.lengths), strict=True))
    picked = gradient(model)
    model.zero_grad()
    for number, row in enumerate(rows):
        expected = plainly(model, row)
        assert torch.allclose(found[number], expected, atol=1e-5)
        (expected**2).sum().backward()
    assert float((picked - gradient(model)).norm() / picked.norm()) < 1e-5


def test_the_head_computes_what_rows_wrote_and_nothing_else() -> None:
    model, rows = llama(), conversations(5)
    computed = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: computed.append(output.shape[:-1].numel()))
    list(forwards(model, rows, [whole(rows)], temperature=1.0, tokens=10_000))
    assert computed == [sum(len(row.output_ids) for row in rows)]


def test_a_model_whose_logits_come_without_a_head_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = llama(), conversations(3)
    [picked] = forwards(model, rows, [whole(rows)], temperature=1.0, tokens=10_000)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    [complete] = forwards(model, rows, [whole(rows)], temperature=1.0, tokens=10_000)
    assert torch.allclose(picked.logprobs, complete.logprobs, atol=1e-5)


def test_entropies_are_computed_where_they_are_asked_for() -> None:
    model, rows = llama(), conversations(2)
    [without] = forwards(model, rows, [whole(rows)], temperature=0.7, tokens=10_000)
    [part] = forwards(model, rows, [whole(rows)], temperature=0.7, tokens=10_000, entropies=True)
    assert without.entropies is None
    row, ids = rows[part.rows[0]], torch.tensor([[*rows[part.rows[0]].prompt_ids, *rows[part.rows[0]].output_ids]])
    logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(part.entropies[: part.lengths[0]], expected, atol=1e-5)


def test_padding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = llama(), conversations(4)

    def computed() -> torch.Tensor:
        model.zero_grad()
        [part] = forwards(model, rows, [whole(rows)], temperature=1.0, tokens=10_000)
        part.logprobs.sum().backward()
        return torch.cat([part.logprobs.detach(), gradient(model)])

    usual = computed()
    monkeypatch.setattr(forward, "padded", lambda tokens: tokens + 37)
    assert torch.allclose(computed(), usual, atol=1e-4)
    monkeypatch.setattr(forward, "padded", lambda tokens: 10_000)  # never beyond the window
    assert torch.allclose(computed(), usual, atol=1e-4)


def test_lengths_are_padded_to_few_sizes() -> None:
    assert [padded(tokens) for tokens in (1, 9, 65, 513, 700, 5000)] == [1, 9, 72, 576, 704, 5056]
    assert len({padded(tokens) for tokens in range(1, 2049)}) < 90
    assert all(tokens <= padded(tokens) <= 1.13 * tokens for tokens in range(1, 5000))


def test_a_prefix_is_computed_once() -> None:
    model, rows = llama(), conversations(3)
    beginning = array("i", range(64))
    rows = [
        Sampled(text="", prompt_ids=beginning + row.prompt_ids, output_ids=row.output_ids, logprobs=row.logprobs)
        for row in rows
    ]
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: seen.append(tuple(inputs[0].shape)))
    [part] = forwards(model, rows, [Bundle(shared=64, rows=(0, 1, 2))], temperature=0.7, tokens=10_000)
    longest = max(len(row.prompt_ids) + len(row.output_ids) for row in rows) - 64
    assert seen == [(1, 64 + 3 * padded(longest))]
    for number, logprobs in zip(part.rows, part.logprobs.split(part.lengths), strict=True):
        assert torch.allclose(logprobs, plainly(model, rows[number]), atol=1e-5)


def test_an_update_smaller_than_what_bfloat16_resolves_is_not_lost() -> None:
    weight = torch.nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], learning_rate=1e-4, weight_decay=0.0)
    for _ in range(60):
        weight.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight.dtype == torch.bfloat16
    assert optimizer.masters[0].tolist() == pytest.approx([1 - 60e-4] * 4, abs=1e-5)
    assert weight.tolist() == pytest.approx([0.9941] * 4, abs=2e-3)  # and the weight has followed it


def test_gradients_of_many_parts_are_summed_in_float32() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], learning_rate=1e-4, weight_decay=0.0)
    for _ in range(1000):  # in bfloat16 the sum would stop at 256
        weight.sum().backward()
    assert weight.grad is None
    assert optimizer.masters[0].grad.tolist() == [1000.0]


def test_the_masters_of_an_optimizer_are_saved_and_loaded() -> None:
    def made() -> tuple[Any, MasterAdamW]:
        weight = torch.nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))
        return weight, MasterAdamW([weight], learning_rate=1e-5, weight_decay=0.01)

    def learn(weight: Any, optimizer: MasterAdamW, steps: int) -> None:
        for _ in range(steps):
            (weight.float() ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    once, again = made(), made()
    learn(*once, 7)
    learn(*again, 3)
    resumed = made()
    resumed[1].load_state_dict(again[1].state_dict())
    learn(*resumed, 4)
    assert torch.equal(resumed[1].masters[0], once[1].masters[0])
    assert torch.equal(resumed[0], once[0])


def test_weights_in_float32_are_their_own_masters() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert MasterAdamW([weight], learning_rate=1e-4, weight_decay=0.0).masters[0] is weight


def test_what_is_computed_at_once_follows_from_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    each = memory._bytes_of_token(model, gradient_checkpointing=False)
    weights = 16 * sum(weight.numel() for weight in model.parameters())
    for free, tokens in ((700, 512), (1100, 1024), (1 << 30, 16_384)):
        monkeypatch.setattr(memory, "available", lambda device, free=free: int((free * each + weights) / 0.6) + 100)
        found = room(model)
        assert found.tokens == tokens
        assert found.longest == pytest.approx(free, abs=2 + 100 / each)
    assert room(model, processes=1 << 20).tokens < 16_384
    assert memory._bytes_of_token(model, gradient_checkpointing=True) < each


def test_a_row_that_cannot_fit_is_an_error_that_names_the_setting() -> None:
    rows = conversations(1)
    tokens = len(rows[0].prompt_ids) + len(rows[0].output_ids)
    Room(tokens=256, longest=tokens).check(rows)
    with pytest.raises(
        UsageError, match=f"{tokens} tokens, and the free memory holds {tokens - 1}: lower chunk_tokens"
    ):
        Room(tokens=256, longest=tokens - 1).check(rows)


def test_what_is_sampled_at_once_follows_from_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 1 << 40)
    assert sampling_tokens(llama(), 32_768) == 32_768
    monkeypatch.setattr(memory, "available", lambda device: 2_000_000)
    assert 256 <= sampling_tokens(llama(), 32_768) < 2048


def test_a_control_group_limits_the_memory(tmp_path: Path) -> None:
    files = {"memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 5\ninactive_file 200000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert 500_000 in memory._left_by_control_groups(tmp_path)
    (tmp_path / "memory.max").write_text("max")
    assert 500_000 not in memory._left_by_control_groups(tmp_path)
    assert memory.available(torch.device("cpu")) > 1 << 20


FEATURES = [
    ({"amx_bf16": True, "avx512_bf16": True}, True),
    ({"avx2": True, "amx_bf16": False}, False),
    ({"avx512_bf16": True, "amx_bf16": False}, False),  # multiplies half as fast as in float32
]


@pytest.mark.parametrize(("features", "expected"), FEATURES)
def test_bfloat16_is_the_default_where_the_processor_computes_it(
    features: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    backend.computes_bfloat16.cache_clear()
    try:
        assert backend.computes_bfloat16() is expected
    finally:
        backend.computes_bfloat16.cache_clear()
