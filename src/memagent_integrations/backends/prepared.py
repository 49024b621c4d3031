"""The embedded models in the form that an engine reads fastest, made from the model's file, once, and kept beside it.

llama.cpp reads another quantisation, transformers and vLLM a folder of their own.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from memagent_integrations.backends import embedded, verified
from memagent_integrations.backends.requantise import requantise

_log = logging.getLogger(__name__)


def for_llamacpp(name: str) -> Path:
    """Return the file that llama.cpp reads, after making it from the model's, and fetching that, if necessary.

    Several processes may ask at once: one makes it, the others wait. What has changed is made anew. Where the cache
    cannot be written, the model's own file is read.

    Raises:
        UsageError: as of `embedded.pull`.
        MissingExtra: gguf is not installed.
        BackendError: as of `embedded.pull`.
    """
    kind = embedded.model(name).quantisation
    return _made(name, kind, f"{name}.{kind}.gguf", partial(requantise, kind=kind)) if kind else embedded.pull(name)


def for_transformers(name: str) -> Path:
    """Return the folder that transformers and vLLM load, made as the file of `for_llamacpp` is.

    transformers takes five times as long to load the GGUF file.

    Raises:
        UsageError: as of `embedded.pull`.
        MissingExtra: torch, transformers or gguf is not installed.
        BackendError: as of `embedded.pull`.
    """
    return _made(name, "float16", f"{name}.float16", _dequantise, weights="model.safetensors")


def weights_of(model: str | Path) -> str | Path:
    """Return what transformers and vLLM load for a model's name: an embedded model's folder, else what was given."""
    return for_transformers(model) if isinstance(model, str) and model in embedded.EMBEDDED else model


def _made(name: str, form: str, made: str, make: Callable[[Path, Path], None], *, weights: str = "") -> Path:
    """Return what `make` has written from the model's file: a file, or a folder with the file `weights`."""
    source = embedded.pull(name)
    target = source.with_name(made)
    if verified.is_as_noted(target / weights):
        return target
    if not os.access(source.parent, os.W_OK):
        return source
    with verified.writing(target):
        if not verified.is_as_noted(target / weights):
            _log.warning("writing the model %s as %s, once, to %s", name, form, target)
            new = target.with_name(f"{target.name}.new")
            _remove(new)
            try:
                make(source, new)
                _remove(target)
                new.replace(target)
            except BaseException:
                _remove(new)  # what there was of it may have filled the disk
                raise
            verified.note(target / weights)
    return target


def _dequantise(source: Path, target: Path) -> None:
    importlib.import_module("memagent_integrations.backends.dequantise").dequantise(source, target)  # needs torch


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
