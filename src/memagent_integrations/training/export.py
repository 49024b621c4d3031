"""Write a trained policy as a directory that every backend loads."""

from __future__ import annotations

import copy
import json
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError

from memagent_integrations import files, policies
from memagent_integrations.backends import gguf_adapter
from memagent_integrations.backends.gguf_adapter import ADAPTER
from memagent_integrations.errors import UsageError
from memagent_integrations.policies import Policy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a run for the card of its policy.

    Args:
        data: what it was trained on, in words.
        steps: batches of rollouts.
        rewards: the mean reward of each batch, in order.
        scores: scores (0.0 to 1.0) before and after, by the name of the evaluation ("niah_single_1, 8192 tokens").
        settings: other settings that the card shows.
    """

    data: str
    steps: int
    rewards: Sequence[float] = ()
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def save(model: Any, tokenizer: Any, directory: str | Path, *, policy: Policy, figures: Figures) -> Policy:
    """Write `memagent.json`, a card (README.md) and the trained weights, and return the policy as written.

    A PEFT model is written as its adapter: `adapter/`, and `adapter.gguf` for llama.cpp. Where llama.cpp cannot hold
    the adapter, `adapter.gguf` is left out; the card and a warning in the log say why. Another transformers model is
    written whole with its tokenizer: `model/`. The directory appears complete or not at all.

    Args:
        model: the trained model.
        tokenizer: its tokenizer; unused for a PEFT model.
        directory: a new directory.
        policy: the prompts, the budgets, and the name of the trained model as `load_backend` takes it.
        figures: the figures of the training for the card.

    Raises:
        UsageError: the directory exists, or cannot be written.
    """
    target = Path(directory)
    check(target)
    with (
        files.accessing("write", target, also=(SafetensorError,)),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary,
    ):
        folder = Path(temporary) / target.name
        _write(model, tokenizer, folder, policy, figures)
        for file in filter(Path.is_file, folder.rglob("*")):
            file.chmod(files.OWNER_ONLY)
        folder.rename(target)
    return policies.load(target)


def check(target: Path) -> None:
    """Check that a policy can be written there, before hours of work go into it.

    Raises:
        UsageError: the directory exists, or cannot be created.
    """
    if target.exists():
        raise UsageError(f"{str(target)!r} is there already; name another folder, or remove it")
    with files.accessing("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=target.parent).cleanup()


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter of a model in PEFT's format."""
    model.save_pretrained(str(folder), selected_adapters=[ADAPTER], save_embedding_layers=False)


def served_rank(rank: int) -> int:
    """Return the least --max-lora-rank of a vLLM server that holds an adapter of this rank."""
    return max(8, 1 << (rank - 1).bit_length())


def _write(model: Any, tokenizer: Any, folder: Path, policy: Policy, figures: Figures) -> None:
    if isinstance(model, PeftModel):
        written = replace(policy, adapter="adapter")
        policies.save(written, folder)
        card_lines = _save_both_adapters(model, folder, policy.model)
    else:
        written = replace(policy, model="transformers:./model", adapter=None)
        policies.save(written, folder)
        _without_quantizer(model).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        card_lines = "- `model/`: the weights and the tokenizer, as transformers and vLLM load them."
    card = _card(folder.name, policy, written, figures, card_lines)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _save_both_adapters(model: PeftModel, folder: Path, base: str) -> str:
    """Write the adapter for PEFT and for llama.cpp, and return the lines of the card about them."""
    save_adapter(model, folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)  # PEFT's template, not filled in
    path = folder / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base.partition(":")[2] or base  # PEFT wrote the folder of the GGUF file
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    module = f"{folder.name}={folder.name}/adapter"
    options = f"`--enable-lora --lora-modules {module} --max-lora-rank {served_rank(config['r'])}`"
    try:
        gguf_adapter.write(model, folder / "adapter.gguf")
        llamacpp = "- `adapter.gguf`: the same for llama.cpp, whose server loads it with `--lora adapter.gguf`."
    except UsageError as error:
        _log.warning("the policy gets no adapter.gguf: %s", error)
        llamacpp = f"- There is no `adapter.gguf`: {error}."
    return f"- `adapter/`: the LoRA adapter in PEFT's form. A vLLM server loads it with {options}.\n{llamacpp}"


def _without_quantizer(model: Any) -> Any:
    """Return the model in a form that transformers saves; it refuses a model that was read from a GGUF file."""
    if getattr(model, "hf_quantizer", None) is None:
        return model
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _card(name: str, trained: Policy, written: Policy, figures: Figures, files_lines: str) -> str:
    budgets = written.budgets
    summary = (
        f"A memory agent: it reads documents of any length in chunks of {budgets.chunk_tokens:,} tokens, and keeps a "
        f"memory of at most {budgets.memory_tokens:,} tokens that it writes anew after each of them. "
        f"Trained from `{trained.model}` with memagent-integrations."
    )
    parts = (
        _front_matter(trained.model, written),
        f"# {name}",
        summary,
        _training_section(figures),
        _scores_section(figures),
        _use_section(name, files_lines),
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def _front_matter(model: str, written: Policy) -> str:
    """Return the YAML that the Hugging Face hub reads from a card."""
    base = model.partition(":")[2]
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists()
    lines = [f"base_model: {base}"] if on_hub else []
    lines.append(f"library_name: {'peft' if written.adapter else 'transformers'}")
    return "\n".join(["---", *lines, "pipeline_tag: text-generation", "tags: [memagent]", "---"])


def _training_section(figures: Figures) -> str:
    lines = ["## Training\n", f"- data: {figures.data}"]
    if figures.steps:
        lines.append(f"- steps: {figures.steps:,}")
    if rewards := figures.rewards:
        means = f"{rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last, {max(rewards):.3f} at best"
        lines.append(f"- mean reward: {means}")
    return "\n".join(lines + [f"- {name}: {value}" for name, value in figures.settings.items()])


def _scores_section(figures: Figures) -> str:
    rows = [f"| {name} | {before:.3f} | {after:.3f} |" for name, (before, after) in figures.scores.items()]
    return "\n".join(["## Evaluation\n", "| | before | after |", "|---|---|---|", *rows]) if rows else ""


def _use_section(name: str, files_lines: str) -> str:
    call = f'answer = Reader("policy:{name}").read(question, document).answer'
    code = f"```python\nfrom memagent_integrations import Reader\n\n{call}\n```"
    return f"## Use\n\n{code}\n\n- `memagent.json`: the model's name, the prompts and the budgets.\n{files_lines}"
