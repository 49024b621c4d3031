"""Rollouts from a real vLLM server whose adapter is swapped, compared with transformers on the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.contract import ask

from memagent_integrations.errors import UsageError
from memagent_integrations.reader import Reader

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

from memagent_integrations.evaluation.samples import Sample, Task  # noqa: E402
from memagent_integrations.training.batches import deal  # noqa: E402
from memagent_integrations.training.forward import scores  # noqa: E402
from memagent_integrations.training.mixture import Drawn  # noqa: E402
from memagent_integrations.training.policy import start  # noqa: E402
from memagent_integrations.training.sampler import Sampler  # noqa: E402
from memagent_integrations.training.served import ServedSampler  # noqa: E402
from memagent_integrations.training.settings import Lora, Settings  # noqa: E402
from memagent_integrations.training.trainer import Trainer  # noqa: E402

# peft uses a deprecated name of transformers
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
TEMPERATURE = 0.7  # at 1.0 the probabilities before and after temperature are the same
SMALL: dict[str, Any] = {
    "steps": 2,
    "questions": 1,
    "group": 2,
    "updates": 1,
    "learning_rate": 1e-3,
    "warmup": 0,
    "temperature": TEMPERATURE,
    "evaluate_every": 0,
    "readings_every": 0,
    "lora": Lora(rank=8, alpha=16),
}
SHARED = "The harbour master noted the tide and the wind in his book every morning before the boats went out. " * 6
PROMPTS = [ask(SHARED + question, 8) for question in ("What did he note?", "Who noted it?", "When did he do it?")]


@pytest.fixture(scope="module")
def policy(url: str, model: Path) -> Iterator[ServedSampler]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}  # that of the server
    with ServedSampler(model, base_url=url, temperature=TEMPERATURE, **options) as sampler:
        start(sampler, Settings(**SMALL))
        yield sampler


def adapt(policy: Sampler, seed: int) -> None:
    """Replace the adapter by random weights, large enough to change the text."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in policy.model.named_parameters():
            if "lora_" in name:
                weights.copy_(torch.randn(weights.shape, generator=random) * 0.06)


def test_every_version_writes_with_its_own_weights(policy: ServedSampler) -> None:
    """The prompts are the same each time: no version may read a cache that an earlier version filled."""
    texts, cached, gaps = [], [], []
    for seed in (1, 2, 1):
        adapt(policy, seed)
        policy.publish()
        with policy.greedy():
            by_server: list[Any] = policy.complete_batch(PROMPTS)
            by_transformers: list[Any] = Sampler.complete_batch(policy, PROMPTS)
        assert [reply.output_ids for reply in by_server] == [reply.output_ids for reply in by_transformers]
        texts.append([reply.text for reply in by_server])
        replies: list[Any] = policy.complete_batch(PROMPTS)
        assert all(len(reply.output_ids) == len(reply.logprobs) for reply in replies)
        batch = deal(replies, 1, share=True)[0]
        computed = torch.cat(scores(policy.model, replies, batch, temperature=TEMPERATURE, tokens=4096))
        sampled = torch.cat([torch.tensor(reply.logprobs) for reply in replies])
        gaps.append(float((computed - sampled).abs().max()))
        cached.append(replies[0].usage.cached_tokens)
    assert max(gaps) < 1e-3
    assert texts[0] == texts[2] != texts[1]
    assert all(cached), "within a version the prefix cache is used"


def test_the_end_of_the_text_is_among_the_tokens(policy: ServedSampler) -> None:
    with torch.no_grad():
        for name, weights in policy.model.named_parameters():
            if "lora_B" in name:
                weights.zero_()  # restores the model without an adapter
    policy.publish()
    with policy.greedy():
        reply = policy.complete(ask("Say the word yes.", 60))
    assert reply.finish_reason == "stop"
    assert reply.output_ids[-1] == policy.tokenizer.eos_token_id
    assert "<|im_end|>" not in reply.text


def test_a_training_on_what_the_server_writes(policy: ServedSampler, tmp_path: Path) -> None:
    task = Task(name="length", metric="em", make=lambda length, seed, number, counted: sample(number), unit=None)

    def sample(number: int) -> Sample:
        return Sample(
            id=f"{number}",
            question="What was noted?",
            answers=("tide",),
            document=lambda: iter([f"{number}. {SHARED[:200]}"]),
        )

    def draw(number: int, share: float) -> Drawn:
        return Drawn(task=task, length=0, sample=sample(number))

    numbers = count()
    reader = Reader(policy, chunk_tokens=80, memory_tokens=8, output_tokens=8)
    trainer = Trainer(reader, draw, Settings(**SMALL), tmp_path, reward=lambda reading, drawn: float(next(numbers) % 2))
    metrics = list(trainer.train())
    assert [line["failed"] for line in metrics] == [0, 0]
    assert all(0 < line["gap"] < 1e-3 for line in metrics), metrics
    assert all(line["gradient_norm"] > 0 for line in metrics), metrics
    assert policy.published
    assert policy.published.endswith("6"), "three for the first test, one for the second, and one for each batch"


def test_what_the_server_cannot_take_is_told(
    policy: ServedSampler, url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServedSampler(model, base_url=url, temperature=TEMPERATURE, device="cpu") as larger:
        start(larger, Settings(**(SMALL | {"lora": Lora(rank=20, alpha=16)})))
        with pytest.raises(UsageError, match=r"rank 20; start it so: .*--max-lora-rank 32"):
            larger.publish()
    load = policy._server.load
    monkeypatch.setattr(
        policy._server, "load", lambda name, path, rank: (shutil.rmtree(path), load(name, path, rank=rank))
    )
    with pytest.raises(UsageError, match="does not see"):
        policy.publish()
