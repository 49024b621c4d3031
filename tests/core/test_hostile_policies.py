"""Policies that somebody else made: they run no code, lead nowhere, and have nothing fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import run
from helpers.fuzz import one_in
from helpers.hostile import CANARY, corrupted, watched
from hypothesis import given

from memagent_integrations import (
    MemAgentError,
    PromptSet,
    Reader,
    UsageError,
    load_backend,
    ownership,
    policies,
    weights,
)
from memagent_integrations.backends import embedded

CODE = f"open('{CANARY}', 'w')\n"
AUTO_MAP = {"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "evil_canary.Model"}}
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "megatron_core": "megatron.core", "loftq_config": {}}
WEIGHTS = {"model/model.safetensors": ""}
POLICY = {"model": "transformers:./model", "prompts": json.loads(json.dumps(asdict(PromptSet.default())))}
ADAPTED = {"model": "transformers:./model", "adapter": "adapter"}
PEFT = WEIGHTS | {"model/config.json": {}, "adapter/adapter_model.safetensors": "", "adapter/adapter_config.json": LORA}
OUTSIDE = Path("elsewhere")

Files = dict[str, Any]
"""What is in the folder: text, what is written as JSON, or what a path is a link to."""


def with_config(name: str = "config.json", **config: Any) -> Files:
    return WEIGHTS | {f"model/{name}": config}


def with_lora(**config: Any) -> Files:
    return PEFT | {"adapter/adapter_config.json": LORA | config}


def without(files: Files, name: str) -> Files:
    return {other: content for other, content in files.items() if other != name}


ATTACKS: dict[str, tuple[dict[str, Any], Files, str]] = {
    # other keys of memagent.json, the files beside it, and what the error says
    "remote code": ({}, with_config(**AUTO_MAP) | {"model/evil_canary.py": CODE}, "'auto_map'"),
    "a module": ({}, with_config() | {"model/evil_canary.py": CODE}, "evil_canary.py may run code"),
    "remote code of the hub": ({}, with_config(auto_map={"AutoConfig": "evil/model--evil_canary.C"}), "'auto_map'"),
    "remote code deep down": ({}, with_config(text_config=[AUTO_MAP]), "'auto_map'"),
    "a tokenizer of code": ({}, with_config("tokenizer_config.json", **AUTO_MAP), "'auto_map'"),
    "a processor of code": ({}, with_config("preprocessor_config.json", **AUTO_MAP), "'auto_map'"),
    "trust": ({}, with_config(trust_remote_code=True), "'trust_remote_code'"),
    "a kernel": ({}, with_config(attn_implementation="evil/kernel"), "'attn_implementation'"),
    "a kernel under another name": ({}, with_config(_attn_implementation="evil/kernel"), "implementation"),
    "a kernel of experts": ({}, with_config(t={"experts_implementation": "evil/kernel"}), "'experts_implementation'"),
    "a way to generate": ({}, with_config("generation_config.json", custom_generate="evil/way"), "'custom_generate'"),
    "pickled weights": ({}, {"model/config.json": {}, "model/pytorch_model.bin": CODE}, "pytorch_model.bin may run"),
    "pickled weights beside": ({}, with_config() | {"model/training_args.bin": CODE}, "training_args.bin may run"),
    "weights of torch": ({}, with_config() | {"model/consolidated.pth": CODE}, "consolidated.pth may run code"),
    "no weights": ({}, {"model/config.json": {}}, "no weights as safetensors"),
    "weights elsewhere": (
        {},
        with_config("model.safetensors.index.json", weight_map={"a": "../../elsewhere/model.safetensors"}),
        "names weights elsewhere",
    ),
    "weights that are pickles": (
        {},
        with_config("pytorch_model.bin.index.json", weight_map={"a": "model-1.bin"}),
        "that are no safetensors",
    ),
    "linked weights": ({}, {"model/config.json": {}, "model/model.safetensors": OUTSIDE / "m"}, "no link"),
    "a linked folder": ({}, {"model": OUTSIDE}, "leads out of the folder"),
    "a vocabulary elsewhere": ({}, with_config("tokenizer_config.json", vocab_file=f"/etc/{CANARY}"), "'vocab_file'"),
    "a configuration without end": ({}, WEIGHTS | {"model/config.json": "[" * 10**5}, "is not JSON"),
    "a folder above": ({"model": "transformers:./../elsewhere"}, {}, "leads out of the folder"),
    "a folder of the machine": ({"model": f"transformers:/etc/{CANARY}"}, {}, "outside of the policy's directory"),
    "a folder beside": ({"model": "transformers:elsewhere"}, {}, "outside of the policy's directory"),
    "a folder of the user": ({"model": f"transformers:~/{CANARY}"}, {}, "outside of the policy's directory"),
    "a share": ({"model": "transformers:\\\\evil\\share"}, {}, "outside of the policy's directory"),
    "a model of the hub": ({"model": "transformers:evil/model"}, {}, "not on this machine"),
    "a model of the hub for vLLM": ({"model": "vllm:evil/model"}, {}, "not on this machine"),
    "a model of the hub with a number": ({"model": "transformers:evil/model@main"}, {}, "outside of the policy's"),
    "a GGUF file of the machine": ({"model": f"llamacpp:/etc/{CANARY}.gguf"}, {}, "outside of the policy's directory"),
    "a policy": ({"model": "policy:../elsewhere"}, {}, "not another policy"),
    "no model": ({"model": "evil:evil"}, {}, "unknown model"),
    "options": ({"backend_options": {"trust_remote_code": True}}, with_config(), "backend_options"),
    "an address": ({"model": "openai:m", "base_url": "http://127.0.0.1:9/v1"}, {}, "base_url"),
    "the mark of another": ({"model": "llamacpp:/x.gguf", "mark": "0" * 64}, {}, "outside of the policy's directory"),
    "a mark that is none": (
        {"model": "llamacpp:/x.gguf", "mark": {"evil": 1}},
        {},
        "outside of the policy's directory",
    ),
    "a pickled adapter": (ADAPTED, PEFT | {"adapter/adapter_model.bin": CODE}, "adapter_model.bin may run code"),
    "an adapter without weights": (ADAPTED, without(PEFT, "adapter/adapter_model.safetensors"), "adapter_model.safet"),
    "an adapter that loads a tokenizer": (
        ADAPTED,
        with_lora(peft_type="PROMPT_TUNING", tokenizer_kwargs={"trust_remote_code": True}),
        "'trust_remote_code'",
    ),
    "an adapter of adapters": (ADAPTED, with_lora(peft_type="XLORA", adapters={"a": "evil/a"}), "is no LoRA adapter"),
    "a module that is imported": (
        ADAPTED,
        with_lora(megatron_config={"a": 1}, megatron_core="evil_canary") | {"evil_canary.py": CODE},
        "'megatron_co",
    ),
    "a setting of tomorrow": (ADAPTED, with_lora(load_from="evil/weights"), "'load_from'"),
    "an adapter above": (ADAPTED | {"adapter": "../elsewhere"}, PEFT, "leads out of the folder"),
    "an adapter of the machine": (ADAPTED | {"adapter": f"/etc/{CANARY}"}, PEFT, "leads out of the folder"),
    "an adapter of the hub": (ADAPTED | {"adapter": "evil/adapter"}, PEFT, "has to be a folder"),
    "a linked adapter": (
        ADAPTED,
        without(PEFT, "adapter/adapter_config.json") | {"adapter/README.md": OUTSIDE},
        "link",
    ),
    "a linked adapter of llama.cpp": (
        {"model": "llamacpp:./m.gguf", "adapter": "adapter"},
        {"m.gguf": "GGUF", "adapter.gguf": OUTSIDE / "m"},
        "no link",
    ),
}


@pytest.fixture(autouse=True)
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / OUTSIDE).mkdir()
    for name in ("m", "config.json", "model.safetensors"):
        (tmp_path / OUTSIDE / name).write_text("{}")
    (tmp_path / "document.txt").write_text("The key is 7.")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-victim")
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    yield
    assert not (tmp_path / CANARY).exists()


def sent(folder: Path, policy: Any, files: Files) -> Path:
    """Write the directory as somebody else may write it."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            file.symlink_to(folder.parent / content)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))
    folder.mkdir(exist_ok=True)
    (folder / "memagent.json").write_text(json.dumps(policy))
    return folder


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_policy_does_no_harm(attack: str, tmp_path: Path) -> None:
    policy, files, message = ATTACKS[attack]
    name = f"policy:{sent(tmp_path / 'policy', POLICY | policy, files)}"
    with watched() as deeds:
        with pytest.raises(UsageError) as refused:
            load_backend(name)
        with pytest.raises(UsageError):
            Reader(name)
        done = run("read", "-q", "Who?", "document.txt", "--model", name)
    assert deeds == []
    assert message in str(refused.value)
    assert (done.exit_code, done.stdout) == (2, "")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = sent(tmp_path / "policy", POLICY, with_config())
    os.mkfifo(folder / "model" / "merges.txt")
    with pytest.raises(UsageError, match="has to be a file"):
        policies.load(folder)


