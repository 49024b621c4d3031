"""A long text of numbered facts, in parts that are whole chunks, and a model that strings the facts together."""

from __future__ import annotations

import re
from typing import Any

from memagent_integrations import Reader, ScriptedBackend
from memagent_integrations.records import Prompt

QUESTION = "What was found?"
CHUNK_TOKENS = 40
EXPECTED = 30
"""The number of chunks of the whole text."""


def _section(number: int) -> str:
    return f"fact{number} was found. " + "more " * (CHUNK_TOKENS - 7) + "\n\n"


WHOLE = "".join(map(_section, range(EXPECTED)))
PARTS = ["".join(map(_section, range(first, first + 3))) for first in range(0, EXPECTED, 3)]


def strung(prompt: Prompt) -> str:
    """Append the facts of the section to the memory; answer with all of them."""
    text = prompt.messages[-1].content
    memory = text.rpartition("<memory>\n")[2].partition("\n</memory>")[0]
    section = text.rpartition("<section>\n")[2].partition("\n</section>")[0] if prompt.phase == "memory" else ""
    known = [] if memory.startswith("(empty") else memory.split()
    return " ".join([*known, *re.findall(r"\bfact\d+", section)])


def carried_reader(journal: Any = None, broken: Any = lambda prompt: None, **settings: Any) -> Reader:
    """A reader whose model strings facts together; `broken(prompt)` may give another reply, or an error."""
    backend = ScriptedBackend(lambda prompt: broken(prompt) or strung(prompt))
    return Reader(backend, journal=journal, **({"chunk_tokens": CHUNK_TOKENS, "memory_tokens": 400} | settings))


def shown_memories(reader: Reader) -> list[str]:
    """The memories that the prompts have shown."""
    assert isinstance(reader.backend, ScriptedBackend)
    texts = (prompt.messages[-1].content for prompt in reader.backend.prompts)
    return [text.rpartition("<memory>\n")[2].partition("\n</memory>")[0] for text in texts]
