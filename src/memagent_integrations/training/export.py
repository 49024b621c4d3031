"""A trained policy as a directory that every backend loads."""

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

from memagent_integrations import policies
from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.files import reason
from memagent_integrations.policies import Policy
from memagent_integrations.training import gguf_adapter
from memagent_integrations.training.gguf_adapter import ADAPTER

try:
    import torch
    from peft import PeftModel
    from safetensors import SafetensorError
except ImportError as error:
    raise MissingExtra.extra(error.name or str(error), "train") from error

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a run tells of itself, for the card of its policy.

    `data` says in words what it was trained on, `steps` how many batches of rollouts that took. `rewards` are the mean rewards of these
    batches, in their order. `scores` are those of the evaluation before and after, from 0.0 to 1.0, by the name of what was asked
    ("niah_single_1, 8192 tokens"). `settings` are any others that the card shall name.
    """

    data: str
    steps: int
    rewards: Sequence[float] = ()
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def save(model: Any, tokenizer: Any, directory: str | Path, *, policy: Policy, figures: Figures) -> Policy:
    """The policy as it was written: `memagent.json`, a card (README.md), and what was trained.

    `model` is a PEFT model, of which the adapter is written (`adapter/`, and for llama.cpp `adapter.gguf`), or a transformers model that was
    trained whole, which is written with its tokenizer (`model/`). `policy` has the prompts, the budgets, and the name of the model that was
    trained, as `load_backend` takes it. The directory appears when it is complete, or not at all.

    Where llama.cpp cannot hold the adapter, `adapter.gguf` is left out; the card and a warning in the log say why.

    Raises:
        UsageError: the directory is there already, or cannot be written.
    """
    target = Path(directory)
    check(target)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as beside:
            folder = Path(beside) / target.name
            _write(model, tokenizer, folder, policy, figures)
            folder.rename(target)
    except (OSError, ValueError, SafetensorError) as error:  # a path with a NUL in it is a ValueError
        raise UsageError(f"cannot write the policy to {str(target)!r}: {reason(error)}") from error
    return policies.load(target)


def check(target: Path) -> None:
    """See that a policy can be written there, before hours of work go into it.

    Raises:
        UsageError: the directory is there already, or cannot be made.
    """
    if target.exists():
        raise UsageError(f"{str(target)!r} is there already; name another folder, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=target.parent).cleanup()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the policy to {str(target)!r}: {reason(error)}") from error


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter of a model in PEFT's form."""
    model.save_pretrained(str(folder), selected_adapters=[ADAPTER], save_embedding_layers=False)


def served_rank(rank: int) -> int:
    """The least --max-lora-rank of a vLLM server that holds an adapter of this rank."""
    return max(8, 1 << (rank - 1).bit_length())


def _write(model: Any, tokenizer: Any, folder: Path, policy: Policy, figures: Figures) -> None:
    if isinstance(model, PeftModel):
        written = replace(policy, adapter="adapter")
        policies.save(written, folder)
        adapter = _save_adapter(model, folder, policy.model)
    else:
        written, adapter = replace(policy, model="transformers:./model", adapter=None), ""
        policies.save(written, folder)
        _plain(model).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    (folder / "README.md").write_text(_card(folder.name, policy, written, figures, adapter), encoding="utf-8")


def _save_adapter(model: PeftModel, folder: Path, base: str) -> str:
    """Write the adapter in both forms; what the card says of them."""
    save_adapter(model, folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)  # PEFT's, a form to be filled in
    path = folder / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base.partition(":")[2] or base  # PEFT has the folder in which a GGUF file was
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    served = (
        f"`--enable-lora --lora-modules {folder.name}={folder.name}/adapter --max-lora-rank {served_rank(config['r'])}`"
    )
    try:
        gguf_adapter.write(model, folder / "adapter.gguf")
        llamacpp = "- `adapter.gguf`: the same for llama.cpp, whose server loads it with `--lora adapter.gguf`."
    except UsageError as error:
        _log.warning("the policy gets no adapter.gguf: %s", error)
        llamacpp = f"- There is no `adapter.gguf`: {error}."
    return f"- `adapter/`: the LoRA adapter in PEFT's form. A vLLM server loads it with {served}.\n{llamacpp}"


def _plain(model: Any) -> Any:
    """The model as one that can be saved: transformers refuses to save what it has read from a GGUF file."""
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


def _card(name: str, trained: Policy, policy: Policy, figures: Figures, adapter: str) -> str:
    budgets = policy.budgets
    what = (
        f"A memory agent: it reads documents of any length in chunks of {budgets.chunk_tokens:,} tokens, and keeps a memory of at most "
        f"{budgets.memory_tokens:,} tokens that it writes anew after each of them. Trained from `{trained.model}` with memagent-integrations."
    )
    parts = (
        _front(trained.model, policy),
        f"# {name}",
        what,
        _training(figures),
        _scores(figures),
        _use(name, policy, adapter),
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def _front(model: str, policy: Policy) -> str:
    """What the Hugging Face hub reads of a card."""
    base = model.partition(":")[2]
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists()
    lines = [
        *([f"base_model: {base}"] if on_hub else []),
        f"library_name: {'peft' if policy.adapter else 'transformers'}",
    ]
    return "\n".join(["---", *lines, "pipeline_tag: text-generation", "tags: [memagent]", "---"])


def _training(figures: Figures) -> str:
    rewards = figures.rewards
    told = (
        [
            f"- mean reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last, {max(rewards):.3f} at best"
        ]
        if rewards
        else []
    )
    settings = [f"- {name}: {value}" for name, value in figures.settings.items()]
    steps = [f"- steps: {figures.steps:,}"] if figures.steps else []
    return "\n".join(["## Training\n", f"- data: {figures.data}", *steps, *told, *settings])


def _scores(figures: Figures) -> str:
    rows = [f"| {name} | {before:.3f} | {after:.3f} |" for name, (before, after) in figures.scores.items()]
    return "\n".join(["## Evaluation\n", "| | before | after |", "|---|---|---|", *rows]) if rows else ""


def _use(name: str, policy: Policy, adapter: str) -> str:
    call = (
        f'from memagent_integrations import Reader\n\nanswer = Reader("policy:{name}").read(question, document).answer'
    )
    files = adapter or "- `model/`: the weights and the tokenizer, as transformers and vLLM load them."
    return f"## Use\n\n```python\n{call}\n```\n\n- `memagent.json`: the model's name, the prompts and the budgets.\n{files}"