def test_what_does_no_harm_is_loaded(tmp_path: Path) -> None:
    folder = sent(tmp_path / "policy", POLICY | ADAPTED, PEFT | {"model/.cache/lock.metadata": "", "model/LICENSE": ""})
    policy = policies.load(folder)
    assert policy.model == f"transformers:{folder / 'model'}"
    assert policy.adapter_for("transformers") == policy.adapter_for("vllm") == str(folder / "adapter")
    assert policies.load(sent(tmp_path / "other", POLICY | {"model": "smollm2-raw"}, {})).model == "smollm2-raw"


def test_a_model_of_the_hub_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "is_cached", lambda name: name == "good/model")
    policies.load(sent(tmp_path / "policy", POLICY | {"model": "transformers:good/model"}, {}))


def test_what_the_caller_names_is_taken(tmp_path: Path) -> None:
    folder = sent(tmp_path / "policy", POLICY | {"model": "transformers:/elsewhere"}, {})
    with load_backend(f"policy:{folder}", model="openai:m", base_url="http://127.0.0.1:9/v1") as backend:
        assert backend.name == "openai:m"
    options = ("--base-model", "openai:m", "--base-url", "http://127.0.0.1:9/v1", "--tokenizer", "approximate")
    done = run("read", "-q", "Who?", "document.txt", "--model", f"policy:{folder}", *options, "--plan")
    assert (done.exit_code, "chunks: 1" in done.stdout) == (0, True)
    refused = run("read", "-q", "Who?", "document.txt", "--model", "openai:n", *options)
    assert "--base-model is the model for a policy" in refused.stderr


