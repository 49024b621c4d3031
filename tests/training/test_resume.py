"""A training that ended at any instant goes on as if it had not; one whose files are damaged says which of them."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from helpers.interrupted import assert_same, ran_through, survived_kills  # noqa: E402
from helpers.tiny_trainer import (  # noqa: E402
    WAIT,
    by_key,
    draw,
    process,
    reader_of,
    trainer,
    validation_set,
)
from safetensors.torch import load_file, save_file  # noqa: E402

from memagent_integrations.errors import UsageError  # noqa: E402
from memagent_integrations.training.checkpoints import Checkpoints, Progress, load  # noqa: E402
from memagent_integrations.training.metrics import read  # noqa: E402
from memagent_integrations.training.settings import Lora  # noqa: E402
from memagent_integrations.training.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.heavy

RICH = {
    "steps": 4,
    "learning_rate": 1e-2,
    "warmup": 3,
    "kl": 0.01,
    "lora": Lora(rank=4, alpha=8),
    "dynamic": True,
    "refills": 1,
    "evaluate_every": 1,
    "save_every": 2,
    "reward": by_key,
}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A training that nobody disturbed."""
    training = rich(model, tmp_path_factory.mktemp("whole"))
    list(training.train())
    return training


def rich(model: Path, folder: Path, **settings: Any) -> Trainer:
    """A trainer with everything that has a state."""
    return trainer(model, folder, **(RICH | {"validation": {"near": validation_set("near", 4)}} | settings))


def test_the_training_that_the_others_are_compared_with_has_a_state_to_lose(whole: Trainer) -> None:
    lines = read(whole.folder / "metrics.jsonl")
    assert len({line["learning_rate"] for line in lines[1:]}) > 1
    assert len({line["validation"] for line in lines}) > 1
    assert lines[-1]["kl"] > 1e-4
    assert whole.progress.positions[0] > 4 * 4  # groups were replaced
    assert whole.progress.step > 0


def test_a_training_goes_on_where_it_was_as_if_nothing_had_happened(model: Path, tmp_path: Path) -> None:
    undisturbed = trainer(model, tmp_path / "whole", steps=3)
    list(undisturbed.train())
    for _ in range(2):
        next(trainer(model, tmp_path / "parts", steps=3).train())
    last = trainer(model, tmp_path / "parts", steps=3)
    assert last.progress.step == 2
    list(last.train())
    assert_same(undisturbed, last)


def test_an_interrupted_training_with_everything_goes_on(model: Path, whole: Trainer, tmp_path: Path) -> None:
    """Before the first checkpoint, and one batch behind a checkpoint."""
    for batches in (1, 3):
        iterator = rich(model, tmp_path).train()
        for _ in range(batches):
            next(iterator)
        iterator.close()
    last = rich(model, tmp_path)
    assert last.progress.step == 2
    list(last.train())
    assert_same(whole, last)


def train_up_to(pipe: Any, model: Path, folder: Path, where: str, step: int) -> None:
    """Train until the training is there; say so, and wait."""
    updates: list[int] = []

    def here(point: str) -> None:
        if (point, training.progress.step) == (where, step):
            pipe.send(point)
            pipe.recv()

    def watched(number: int, share: float) -> Any:
        here("reading")
        return draw(number, share)

    def updating(*_: Any) -> None:
        updates.append(training.progress.step)
        if updates.count(step) == 2:
            here("updating")

    [first, *others] = validation_set("near", 4)
    document = first.sample.document

    def watched_document() -> Any:
        here("evaluating")
        return document()

    watching = replace(first, sample=replace(first.sample, document=watched_document))
    training = rich(model, folder, draw=watched, validation={"near": [watching, *others]})
    training.optimizer.register_step_pre_hook(updating)
    list(training.train())


def test_a_killed_training_with_everything_goes_on(model: Path, whole: Trainer, tmp_path: Path) -> None:
    """SIGKILL in evaluations before and after the first batch, while drawing questions, and between two updates."""
    for where, step in (("evaluating", 0), ("reading", 1), ("updating", 2), ("evaluating", 3)):
        with process(train_up_to, model, tmp_path, where, step) as (worker, pipe):
            assert pipe.poll(WAIT)
            assert pipe.recv() == where
            worker.kill()
            worker.join()
            assert worker.exitcode == -signal.SIGKILL
    last = rich(model, tmp_path)
    list(last.train())
    assert_same(whole, last)


def linear() -> Any:
    model = torch.nn.Linear(2, 2)
    model.device = torch.device("cpu")
    return model


