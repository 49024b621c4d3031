"""Batches with each option of the trainer: its effect on rewards, advantages, gradients and metrics, recomputed."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from helpers.tiny_trainer import by_key, draw, echo, letters, reader_of, trainer, weights  # noqa: E402

from memagent_integrations.backends.prefixes import whole  # noqa: E402
from memagent_integrations.errors import BackendError, UsageError  # noqa: E402
from memagent_integrations.training.forward import scores  # noqa: E402
from memagent_integrations.training.metrics import Sums  # noqa: E402
from memagent_integrations.training.policy import swapped  # noqa: E402
from memagent_integrations.training.rollouts import load_reward  # noqa: E402
from memagent_integrations.training.sampler import Sampler  # noqa: E402
from memagent_integrations.training.settings import Lora  # noqa: E402
from memagent_integrations.training.trainer import Batch  # noqa: E402

pytestmark = pytest.mark.heavy


def nothing(reading: Any, question: Any) -> float:
    return 0.0


def groups(batch: Batch) -> dict[int, list[int]]:
    """The places of the rollouts of each question."""
    by_group: dict[int, list[int]] = {}
    for index, rollout in enumerate(batch.rollouts):
        by_group.setdefault(rollout.group, []).append(index)
    return by_group


def centred(batch: Batch, rewards: list[float], *, scale: bool = False) -> list[float]:
    """What each rollout of a batch is worth with these rewards."""
    worth = [0.0] * len(rewards)
    for indices in groups(batch).values():
        own = [rewards[index] for index in indices]
        for index in indices:
            worth[index] = rewards[index] - mean(own)
            if scale and len(set(own)) > 1:
                worth[index] /= stdev(own)
    return worth


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_training_computes_the_probabilities_of_sampling_at_any_temperature(
    model: Path, tmp_path: Path, temperature: float
) -> None:
    [metrics] = list(trainer(model, tmp_path, steps=1, temperature=temperature).train())
    assert 0 < metrics["gap"] < 1e-3


class Failing(Sampler):
    """Loses the calls of the first `lost` readings at the third chunk."""

    lost = 5

    def complete_batch(self, prompts: Any) -> Any:
        replies = super().complete_batch(prompts)
        here = self.lost if (prompts[0].phase, prompts[0].index) == ("memory", 2) else 0
        return [BackendError("the line went dead")] * min(here, len(replies)) + replies[here:]


class Dead(Failing):
    lost = 1_000_000


def test_rollouts_that_fail_are_told_and_the_others_learned_from(model: Path, tmp_path: Path) -> None:
    training = trainer(model, tmp_path, Failing, steps=1, updates=3)
    batch = training.collect(Sums())
    assert [len(indices) for indices in groups(batch).values()] == [
        3,
        4,
        4,
    ]  # all of the first question failed, and one of the second
    assert batch.advantages == pytest.approx(centred(batch, [rollout.reward for rollout in batch.rollouts]), abs=1e-6)
    before = weights(training)
    [metrics] = list(training.train())
    assert metrics["failed"] == pytest.approx(5 / 16)
    assert metrics["updates"] == 3
    assert metrics["steps_a_rollout"] == 6
    assert not torch.equal(weights(training), before)


def test_a_batch_without_one_rollout_ends_the_training_with_the_error_of_the_calls(model: Path, tmp_path: Path) -> None:
    training = trainer(model, tmp_path, Dead, steps=1)
    before = weights(training)
    with pytest.raises(BackendError, match="the line went dead"):
        list(training.train())
    assert torch.equal(weights(training), before)


def test_long_replies_lose_reward_and_the_metric_does_not_tell(model: Path, tmp_path: Path) -> None:
    """The limit is 2 tokens and so is the buffer: a reply of one token loses a half, one of two loses 1."""
    training = trainer(model, tmp_path, overlong=2, reward=nothing)
    sums = Sums()
    batch = training.collect(sums)
    lost = [-mean(len(row.output_ids) / 2 for row in rollout.conversations) for rollout in batch.rollouts]
    assert len(set(lost)) > 1
    assert batch.advantages == pytest.approx(centred(batch, lost), abs=1e-6)
    metrics = sums.means(training.accelerator, ["reward", "reward_deviation", "collapsed"])
    equal = [len({lost[index] for index in indices}) == 1 for indices in groups(batch).values()]
    assert not all(equal)
    assert metrics == {
        "reward": 0.0,
        "reward_deviation": 0.0,
        "collapsed": mean(equal),
    }  # a group of one reward may differ by what it loses


def test_an_answer_in_form_gets_more(model: Path, tmp_path: Path) -> None:
    """The words of this model's values stand in boxes."""
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    for file in model.iterdir():
        (boxes / file.name).write_bytes(file.read_bytes())
    words = (boxes / "tokenizer.json").read_text()
    for value in range(4):
        assert f'"v{value}"' in words
        words = words.replace(f'"v{value}"', rf'"\\boxed{{v{value}}}"')
    (boxes / "tokenizer.json").write_text(words)
    training = trainer(boxes, tmp_path / "run", format_reward=0.5, reward=lambda *_: 0.25)
    sums = Sums()
    batch = training.collect(sums)
    boxed = [r"\boxed{v" in rollout.reading.steps[-1].reply.text for rollout in batch.rollouts]
    assert 0 < sum(boxed) < len(boxed)
    rewards = [0.75 if is_boxed else 0.25 for is_boxed in boxed]
    assert [rollout.reward for rollout in batch.rollouts] == rewards
    assert batch.advantages == pytest.approx(centred(batch, rewards), abs=1e-6)
    assert sums.means(training.accelerator, ["reward"])["reward"] == pytest.approx(mean(rewards))


