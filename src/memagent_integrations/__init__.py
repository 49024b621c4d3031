"""Read documents of any length with a fixed context window.

The names below are all there is to import from here; each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from memagent_integrations.backends import Backend, ScriptedBackend, load_backend
    from memagent_integrations.errors import BackendError, ContextOverflow, MemAgentError, MissingExtra, UsageError
    from memagent_integrations.langchain import MemAgentReader
    from memagent_integrations.llama_index import MemAgentQueryEngine, MemAgentSynthesizer
    from memagent_integrations.prompts import PromptSet
    from memagent_integrations.reader import Reader
    from memagent_integrations.records import Budgets, Reading, Step

_HOMES = {
    "Backend": "backends",
    "BackendError": "errors",
    "Budgets": "records",
    "ContextOverflow": "errors",
    "MemAgentError": "errors",
    "MemAgentQueryEngine": "llama_index",
    "MemAgentReader": "langchain",
    "MemAgentSynthesizer": "llama_index",
    "MissingExtra": "errors",
    "PromptSet": "prompts",
    "Reader": "reader",
    "Reading": "records",
    "ScriptedBackend": "backends",
    "Step": "records",
    "UsageError": "errors",
    "load_backend": "backends",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
