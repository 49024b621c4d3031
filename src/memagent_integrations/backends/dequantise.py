"""A GGUF model as a folder of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

from memagent_integrations.backends.transformers import load_model, load_tokenizer


def dequantise(source: Path, target: Path) -> None:
    """Write the model of a GGUF file as a folder that transformers and vLLM load, its weights in float16.

    Raises:
        MissingExtra: gguf is not installed.
        UsageError: transformers cannot load the file.
    """
    load_tokenizer(source, {}).save_pretrained(target)
    load_model(source, "cpu", "float16", {}).save_pretrained(target)
    for weights in target.glob("*.safetensors"):  # which safetensors writes for the owner alone
        shutil.copymode(target / "config.json", weights)