class Certain(Sampler):
    """Another engine: what it says of its tokens is four times as likely as the trainer finds."""

    factor = 4.0

    def complete_batch(self, prompts: Any) -> Any:
        moved = math.log(self.factor)
        return [
            replace(reply, logprobs=array("f", (value + moved for value in reply.logprobs)))
            for reply in super().complete_batch(prompts)
        ]


class Doubtful(Certain):
    """The same the other way."""

    factor = 0.25


@pytest.mark.parametrize(("kind", "weight"), [(Sampler, 1.0), (Certain, 0.25), (Doubtful, 2.0)])
def test_tokens_of_another_engine_weigh_by_both_probabilities_up_to_a_bound(
    model: Path, tmp_path: Path, kind: type[Sampler], weight: float
) -> None:
    """The probabilities say a quarter and four; the bound is two."""
    bounds = {"plain": None, "corrected": 2.0}
    metrics = {
        name: list(trainer(model, tmp_path / name, kind, steps=1, updates=1, correction=most).train())
        for name, most in bounds.items()
    }
    [plain], [corrected] = metrics.values()
    assert corrected["gradient_norm"] == pytest.approx(weight * plain["gradient_norm"], rel=1e-4)
    assert plain["gap"] == pytest.approx(0.0 if kind is Sampler else math.log(4), abs=1e-4)
    assert corrected["reward"] == plain["reward"]


def test_a_reward_by_its_dotted_name_is_that_reward(model: Path, tmp_path: Path) -> None:
    training = trainer(model, tmp_path, reward=load_reward("helpers.tiny_trainer:echo"))
    batch = training.collect(Sums())
    rewards = [echo(rollout.reading, None) for rollout in batch.rollouts]
    assert len(set(rewards)) > 1
    assert [rollout.reward for rollout in batch.rollouts] == rewards


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "package.module:function"),
        ("helpers.tiny_trainer", "package.module:function"),
        ("helpers.tiny_trainer:", "package.module:function"),
        (":echo", "package.module:function"),
        ("helpers.tiny_trainer.echo", "package.module:function"),
        ("helpers.tiny_trainer:ohce", "ohce"),
        ("helpers.tiny_trainers:echo", "helpers.tiny_trainers"),
        ("helpers.tiny_trainer:SMALL", "is no function"),
        (".helpers.tiny_trainer:echo", "package.module:function"),
    ],
)
def test_a_name_that_is_no_reward_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_reward(name)


def test_advantages_in_deviations_of_their_group(model: Path, tmp_path: Path) -> None:
    for scale in (False, True):
        batch = trainer(model, tmp_path / str(scale), scale=scale, reward=letters).collect(Sums())
        rewards = [rollout.reward for rollout in batch.rollouts]
        assert batch.advantages == pytest.approx(centred(batch, rewards, scale=scale), abs=1e-5)
        moments = [stdev(batch.advantages[index] for index in indices) for indices in groups(batch).values()]
        assert (moments == pytest.approx([1.0] * 4, abs=1e-5)) is scale


