"""The policy that ships: its files, what its name means, and that it reads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent_integrations import Backend, Reader, ScriptedBackend, UsageError, backends, load_backend, policies
from memagent_integrations.backends import embedded
from memagent_integrations.reader import loading

FOLDER = policies.SHIPPED["smollm2"]
IN_TRANSFORMERS = "transformers:smollm2"
QUESTION = "What is the special magic number for north-gate that the text mentions?"


def document(*, sections: int = 3) -> str:
    """Return some sections of dull sentences, one of which has the code."""
    dice = random.Random(2)
    words = ["rain", "wall", "road", "hill", "field", "house", "river", "stone", "bridge", "garden", "market", "tower"]
    lines = [f"The {dice.choice(words)} lies near the {dice.choice(words)}." for _ in range(40 * sections)]
    lines[60] = "One of the special magic numbers for north-gate is: 7319245."
    return " ".join(lines)


def test_its_files_are_small_and_name_nothing_but_the_embedded_model() -> None:
    assert sorted(file.name for file in FOLDER.iterdir()) == ["README.md", "adapter.gguf", "memagent.json"]
    assert (FOLDER / "adapter.gguf").stat().st_size < 12_000_000
    policy = policies.load(FOLDER)
    assert policy.model in embedded.EMBEDDED
    assert policy.adapter_for("llamacpp") == policy.adapter_for("transformers") == str(FOLDER / "adapter.gguf")
    with pytest.raises(UsageError, match="PEFT's form"):
        policy.adapter_for("vllm")


def test_its_name_brings_its_prompts_and_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_backend", lambda name, **options: ScriptedBackend([]))
    policy, reader = policies.load(FOLDER), Reader("smollm2")
    assert (reader.prompts, reader.budgets) == (policy.prompts, policy.budgets)
    assert Reader("smollm2", memory_tokens=100).budgets.memory_tokens == 100
    assert Reader("smollm2-raw").prompts != policy.prompts


def test_it_reads_in_transformers_by_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policies.load(FOLDER)
    made: list[tuple[str, object, dict[str, object]]] = []

    def make(kind: str, model: object, options: dict[str, object]) -> Backend:
        made.append((kind, model, options))
        return ScriptedBackend([])

    monkeypatch.setattr(backends, "_make", make)
    reader = Reader(IN_TRANSFORMERS)
    assert (reader.prompts, reader.budgets) == (policy.prompts, policy.budgets)
    assert made == [("transformers", policy.model, {"adapter": policy.adapter})]


@pytest.mark.parametrize("name", ["smollm2", "transformers:smollm2"])
def test_a_policy_is_no_answer_model(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a policy"):
        Reader(ScriptedBackend([]), answer_model=name)


@pytest.fixture(scope="module", params=["llamacpp", "transformers"])
def reading_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with load_backend("smollm2") if request.param == "llamacpp" else load_backend(IN_TRANSFORMERS, device="cpu") as it:
        yield it


@pytest.mark.real
@pytest.mark.heavy
def test_it_notes_what_is_asked_for_and_leaves_the_rest(reading_backend: Backend, tmp_path: Path) -> None:
    policy = policies.load(FOLDER)
    reader = Reader(reading_backend, prompts=policy.prompts, **vars(policy.budgets))
    reading = reader.read(QUESTION, document())
    assert "7319245" in (reading.answer or "")
    assert "7319245" in reading.memory
    outcomes = [step.outcome for step in reading.steps if step.phase == "memory"]
    assert outcomes.count("unchanged") >= len(outcomes) / 2
