"""A training from the command line, end to end: a warm start, batches, a picture, a policy that is read with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("wonderwords")

from helpers.command_line import run as memagent
from helpers.tiny_gguf import make_folder
from typer.testing import Result

from memagent_integrations.reader import Reader
from memagent_integrations.training.metrics import read

pytestmark = pytest.mark.heavy

MIXTURE = """
[[task]]
name = "niah_single_1"
lengths = [400]
"""
RECIPE = """
model = "transformers:{model}"
mixture = "mixture.toml"
{more}
[budgets]
chunk_tokens = 250
memory_tokens = 60
output_tokens = 8
question_tokens = 200

[training]
steps = 2
questions = 2
group = 2
updates = 1
learning_rate = 1e-3
warmup = 0
evaluate_every = 1
readings_every = 2

[training.lora]
rank = 4
alpha = 8

[sft]
readings = 3
passes = 1
batch = 4
learning_rate = 1e-2

[[validation]]
name = "niah_single_1"
lengths = [400]
samples = 2
"""


def recipe(folder: Path, model: Path, more: str = "") -> Path:
    (folder / "mixture.toml").write_text(MIXTURE)
    (folder / "recipe.toml").write_text(RECIPE.format(model=model, more=more))
    return folder / "recipe.toml"


def train(*arguments: object) -> Result:
    return memagent("train", *arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=4096)


def imitated(model: Path, folder: Path) -> Path:
    """Train on demonstrations, and return the adapter."""
    done = train("sft", recipe(folder, model), "--output", folder / "sft")
    assert done.exit_code == 0, done.output
    return folder / "sft" / "policy" / "adapter"


def test_from_demonstrations_to_a_policy(model: Path, tmp_path: Path) -> None:
    folder, path = tmp_path / "sft", tmp_path / "recipe.toml"
    adapter = imitated(model, tmp_path)
    assert (adapter / "adapter_model.safetensors").is_file()
    lines = read(folder / "metrics.jsonl")
    steps = len(lines) - 1
    assert [line["step"] for line in lines] == list(range(steps + 1))
    assert all("validation/niah_single_1@400" in line for line in (lines[0], lines[-1]))
    assert lines[-1]["loss"] < lines[1]["loss"]
    card = (folder / "policy" / "README.md").read_text()
    assert f"- steps: {steps}" in card
    assert f"- loss: {lines[1]['loss']:.4g} in the first step" in card
    assert "- passes: 1" in card

    again = train("sft", path, "--output", folder)
    assert again.exit_code == 0, again.output
    assert f"policy:{folder / 'policy'}" in again.output
    assert read(folder / "metrics.jsonl") == lines

    path.write_text(path.read_text().replace("passes = 1", "passes = 2"))
    more = train("sft", path, "--output", folder)
    assert more.exit_code == 0, more.output
    longer = read(folder / "metrics.jsonl")
    assert longer[: steps + 1] == lines
    assert longer[-1]["step"] > steps
    assert "- passes: 2" in (folder / "policy" / "README.md").read_text()

    plot = train("plot", folder)
    assert plot.exit_code == 0, plot.output
    assert (folder / "curves.png").is_file()

    for old, new, message in (("readings = 3", "readings = 4", "readings: 3, now 4"), ("400", "300", "origin: ")):
        path.write_text(path.read_text().replace(old, new))
        refused = train("sft", path, "--output", folder)
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())


def test_from_nothing_to_a_policy_that_reads(model: Path, tmp_path: Path) -> None:
    adapter = imitated(model, tmp_path)
    run = train("run", tmp_path / "recipe.toml", "--adapter", adapter, "--output", tmp_path / "run")
    assert run.exit_code == 0, run.output
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all("validation/niah_single_1@400" in line for line in lines)
    assert lines[1]["shared"] > 0.3  # the rollouts of a question begin with the same section
    assert f"policy:{tmp_path / 'run' / 'policy'}" in run.output
    assert len(list((tmp_path / "run" / "readings").iterdir())) == 1

    card = (tmp_path / "run" / "policy" / "README.md").read_text()
    assert "niah_single_1" in card
    assert json.loads((tmp_path / "run" / "policy" / "memagent.json").read_text())["budgets"]["chunk_tokens"] == 250
    with Reader(f"policy:{tmp_path / 'run' / 'policy'}") as reader:
        [reading] = reader.read_many([("What is it?", "A short text.")])
        assert reading.steps

    longer = tmp_path / "recipe.toml"
    longer.write_text(longer.read_text().replace("steps = 2", "steps = 3"))
    more = train("run", longer, "--adapter", adapter, "--output", tmp_path / "run")
    assert more.exit_code == 0, more.output
    assert "- steps: 3" in (tmp_path / "run" / "policy" / "README.md").read_text()

    plot = train("plot", tmp_path / "run")
    assert plot.exit_code == 0, plot.output
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 2", "stepps = 2", "no key 'stepps' in training"),
        ('model = "transformers:', 'model = "openai:', "transformers:NAME"),
        ('mixture = "mixture.toml"', 'mixture = "missing.toml"', "missing.toml"),
        ("group = 2", "group = 1", "group"),
        ("samples = 2", "samples = 0", "samples"),
        (
            '[[validation]]\nname = "niah_single_1"\nlengths = [400]',
            '[[validation]]\nname = "niah_single_1"',
            "needs lengths, in tokens",
        ),
        ("samples = 2", "samples = 2\n[[validation]]\nname = 'niah_single_1'\nlengths = [800]", "stands there twice"),
        ("lengths = [400]\nsamples", "lengths = [-5]\nsamples", "length has to be"),
        ("steps = 2", "steps = 2\nschedule = 'sometimes'", "schedule"),
        ("passes = 1", "passes = 0", "passes"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_before_a_model_is_loaded(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = recipe(tmp_path, tmp_path / "no model")
    path.write_text(path.read_text().replace(old, new))
    for command in ("run", "sft"):
        refused = train(command, path, "--output", tmp_path / command)
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())


def test_demonstrations_go_on_with_an_adapter(model: Path, tmp_path: Path) -> None:
    adapter = imitated(model, tmp_path)
    more = train("sft", tmp_path / "recipe.toml", "--adapter", adapter, "--output", tmp_path / "more")
    assert more.exit_code == 0, more.output
    first, second = (read(tmp_path / name / "metrics.jsonl")[1]["loss"] for name in ("sft", "more"))
    assert second < first


def test_an_adapter_goes_on_being_trained_and_trackers_are_told_of_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward function lies in the folder of the command, and the recipe does not repeat the adapter's rank."""
    imitated(model, tmp_path)
    path = recipe(
        tmp_path, model, 'trackers = ["tensorboard"]\nreward = "own_rewards:short"\nadapter = "sft/policy/adapter"'
    )
    path.write_text(path.read_text().replace("[training.lora]\nrank = 4\nalpha = 8\n", "[training.clip]\ndual = inf\n"))
    (tmp_path / "own_rewards.py").write_text(
        "def short(reading, drawn):\n    return 1 / (1 + len(reading.answer or ''))\n"
    )
    monkeypatch.chdir(tmp_path)
    run = train("run", path, "--output", tmp_path / "run", "--reward", "own_rewards:short")
    assert run.exit_code == 0, run.output
    assert 0 < read(tmp_path / "run" / "metrics.jsonl")[1]["reward"] < 1
    assert (tmp_path / "run" / "policy" / "adapter" / "adapter_model.safetensors").is_file()
    assert any(b"gradient_norm" in events.read_bytes() for events in (tmp_path / "run" / "memagent").glob("events.*"))


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    refused = train(
        *("run", recipe(tmp_path, tmp_path / "no model", 'trackers = ["crystal"]')),
        *("--tracker", "crystal", "--output", tmp_path / "run"),
    )
    assert refused.exit_code == 2
    assert "no tracker 'crystal'" in " ".join(refused.output.split())


def test_a_folder_without_a_training_cannot_be_drawn(tmp_path: Path) -> None:
    refused = train("plot", tmp_path)
    assert refused.exit_code == 2
    assert "no metrics" in refused.output


def test_metrics_that_are_none_are_told_with_their_line(tmp_path: Path) -> None:
    for wrong in (
        b'{"step": 1}\n{"step"\n',
        b'{"step": 1}\n5\n',
        b'{"step": 1}\n{"reward": 1}\n',
        b'{"step": 1}\n\xff\n',
        b'{"step": 1}\n\n',
    ):
        (tmp_path / "metrics.jsonl").write_bytes(wrong)
        refused = train("plot", tmp_path)
        assert refused.exit_code == 2
        assert "line 2 is no line of metrics" in " ".join(refused.output.split())


def test_where_a_policy_cannot_be_written_is_told_before_the_work(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "warm"
    refused = train("sft", recipe(tmp_path, tmp_path / "no model"), "--output", folder)
    assert refused.exit_code == 2
    assert f"cannot write {str(folder)!r}" in refused.output


def test_the_command_line_is_a_module_for_launchers() -> None:
    command = [sys.executable, "-m", "memagent_integrations", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("memagent ")