def fill(model: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def filled(model: Any) -> float:
    """With what; one value, or the weights are not whole."""
    [value] = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    return float(value)


def write(folder: Path) -> None:
    """The weights of a start, of three checkpoints, and three times of the best."""
    model = linear()
    fill(model, 0)
    checkpoints = Checkpoints(folder=folder, fingerprint={}, model=model)
    checkpoints.start()
    for step in (1, 2, 3):
        fill(model, step)
        checkpoints.save(Progress(step=step), keep=1)
        checkpoints.keep_best(Progress(step=step, best=float(step)))


def test_a_checkpoint_with_the_old_name_of_its_progress_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(folder=tmp_path, fingerprint={}, model=linear())
    progress = Progress(step=3, positions=(5, 7), best=0.5)
    checkpoints.save(progress, keep=1)
    file = tmp_path / "checkpoints" / "step-000003" / "state.json"
    file.write_text(file.read_text().replace('"progress"', '"place"'))
    assert checkpoints.resume() == progress


def test_a_kill_between_any_two_renames_leaves_everything_whole(tmp_path: Path) -> None:
    order = ["start", "step", "best", "step", "away", "best", "step", "away", "best"]  # what is renamed
    for number in range(1, len(order) + 2):
        folder, done = tmp_path / str(number), order[: number - 1]
        assert ran_through(number, write, folder) is (number > len(order))
        model = linear()
        checkpoints = Checkpoints(folder=folder, fingerprint={}, model=model)
        progress = checkpoints.resume()
        assert (progress.step if progress else 0) == done.count("step")
        assert not progress or filled(model) == progress.step
        assert (folder / "best").exists() is ("best" in done)
        if "best" in done:
            load(model, folder / "best")
            assert filled(model) == done.count("best")
            assert json.loads((folder / "best" / "state.json").read_text())["progress"]["best"] == done.count("best")
        fill(model, 0)
        assert {value for weight in checkpoints.start().values() for value in weight.flatten().tolist()} == {0.0}


def short(model: Path, folder: Path) -> Trainer:
    sizes = {"steps": 2, "questions": 2, "group": 2, "save_every": 1}
    return rich(model, folder, dynamic=False, validation={"one": validation_set("one", 1)}, **sizes)


def test_a_training_that_was_killed_at_any_rename_goes_on(model: Path, tmp_path: Path) -> None:
    assert survived_kills(short, model, tmp_path) > 3  # the start, the best, two checkpoints


def test_a_checkpoint_that_was_not_finished_is_not_gone_on_from(model: Path, tmp_path: Path) -> None:
    list(trainer(model, tmp_path, steps=2).train())
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-000003.new").mkdir()
    assert trainer(model, tmp_path, steps=2).progress.step == 2
    assert sorted(path.name for path in checkpoints.iterdir() if path.suffix != ".new") == [
        "step-000001",
        "step-000002",
    ]


def test_a_training_with_other_settings_is_not_gone_on_with(model: Path, tmp_path: Path) -> None:
    list(trainer(model, tmp_path, steps=1).train())
    with pytest.raises(UsageError, match=r"learning_rate: 0\.001, now 0\.01"):
        trainer(model, tmp_path, learning_rate=0.01)
    assert trainer(model, tmp_path, steps=7, save_every=3).progress.step == 1


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def narrower(file: Path) -> None:
    """Weights of a smaller model, which would fit by repeating them."""
    save_file({name: weight[:1].clone() for name, weight in load_file(file).items()}, file)


def fewer(file: Path) -> None:
    save_file(dict(list(load_file(file).items())[1:]), file)


def more(file: Path) -> None:
    save_file(load_file(file) | {"another": torch.zeros(1)}, file)


def another(file: Path) -> None:
    torch.save({"optimizer": {"state": {}, "param_groups": []}, "scheduler": {}}, file)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "half of the optimizer": ("learner.pt", halved, "cannot read"),
    "an empty optimizer": ("learner.pt", lambda file: file.write_bytes(b""), "cannot read"),
    "no optimizer": ("learner.pt", Path.unlink, "cannot read"),
    "another optimizer": (
        "learner.pt",
        lambda file: torch.save({"optimizer": {"state": {}, "param_groups": []}, "scheduler": {}}, file),
        "cannot read",
    ),
    "a file without it": ("learner.pt", lambda file: torch.save({}, file), "cannot read"),
    "no weights": ("weights.safetensors", Path.unlink, "cannot read"),
    "half of the weights": ("weights.safetensors", halved, "cannot read"),
    "weights of other shapes": ("weights.safetensors", narrower, "holds no weights of this model"),
    "fewer weights": ("weights.safetensors", fewer, "holds no weights of this model"),
    "more weights": ("weights.safetensors", more, "holds no weights of this model"),
    "half a state": ("state.json", halved, "cannot read"),
    "no state": ("state.json", Path.unlink, "cannot read"),
    "a state of nothing": ("state.json", lambda file: file.write_text("{}"), "cannot read"),
    "a state that is a list": ("state.json", lambda file: file.write_text("[]"), "cannot read"),
    "a state that is no text": ("state.json", lambda file: file.write_bytes(b"\xff\xfe\x00"), "cannot read"),
}


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    list(short(model, folder).train())
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_without_it_the_training_goes_on(
    model: Path, trained: Path, tmp_path: Path, name: str
) -> None:
    file, damage, message = DAMAGES[name]
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    damaged = folder / "checkpoints" / "step-000002"
    damage(damaged / file)
    with pytest.raises(UsageError, match=message) as raised:
        short(model, folder)
    assert str(damaged / file) in str(raised.value)
    shutil.rmtree(damaged)
    assert short(model, folder).progress.step == 1


@pytest.mark.parametrize("file", ["weights.safetensors", "state.json"])
def test_a_damaged_start_is_named_and_made_again_without_it(
    model: Path, trained: Path, tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    halved(folder / "start" / file)
    with pytest.raises(UsageError, match=file):
        short(model, folder)
    shutil.rmtree(folder / "start")
    again = short(model, folder).reference
    before = load_file(trained / "start" / "weights.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_weights_that_cannot_be_loaded_leave_the_model_as_it_was(model: Path, tmp_path: Path) -> None:
    policy = reader_of(model).backend.model
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    save_file(
        {name: torch.zeros_like(weight) for name, weight in list(before.items())[:-1]}, tmp_path / "weights.safetensors"
    )
    with pytest.raises(UsageError, match="holds no weights of this model"):
        load(policy, tmp_path)
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())
