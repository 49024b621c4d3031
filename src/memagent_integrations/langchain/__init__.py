"""LangChain and LangGraph: a runnable that reads documents; a tool, a compressor, a graph and an agent's memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memagent_integrations.errors import MissingExtra

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise MissingExtra.extra("langchain-core", "langchain") from error

from memagent_integrations.langchain.backend import ChatModelBackend
from memagent_integrations.langchain.compressor import MemAgentDocumentCompressor
from memagent_integrations.langchain.inputs import ReaderInput
from memagent_integrations.langchain.messages import STEP
from memagent_integrations.langchain.reader import MemAgentReader
from memagent_integrations.langchain.tool import MemAgentTool

if TYPE_CHECKING:
    from memagent_integrations.langchain.graph import ReadingGraph, ReadingState, ReadingTask, build_graph
    from memagent_integrations.langchain.middleware import MemAgentMiddleware

__all__ = [
    "STEP",
    "ChatModelBackend",
    "MemAgentDocumentCompressor",
    "MemAgentMiddleware",
    "MemAgentReader",
    "MemAgentTool",
    "ReaderInput",
    "ReadingGraph",
    "ReadingState",
    "ReadingTask",
    "build_graph",
]
# imported at first use: they need langchain and langgraph, which are slow to import
_LAZY = {
    "MemAgentMiddleware": "middleware",
    **dict.fromkeys(("ReadingGraph", "ReadingState", "ReadingTask", "build_graph"), "graph"),
}


if not TYPE_CHECKING:  # with a `__getattr__` mypy would accept any name

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
