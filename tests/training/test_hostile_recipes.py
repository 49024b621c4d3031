"""Recipes that somebody else made, in a folder with other things of theirs: they run no code and send nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

from helpers.command_line import run
from helpers.fuzz import one_in
from helpers.hostile import CANARY, corrupted, watched
from hypothesis import given
from typer.testing import Result

from memagent_integrations import MemAgentError, UsageError
from memagent_integrations.training import Given, Mixture, Recipe

pytestmark = pytest.mark.heavy

CODE = f"open('{CANARY}', 'w')\n"
RECIPE = 'mixture = "mixture.toml"\n'
MIXTURE = '[[task]]\nname = "niah_single_1"\nlengths = [400]\n'
SERVER = "[server]\nbase_url = '{}'\n"
ATTACKS = {  # what stands in the recipe, and what the error says
    "code beside": ('model = "smollm2"\nreward = "evil_canary:reward"', "--reward evil_canary:reward"),
    "code of the standard library": ('model = "smollm2"\nreward = "os:system"', "--reward os:system"),
    "code in a package": ('model = "smollm2"\nreward = "evil.canary:reward"', "--reward evil.canary:reward"),
    "code in another form": ('model = "smollm2"\nreward = "evil_canary"', "--reward evil_canary"),
    "a model of the hub": ('model = "transformers:evil/model"', "--model transformers:evil/model"),
    "a model of the hub without a user": ('model = "transformers:evil"', "--model transformers:evil"),
    "a model with a revision": ('model = "transformers:evil/model@main"', "--model transformers:evil/model@main"),
    "a model with an end of line": ('model = "transformers:evil/model\\n"', "has fetched"),
    "a model of a share": ("model = 'transformers:\\\\evil\\model'", "has fetched"),
    "a folder with code": ('model = "transformers:model"', "may run code"),
    "a folder with code by its path": ('model = "transformers:{here}/model"', "may run code"),
    "a folder with pickles": ('model = "transformers:pickled"', "pytorch_model.bin may run code"),
    "a linked folder with code": ('model = "transformers:linked"', "may run code"),
    "a server of models": ('model = "openai:m"', "transformers:NAME or one of"),
    "a model of llama.cpp": ('model = "llamacpp:evil.gguf"', "transformers:NAME or one of"),
    "a policy": ('model = "policy:policy"', "transformers:NAME or one of"),
    "an adapter of pickles": ('model = "smollm2"\nadapter = "pickled"', "may run code"),
    "an adapter that is a model": ('model = "smollm2"\nadapter = "model"', "may run code"),
    "an adapter that is a link": ('model = "smollm2"\nadapter = "linked"', "no link"),
    "an adapter of the hub": ('model = "smollm2"\nadapter = "evil/adapter"', "has to be a folder"),
    "a server": ('model = "smollm2"\n' + SERVER.format("http://127.0.0.1:9/v1"), "--base-url http://127.0.0.1:9/v1"),
    "a server on the net": ('model = "smollm2"\n' + SERVER.format("https://evil.example/v1"), "OPENAI_API_KEY"),
    "a server with a folder": (
        'model = "smollm2"\n' + SERVER.format("http://127.0.0.1:9/v1") + f'folder = "/etc/{CANARY}"',
        "--base-url",
    ),
    "a server with a key": ('model = "smollm2"\n' + SERVER.format("http://e/v1") + 'api_key = "sk"', "'api_key'"),
    "a service": ('model = "smollm2"\ntrackers = ["wandb"]', "--tracker wandb"),
    "a service beside a file": ('model = "smollm2"\ntrackers = ["tensorboard", "comet_ml"]', "--tracker comet_ml"),
    "all services": ('model = "smollm2"\ntrackers = ["all"]', "--tracker all"),
    "remote code": ('model = "transformers:model"\ntrust_remote_code = true', "'trust_remote_code'"),
    "options": ('model = "smollm2"\nbackend_options = {{trust_remote_code = true}}', "'backend_options'"),
    "an optimizer of another": ('model = "smollm2"\n[training]\noptimizer = "evil_canary:Optimizer"', "'optimizer'"),
    "a kind of adapter": ('model = "smollm2"\n[training.lora]\nmegatron_core = "evil_canary"', "'megatron_core'"),
    "a mixture that is no file": ('model = "smollm2"\nmixture = "/dev/zero"', "no regular file"),
    "questions that are no file": ('model = "smollm2"\n[[validation]]\nname = "jsonl:/dev/zero"', "no regular file"),
}


@pytest.fixture(autouse=True)
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in the folder that was sent."""
    for folder in ("model", "pickled"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text('{"model_type": "evil"}')
    (tmp_path / "model" / "evil_canary.py").write_text(CODE)
    (tmp_path / "pickled" / "pytorch_model.bin").write_text(CODE)
    (tmp_path / "linked").symlink_to(tmp_path / "model")
    (tmp_path / "evil_canary.py").write_text(CODE)
    (tmp_path / "mixture.toml").write_text(MIXTURE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-victim")
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    yield
    assert not (tmp_path / CANARY).exists()


def sent(folder: Path, content: str) -> Path:
    content = content.format(here=folder)
    (folder / "recipe.toml").write_text(content if "mixture" in content else RECIPE + content)
    return folder / "recipe.toml"


def begun(folder: Path, *options: object) -> Result:
    return run("train", "run", folder / "recipe.toml", "--output", folder / "run", *options)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_recipe_does_no_harm(attack: str, tmp_path: Path) -> None:
    content, message = ATTACKS[attack]
    sent(tmp_path, content)
    path = list(sys.path)
    with watched() as deeds:
        done = begun(tmp_path)
    assert (deeds, done.exit_code, sys.path) == ([], 2, path)
    assert message in " ".join(done.output.split())


def test_what_is_given_again_is_used(tmp_path: Path) -> None:
    content = 'model = "transformers:evil/model"\nreward = "evil:reward"\ntrackers = ["wandb"]\n'
    path = sent(tmp_path, content + SERVER.format("http://127.0.0.1:9/v1") + 'folder = "versions"')
    says = {"model": "smollm2", "reward": "good:reward", "trackers": ("tensorboard",)}
    with pytest.raises(UsageError, match="--server-folder versions"):
        Recipe.load(path, Given(**says, base_url="http://127.0.0.1:9/v1"))
    recipe = Recipe.load(path, Given(**says, base_url="http://127.0.0.1:9/v1", server_folder="versions"))
    assert (recipe.model, recipe.reward, recipe.trackers) == ("smollm2", "good:reward", ("tensorboard",))
    assert Recipe.load(path, Given(model="smollm2", trackers=("wandb",)), sft=True).model == "smollm2"


def test_what_lies_in_the_folder_is_not_taken_for_a_package(tmp_path: Path) -> None:
    for name in ("accelerate", "torch", "typer", "rich", "pydantic", "platformdirs"):
        (tmp_path / f"{name}.py").write_text(CODE)
    command = [sys.executable, "-m", "memagent_integrations", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert (done.returncode, done.stdout[:9]) == (0, "memagent "), done.stderr


def test_a_reward_of_the_folder_stands_behind_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sent(tmp_path, 'model = "openai:m"\nreward = "mine:reward"')
    assert begun(tmp_path, "--reward", "mine:reward").exit_code == 2
    assert sys.path[-1] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


@pytest.mark.fuzz
@one_in(4)
@given(
    recipe=corrupted(
        {
            "model": "smollm2",
            "mixture": "mixture.toml",
            "reward": "evil_canary:reward",
            "server": {"base_url": "http://e"},
        },
        ("trackers", "adapter", "model", "reward"),
    )
)
def test_whatever_is_in_a_recipe(recipe: dict[str, object], tmp_path: Path) -> None:
    lines = [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in recipe.items()]
    (tmp_path / "recipe.toml").write_text("\n".join(lines), encoding="utf-8")
    with watched() as deeds:
        for load in (Recipe.load, Mixture.load):
            try:
                loaded = load(tmp_path / "recipe.toml")
            except MemAgentError:
                continue
            assert isinstance(loaded, Recipe)
            assert (loaded.reward, loaded.server, set(loaded.trackers) - {"tensorboard"}) == (None, None, set())
    assert deeds == []
