"""LlamaIndex: a response synthesizer, a query engine, a workflow and a memory block over its LLMs, or over any backend.

`Reader` does the reading; this package turns its events into responses, source nodes, callbacks and instrumentation
events.
"""

from __future__ import annotations

from memagent_integrations.errors import MissingExtra

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise MissingExtra.extra("llama-index-core", "llama-index") from error

from memagent_integrations.llama_index.backend import LLMBackend
from memagent_integrations.llama_index.memory import MemAgentMemoryBlock
from memagent_integrations.llama_index.query_engine import MemAgentQueryEngine
from memagent_integrations.llama_index.record import MemAgentAnswerEnd, MemAgentStep
from memagent_integrations.llama_index.synthesizer import MemAgentSynthesizer
from memagent_integrations.llama_index.workflow import (
    MemAgentAnswer,
    MemAgentReview,
    MemAgentReviewed,
    MemAgentStart,
    MemAgentStepEvent,
    MemAgentWorkflow,
)

__all__ = [
    "LLMBackend",
    "MemAgentAnswer",
    "MemAgentAnswerEnd",
    "MemAgentMemoryBlock",
    "MemAgentQueryEngine",
    "MemAgentReview",
    "MemAgentReviewed",
    "MemAgentStart",
    "MemAgentStep",
    "MemAgentStepEvent",
    "MemAgentSynthesizer",
    "MemAgentWorkflow",
]
