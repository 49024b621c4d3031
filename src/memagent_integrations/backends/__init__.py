"""Backends by name. Each file is the one home of its SDK, imported when it is asked for."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from memagent_integrations import models, policies
from memagent_integrations.backends.base import Backend
from memagent_integrations.backends.scripted import ScriptedBackend
from memagent_integrations.errors import MemAgentError, MissingExtra, UsageError

__all__ = ["KINDS", "Backend", "ScriptedBackend", "load_backend"]

_KINDS = {  # kind -> module, class, extra
    "openai": ("openai", "OpenAIBackend", None),
    "llamacpp": ("llamacpp", "LlamaCppBackend", "llamacpp"),
    "transformers": ("transformers", "TransformersBackend", "transformers"),
    "vllm": ("vllm", "VLLMBackend", "vllm"),
}
KINDS = (*_KINDS, "policy")
"""What may stand before the colon of a name."""


def load_backend(spec: str, **options: Any) -> Backend:
    """The backend that a name stands for.

    "openai:MODEL" (any OpenAI-compatible endpoint), "llamacpp:FILE.gguf", "transformers:NAME", "vllm:NAME", "policy:DIR" (the model and
    adapter that its `memagent.json` names; `Reader` takes the prompts and budgets too), or the name of an embedded model ("smollm2",
    fetched at first use). `options` go to the backend's class.

    Raises:
        UsageError: the name or an option is unknown.
        MissingExtra: the backend's package is not installed.
        BackendError: the model cannot be fetched or loaded.
    """
    kind, _, name = spec.partition(":")
    if spec in models.EMBEDDED:
        embedded = models.EMBEDDED[spec]
        defaults = {"name": spec, "window": embedded.window, "sampling": embedded.sampling}
        return _make("llamacpp", models.pull(spec), defaults | options)
    if kind == "policy" and name:
        policy = policies.load(name)
        adapter = {"adapter": policy.adapter} if policy.adapter else {}
        return load_backend(policy.model, **(adapter | options))
    if kind in _KINDS and name:
        return _make(kind, name, options)
    known = ", ".join([*(f"{kind}:NAME" for kind in KINDS), *models.EMBEDDED])
    raise UsageError(f"unknown model {spec!r}; use one of {known}, or in MemAgentReader provider:NAME of LangChain's init_chat_model")


def _make(kind: str, model: Any, options: dict[str, Any]) -> Backend:
    module, name, extra = _KINDS[kind]
    try:
        cls = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except MemAgentError:
        raise
    except ImportError as error:
        raise MissingExtra.extra(error.name or str(error), extra or "all") from error
    try:
        inspect.signature(cls).bind(model, **options)
    except TypeError as error:
        raise UsageError(f"{name} does not take these options: {error}") from error
    backend: Backend = cls(model, **options)
    return backend
