"""Read documents of any length with a fixed context window.

`__all__` lists the public names; each is imported when it is first used, so that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from memagent_integrations.backends import Backend, ScriptedBackend, load_backend
    from memagent_integrations.calls import Limits
    from memagent_integrations.citations import Citation
    from memagent_integrations.errors import (
        BackendError,
        ContextOverflow,
        JournalError,
        JournalMismatch,
        MemAgentError,
        MissingExtra,
        RunPaused,
        UsageError,
    )
    from memagent_integrations.journal import Journal
    from memagent_integrations.langchain import MemAgentReader
    from memagent_integrations.llama_index import MemAgentQueryEngine, MemAgentSynthesizer
    from memagent_integrations.prompts import PromptSet
    from memagent_integrations.reader import Reader
    from memagent_integrations.records import Budgets, Reading, Step
    from memagent_integrations.trace import save_trace

__all__ = [
    "Backend",
    "BackendError",
    "Budgets",
    "Citation",
    "ContextOverflow",
    "Journal",
    "JournalError",
    "JournalMismatch",
    "Limits",
    "MemAgentError",
    "MemAgentQueryEngine",
    "MemAgentReader",
    "MemAgentSynthesizer",
    "MissingExtra",
    "PromptSet",
    "Reader",
    "Reading",
    "RunPaused",
    "ScriptedBackend",
    "Step",
    "UsageError",
    "load_backend",
    "save_trace",
]

_MODULES = {  # module -> the public names that it defines
    "backends": ("Backend", "ScriptedBackend", "load_backend"),
    "calls": ("Limits",),
    "citations": ("Citation",),
    "errors": (
        "BackendError",
        "ContextOverflow",
        "JournalError",
        "JournalMismatch",
        "MemAgentError",
        "MissingExtra",
        "RunPaused",
        "UsageError",
    ),
    "journal": ("Journal",),
    "langchain": ("MemAgentReader",),
    "llama_index": ("MemAgentQueryEngine", "MemAgentSynthesizer"),
    "prompts": ("PromptSet",),
    "reader": ("Reader",),
    "records": ("Budgets", "Reading", "Step"),
    "trace": ("save_trace",),
}


if not TYPE_CHECKING:  # with a `__getattr__` mypy would accept any name

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
