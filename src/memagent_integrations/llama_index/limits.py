"""How LLM classes of LlamaIndex take their output limit, and how long their windows are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import LLM, MockLLM
from llama_index.core.llms.structured_llm import StructuredLLM

from memagent_integrations.llama_index.llms import changed, class_names

_KEYWORDS = dict.fromkeys(("OpenAI", "Anthropic", "BedrockConverse", "Cohere", "LiteLLM", "MistralAI"), "max_tokens")
_KEYWORDS["OpenAIResponses"] = "max_output_tokens"
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_output", "num_predict")
"""Fields of an LLM, and keys of the options that it sends, which limit the output."""
_OPTIONS = ("additional_kwargs", "generate_kwargs")
_LOADED_WINDOWS = {
    "HuggingFaceLLM": ("_model", "config", "max_position_embeddings"),
    "Vllm": ("_client", "llm_engine", "model_config", "max_model_len"),
}
"""Where the class has its model, whose window it does not report."""


def limited(llm: LLM, limit: int, keyword: str | None = None) -> tuple[LLM, dict[str, Any]] | None:
    """Return the LLM to call and the keyword arguments for it, so that it writes at most `limit` tokens.

    That LLM is a copy where the limit is a field that the class reads at each call. None: nothing is known that
    limits the class. `keyword` names the keyword argument that does.
    """
    if keyword:
        return llm, {keyword: limit}
    kinds = class_names(llm)
    if kinds & {"GoogleGenAI", "Gemini"}:
        return llm, {"generation_config": {"max_output_tokens": limit}}
    if isinstance(llm, MockLLM):  # its max_tokens is the length of what it writes
        return None
    options = _limited_options(llm, limit, extra=["num_predict"] if "Ollama" in kinds else [])
    argument = next((_KEYWORDS[kind.__name__] for kind in type(llm).__mro__ if kind.__name__ in _KEYWORDS), None)
    arguments = {argument: limit} if argument and not options else {}
    fields = {name: getattr(llm, name) for name in _LIMITS if name in type(llm).model_fields}
    # a field of None is not sent: the keyword argument, or the options, hold in its place
    new = {name: limit for name, value in fields.items() if value is not None or not (arguments or options)}
    if not (new or arguments or options):
        return None
    differing = {name: limit for name in new if fields[name] != limit}
    return changed(llm, **differing, **options), arguments


def _limited_options(llm: LLM, limit: int, extra: Sequence[str]) -> dict[str, Any]:
    """Return the fields of options that name a limit, with this one in its place; `extra` is always named."""
    changes = {}
    for field in _OPTIONS:
        options = getattr(llm, field, None)
        if isinstance(options, Mapping) and (names := [*(name for name in _LIMITS if name in options), *extra]):
            changes[field] = {**options, **dict.fromkeys(names, limit)}
    return changes


def streams_usage(llm: LLM) -> bool:
    """Return whether the LLM has to be asked for the usage of a streamed call, in OpenAI's way, and is not yet."""
    return "OpenAI" in class_names(llm) and "stream_options" not in (getattr(llm, "additional_kwargs", None) or {})


def window_of(llm: LLM, metadata: LLMMetadata) -> int | None:
    """Return the context window of the LLM, None if it does not know it.

    3,900 is LlamaIndex's value for an unknown window, unless it was set, or the class calls its model with it.
    """
    if isinstance(llm, StructuredLLM):
        return window_of(llm.llm, metadata)
    kinds, window = class_names(llm), metadata.context_window
    if "Ollama" in kinds:
        window = llm.additional_kwargs.get("num_ctx") or window  # type: ignore[attr-defined]
    elif window == DEFAULT_CONTEXT_WINDOW and "LlamaCPP" not in kinds:
        paths = [_LOADED_WINDOWS[kind] for kind in kinds if kind in _LOADED_WINDOWS]
        if paths:
            window = _attribute(llm, *paths[0])
        elif "context_window" not in llm.model_fields_set:
            return None
    return window if isinstance(window, int) and window > 0 else None


def _attribute(holder: Any, *names: str) -> Any:
    for name in names:
        holder = getattr(holder, name, None)
    return holder
