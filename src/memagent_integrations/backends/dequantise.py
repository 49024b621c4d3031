"""A GGUF model as a folder of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

from memagent_integrations.backends.transformers import load_model, load_tokenizer


def dequantise(source: Path, target: Path) -> None:
    """Write the model of a GGUF file as a folder that transformers and vLLM load, its weights in float16.

    Raises:
        MissingExtra: gguf is not installed.
        OSError: the folder cannot be written.
    """
    tokenizer, model = load_tokenizer(source, {}), load_model(source, "cpu", "float16", {})
    try:
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)
        for weights in target.glob("*.safetensors"):  # which are for the owner alone
            shutil.copymode(target / "config.json", weights)
    except Exception as error:  # safetensors has errors of its own for a full disk
        raise OSError(str(error)) from error
