"""The setup of a reader, and the checks that question, memory and prompts fit their budgets and the window."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from memagent_integrations import policies
from memagent_integrations.backends import Backend, embedded, load_backend
from memagent_integrations.calls import Calls, Limits
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.chunking import Chunker, achunks, chunks
from memagent_integrations.documents import apieces, is_async, pieces
from memagent_integrations.errors import ContextOverflow, EmptyDocument, QuestionError, UsageError
from memagent_integrations.loop import AsyncChunks, Turns, reading_loop
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets, Chunk, Layout, Phase, Plan, Prompt, Reply
from memagent_integrations.tokens import Counter

_DEFAULT_WINDOW = 8192
TWO_LAYOUTS = "pass prompts or layout, not both: a prompt set, like that of a policy, has its own layout"
_POLICY = "policy:"
_LEAST_CHUNK = 64  # smaller chunks are no advice: a document would take too many calls
_NO_ROOM = "lower memory_tokens or output_tokens, or use a model with a larger window"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model, how it is called, its prompts and their sizes. `window` is the caller's; None: the backend's own."""

    backend: Backend
    calls: Calls
    prompts: PromptSet
    budgets: Budgets
    window: int | None = None

    def resolve_window(self) -> int:
        """Return the window to keep to: the one that was set, else the backend's (perhaps by a call), else 8,192."""
        return self.window or self.calls.query(self.backend, lambda: self.backend.window) or _DEFAULT_WINDOW

    def count(self, text: str) -> int:
        """Return the tokens of a text as it stands in a prompt."""
        return self.calls.count(self.backend, self.prompts.harmless(text))

    def check(self, question: str) -> int:
        """Check that every prompt for this question will fit; return the tokens of the question.

        Raises:
            QuestionError: the question is empty, or longer than its budget.
            ContextOverflow: the budgets do not fit the window.
        """
        if not isinstance(question, str) or not question.strip():
            raise QuestionError("the question is empty")
        budgets, tokens = self.budgets, self.count(question)
        if tokens > budgets.question_tokens:
            raise QuestionError(
                f"the question has {tokens} tokens, its budget is {budgets.question_tokens}; "
                "shorten it or raise question_tokens"
            )
        window = self.resolve_window()
        self._check_phase("memory", tokens, budgets.chunk_tokens, window)
        self._check_phase("answer", tokens, 0, window)
        return tokens

    def _check_phase(self, phase: Phase, question: int, chunk: int, window: int) -> None:
        memory, output = self.budgets.memory_tokens, self.budgets.output(phase)
        prompt = self._prompt_tokens(phase, question, chunk)
        if prompt + output <= window:
            return
        room = (window - output - self._prompt_tokens(phase, question, 0)) // self._sections
        advice = _NO_ROOM
        if phase == "memory" and room >= _LEAST_CHUNK:
            advice = f"chunk_tokens={room} or less would fit"
        raise ContextOverflow(
            f"question {question} + chunk {chunk} + memory {memory} + output {output} + template "
            f"{prompt - question - chunk - memory} = {prompt + output} tokens, but the window holds {window}; {advice}"
        )

    def checked_memory(self, memory: str) -> str:
        """Return the memory, after checking that it is within its budget: one that the model did not write may not be.

        Raises:
            UsageError: it is longer, or not text.
        """
        if not isinstance(memory, str):
            raise UsageError(f"the memory has to be text, not {type(memory).__name__}")
        if memory and (tokens := self.count(memory)) > self.budgets.memory_tokens:
            raise UsageError(
                f"the memory has {tokens} tokens, its budget is {self.budgets.memory_tokens}; make it shorter"
            )
        return memory

    def chunks(self, document: Any) -> Iterator[Chunk]:
        """Return the chunks in which a document, or one `Chunk`, is read. One of nothing but space is left out.

        Raises:
            UsageError: the one chunk was made for a larger budget.
        """
        source = iter((self._checked_chunk(document),)) if isinstance(document, Chunk) else self._cut(document)
        return (chunk for chunk in source if not chunk.text.isspace())

    def checked_chunks(self, question: str, source: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks once the question is checked: the loop meets a bad question as it meets a bad document."""
        self.check(question)
        yield from source

    def async_chunks(self, question: str, document: Any) -> AsyncChunks | None:
        """Return the chunks of an async document, for the loop; None if the document is not async."""
        return AsyncChunks(self._achecked_chunks(question, document)) if is_async(document) else None

    async def _achecked_chunks(self, question: str, document: Any) -> AsyncGenerator[Chunk]:
        async with aclosing(achunks(apieces(document), self._chunker())) as source:
            await asyncio.to_thread(self.check, question)
            async for chunk in source:
                if not chunk.text.isspace():
                    yield chunk

    def loop(self, question: str, source: Iterable[Chunk] | None, **part: Any) -> Turns:
        """Return the reading loop over these chunks; `part` are more arguments of `reading_loop`."""
        return reading_loop(
            question,
            source,
            prompts=self.prompts,
            budgets=self.budgets,
            count=self.count,
            model=self.backend.name,
            **part,
        )

    def plan(self, question: str, source: Iterable[Chunk]) -> Plan:
        """Return what reading these chunks for a question takes.

        Raises:
            EmptyDocument: there are none.
            QuestionError, ContextOverflow: as `check`.
        """
        question_tokens, number, size = self.check(question), 0, 0
        for chunk in source:
            number, size = number + 1, size + chunk.span.tokens
        if not number:
            raise EmptyDocument
        update = self._prompt_tokens("memory", question_tokens, 0)
        return Plan(
            chunks=number,
            calls=number + 1,
            document_tokens=size,
            prompt_tokens=number * update + size * self._sections + self._prompt_tokens("answer", question_tokens, 0),
            completion_tokens=number * self.budgets.output("memory") + self.budgets.output("answer"),
        )

    def complete(self, prompt: Prompt, cancelled: threading.Event | None = None) -> Iterator[str | Reply]:
        """Yield the reply to a prompt; once `cancelled` is set, the call is not retried."""
        yield self.calls.complete(self.backend, prompt, cancelled)

    async def acomplete(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`complete`, async."""
        yield await self.calls.acomplete(self.backend, prompt)

    def stream(self, prompt: Prompt) -> Iterator[str | Reply]:
        """Yield the reply to a prompt, an answer in pieces before the whole."""
        return self.calls.stream(self.backend, prompt) if prompt.phase == "answer" else self.complete(prompt)

    def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        return self.calls.astream(self.backend, prompt) if prompt.phase == "answer" else self.acomplete(prompt)

    def _cut(self, document: Any) -> Iterator[Chunk]:
        return chunks(pieces(document), self._chunker())

    def _chunker(self) -> Chunker:
        return Chunker(self.count, self.budgets.chunk_tokens, self.budgets.overlap_tokens)

    def _checked_chunk(self, chunk: Chunk) -> Chunk:
        if chunk.span.tokens > self.budgets.chunk_tokens:
            raise UsageError(
                f"the chunk has {chunk.span.tokens} tokens, chunk_tokens is {self.budgets.chunk_tokens}; "
                "take the chunks of this reader"
            )
        return chunk

    @property
    def _sections(self) -> int:
        """How often a prompt shows its section."""
        return self.prompts.update.count("{section}")

    def _prompt_tokens(self, phase: Phase, question: int, section: int) -> int:
        """Return the most tokens that a prompt of this phase has, given the tokens of question and section."""
        size = self.prompts.size(
            phase, self._count_template, question=question, memory=self.budgets.memory_tokens, section=section
        )
        return size + self.backend.template_tokens

    @cached_property
    def _count_template(self) -> Counter:
        """Counts a text of the prompt set, each only once: with many endpoints a count is a call."""
        return lru_cache(partial(self.calls.count, self.backend))


def load_setup(
    model: str | Backend,
    *,
    prompts: PromptSet | None,
    layout: Layout | None,
    window: int | None,
    limits: Limits | None,
    backend_options: Mapping[str, Any] | None,
    **budgets: int | None,
) -> Setup:
    """Return the setup for the arguments of `Reader`, with the prompts and budgets that a policy or a model brings.

    Raises:
        UsageError: a setting is wrong, or the model's name is unknown.
        MissingExtra: the model's package is not installed.
    """
    if not isinstance(model, (str, Backend)):
        raise UsageError(
            f"model has to be a name or a Backend, not {type(model).__name__}; for LangChain and LlamaIndex models use "
            "memagent_integrations.langchain and memagent_integrations.llama_index"
        )
    if backend_options and isinstance(model, Backend):
        raise UsageError("backend_options are for a model given by name; this backend has been made already")
    if not isinstance(limits, Limits | None):
        raise UsageError(f"limits has to be a Limits, not {limits!r}")
    check_int(**drop_none(window=window))
    defaults = Budgets()
    if isinstance(model, str) and names_policy(model):
        policy = policies.load(model.removeprefix(_POLICY))
        prompts, defaults = prompts or policy.prompts, policy.budgets
    elif isinstance(model, str) and model in embedded.EMBEDDED:
        defaults = embedded.EMBEDDED[model].budgets
    if prompts and layout:
        raise UsageError(TWO_LAYOUTS)
    return Setup(
        budgets=replace(defaults, **drop_none(**budgets)),
        prompts=prompts or PromptSet.default(layout=layout or "section-first"),
        backend=model if isinstance(model, Backend) else load_backend(model, **(backend_options or {})),
        calls=Calls(limits or Limits()),
        window=window,
    )


def names_policy(model: str | Backend) -> bool:
    """Return whether a model is given as a policy's folder."""
    return isinstance(model, str) and model.startswith(_POLICY)
