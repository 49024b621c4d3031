"""Backends by name. Each file is the one home of its SDK, and is imported when a backend of its kind is loaded."""

from __future__ import annotations

import importlib
import inspect
from difflib import get_close_matches
from typing import Any

from memagent_integrations import policies
from memagent_integrations.backends import embedded, prepared
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
    """Return the backend with this name.

    `spec` is "openai:MODEL" (any OpenAI-compatible endpoint), "llamacpp:FILE.gguf", "transformers:NAME", "vllm:NAME",
    "policy:DIR" (the model and adapter that its `memagent.json` names; `Reader` takes the prompts and budgets too. One
    that somebody sent has no code loaded and nothing fetched), "smollm2" (the policy in this package), or the name of
    an embedded model ("smollm2-raw", fetched at first use). Both run in llama.cpp, and with "transformers:" before
    their name in transformers; the embedded model with "vllm:" in vLLM. `options` go to the backend's class.

    The option `model` loads a policy's adapter on the same weights in another backend:
    `load_backend("policy:DIR", model="vllm:NAME")`. An endpoint already serves the adapter, under a name of its own:
    "openai:THAT_NAME".

    Raises:
        UsageError: the name or an option is unknown.
        MissingExtra: the backend's package is not installed.
        BackendError: the model cannot be fetched or loaded.
    """
    kind, _, name = spec.partition(":")
    if spec in embedded.EMBEDDED:
        return _load_embedded(spec, options)
    if policies.names_policy(spec):
        return _load_policy(policies.load_named(spec, base=options.get("model")), options)
    if kind in _KINDS and name:
        if kind == "llamacpp" and name in embedded.EMBEDDED:
            return _make(kind, prepared.for_llamacpp(name), {"name": spec} | options)
        return _make(kind, name, options)
    names = (*policies.SHIPPED, *embedded.EMBEDDED)
    known = ", ".join([*(f"{kind}:NAME" for kind in KINDS), *names])
    meant = get_close_matches(spec, names, 1)
    hint = f"did you mean {meant[0]}? There are" if meant else "use one of"
    raise UsageError(
        f"unknown model {spec!r}; {hint} {known}, or in MemAgentReader provider:NAME of LangChain's init_chat_model"
    )


def _load_embedded(name: str, options: dict[str, Any]) -> Backend:
    model = embedded.EMBEDDED[name]
    # the sampling settings prop up the raw model; adapters are trained without them
    sampling = {} if options.get("adapter") else model.sampling
    defaults = {"name": name, "window": model.window, "sampling": sampling}
    return _make("llamacpp", prepared.for_llamacpp(name), defaults | options)


def _load_policy(policy: policies.Policy, options: dict[str, Any]) -> Backend:
    """Load a policy's model, or another with the same weights, with the adapter in the form that this backend reads."""
    model = options.pop("model", policy.model)
    if not isinstance(model, str) or policies.names_policy(model):
        raise UsageError(f"model has to be the name of a model that has the weights of {policy.model}, not {model!r}")
    kind = "llamacpp" if model in embedded.EMBEDDED else model.partition(":")[0]
    served = kind == "openai" and model != policy.model
    if not served and "adapter" not in options and (adapter := policy.adapter_for(kind)):
        options["adapter"] = adapter
    return load_backend(model, **options)


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
