"""Training on demonstrations: what is shown when, what is computed, and that it goes on after a kill."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from helpers.interrupted import assert_same, survived_kills  # noqa: E402
from helpers.tiny_trainer import (  # noqa: E402
    TASK,
    WAIT,
    constructed,
    fact,
    figures,
    join,
    process,
    reader_of,
    validation_set,
)

from memagent_integrations.backends import ScriptedBackend  # noqa: E402
from memagent_integrations.errors import ContextOverflow, UsageError  # noqa: E402
from memagent_integrations.evaluation.samples import Sample, Task  # noqa: E402
from memagent_integrations.reader import Reader  # noqa: E402
from memagent_integrations.records import Message  # noqa: E402
from memagent_integrations.training import plots, sft  # noqa: E402
from memagent_integrations.training.demonstrations import Example  # noqa: E402
from memagent_integrations.training.metrics import read  # noqa: E402
from memagent_integrations.training.settings import Lora, Settings  # noqa: E402
from memagent_integrations.training.sft import SftSettings, SftTrainer  # noqa: E402

pytestmark = pytest.mark.heavy

EXAMPLES = 24
RICH = {
    "passes": 2,
    "batch": 12,
    "learning_rate": 1e-2,
    "schedule": "cosine",
    "warmup": 1,
    "weight_decay": 0.01,
    "evaluate_every": 1,
    "save_every": 2,
    "training": Settings(lora=Lora(rank=4, alpha=8)),
}


def trainer(model: Path, folder: Path, examples: list[Example] | None = None, **settings: Any) -> SftTrainer:
    """Return a trainer on demonstrations of a model of `model_of`; `settings` are of `SftSettings` and `SftTrainer`."""
    names = ("training", "validation", "accelerator", "origin")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    arguments.setdefault("training", Settings(embeddings=True))
    merged = {"batch": 12, "learning_rate": 1e-3, "evaluate_every": 0, "save_every": 1} | settings
    reader = reader_of(model)
    shown = list(islice(constructed(reader, 4, 0), EXAMPLES)) if examples is None else examples
    return SftTrainer(reader, shown, SftSettings(**merged), folder, **arguments)


def rich(model: Path, folder: Path, **settings: Any) -> SftTrainer:
    """A trainer with everything that has a state."""
    return trainer(model, folder, **(RICH | {"validation": {"near": validation_set("near", 4)}} | settings))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> SftTrainer:
    """A training that nobody disturbed."""
    training = rich(model, tmp_path_factory.mktemp("whole"))
    list(training.train())
    return training


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The replies and prompts of each step that is done, as they are dealt to the processes."""
    steps: list[list[tuple[str, tuple[int, ...]]]] = []
    deal = sft.deal

    def watched(rows: Any, *args: Any, **options: Any) -> Any:
        steps.append([(row.text, tuple(row.prompt_ids)) for row in rows])
        return deal(rows, *args, **options)

    monkeypatch.setattr(sft, "deal", watched)
    return steps


def about_sections(sections: int, questions: int, phase: Any = "memory") -> list[Example]:
    """Every question about every section; a prompt begins with its section, of 80 tokens."""
    return [
        Example(
            messages=(Message(role="user", content=fact(section, section) * 80 + f" question k{question}"),),
            target=f"v{(section + question) % 4}",
            phase=phase,
        )
        for question in range(questions)
        for section in range(sections)
    ]


def gradients_of(training: SftTrainer) -> torch.Tensor:
    """Return the gradients of a step as its optimizer gets them."""
    return torch.cat([parameter.grad.flatten() for parameter in training.policy.model.parameters()])


