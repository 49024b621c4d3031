"""The models inside of what LangChain wraps them in: retries, bindings, fallbacks, configurable parts, sequences."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.load import dumps
from langchain_core.runnables import (
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.configurable import DynamicRunnable

from memagent_integrations.backends.base import digest
from memagent_integrations.errors import UsageError

Change = Callable[[Any, Mapping[str, Any]], Any]
"""Takes a model and the arguments that are bound to it; returns what stands in its place, with them."""
_INCIDENTAL = ("metadata", "tags", "callbacks", "verbose", "cache", "rate_limiter", "profile", "max_retries", "timeout")
_INCIDENTAL_TEXT = re.compile(  # in the description of an object that LangChain cannot serialise
    r"\b(?:metadata|callbacks|cache|rate_limiter|profile)=\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\},? ?"
    r"|\btags=\[[^\]]*\],? ?|0x[0-9a-f]+",
    re.IGNORECASE,
)
_KEYS = re.compile(
    r"(\w*(?:api_?key|secret|password|authorization|access_?token|auth_?token|credential)\w*['\"]?[:=] ?)(['\"]).*?\2",
    re.IGNORECASE,
)


def resolved(runnable: Any, config: RunnableConfig | None) -> Any:
    """Return the runnable with each choice made that the config of a call makes: fields, alternatives, the model.

    Raises:
        UsageError: the config names an alternative or a model that there is not, or no model at all.
    """
    if isinstance(runnable, DynamicRunnable):
        try:
            chosen, config = runnable.prepare(config)
        except ValueError as error:
            raise UsageError(f"the config chooses no model: {error}") from error
        chosen = resolved(chosen, config)
        return chosen.with_config(runnable.config) if runnable.config else chosen
    if hasattr(runnable, "_model") and type(runnable).__name__ == "_ConfigurableModel":  # of init_chat_model
        try:
            return runnable._model(config)
        except (ImportError, TypeError, ValueError) as error:
            raise UsageError(
                f"init_chat_model cannot make a model from this config ({error}); "
                "name one: config={'configurable': {'model': 'provider:name'}}"
            ) from error
    if isinstance(runnable, RunnableBindingBase):
        config = merge_configs(runnable.config, config)
    return mapped(runnable, lambda child: resolved(child, config))


def models_in(runnable: Any) -> list[Any]:
    """Return the models, the first choice first; where none is found, the runnable that stands for them."""
    if isinstance(runnable, RunnableSequence):
        return [model for step in runnable.steps if has_model(step) for model in models_in(step)] or [runnable]
    found: list[Any] = []

    def note(child: Any) -> Any:
        found.extend(models_in(child))
        return child

    mapped(runnable, note)
    return found or [runnable]


def all_models_in(runnable: Any) -> list[Any]:
    """Return the models, also those that a function uses: they can be asked for their name, but not given options."""
    found = []
    for model in models_in(runnable):
        used = [one for dep in model.deps for one in all_models_in(dep)] if isinstance(model, RunnableLambda) else []
        found += [one for one in used if isinstance(one, BaseLanguageModel)] or [model]
    return found


def has_model(runnable: Any) -> bool:
    """Return whether a model of LangChain's is seen in the runnable."""
    return any(isinstance(model, BaseLanguageModel) for model in all_models_in(runnable))


def rebuilt(runnable: Any, change: Change, options: Mapping[str, Any] | None = None) -> Any:
    """Return the runnable with each model changed, with the arguments that are bound outside of it.

    An argument of the call itself would reach only the first step of a sequence, and all models of a chain of
    fallbacks alike.
    """
    options = options or {}
    if not has_model(runnable):
        return change(runnable, options)
    if isinstance(runnable, RunnableBindingBase):
        inner = rebuilt(runnable.bound, change, {**runnable.kwargs, **options})
        return runnable.model_copy(update={"bound": inner, "kwargs": {}})
    if isinstance(runnable, RunnableSequence):
        return _with_steps(
            runnable, [_step(step, change, {} if n else options) for n, step in enumerate(runnable.steps)]
        )
    changed = mapped(runnable, lambda child: rebuilt(child, change, options) if has_model(child) else child)
    return change(runnable, options) if changed is runnable else changed


def _step(step: Any, change: Change, options: Mapping[str, Any]) -> Any:
    if has_model(step):
        return rebuilt(step, change, options)
    return step.bind(**options) if options else step


def _with_steps(sequence: Any, steps: list[Any]) -> Any:
    return sequence.model_copy(update={"first": steps[0], "middle": steps[1:-1], "last": steps[-1]})


def mapped(runnable: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy with each child changed; for a runnable without children the runnable itself."""
    if isinstance(runnable, RunnableBindingBase):
        return runnable.model_copy(update={"bound": change(runnable.bound)})
    if isinstance(runnable, RunnableWithFallbacks):
        first, *others = [change(child) for child in runnable.runnables]
        return runnable.model_copy(update={"runnable": first, "fallbacks": others})
    if isinstance(runnable, RunnableBranch):
        branches = [(condition, change(child)) for condition, child in runnable.branches]
        return runnable.model_copy(update={"branches": branches, "default": change(runnable.default)})
    if isinstance(runnable, RunnableParallel):
        return runnable.model_copy(update={"steps__": {key: change(child) for key, child in runnable.steps__.items()}})
    if isinstance(runnable, RunnableSequence):
        return _with_steps(runnable, [change(step) for step in runnable.steps])
    return runnable


def takes_schema(runnable: Any) -> bool:
    """Return whether every model can keep to a schema, and nothing comes after it that expects a message."""
    if isinstance(runnable, RunnableSequence):
        last = runnable.steps[-1]
        return has_model(last) and takes_schema(last)
    return all(map(_takes_schema, models_in(runnable)))


def _takes_schema(model: Any) -> bool:
    own = type(model)
    return isinstance(model, BaseChatModel) and (
        own.with_structured_output is not BaseChatModel.with_structured_output
        or own.bind_tools is not BaseChatModel.bind_tools
    )


def identity_of(runnable: Any) -> str:
    """Return a digest of what decides the text that the runnable gives: the same for equal ones in another process.

    Keys, addresses in memory, versions of packages, and what is about retries or traces have no part in it.
    """
    text = json.dumps(_deciding(json.loads(dumps(runnable))), sort_keys=True)
    return digest(_KEYS.sub(r"\1***", _INCIDENTAL_TEXT.sub("", text)))


def _deciding(value: Any) -> Any:
    if isinstance(value, list):
        return [_deciding(item) for item in value]
    if isinstance(value, dict):
        return {name: _deciding(item) for name, item in value.items() if name not in _INCIDENTAL}
    return value
