"""What fits: question, memory and prompts against their budgets and the model's window, known before the first call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memagent_integrations.backends import Backend
from memagent_integrations.calls import Calls
from memagent_integrations.errors import ContextOverflow, EmptyDocument, QuestionError, UsageError
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Chunk, Phase, Plan

DEFAULT_WINDOW = 8192
_NO_ROOM = "lower memory_tokens or output_tokens, or use a model with a larger window"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The sizes of a reader's prompts. `window` comes before what the backend says of its own; 8,192 if neither says."""

    backend: Backend
    calls: Calls
    prompts: PromptSet
    budgets: Budgets
    window: int | None = None

    def count(self, text: str) -> int:
        """Tokens of a text as it stands in a prompt."""
        return self._count(self.prompts.harmless(text))

    def check(self, question: str) -> None:
        """See that every prompt for this question will fit.

        Raises:
            QuestionError: the question is empty, or longer than its budget.
            ContextOverflow: the budgets do not fit the window.
        """
        if not isinstance(question, str) or not question.strip():
            raise QuestionError("the question is empty")
        budgets, asked = self.budgets, self.count(question)
        if asked > budgets.question_tokens:
            raise QuestionError(
                f"the question has {asked} tokens, its budget is {budgets.question_tokens}; shorten it or raise question_tokens"
            )
        window = self.window or self.calls.query(self.backend, lambda: self.backend.window) or DEFAULT_WINDOW
        sections: dict[Phase, int] = {"memory": budgets.chunk_tokens, "answer": 0}
        for phase, chunk in sections.items():
            prompt, output = self._prompt_tokens(question, phase, chunk), budgets.output(phase)
            if prompt + output > window:
                room = (window - output - self._prompt_tokens(question, phase, 0)) // self._sections
                raise ContextOverflow(
                    f"question {asked} + chunk {chunk} + memory {budgets.memory_tokens} + output {output} + template "
                    f"{prompt - asked - chunk - budgets.memory_tokens} = {prompt + output} tokens, but the window holds {window}; "
                    + (f"chunk_tokens={room} or less would fit" if room >= 64 and phase == "memory" else _NO_ROOM)
                )

    def memory(self, memory: str) -> str:
        """The memory, if it keeps to its budget. The model's own does; one that somebody wrote may not.

        Raises:
            UsageError: it is longer, or no text.
        """
        if not isinstance(memory, str):
            raise UsageError(f"the memory has to be text, not {type(memory).__name__}")
        if (tokens := self.count(memory)) > self.budgets.memory_tokens:
            raise UsageError(
                f"the memory has {tokens} tokens, its budget is {self.budgets.memory_tokens}; make it shorter"
            )
        return memory

    def chunk(self, chunk: Chunk) -> Chunk:
        """The chunk, if it keeps to its budget.

        Raises:
            UsageError: it was cut for another one.
        """
        if chunk.span.tokens > self.budgets.chunk_tokens:
            raise UsageError(
                f"the chunk has {chunk.span.tokens} tokens, chunk_tokens is {self.budgets.chunk_tokens}; take the chunks of this reader"
            )
        return chunk

    def plan(self, question: str, chunks: Iterable[Chunk]) -> Plan:
        """What reading these chunks for a question takes.

        Raises:
            EmptyDocument: there are none.
        """
        number, size = 0, 0
        for chunk in chunks:
            number, size = number + 1, size + chunk.span.tokens
        if not number:
            raise EmptyDocument
        fixed, end = self._prompt_tokens(question, "memory", 0), self._prompt_tokens(question, "answer", 0)
        return Plan(
            chunks=number,
            calls=number + 1,
            document_tokens=size,
            prompt_tokens=number * fixed + size * self._sections + end,
            completion_tokens=number * self.budgets.output("memory") + self.budgets.output("answer"),
        )

    def _count(self, text: str) -> int:
        return self.calls.count(self.backend, text)

    @property
    def _sections(self) -> int:
        """How often a prompt shows its section."""
        return self.prompts.update.count("{section}")

    def _prompt_tokens(self, question: str, phase: Phase, section: int) -> int:
        """Tokens of a prompt of this phase at most, with `section` tokens of the document."""
        size = self.prompts.size(
            phase, self._count, question=self.count(question), memory=self.budgets.memory_tokens, section=section
        )
        return size + self.backend.template_tokens
