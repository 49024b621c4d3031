"""What it takes to fold a text that is thrown away afterwards: no section of it may hold up the others."""

from __future__ import annotations

from memagent_integrations.errors import BackendError, ContextOverflow, MemAgentError, NoMemory
from memagent_integrations.reader.base import BaseReader

TRIES = 3
"""How often a section is read before the model's failing to write a memory of it counts."""
_OF_THE_REQUEST = (None, 400, 413, 422)
"""The statuses of a failure that another section need not have; others are about the key, the model or the address."""


def is_about_the_section(error: MemAgentError, reader: BaseReader, question: str) -> bool:
    """Return whether another section may be read in spite of this error, and the same one will fail again."""
    if isinstance(error, NoMemory):
        return True
    if isinstance(error, ContextOverflow):
        return _budgets_fit(reader, question)
    return isinstance(error, BackendError) and not error.retryable and error.status in _OF_THE_REQUEST


def _budgets_fit(reader: BaseReader, question: str) -> bool:
    try:
        reader.plan(question, "any text")
    except ContextOverflow:
        return False
    return True