def test_every_reply_is_shown_in_every_pass_and_in_another_order(
    model: Path, tmp_path: Path, shown: list[list[Any]]
) -> None:
    lines = list(trainer(model, tmp_path / "one", passes=3, batch=9).train())
    assert [len(step) for step in shown] == [9] * 8
    assert len(lines) == 8
    replies = [reply for step in shown for reply in step]
    passes = [replies[start : start + EXAMPLES] for start in range(0, len(replies), EXAMPLES)]
    assert len(passes) == 3
    assert len({tuple(one) for one in passes}) == 3
    assert len({frozenset(Counter(one).items()) for one in passes}) == 1
    shown.clear()
    list(trainer(model, tmp_path / "two", passes=3, batch=9).train())
    assert [reply for step in shown for reply in step] == replies
    shown.clear()
    training = Settings(embeddings=True, seed=1)
    list(trainer(model, tmp_path / "three", passes=3, batch=9, training=training).train())
    assert [reply for step in shown for reply in step] != replies


def test_the_first_pass_begins_with_the_lower_stages(model: Path, tmp_path: Path, shown: list[list[Any]]) -> None:
    examples = [
        Example(messages=(Message(role="user", content=f"k{number % 4}"),), target=f"v{number % 3}", phase="memory")
        for number in range(12)
    ]
    staged = [replace(example, target="v3", stage=1) if n < 6 else example for n, example in enumerate(examples)]
    list(trainer(model, tmp_path, staged, passes=2, batch=6).train())
    late = [sum(reply == "v3" for reply, _ in step) for step in shown]
    assert late[:2] == [0, 6]
    assert late[2] not in (0, 6)


def test_questions_about_one_section_are_shown_together(model: Path, tmp_path: Path, shown: list[list[Any]]) -> None:
    lines = list(trainer(model, tmp_path / "updates", about_sections(4, 3), batch=6).train())
    assert [len({prompt[:80] for _, prompt in step}) for step in shown] == [2, 2]
    assert all(line["shared"] > 0.6 for line in lines)
    shown.clear()
    list(trainer(model, tmp_path / "answers", about_sections(4, 3, "answer"), batch=3).train())
    assert max(len({prompt[:80] for _, prompt in step}) for step in shown) > 1


def test_a_section_computed_once_gives_the_same_loss_and_gradients(model: Path, tmp_path: Path) -> None:
    gradients, lines = {}, {}
    for share in (True, False):
        training = trainer(model, tmp_path / str(share), about_sections(2, 4), batch=8, share=share)

        def keep(*_: Any, share: bool = share, training: SftTrainer = training) -> None:
            gradients[share] = gradients_of(training)

        training.optimizer.register_step_pre_hook(keep)
        [lines[share]] = list(training.train())
    assert lines[True]["shared"] > 0.6
    assert lines[False]["shared"] == 0
    assert lines[True]["loss"] == pytest.approx(lines[False]["loss"], abs=1e-5)
    assert torch.allclose(gradients[True], gradients[False], atol=1e-5)


def test_the_loss_is_the_mean_over_the_tokens_of_the_replies(model: Path, tmp_path: Path) -> None:
    [line] = list(trainer(model, tmp_path / "all", batch=EXAMPLES).train())
    alone = trainer(model, tmp_path / "alone", batch=1, learning_rate=1e-12)
    rows, each = alone._rows, [step["loss"] for step in alone.train()]
    lengths = [len(rows[number].output_ids) for number in alone._order]
    expected = sum(loss * length for loss, length in zip(each, lengths, strict=True)) / sum(lengths)
    assert line["loss"] == pytest.approx(expected, abs=1e-4)
    assert line["tokens"] == sum(len(row.prompt_ids) + len(row.output_ids) for row in rows)


def test_it_learns_what_it_is_shown(model: Path, tmp_path: Path) -> None:
    lines = list(trainer(model, tmp_path, passes=10).train())
    assert lines[-1]["loss"] < lines[0]["loss"] / 2


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant_with_warmup", [0, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3]),
        ("linear", [0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4]),
        ("cosine", [0, 5e-4, 1e-3, 8.5355e-4, 5e-4, 1.4645e-4]),
    ],
)
def test_the_learning_rate_follows_the_schedule(model: Path, tmp_path: Path, schedule: str, rates: list[float]) -> None:
    lines = list(trainer(model, tmp_path, passes=3, schedule=schedule, warmup=2).train())
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates, abs=1e-7)


