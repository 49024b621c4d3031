"""The door to LangChain: a backend over any of its models, and a runnable that reads a document for a question."""

from __future__ import annotations

from memagent_integrations.errors import MissingExtra

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise MissingExtra.extra("langchain-core", "langchain") from error

from memagent_integrations.langchain.backend import ChatModelBackend
from memagent_integrations.langchain.messages import STEP
from memagent_integrations.langchain.reader import MemAgentReader, ReaderInput

__all__ = ["STEP", "ChatModelBackend", "MemAgentReader", "ReaderInput"]
