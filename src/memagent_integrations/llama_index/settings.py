"""The settings that the classes of this package share, and the reader that they make of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from pydantic import BaseModel

from memagent_integrations.backends import Backend
from memagent_integrations.calls import Limits
from memagent_integrations.checks import check_names
from memagent_integrations.errors import UsageError
from memagent_integrations.journal import Journal
from memagent_integrations.llama_index.backend import LLMBackend
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Layout, OnLostSection, Strategy
from memagent_integrations.tokens import Counter

Model = LLM | Backend | str | None
"""A LlamaIndex LLM, a `Backend`, or a name that `load_backend` knows; None: `Settings.llm`."""


class ReaderSettings(TypedDict, total=False):
    """The arguments of `Reader` besides the model that writes the memory.

    `answer_llm` is its `answer_model`, `output_cls` its `output`: LlamaIndex's names.
    """

    answer_llm: Model
    output_cls: type[BaseModel] | None
    prompts: PromptSet | None
    layout: Layout | None
    chunk_tokens: int | None
    memory_tokens: int | None
    question_tokens: int | None
    output_tokens: int | None
    overlap_tokens: int | None
    window: int | None
    journal: Journal | str | Path | None
    limits: Limits | None
    backend_options: Mapping[str, Any] | None
    answer_options: Mapping[str, Any] | None
    on_lost_section: OnLostSection
    lookup: int
    strategy: Strategy
    segments: int | None
    reread: int


def reader_over(
    llm: Model,
    tokenizer: str | Counter | None = None,
    callback_manager: CallbackManager | None = None,
    **settings: Unpack[ReaderSettings],
) -> Reader:
    """Return a reader over a LlamaIndex LLM, a `Backend`, or the name of one.

    Raises:
        UsageError: a setting is wrong, or unknown.
    """
    if "model" in settings or "answer_model" in settings:
        raise UsageError("models are called llm and answer_llm here, as in LlamaIndex")
    check_names(settings, ReaderSettings.__annotations__)
    others: dict[str, Any] = {**settings}
    answer_llm, output = others.pop("answer_llm", None), others.pop("output_cls", None)
    if output is not None and not (isinstance(output, type) and issubclass(output, BaseModel)):
        raise UsageError(f"output_cls has to be a pydantic model class, not {output!r}")
    answering = llm if answer_llm is None else answer_llm
    if settings.get("reread") and isinstance(answering, StructuredLLM):
        raise UsageError("reread needs an answer that is a text, and this LLM writes objects; leave reread out")
    if tokenizer is not None and isinstance(llm, str | Backend):
        raise UsageError(
            "tokenizer goes with a LlamaIndex LLM; a backend counts by itself (load_backend may take a tokenizer)"
        )

    def backend(model: Model) -> Backend | str:
        if isinstance(model, str | Backend):
            return model
        return LLMBackend(model, tokenizer=tokenizer, callback_manager=callback_manager)

    answer_model = None if answer_llm is None else backend(answer_llm)
    return Reader(backend(llm), answer_model=answer_model, output=output, **others)