def test_the_metrics_are_written_and_drawn(whole: SftTrainer, tmp_path: Path) -> None:
    lines = read(whole.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert {"validation", "validation/near", "validation_failed"} == set(lines[0]) - {"step"}
    for line in lines[1:]:
        assert {"loss", "tokens", "tokens_per_second", "learn_seconds", "learning_rate", "gradient_norm"} <= set(line)
        assert line["validation"] == line["validation/near"]
    assert len({line["validation"] for line in lines}) > 1
    plots.curves(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_policy_is_kept(whole: SftTrainer) -> None:
    lines = read(whole.folder / "metrics.jsonl")
    assert whole.progress.best == max(line["validation"] for line in lines)
    assert (whole.folder / "best" / "weights.safetensors").is_file()


def test_of_equal_scores_the_later_policy_is_kept(model: Path, tmp_path: Path) -> None:
    """A policy that answers nothing right, before and after, is the trained one."""

    class Never(Task):
        def score(self, answer: str, sample: Sample, *, reply: str | None = None) -> float:
            return 0.0

    never = Never(name="never", metric="em", make=TASK.make, unit=None)
    validation = {"never": [replace(question, task=never) for question in validation_set("never", 1)]}
    list(rich(model, tmp_path, passes=1, validation=validation).train())
    assert json.loads((tmp_path / "best" / "state.json").read_text())["progress"]["step"] == 2


def test_it_is_evaluated_as_often_as_the_settings_say_and_at_the_end(model: Path, tmp_path: Path) -> None:
    lines = list(rich(model, tmp_path, passes=3, batch=14, evaluate_every=4).train())
    assert [line["step"] for line in lines if "validation" in line] == [4, 6]


def test_an_interrupted_training_goes_on_as_if_nothing_had_happened(
    model: Path, whole: SftTrainer, tmp_path: Path
) -> None:
    """Before the first checkpoint, and one step behind a checkpoint."""
    for steps in (1, 3):
        iterator = rich(model, tmp_path).train()
        for _ in range(steps):
            next(iterator)
        iterator.close()
    last = rich(model, tmp_path)
    assert last.progress.step == 2
    list(last.train())
    assert_same(whole, last)


def train_up_to(pipe: Any, model: Path, folder: Path, where: str, step: int) -> None:
    """Train until the training is there; say so, and wait."""

    def here(point: str) -> None:
        if (point, training.progress.step) == (where, step):
            pipe.send(point)
            pipe.recv()

    [first, *others] = validation_set("near", 4)
    document = first.sample.document

    def watched_document() -> Any:
        here("evaluating")
        return document()

    watching = replace(first, sample=replace(first.sample, document=watched_document))
    training = rich(model, folder, validation={"near": [watching, *others]})
    training.optimizer.register_step_pre_hook(lambda *_: here("updating"))
    training.optimizer.register_step_post_hook(lambda *_: here("updated"))
    list(training.train())


def test_a_killed_training_goes_on(model: Path, whole: SftTrainer, tmp_path: Path) -> None:
    """SIGKILL in evaluations before and after the first step, before an update and after one."""
    for where, step in (("evaluating", 0), ("updating", 1), ("evaluating", 2), ("updated", 3)):
        with process(train_up_to, model, tmp_path, where, step) as (worker, pipe):
            assert pipe.poll(WAIT)
            assert pipe.recv() == where
            worker.kill()
            worker.join()
            assert worker.exitcode == -signal.SIGKILL
    last = rich(model, tmp_path)
    assert last.progress.step == 2
    list(last.train())
    assert_same(whole, last)


def short(model: Path, folder: Path) -> SftTrainer:
    return rich(model, folder, passes=1, save_every=1, validation={"one": validation_set("one", 1)})


def test_a_training_that_was_killed_at_any_rename_goes_on(model: Path, tmp_path: Path) -> None:
    assert survived_kills(short, model, tmp_path) > 3  # the start, the best, two checkpoints


def test_an_interrupted_step_is_gone_on_with_by_a_new_trainer(model: Path, tmp_path: Path) -> None:
    training = trainer(model, tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = training.optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(training.train())
    hook.remove()
    with pytest.raises(UsageError, match="make a new SftTrainer"):
        list(training.train())


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "learning rate": (lambda: {"learning_rate": 0.1}, r"learning_rate: 0\.001, now 0\.1"),
    "batch": (lambda: {"batch": 8}, "batch: 12, now 8"),
    "seed": (lambda: {"training": Settings(embeddings=True, seed=1)}, "seed: 0, now 1"),
    "demonstrations": (lambda: {"examples": about_sections(2, 2)}, "demonstrations: "),
    "origin": (lambda: {"origin": {"mixture": "another"}}, "origin: "),
}


@pytest.fixture(scope="module")
def begun(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    next(trainer(model, folder).train())
    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_another_training_is_not_gone_on_with(model: Path, begun: Path, name: str) -> None:
    settings, message = OTHERS[name]
    with pytest.raises(UsageError, match=message):
        trainer(model, begun, **settings())


def test_a_training_is_extended_by_more_passes(model: Path, tmp_path: Path) -> None:
    list(trainer(model, tmp_path / "parts", passes=1).train())
    more = trainer(model, tmp_path / "parts", passes=2, save_every=5)
    assert more.progress.step == 2
    list(more.train())
    undisturbed = trainer(model, tmp_path / "whole", passes=2)
    list(undisturbed.train())
    assert_same(undisturbed, more)


def test_two_trainings_do_not_write_into_one_folder(model: Path, tmp_path: Path) -> None:
    one, other = (trainer(model, tmp_path) for _ in range(2))
    going = one.train()
    next(going)
    with pytest.raises(UsageError, match="another training writes"):
        next(other.train())
    going.close()


def test_demonstrations_that_cannot_be_shown_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no demonstrations"):
        trainer(model, tmp_path, [])
    long = Example(messages=(Message(role="user", content="k0 " * 300),), target="v0", phase="memory")
    with pytest.raises(ContextOverflow):
        trainer(model, tmp_path, [long])
    with pytest.raises(UsageError, match="a Sampler"):
        SftTrainer(Reader(ScriptedBackend(["x"])), [], SftSettings(), tmp_path)


@pytest.mark.parametrize("wrong", [{"passes": 0}, {"batch": 0}, {"warmup": -1}, {"schedule": "sometimes"}, {"keep": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SftSettings(**wrong)


def two(accelerator: Accelerator | None, model: Path, folder: Path) -> Iterator[SftTrainer]:
    """Trainings on rows that share a section and rows that share nothing."""
    few = {"learning_rate": 1e-5, "accelerator": accelerator}
    yield trainer(model, folder / "sections", about_sections(2, 3), batch=6, passes=2, **few)
    validation = {"three": validation_set("three", 3)}
    yield trainer(model, folder / "readings", batch=7, evaluate_every=1, validation=validation, **few)


def trained(training: SftTrainer) -> tuple[list[dict[str, float]], list[float]]:
    """Return the metrics, and the gradients of the last step: AdamW makes large updates of tiny gradients."""
    gradients: list[torch.Tensor] = []
    training.optimizer.register_step_pre_hook(lambda *_: gradients.append(gradients_of(training)))
    lines = figures(list(training.train()))
    return lines, gradients[-1].tolist()


def half(pipe: Any, rank: int, model: Path, folder: Path) -> None:
    for training in two(join(rank, folder / "meeting"), model, folder):
        pipe.send(trained(training))


def test_two_processes_make_what_one_makes(model: Path, tmp_path: Path) -> None:
    with process(half, 0, model, tmp_path) as (_, first), process(half, 1, model, tmp_path) as (_, second):
        for training in two(None, model, tmp_path / "alone"):
            lines, gradients = trained(training)
            for pipe in (first, second):
                assert pipe.poll(WAIT)
                others, received = pipe.recv()
                assert torch.allclose(torch.tensor(received), torch.tensor(gradients), atol=1e-5)
                for line, other in zip(lines, others, strict=True):
                    assert {**line, "shared": 0} == pytest.approx({**other, "shared": 0}, abs=1e-4)
