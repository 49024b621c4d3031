"""A training by two processes makes what one process makes of the same questions."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from helpers.tiny_trainer import (  # noqa: E402
    WAIT,
    by_key,
    drawn,
    figures,
    join,
    letters,
    process,
    trainer,
    validation_set,
    weights,
)

from memagent_integrations.training.metrics import Sums, read  # noqa: E402
from memagent_integrations.training.sampler import Sampler  # noqa: E402
from memagent_integrations.training.settings import Lora  # noqa: E402
from memagent_integrations.training.trainer import Batch  # noqa: E402

pytestmark = pytest.mark.heavy


class Settled(Sampler):
    """A reply depends on its prompt and on how often that occurred in the batch, not on the other prompts."""

    def complete_batch(self, prompts: Sequence[Any]) -> list[Any]:
        if not self.temperature:
            return super().complete_batch(prompts)
        seen: Counter[str] = Counter()
        replies = []
        for prompt in prompts:
            text = f"{prompt.messages}"
            seen[text] += 1
            torch.manual_seed(random.Random(f"{text}/{seen[text]}").getrandbits(63))
            replies += super().complete_batch([prompt])
        return replies


def apart(number: int, share: float) -> Any:
    """Draw batches of four questions for four keys, so that no two share a prompt; the second process gets odd keys."""
    candidates = (drawn((number, seed)) for seed in count())
    return next(candidate for candidate in candidates if candidate.sample.question == f"k{number % 4}")


BOTH: dict[str, Any] = {
    "kind": Settled,
    "draw": apart,
    "steps": 2,
    "group": 2,
    "updates": 1,
    "learning_rate": 1e-4,
    "reward": letters,
}
CASES: dict[str, dict[str, Any]] = {
    "weights": BOTH
    | {
        "kl": 0.01,
        "evaluate_every": 2,
        "validation": {"one": validation_set("one", 1), "three": validation_set("three", 3)},
    },
    "adapter": BOTH | {"lora": Lora(rank=4, alpha=8), "overlong": 2, "scale": True},
    "one has nothing": BOTH | {"dynamic": True, "refills": 0, "reward": by_key},
}


def train(model: Path, folder: Path, accelerator: Any, case: str) -> Any:
    training = trainer(model, folder, accelerator=accelerator, **CASES[case])
    list(training.train())
    return weights(training)


def go_on(model: Path, folder: Path, accelerator: Any) -> Any:
    """Train with an interruption and without; one process needs more rounds of questions than the other."""
    settings = {
        "steps": 2,
        "group": 2,
        "kl": 0.01,
        "dynamic": True,
        "refills": 2,
        "reward": by_key,
        "accelerator": accelerator,
    }
    undisturbed = trainer(model, folder / "whole", **settings)
    list(undisturbed.train())
    next(trainer(model, folder / "parts", **settings).train())
    accelerator.wait_for_everyone()
    last = trainer(model, folder / "parts", **settings)
    list(last.train())
    return torch.stack([weights(undisturbed), weights(last)]), undisturbed.progress, last.progress


def learned(model: Path, folder: Path, accelerator: Any, batch: Path) -> Any:
    """Return the gradients of one update over the rollouts of a file; each process takes those of its questions."""
    training = trainer(model, folder, updates=1, max_grad_norm=1e9, accelerator=accelerator)
    gradients: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in training.policy.model.parameters()]))

    training.optimizer.register_step_pre_hook(keep)
    pairs = [
        pair
        for pair in pickle.loads(batch.read_bytes())
        if pair[0].group % accelerator.num_processes == accelerator.process_index
    ]
    training.learn(Batch(rollouts=[rollout for rollout, _ in pairs], advantages=[worth for _, worth in pairs]), Sums())
    [gradient] = gradients
    return gradient


def jobs(outputs: Path) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    return {
        **{case: (train, (case,)) for case in CASES},
        "learned": (learned, (outputs / "batch",)),
        "go on": (go_on, ()),
    }


def one_of_two(pipe: Any, rank: int, outputs: Path, model: Path) -> None:
    """Do all jobs together with the other process, and save the result of each."""
    accelerator = join(rank, outputs / "meeting")
    for name, (job, args) in jobs(outputs).items():
        torch.save(job(model, outputs / f"two {name}", accelerator, *args), outputs / f"{name} {rank}.pt")
        pipe.send(name)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def outputs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes made, in a folder; they are started once."""
    folder = tmp_path_factory.mktemp("made")
    batch = trainer(model, folder / "batch of one", reward=letters).collect(Sums())
    (folder / "batch").write_bytes(pickle.dumps(list(zip(batch.rollouts, batch.advantages, strict=True))))
    with ExitStack() as stack:
        both = [stack.enter_context(process(one_of_two, rank, folder, model)) for rank in range(2)]
        for name in jobs(folder):
            for _, pipe in both:
                assert pipe.poll(WAIT), f"nothing came of {name}"
                assert pipe.recv() == name
    return folder


def results(outputs: Path, name: str) -> list[Any]:
    """Those of both processes."""
    return [torch.load(outputs / f"{name} {rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_metrics_and_the_weights_of_one(
    model: Path, outputs: Path, tmp_path: Path, case: str
) -> None:
    alone = train(model, tmp_path, Accelerator(), case)
    for both in results(outputs, case):
        assert float((both - alone).abs().max()) < 1e-5
    lines, others = (figures(read(folder / "metrics.jsonl")) for folder in (tmp_path, outputs / f"two {case}"))
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, expected in zip(lines, others, strict=True):
        assert line == pytest.approx(expected, abs=1e-5)
    assert all(line["updates"] == 1 and line["gradient_norm"] > 0 for line in lines if "updates" in line)


def test_both_processes_have_the_same_weights(outputs: Path) -> None:
    for case in CASES:
        one, other = results(outputs, case)
        assert torch.equal(one, other)


def test_a_process_without_questions_evaluates_with_the_others(outputs: Path) -> None:
    lines = read(outputs / "two weights" / "metrics.jsonl")
    assert [line["step"] for line in lines if {"validation/one", "validation/three"} <= set(line)] == [0, 2]


def test_a_process_without_rollouts_waits_for_the_others(outputs: Path) -> None:
    """The questions of the second teach nothing: half of the groups are left, all of them in the first."""
    lines = read(outputs / "two one has nothing" / "metrics.jsonl")
    assert [line["collapsed"] for line in lines] == [0.5, 0.5]


def test_two_processes_have_the_gradients_of_one(model: Path, outputs: Path, tmp_path: Path) -> None:
    alone = learned(model, tmp_path, Accelerator(), outputs / "batch")
    for both in results(outputs, "learned"):
        assert float((both - alone).abs().max()) < 1e-5
        assert float((both - alone).norm() / alone.norm()) < 1e-5


def test_a_training_of_two_processes_goes_on(outputs: Path) -> None:
    (both_weights, whole, last), (other, *_) = results(outputs, "go on")
    assert torch.allclose(both_weights[0], both_weights[1], atol=1e-6)
    assert torch.equal(both_weights, other)
    assert whole == last
    assert whole.positions[0] != whole.positions[1]
    lines, others = (figures(read(outputs / "two go on" / name / "metrics.jsonl")) for name in ("whole", "parts"))
    assert len(lines) == len(others) == 2
    for line, expected in zip(lines, others, strict=True):
        assert line == pytest.approx(expected, abs=1e-6)
