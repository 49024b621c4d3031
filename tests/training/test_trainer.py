"""The trainer on a tiny model: what it makes of rollouts, what it learns, and the errors that it raises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from helpers.tiny_trainer import SMALL, draw, drawn, echo, figures, model_of, reader_of, trainer, weights  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from memagent_integrations.backends import ScriptedBackend  # noqa: E402
from memagent_integrations.errors import BackendError, UsageError  # noqa: E402
from memagent_integrations.reader import Reader  # noqa: E402
from memagent_integrations.records import Message, Prompt, Reading  # noqa: E402
from memagent_integrations.training.conversations import Sampled  # noqa: E402
from memagent_integrations.training.metrics import Sums, read  # noqa: E402
from memagent_integrations.training.policy import trainable  # noqa: E402
from memagent_integrations.training.sampler import Sampler  # noqa: E402
from memagent_integrations.training.settings import Lora, Settings  # noqa: E402
from memagent_integrations.training.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.heavy


def test_a_batch_has_the_same_number_of_updates_however_long_the_documents_are(model: Path, tmp_path: Path) -> None:
    for length in (1, 3):
        training = trainer(
            model,
            tmp_path / str(length),
            steps=1,
            updates=3,
            draw=lambda number, share, length=length: drawn(number, length),
        )
        [metrics] = list(training.train())
        assert metrics["updates"] == 3
        assert metrics["steps_a_rollout"] == 5 * length + 1


def test_what_is_told_of_a_batch(model: Path, tmp_path: Path) -> None:
    training = trainer(model, tmp_path, steps=2, kl=0.01, lora=Lora(rank=4, alpha=8))
    list(training.train())
    first, second = read(tmp_path / "metrics.jsonl")
    assert first["step"] == 1
    assert 0 < first["reward"] < 1
    assert first["reward_deviation"] > 0
    assert first["gap"] < 1e-4  # sampling and training compute the same probabilities
    assert first["kl"] < second["kl"]  # it moves away from the start
    assert first["entropy"] > 0
    assert first["gradient_norm"] > 0
    assert {
        "collapsed",
        "failed",
        "answer_tokens",
        "memory_tokens",
        "kept",
        "cut",
        "clipped",
        "shared",
        "tokens_per_second",
    } <= set(first)


def test_the_gap_is_told_without_computing_the_rollouts_anew(model: Path, tmp_path: Path) -> None:
    [metrics] = list(trainer(model, tmp_path, steps=1, rescore=False).train())
    assert 0 < metrics["gap"] < 1e-4


def test_a_reading_is_saved_for_a_person_to_look_at(model: Path, tmp_path: Path) -> None:
    list(trainer(model, tmp_path, steps=2, readings_every=2).train())
    [saved] = (tmp_path / "readings").iterdir()
    reading = Reading.from_json(saved.read_text())
    assert saved.name == "step-000002.json"
    assert len(reading.steps) == 6


def test_the_policy_learns_what_is_rewarded(model: Path, tmp_path: Path) -> None:
    lines = list(trainer(model, tmp_path, steps=10, questions=4, group=8, learning_rate=3e-3).train())
    assert sum(line["reward"] for line in lines[-3:]) > 1.5 * sum(line["reward"] for line in lines[:3])


def test_activations_that_are_computed_anew_change_nothing(model: Path, tmp_path: Path) -> None:
    one, other = (
        trainer(model, tmp_path / str(flag), steps=2, share=False, gradient_checkpointing=flag)
        for flag in (False, True)
    )
    runs = [list(training.train()) for training in (one, other)]
    assert runs[1][0]["gap"] < 1e-4
    for line, expected in zip(*map(figures, runs), strict=True):
        assert line == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(weights(one), weights(other), atol=1e-6)


def test_only_the_adapter_learns(model: Path, tmp_path: Path) -> None:
    training = trainer(model, tmp_path, steps=1, lora=Lora(rank=2, alpha=4))
    before = {name: parameter.clone() for name, parameter in training.policy.model.named_parameters()}
    list(training.train())
    moved = {
        name for name, parameter in training.policy.model.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert moved
    assert all("lora_" in name for name in moved)


def test_groups_that_teach_nothing_are_replaced(model: Path, tmp_path: Path) -> None:
    positions: list[int] = []

    def watched(number: int, share: float) -> Any:
        positions.append(number)
        return draw(number, share)

    def half(reading: Any, question: Any) -> float:
        """The questions with an even key are always answered rightly."""
        return 1.0 if int(question.sample.question[1:]) % 2 == 0 else echo(reading, question)

    training = trainer(model, tmp_path, steps=1, dynamic=True, refills=5, reward=half, draw=watched)
    batch = training.collect(Sums())
    assert len(positions) > 4
    assert positions == list(range(len(positions)))
    assert len(batch.rollouts) == 4 * 4
    assert all(int(rollout.reading.question[1:]) % 2 for rollout in batch.rollouts)


def test_a_gradient_that_is_no_number_spoils_no_weights(model: Path, tmp_path: Path) -> None:
    training = trainer(model, tmp_path, steps=1, reward=lambda *read: 1e39 * echo(*read))  # more than a float32 holds
    before = weights(training)
    with pytest.raises(UsageError, match="the gradient of batch 1 is nan"):
        list(training.train())
    assert torch.equal(weights(training), before)


@pytest.mark.parametrize("scale", [False, True])
def test_a_batch_that_teaches_nothing_changes_nothing(model: Path, tmp_path: Path, scale: bool) -> None:
    training = trainer(model, tmp_path, steps=1, reward=lambda *_: 0.7, weight_decay=0.0, group=8, scale=scale)
    before = weights(training)
    [metrics] = list(training.train())
    assert metrics["collapsed"] == 1
    assert torch.equal(weights(training), before)


def test_an_evaluation_in_which_calls_failed_is_no_measure(model: Path, tmp_path: Path) -> None:
    class Broken(Sampler):
        def complete_batch(self, prompts: Any) -> Any:
            return super().complete_batch(prompts) if self.temperature else [BackendError("down") for _ in prompts]

    validation = {"near": [drawn(("v", number)) for number in range(2)]}
    [metrics] = list(trainer(model, tmp_path, kind=Broken, steps=1, evaluate_every=1, validation=validation).train())
    assert metrics["validation_failed"] == 1
    assert "validation" not in metrics
    assert not (tmp_path / "best").exists()


def test_the_learning_rate_falls_where_the_schedule_says_so(model: Path, tmp_path: Path) -> None:
    lines = list(trainer(model, tmp_path, steps=4, updates=1, schedule="linear").train())
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    with pytest.raises(UsageError, match="schedule has to be one of"):
        trainer(model, tmp_path, schedule="sometimes")


def test_the_best_policy_is_kept(model: Path, tmp_path: Path) -> None:
    validation = {"near": [drawn(("v", number)) for number in range(8)]}
    training = trainer(model, tmp_path, steps=2, evaluate_every=1, validation=validation)
    list(training.train())
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["validation"] == line["validation/near"] for line in lines)
    assert json.loads((tmp_path / "best" / "state.json").read_text())["progress"]["best"] == max(
        line["validation"] for line in lines
    )


def test_a_reader_without_a_sampler_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a Sampler"):
        Trainer(Reader(ScriptedBackend(["x"])), draw, Settings(), tmp_path)


def test_a_temperature_that_is_not_the_policys_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the settings say 0"):
        Trainer(reader_of(model), draw, Settings(temperature=0.5), tmp_path)


def test_layers_that_are_not_there_cannot_be_adapted(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no adapter can be added"):
        trainer(model, tmp_path, lora=Lora(targets=("nothing",)))


def test_weights_in_bfloat16_learn_through_masters_in_float32(model: Path, tmp_path: Path) -> None:
    for number, lora in enumerate((None, Lora(rank=2, alpha=4))):
        coarse = Reader(Sampler(model, dtype="bfloat16"))
        settings = Settings(**SMALL | {"lora": lora, "embeddings": False})
        training = Trainer(coarse, draw, settings, tmp_path / str(number))
        learning = trainable(training.policy.model)
        assert {parameter.dtype for parameter in learning.values()} == {torch.bfloat16}
        assert {master.dtype for master in training.optimizer.masters} == {torch.float32}
        assert not [name for name in learning if "embed" in name]


def test_memory_that_does_not_suffice_is_told_with_the_setting_to_lower(model: Path, tmp_path: Path) -> None:
    training = trainer(model, tmp_path, steps=1)
    batch = training.collect(Sums())

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    training.policy.model.register_forward_pre_hook(full)
    with pytest.raises(BackendError, match=r"tokens \(now 16,384\)"):
        training.learn(batch, Sums())
    with pytest.raises(BackendError, match="rollout_tokens"):
        training.collect(Sums())


def test_prompts_are_sampled_together_as_their_replies_fit(model: Path) -> None:
    sampler = Sampler(model, tokens=100)
    sampler.share = False
    widths: list[int] = []
    sampler.model.register_forward_pre_hook(
        lambda _, __, inputs: widths.append(inputs["input_ids"].shape[0]), with_kwargs=True
    )
    prompts = [
        Prompt(index=0, phase="memory", messages=(Message(role="user", content="k0 " * 10),), max_tokens=40)
        for _ in range(5)
    ]
    assert all(isinstance(reply, Sampled) for reply in sampler.complete_batch(prompts))
    assert max(widths) == 2


def test_a_folder_with_other_things_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match="a folder of its own"):
        trainer(model, tmp_path)
    assert (tmp_path / "policy" / "thesis.tex").read_text() == "years"
    with pytest.raises(UsageError, match="cannot write"):
        trainer(model, tmp_path / "policy" / "thesis.tex")


def test_two_trainings_do_not_write_into_one_folder(model: Path, tmp_path: Path) -> None:
    one, other = (trainer(model, tmp_path) for _ in range(2))
    going = one.train()
    next(going)
    with pytest.raises(UsageError, match="another training writes"):
        next(other.train())
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1]
    going.close()
    assert next(trainer(model, tmp_path).train())["step"] == 2


def test_a_policy_that_has_learned_begins_no_other_training(model: Path, tmp_path: Path) -> None:
    first = trainer(model, tmp_path / "first", steps=2)
    next(first.train())
    again = Trainer(first.reader, draw, first.settings, tmp_path / "first", reward=echo)
    assert again.progress.step == 1
    with pytest.raises(UsageError, match="load it anew"):
        Trainer(first.reader, draw, first.settings, tmp_path / "second", reward=echo)


def test_other_weights_or_other_data_are_another_training(model: Path, tmp_path: Path) -> None:
    next(trainer(model, tmp_path / "run").train())
    with pytest.raises(UsageError, match="weights: "):
        trainer(model_of(tmp_path / "other", 1), tmp_path / "run")
    reader = reader_of(model)
    with pytest.raises(UsageError, match="origin: "):
        Trainer(reader, draw, Settings(**SMALL | {"steps": 3}), tmp_path / "run", origin={"mixture": "another"})


def test_an_interrupted_batch_is_gone_on_with_by_a_new_trainer(model: Path, tmp_path: Path) -> None:
    """Interrupted between two updates of the first batch, before there is any checkpoint."""
    whole = list(trainer(model, tmp_path / "whole", steps=2).train())
    training = trainer(model, tmp_path / "parts", steps=2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = training.optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(training.train())
    hook.remove()
    with pytest.raises(UsageError, match="make a new Trainer"):
        list(training.train())
    again = Trainer(training.reader, draw, training.settings, tmp_path / "parts", reward=echo)
    assert figures(list(again.train()))[1] == pytest.approx(figures(whole)[1], abs=1e-6)


def test_a_question_that_cannot_be_read_is_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def long(number: int, share: float) -> Any:
        question = drawn(("train", number))
        return replace(question, sample=replace(question.sample, question="k0 " * 50)) if number in (1, 2) else question

    training = trainer(model, tmp_path, steps=1, draw=long)
    batch = training.collect(Sums())
    assert len(batch.rollouts) == 16
    assert caplog.text.count("is left out") == 2
    with pytest.raises(UsageError, match="of the validation far cannot be read"):
        list(trainer(model, tmp_path / "v", evaluate_every=1, validation={"far": [long(1, 0.0)]}).train())
    with pytest.raises(UsageError, match="question"):
        trainer(model, tmp_path / "all", draw=lambda number, share: long(1, share)).collect(Sums())


def test_an_adapter_of_another_shape_is_told(model: Path, tmp_path: Path) -> None:
    first = trainer(model, tmp_path / "first", lora=Lora(rank=2, alpha=4))
    first.policy.model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UsageError, match="rank 2 and alpha 4, the settings say 8 and 4"):
        trainer(model, tmp_path / "second", adapter=tmp_path / "adapter", lora=Lora(rank=8, alpha=4))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({f"other.{name}": weight for name, weight in load_file(weights).items()}, weights)
    with pytest.raises(UsageError, match="missing adapter keys"):
        trainer(model, tmp_path / "third", adapter=tmp_path / "adapter")
