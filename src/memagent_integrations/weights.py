"""Folders of weights that somebody may have sent: whether loading them runs no code and stays in the folder.

Weights are safetensors, an adapter is LoRA, and no configuration names code, kernels or other files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memagent_integrations import files
from memagent_integrations.errors import UsageError

_SUFFIXES = ("", ".safetensors", ".json", ".jinja", ".txt", ".md", ".model", ".gguf")
_ADVICE = "if you trust it, name the model and the adapter yourself: --model, or model= and adapter= in Python"
_CODE = ("auto_map", "trust_remote_code", "attn_implementation", "experts_implementation", "custom_generate")
"""Endings of the keys in a configuration by which code is found."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILES = ("vocab_file", "merges_file", "tokenizer_file", "gguf_file")
_LORA = {
    *("alora_invocation_tokens", "alpha_pattern", "auto_mapping", "base_model_name_or_path"),
    *("bias", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "init_lora_weights", "layer_replication", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout"),
    *("modules_to_save", "peft_type", "peft_version", "qalora_group_size"),
    *("r", "rank_pattern", "revision", "target_modules"),
    *("target_parameters", "task_type", "trainable_token_indices", "use_dora"),
    *("use_qalora", "use_rslora"),
}
"""Settings of a LoRA adapter that name no code and no file; `auto_mapping` is not used."""
_DEFAULTS = {"megatron_core": "megatron.core"}
"""Others may only have no value, or that which PEFT writes where they are not used."""


def inside(folder: str | Path, path: str | Path) -> Path:
    """Return a path in a folder, links followed.

    Raises:
        UsageError: it leads out of the folder.
    """
    with files.accessing("read", path, also=(RuntimeError,)):
        root = Path(folder).resolve()
        target = (root / path).resolve()
    if not target.is_relative_to(root):
        raise UsageError(
            f"{str(path)!r} leads out of the folder {str(folder)!r}; what is used lies in it, without links"
        )
    return target


def is_hub_name(name: str) -> bool:
    """Return whether a model's name is one of the Hugging Face hub, and no file or folder."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def is_cached(name: str) -> bool:
    """Return whether the cache of the Hugging Face hub holds a model."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return False
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def check_model(folder: Path) -> None:
    """Check that a folder holds a model as transformers writes it, and nothing that runs code.

    Raises:
        UsageError: it does not.
    """
    names = _check_files(folder)
    if not any(name.endswith(".safetensors") for name in names):
        raise UsageError(f"{folder} has no weights as safetensors")


def check_adapter(folder: Path) -> None:
    """Check that a folder holds a LoRA adapter as PEFT writes it, and nothing that runs code.

    Raises:
        UsageError: it does not.
    """
    names = _check_files(folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if name not in names:
            raise UsageError(f"{folder} is no adapter: there is no {name}")
    config = _json(folder / "adapter_config.json")
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UsageError(f"{folder} is no LoRA adapter, and another kind is not loaded from a policy; {_ADVICE}")
    for name, value in config.items():
        if name not in _LORA and value and value != _DEFAULTS.get(name):
            raise UsageError(f"the adapter {folder} sets {name!r}, which a policy may not; {_ADVICE}")


def check_file(file: Path) -> None:
    """Check that a file is a regular one, and no link.

    Raises:
        UsageError: it is another, or is not there.
    """
    if file.is_symlink() or not file.is_file():
        raise UsageError(f"{file} has to be a file, and no link")


def _check_files(folder: Path) -> set[str]:
    """Return the names of the files right in a folder, after checking all of them."""
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"{folder} has to be a folder, and no link")
    names = set()
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        if relative.parts[0].startswith("."):  # nobody loads from .git and its like
            continue
        if file.is_dir() and not file.is_symlink():
            continue
        check_file(file)
        if file.suffix.lower() not in _SUFFIXES:
            raise UsageError(
                f"{file} may run code when it is loaded, or is not needed: weights are safetensors here; remove it, or "
                f"convert it; {_ADVICE}"
            )
        if file.name.endswith((".index.json", "config.json")):
            _check_config(file)
        names.add(str(relative))
    return names


def _check_config(file: Path) -> None:
    config = _json(file)
    for key, value in _items(config):
        if key.endswith(_CODE) and value:
            raise UsageError(f"{file} sets {key!r}, which names code to load; {_ADVICE}")
        if key in _FILES and value is not None and not _is_name(value):
            raise UsageError(f"{file} names a file elsewhere, as {key!r}; {_ADVICE}")
    if file.name.endswith(".index.json"):
        shards = config.get("weight_map") if isinstance(config, dict) else None
        if not isinstance(shards, dict) or not all(
            _is_name(name) and name.endswith(".safetensors") for name in shards.values()
        ):
            raise UsageError(f"{file} names weights elsewhere, or that are no safetensors; {_ADVICE}")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & set("/\\:\0")


def _json(file: Path) -> Any:
    try:
        return json.loads(files.read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from error


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of all objects in a JSON value, with their values."""
    waiting = [value]
    while waiting:  # not by recursion: it may be nested deeply
        part = waiting.pop()
        if isinstance(part, dict):
            yield from part.items()
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