def test_groups_that_teach_nothing_are_replaced_until_the_rounds_are_over(model: Path, tmp_path: Path) -> None:
    """With one round of refills as many questions come as were missing, and the batch is as large as that makes it."""
    questions: list[Any] = []

    def watched(number: int, share: float) -> Any:
        questions.append(draw(number, share))
        return questions[-1]

    training = trainer(model, tmp_path, dynamic=True, refills=1, reward=by_key, draw=watched)
    sums = Sums()
    batch = training.collect(sums)
    even = [int(question.sample.question[1:]) % 2 == 0 for question in questions]
    missing = 4 - sum(even[:4])
    assert len(questions) == 4 + missing
    assert not all(even[4:])  # the round left gaps, and no other came
    assert len(batch.rollouts) == 4 * sum(even)
    assert all(int(rollout.reading.question[1:]) % 2 == 0 for rollout in batch.rollouts)
    assert sums.means(training.accelerator, ["collapsed"])["collapsed"] == pytest.approx(1 - mean(even))


def test_where_no_question_teaches_anything_the_rounds_end_and_nothing_moves(model: Path, tmp_path: Path) -> None:
    numbers: list[int] = []

    def watched(number: int, share: float) -> Any:
        numbers.append(number)
        return draw(number, share)

    training = trainer(model, tmp_path, steps=2, dynamic=True, refills=2, reward=nothing, draw=watched, kl=0.01)
    before = weights(training)
    lines = list(training.train())
    assert numbers == list(range(2 * 4 * (1 + 2)))
    assert training.progress.positions == (24,)
    assert [(line["updates"], line["gradient_norm"], line["collapsed"]) for line in lines] == [(0, 0, 1), (0, 0, 1)]
    assert torch.equal(weights(training), before)


@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8)], ids=["weights", "adapter"])
def test_the_divergence_is_measured_from_the_start(model: Path, tmp_path: Path, lora: Lora | None) -> None:
    training = trainer(model, tmp_path, steps=3, updates=1, kl=0.01, lora=lora, learning_rate=3e-3)
    rows = [conversation for rollout in training.collect(Sums()).rollouts for conversation in rollout.conversations]

    def scored(policy: Any) -> torch.Tensor:
        return torch.cat(scores(policy, rows, [whole(rows)], temperature=1.0, tokens=8192))

    began = scored(training.policy.model)
    first, *later = [line["kl"] for line in training.train()]
    assert abs(first) < 1e-10
    assert all(line > 1e-6 for line in later)
    now = scored(training.policy.model)
    with swapped(training.policy.model, training.reference):
        assert torch.equal(scored(training.policy.model), began)
    assert torch.equal(scored(training.policy.model), now)
    assert not torch.allclose(now, began, atol=1e-3)
    again = trainer(
        model, tmp_path, steps=4, updates=1, kl=0.01, lora=lora, learning_rate=3e-3
    )  # goes on, and has the same start
    with swapped(again.policy.model, again.reference):
        assert torch.equal(scored(again.policy.model), began)


def test_the_adapter_of_a_warm_start_goes_on_and_the_divergence_is_from_there(model: Path, tmp_path: Path) -> None:
    warm = trainer(model, tmp_path / "warm", steps=2, lora=Lora(rank=4, alpha=8), learning_rate=1e-2)
    list(warm.train())
    warm.policy.model.save_pretrained(tmp_path / "adapter")
    training = trainer(model, tmp_path / "run", adapter=tmp_path / "adapter", steps=2, updates=1, kl=0.01)
    assert torch.equal(weights(training), weights(warm))
    plain = {
        name: parameter.clone()
        for name, parameter in training.policy.model.named_parameters()
        if not parameter.requires_grad
    }
    first, second = [line["kl"] for line in training.train()]
    assert abs(first) < 1e-10 < second
    assert not torch.equal(weights(training), weights(warm))
    base = dict(reader_of(model).backend.model.named_parameters())
    assert plain.keys() <= dict(training.policy.model.named_parameters()).keys()
    for name, parameter in training.policy.model.named_parameters():
        if name in plain:
            assert torch.equal(parameter, base[name.removeprefix("base_model.model.").replace(".base_layer", "")])


@pytest.mark.parametrize("value", [None, "much", float("nan"), float("-inf")])
def test_a_reward_that_is_no_number_is_told(model: Path, tmp_path: Path, value: object) -> None:
    with pytest.raises(UsageError, match=f"a reward has to be a finite number, not {value!r}"):
        list(trainer(model, tmp_path, steps=1, reward=lambda *_: value).train())
