"""How LangChain's model classes take their output limit, and tell their window and tokens. They are known by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from pydantic import BaseModel

from memagent_integrations.backends.failures import from_exception

_log = logging.getLogger(__name__)
_ARGUMENTS = {
    **dict.fromkeys(
        ("BaseChatOpenAI", "BaseOpenAI", "ChatAnthropic", "AnthropicLLM", "ChatAnthropicVertex"), "max_tokens"
    ),
    **dict.fromkeys(("ChatGroq", "ChatMistralAI", "ChatFireworks", "ChatCohere", "ChatPerplexity"), "max_tokens"),
    **dict.fromkeys(("ChatOpenRouter", "ChatLiteLLM", "ChatWatsonx", "ChatHuggingFace", "NVIDIA"), "max_tokens"),
    **dict.fromkeys(("ChatVertexAI", "VertexAI", "ChatGoogleGenerativeAI", "GoogleGenerativeAI"), "max_output_tokens"),
    **dict.fromkeys(("HuggingFaceEndpoint", "HuggingFaceTextGenInference"), "max_new_tokens"),
}
"""The argument of a call by which a class takes the limit."""
_FIELDS = ("max_tokens", "num_predict", "max_output_tokens", "max_new_tokens", "max_completion_tokens", "n_predict")
"""The fields that hold the limit of any other class: it is set on a copy of the model."""
_LEAST_CONTEXT = 4096  # tokens


class Limiter:
    """Gives models their output limit, and those of Ollama a context that holds prompt and reply.

    A class whose limit cannot be set is told in a warning, once. `parameter` is the caller's name for the limit.
    """

    def __init__(self, parameter: str | None) -> None:
        self.parameter = parameter
        self._warned: set[str] = set()
        self._context = _LEAST_CONTEXT

    def limited(self, model: Any, bound: Mapping[str, Any], tokens: int, size: Callable[[], int]) -> Any:
        """Return the model with the limit of `tokens`, with the arguments that are bound to it.

        `size` returns the tokens of prompt and reply together.
        """
        if pipeline := _pipeline(model):
            options = {**bound, "pipeline_kwargs": {**(bound.get("pipeline_kwargs") or {}), "max_new_tokens": tokens}}
            return pipeline.bind(**options)
        argument, fields = self._names(model)
        changes: dict[str, Any] = {}
        if fields:
            changes[fields] = tokens
        if "num_ctx" in _fields(model) and model.num_ctx is None:
            changes["num_ctx"] = self._fitting(size())
        options = {**bound, **({argument: tokens} if argument else {})}
        if isinstance(bound.get("options"), Mapping) and "num_predict" in _fields(model):  # these hide Ollama's fields
            options["options"] = {**changes, **bound["options"], "num_predict": tokens}
        if changes:
            model = model.model_copy(update=changes)
        return model.bind(**options) if options else model

    def _names(self, model: Any) -> tuple[str | None, str | None]:
        """Return the argument and the field that take the model's limit; both None where there is none."""
        known = next((_ARGUMENTS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _ARGUMENTS), None)
        if self.parameter:
            is_field = not known and self.parameter in _fields(model)
            return (None, self.parameter) if is_field else (self.parameter, None)
        if known:
            return known, None
        field = next((name for name in _FIELDS if name in _fields(model)), None)
        if not field:
            self._warn(type(model).__name__)
        return None, field

    def _warn(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "it is not known how %s takes its output limit, so its replies may be longer than the budgets, or cut; "
                "name the argument of a call that takes it (limit_parameter), or set the limit on the model",
                name,
            )

    def _fitting(self, tokens: int) -> int:
        """Return a context for this many tokens that never shrinks and seldom grows: each change loads the model anew.

        Without one Ollama takes 2,048 or 4,096 tokens, and drops the beginning of a longer prompt without a word.
        """
        while self._context < tokens:
            self._context *= 2
        return self._context


def window_of(model: Any) -> int | None:
    """Return the window of a model in tokens, from its own settings, its server or its profile; None if unknown.

    Raises:
        MemAgentError: the server of an Ollama model failed.
    """
    context = next((size for name in ("num_ctx", "n_ctx") if (size := _number(model, name))), None)
    if context:
        return context
    if "num_ctx" in _fields(model):
        return _window_of_ollama(model)
    if pipeline := _pipeline(model):
        return _number(getattr(getattr(_inner(pipeline), "model", None), "config", None), "max_position_embeddings")
    size = (getattr(model, "profile", None) or {}).get("max_input_tokens")
    return size if isinstance(size, int) else None


def counter_of_model(model: Any) -> Callable[[str], int] | None:
    """Return the count of a tokenizer that the model holds in this process, if it does."""
    if getattr(model, "custom_get_token_ids", None):
        return lambda text: int(model.get_num_tokens(text))
    if (pipeline := _pipeline(model)) and (tokenizer := getattr(_inner(pipeline), "tokenizer", None)):
        return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
    tokenize = getattr(getattr(model, "client", None), "tokenize", None)
    if "n_ctx" in _fields(model) and tokenize:  # llama.cpp
        return lambda text: len(tokenize(text.encode("utf-8", "replace"), add_bos=False))
    return None


def _pipeline(model: Any) -> Any:
    """Return the model if it is a transformers pipeline, or a chat model around one."""
    inner = getattr(model, "llm", model) if type(model).__name__ == "ChatHuggingFace" else model
    return model if type(inner).__name__ == "HuggingFacePipeline" else None


def _inner(model: Any) -> Any:
    return getattr(getattr(model, "llm", model), "pipeline", None)


def _window_of_ollama(model: Any) -> int | None:
    """Return the context that the model was trained for, as its server says; the calls ask for as much as they need."""
    show = getattr(getattr(model, "_client", None), "show", None)
    if not show:
        return None
    try:
        details = show(model.model)
    except Exception as error:
        failure = from_exception(error, f"{type(model).__name__}:{model.model}")
        raise failure or error from error
    sizes = getattr(details, "modelinfo", None) or {}
    return next((size for name, size in sizes.items() if name.endswith(".context_length")), None)


def _number(model: Any, name: str) -> int | None:
    value = getattr(model, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _fields(model: Any) -> Mapping[str, Any]:
    return type(model).model_fields if isinstance(model, BaseLanguageModel) and isinstance(model, BaseModel) else {}