def test_a_policy_of_ones_own_names_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = policies.Policy(model="transformers:/models/mine", prompts=PromptSet.default())
    policies.save(own, tmp_path / "own")
    assert policies.load(tmp_path / "own") == own
    file = tmp_path / "own" / policies.FILE
    file.write_text(file.read_text().replace("/models/mine", "/models/evil"))
    with pytest.raises(UsageError, match="not saved by you"):
        policies.load(tmp_path / "own")
    policies.save(own, tmp_path / "own")
    monkeypatch.setattr(ownership, "_key", lambda file: None)  # another machine
    with pytest.raises(UsageError, match="--base-model"):
        policies.load(tmp_path / "own")


NAMES = ("base_url", "trust_remote_code", "auto_map", "megatron_config", "mark", "model", "adapter", "peft_type")


@pytest.mark.fuzz
@one_in(4)
@given(policy=corrupted(POLICY | ADAPTED, NAMES), lora=corrupted(LORA, NAMES), config=corrupted(AUTO_MAP, NAMES))
def test_whatever_is_in_a_policy(policy: Any, lora: Any, config: Any, tmp_path: Path) -> None:
    files = with_config(**config) | {"adapter/adapter_config.json": lora, "adapter/adapter_model.safetensors": ""}
    folder = sent(tmp_path / "policy", policy, files)
    with watched() as deeds:
        try:
            loaded = policies.load(folder)
            adapter = loaded.adapter_for("transformers")
        except MemAgentError:
            pass
        else:
            assert not adapter or (lora["peft_type"] == "LORA" and not lora.get("megatron_config"))
            kind, _, name = loaded.model.partition(":")
            assert not config.get("auto_map") or name != str(folder / "model")
            assert kind not in ("transformers", "vllm", "llamacpp") or Path(name).is_relative_to(tmp_path)
    assert deeds == []


def test_the_embedded_models_have_digests() -> None:
    """A policy may have these fetched: what comes is what the package names, or nothing."""
    assert all(len(model.sha256) == 64 for model in embedded.EMBEDDED.values())
