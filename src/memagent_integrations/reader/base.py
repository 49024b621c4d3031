"""What a reader is made of, what it tells of a document without a call, and how it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack
from copy import copy
from pathlib import Path
from typing import Any, Self

from memagent_integrations.backends import Backend
from memagent_integrations.calls import Calls
from memagent_integrations.documents import is_one_shot
from memagent_integrations.errors import UsageError
from memagent_integrations.journal import Journal
from memagent_integrations.outputs import Output
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader.position import Position, loaded_document
from memagent_integrations.reader.setup import Setup
from memagent_integrations.records import Budgets, Chunk, Plan


class BaseReader:
    """The setup and the journal of a reader; `Reader` says what it does with them."""

    def __init__(self, setup: Setup, journal: Journal | str | Path | None) -> None:
        self._setup = setup
        self.journal = journal if isinstance(journal, Journal | None) else Journal(journal)
        self._opened_journal = self.journal if self.journal is not journal else None

    @property
    def backend(self) -> Backend:
        """The model; with an `answer_model`, the one that writes the memory."""
        return self._setup.model.backend

    @property
    def answer_backend(self) -> Backend:
        """The model that answers."""
        return self._setup.model_for("answer").backend

    @property
    def output(self) -> Output | None:
        """What an answer has to be, None for a text; its `parse` returns the object that an answer is."""
        return self._setup.output

    @property
    def prompts(self) -> PromptSet:
        """The templates."""
        return self._setup.prompts

    @property
    def budgets(self) -> Budgets:
        """The most tokens of each part of a prompt."""
        return self._setup.budgets

    @property
    def calls(self) -> Calls:
        """The caller of the model, which keeps to the limits."""
        return self._setup.model.calls

    def plan(self, question: str, document: Any) -> Plan:
        """Return what `read` would take, without calling the model (the text is tokenized to the end).

        Raises:
            UsageError: as `read`, and for an iterator, which a plan would use up.
            ContextOverflow: the budgets do not fit the window.
        """
        return self.plans([question], document)[0]

    def plans(self, questions: Iterable[str], document: Any) -> list[Plan]:
        """Return what `ask` would take: a `plan` for each question, for which the text is tokenized once.

        Raises:
            MemAgentError: as `plan`.
        """
        if is_one_shot(document):
            raise UsageError(
                "a plan would use up this iterator; "
                "plan for a document that can be read again (str, Path, list, loader)"
            )
        setup = self._setup.for_reading()
        return setup.plans(questions, setup.chunks(document))

    def count(self, text: str) -> int:
        """Return the tokens of a text as it stands in a prompt."""
        return self._setup.count(text)

    def checked_memory(self, memory: str) -> str:
        """Return the memory, after checking that it is within its budget: one that the model did not write may not be.

        Raises:
            UsageError: it is longer, or not text.
        """
        return self._setup.checked_memory(memory)

    def chunks(self, document: Any) -> Iterator[Chunk]:
        """Return the chunks in which a document is read."""
        return self._setup.chunks(document)

    def position(self, load: Callable[[], Any], number: int = 0, digest: str = "") -> Position:
        """Return the position of a reading in parts in its document, after `number` chunks; no model is called.

        `load` returns the document, each time with the same text; `digest` is the one of the chunks that were read.

        Raises:
            UsageError: the document cannot be read, or those chunks are not the ones that were read.
        """
        return Position(self.chunks(loaded_document(load)), number, digest)

    def for_reading(self) -> Self:
        """Return this reader for one reading, or the parts of one, with the models that its backends stand for now.

        Only a backend over LlamaIndex's `Settings.llm` stands for another model later. `read` and the like do this.

        Raises:
            UsageError: `Settings` has no LLM.
        """
        setup = self._setup.for_reading()
        if setup is self._setup:
            return self
        reader = copy(self)
        reader._setup = setup
        return reader

    def close(self) -> None:
        """Close the backends, and the journal if it was given as a file."""
        with ExitStack() as closing:  # the others too if one fails
            if self._opened_journal:
                closing.callback(self._opened_journal.close)
            for model in reversed(self._setup.models):
                closing.callback(model.backend.close)

    async def aclose(self) -> None:
        """`close`, async."""
        async with AsyncExitStack() as closing:
            if self._opened_journal:
                closing.push_async_callback(asyncio.to_thread, self._opened_journal.close)
            for model in reversed(self._setup.models):
                closing.push_async_callback(model.backend.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Reader {self.backend.name} {self.prompts.name} {self.budgets}>"
