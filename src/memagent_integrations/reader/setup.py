"""The setup of a reader, and the checks that question, memory and prompts fit their budgets and the window."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, get_args

from memagent_integrations.checks import check_int, check_question, drop_none
from memagent_integrations.chunking import Chunker, achunks, chunks
from memagent_integrations.documents import apieces, is_async, pieces
from memagent_integrations.drivers import AsyncChunks
from memagent_integrations.errors import ContextOverflow, EmptyDocument, MemAgentError, QuestionError, UsageError
from memagent_integrations.journal import NamedMemory, settings_of
from memagent_integrations.lookup import BETWEEN_TOKENS, LEAST_PASSAGE_TOKENS, PASSAGE_TOKENS, PassageIndex
from memagent_integrations.loop import Turns, reading_loop
from memagent_integrations.outputs import Output
from memagent_integrations.parallel import parallel_loop
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader.model import Model
from memagent_integrations.records import Budgets, Chunk, OnLostSection, Phase, Plan, Prompt, Reply, Strategy
from memagent_integrations.scopes import in_thread
from memagent_integrations.spool import Replayable, Spool

_LEAST_CHUNK = 64  # smaller chunks are no advice: a document would take too many calls
_SEGMENTS = 8  # of a parallel reading, by default
_NO_ROOM = "lower memory_tokens or output_tokens, or use a model with a larger window"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model that notes, the one that answers if it is another, the prompts and their sizes, and what an answer is.

    Raises:
        UsageError: the model that answers cannot keep to `output`, `on_lost_section` or `strategy` is unknown, `lookup`
            is no number of passages, or `segments` no number of segments, or given for a sequential reading; or
            `reread` is neither 0 nor 1, or given with `output` or for a parallel reading.
    """

    model: Model
    answer_model: Model | None = None
    prompts: PromptSet
    budgets: Budgets
    output: Output | None = None
    on_lost_section: OnLostSection = "error"
    lookup: int = 0
    strategy: Strategy = "sequential"
    segments: int | None = None
    reread: int = 0

    def __post_init__(self) -> None:
        check_int(least=0, lookup=self.lookup, reread=self.reread)
        self._check_reread()
        check_int(**drop_none(segments=self.segments))
        if self.strategy not in get_args(Strategy):
            raise UsageError(f'strategy has to be "sequential" or "parallel", not {self.strategy!r}')
        if self.segments is not None and self.strategy != "parallel":
            raise UsageError('segments are those of strategy="parallel"; give that too')
        if self.on_lost_section not in get_args(OnLostSection):
            raise UsageError(f'on_lost_section has to be "error" or "skip", not {self.on_lost_section!r}')
        backend = self.model_for("answer").backend
        if self.output and not backend.structured:
            raise UsageError(
                f"{backend.name} cannot keep an answer to a schema (output). Pass a model that can as answer_model: "
                "openai:NAME, llamacpp:FILE.gguf or vllm:NAME, a chat model of LangChain's that can call tools, or (as "
                "answer_llm) an LLM of LlamaIndex's"
            )
        if self.output and self.prompts.answer_format == "boxed":
            raise UsageError(
                "these prompts ask for an answer in \\boxed{}, output for JSON; "
                "pass prompts.changed(answer=...) with a template that does not"
            )

    def _check_reread(self) -> None:
        if self.reread > 1:
            raise UsageError(f"reread has to be 0 or 1, not {self.reread}: the document is read once more, not oftener")
        if self.reread and self.strategy == "parallel":
            raise UsageError(
                'reread goes on from one memory, and strategy="parallel" has several; leave one of them out'
            )
        if self.reread and self.output:
            raise UsageError(
                "reread needs an answer that can say that the memory does not suffice, and output asks for JSON; leave "
                "one of them out"
            )

    def model_for(self, phase: Phase) -> Model:
        """Return the model that gets the prompts of a phase."""
        return self.answer_model if self.answer_model and phase == "answer" else self.model

    def for_reading(self) -> Setup:
        """Return the setup for one reading, with the models that its backends stand for now."""
        model, answer_model = self.model.for_reading(), self.answer_model and self.answer_model.for_reading()
        if model is self.model and answer_model is self.answer_model:
            return self
        return replace(self, model=model, answer_model=answer_model)

    @property
    def models(self) -> tuple[Model, ...]:
        """The models, each once."""
        return (self.model, self.answer_model) if self.answer_model else (self.model,)

    @property
    def answer_name(self) -> str | None:
        """The name of the model that answers, None if it is the one that notes."""
        return self.answer_model.backend.name if self.answer_model else None

    def count(self, text: str, phase: Phase = "memory") -> int:
        """Return the tokens of a text as it stands in a prompt of this phase."""
        return self.model_for(phase).count(self.prompts.harmless(text))

    def check(self, question: str) -> int:
        """Check that every prompt for this question will fit; return the tokens of the question.

        Raises:
            QuestionError: the question is no text, empty, or longer than its budget.
            ContextOverflow: the budgets do not fit the window.
        """
        check_question(question)
        budgets, tokens = self.budgets, self.count(question)
        if tokens > budgets.question_tokens:
            raise QuestionError(
                f"the question has {tokens} tokens, its budget is {budgets.question_tokens}; "
                "shorten it or raise question_tokens"
            )
        self._check_phase("memory", tokens, budgets.chunk_tokens)
        if self.parallel_segments:
            self._merging._check_phase("memory", tokens, budgets.memory_tokens)
        in_answer = self.count(question, "answer") if self.answer_model else tokens
        self._check_phase("answer", in_answer, 0)
        if self.lookup and (most := self._passage_tokens(in_answer)) < LEAST_PASSAGE_TOKENS:
            raise ContextOverflow(
                f"lookup={self.lookup} leaves {max(most, 0)} tokens for a passage in the window of the answer, and "
                f"{LEAST_PASSAGE_TOKENS} are the least; look up fewer, or {_NO_ROOM}"
            )
        return tokens

    def _check_phase(self, phase: Phase, question: int, chunk: int) -> None:
        memory, output = self.budgets.memory_tokens, self.budgets.output(phase)
        prompt, window = self._prompt_tokens(phase, question, chunk), self.model_for(phase).resolve_window()
        if prompt + output <= window:
            return
        room = (window - output - self._prompt_tokens(phase, question, 0)) // self._sections
        advice = _NO_ROOM
        if phase == "memory" and room >= _LEAST_CHUNK:
            advice = f"chunk_tokens={room} or less would fit"
        raise ContextOverflow(
            f"question {question} + chunk {chunk} + memory {memory} + output {output} + template "
            f"{prompt - question - chunk - memory} = {prompt + output} tokens, "
            f"but the window{self._whose(phase)} holds {window}; {advice}"
        )

    def _check_answer(self, prompt: Prompt) -> None:
        """Check the prompt for another model's answer: only now its tokens of the memory are known.

        Raises:
            ContextOverflow: it does not fit the window.
        """
        model = self.model_for("answer")
        size = sum(model.count(message.content) + model.backend.template_tokens for message in prompt.messages)
        total, window = size + self._schema_tokens(model) + prompt.max_tokens, model.resolve_window()
        if total > window:
            raise ContextOverflow(
                f"prompt {total - prompt.max_tokens} + output {prompt.max_tokens} = {total} tokens, but the window"
                f"{self._whose('answer')} holds {window}, whose tokens are others than those of "
                f"{self.model.backend.name}; {_NO_ROOM}"
            )

    def _whose(self, phase: Phase) -> str:
        return f" of {self.answer_name}" if self.answer_name and phase == "answer" else ""

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

    def checked_chunks(self, question: str, source: Iterable[Chunk], memory: str | NamedMemory = "") -> Iterator[Chunk]:
        """Yield the chunks once question and memory are checked: the loop meets bad ones as it meets a bad document.

        What a named memory holds is checked when the loop starts from it.
        """
        self._check_start(question, memory)
        yield from source

    def async_chunks(
        self,
        question: str,
        document: Any,
        memory: str | NamedMemory = "",
        source: AsyncGenerator[Chunk] | None = None,
    ) -> AsyncChunks | None:
        """Return the chunks of an async document, for the loop; None if the document is not async.

        `source` has its chunks, if several loops share them.
        """
        if not is_async(document):
            return None
        more = memory.search(question).more if isinstance(memory, NamedMemory) else None
        if self.parallel_segments:
            more = _take_all
        source = source or self.achunks(document)
        return AsyncChunks(self._achecked_chunks(question, source, memory), more)

    async def achunks(self, document: Any) -> AsyncGenerator[Chunk]:
        """`chunks` of an async document."""
        async with aclosing(achunks(apieces(document), self._chunker())) as source:
            async for chunk in source:
                if not chunk.text.isspace():
                    yield chunk

    async def _achecked_chunks(
        self, question: str, source: AsyncGenerator[Chunk], memory: str | NamedMemory
    ) -> AsyncGenerator[Chunk]:
        """`checked_chunks`, async."""
        async with aclosing(source):
            await in_thread(self._check_start, question, memory)
            async for chunk in source:
                yield chunk

    def _check_start(self, question: str, memory: str | NamedMemory) -> None:
        self.check(question)
        if isinstance(memory, str):
            self.checked_memory(memory)

    def loop(self, question: str, source: Iterable[Chunk] | None, **part: Any) -> Turns:
        """Return the reading loop over these chunks; `part` are more arguments of `reading_loop`."""
        if not self.lookup or source is None:
            return self._read(question, source, **part)
        return self._looking_up(question, source, **part)

    def _read(self, question: str, source: Iterable[Chunk] | None, memory: str = "", **part: Any) -> Turns:
        if source is not None and self.reread:
            return self._rereading(question, source, memory=memory, **part)
        if not self.parallel_segments or source is None:
            return self._loop(question, source, memory=memory, **part)
        return parallel_loop(
            source,
            self.parallel_segments,
            part=partial(self._loop, question, answering=False),
            final=partial(self._merging._loop, question, **part),
            count=self.count,
            memory=memory,
        )

    @property
    def parallel_segments(self) -> int:
        """The most segments that are read side by side; 0 if the document is read in one go."""
        return (self.segments or _SEGMENTS) if self.strategy == "parallel" else 0

    @property
    def _merging(self) -> Setup:
        """The setup whose updates merge memories."""
        return replace(self, prompts=self.prompts.merging)

    def _looking_up(self, question: str, source: Iterable[Chunk], **part: Any) -> Turns:
        """Return the loop with its chunks in an index, from which passages are taken for the answer."""
        count = partial(self.count, phase="answer")
        size = cache(lambda: self._passage_tokens(count(question)))
        with PassageIndex(size, count) as index:
            look_up = partial(index.best, question, self.lookup)
            return (yield from self._read(question, index.indexed(source), look_up=look_up, **part))

    def _rereading(self, question: str, source: Iterable[Chunk], **part: Any) -> Turns:
        """Return the loop with its chunks kept, to be read once more."""
        with Spool() as spool:
            return (yield from self._loop(question, Replayable(source, spool), reread=self.reread, **part))

    def _loop(self, question: str, source: Iterable[Chunk] | None, **part: Any) -> Turns:
        return reading_loop(
            question,
            source,
            prompts=self.prompts,
            budgets=self.budgets,
            count=self.count,
            model=self.model.backend.name,
            answer_model=self.answer_name,
            output=self.output,
            check_answer=self._check_answer if self.answer_model else None,
            empty_retries=self.model.calls.limits.empty_retries,
            on_lost_section=self.on_lost_section,
            **part,
        )

    def settings(self, question: str, memory: str) -> dict[str, Any]:
        """Return the settings of a reading that starts from a memory, for the journal."""
        return settings_of(
            question,
            self.model.backend.name,
            self.model.backend.identity,
            self.budgets,
            self.prompts,
            memory=memory,
            answer=(self.answer_model.backend.name, self.answer_model.backend.identity) if self.answer_model else None,
            schema=self.output.schema if self.output else None,
            lookup=self.lookup,
            segments=self.parallel_segments,
            reread=self.reread,
        )

    def plans(self, questions: Iterable[str], source: Iterable[Chunk]) -> list[Plan]:
        """Return what reading these chunks takes for each of the questions.

        Raises:
            EmptyDocument: there are none.
            QuestionError, ContextOverflow: as `check`.
        """
        checked, number, size = [(question, self.check(question)) for question in questions], 0, 0
        for chunk in source:
            number, size = number + 1, size + chunk.span.tokens
        if not number:
            raise EmptyDocument
        return [self._plan(question, tokens, number, size) for question, tokens in checked]

    def _plan(self, question: str, question_tokens: int, number: int, size: int) -> Plan:
        """Return what reading so many chunks with so many tokens takes, each time that they may be read."""
        passes = 1 + self.reread
        update = self._prompt_tokens("memory", question_tokens, 0)
        merges = max(min(self.parallel_segments, number) - 1, 0)
        merging = merges and merges * self._merging._prompt_tokens(
            "memory", question_tokens, self.budgets.memory_tokens
        )
        answer_question = self.count(question, "answer") if self.answer_model else question_tokens
        return Plan(
            chunks=number,
            calls=passes * (number + merges + 1),
            document_tokens=size,
            prompt_tokens=passes
            * (number * update + size * self._sections + merging + self._answer_tokens(answer_question)),
            completion_tokens=passes
            * ((number + merges) * self.budgets.output("memory") + self.budgets.output("answer")),
        )

    def complete(self, prompt: Prompt) -> Iterator[str | Reply]:
        """Yield the reply to a prompt."""
        return self.model_for(prompt.phase).complete(prompt)

    def acomplete(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`complete`, async."""
        return self.model_for(prompt.phase).acomplete(prompt)

    def stream(self, prompt: Prompt) -> Iterator[str | Reply]:
        """Yield the reply to a prompt, an answer in pieces before the whole."""
        return self.model_for(prompt.phase).stream(prompt)

    def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        return self.model_for(prompt.phase).astream(prompt)

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to prompts of several readings, those of each model computed together."""
        replies: dict[int, Reply | MemAgentError] = {}
        for model in self.models:
            own = [n for n, prompt in enumerate(prompts) if self.model_for(prompt.phase) is model]
            if own:
                replies.update(zip(own, model.complete_batch([prompts[n] for n in own]), strict=True))
        return [replies[n] for n in range(len(prompts))]

    def _cut(self, document: Any) -> Iterator[Chunk]:
        return chunks(pieces(document), self._chunker())

    def _chunker(self) -> Chunker:
        budgets = self.budgets
        return Chunker(self.model.count, budgets.chunk_tokens, budgets.overlap_tokens, self.prompts.harmless)

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
        return self.prompts.text("memory").count("{section}")

    def _passage_tokens(self, question: int) -> int:
        """Return the most tokens of a passage that is looked up: the window of the answer is shared out."""
        room = self.model_for("answer").resolve_window() - self.budgets.output("answer")
        room -= self._prompt_tokens("answer", question, 0, passages=1)
        return min(PASSAGE_TOKENS, room // self.lookup - BETWEEN_TOKENS)

    def _answer_tokens(self, question: int) -> int:
        """Return the most tokens that the prompt for the answer has."""
        passages = self.lookup * (self._passage_tokens(question) + BETWEEN_TOKENS) if self.lookup else 0
        return self._prompt_tokens("answer", question, 0, passages)

    def _prompt_tokens(self, phase: Phase, question: int, section: int, passages: int = 0) -> int:
        """Return the most tokens that a prompt of this phase has, given the tokens of what it shows."""
        model, memory = self.model_for(phase), self.budgets.memory_tokens
        parts = {"question": question, "memory": memory, "section": section, "passages": passages}
        rereads = phase == "answer" and self.reread > 0
        size = self.prompts.size(phase, model.count_template, reread=rereads, **parts)
        schema = self._schema_tokens(model) if phase == "answer" else 0
        return size + schema + model.backend.template_tokens * len(self.prompts.messages(phase))

    def _schema_tokens(self, model: Model) -> int:
        """Return the tokens of the schema, which some servers put into the prompt."""
        return model.count_template(json.dumps(self.output.schema)) if self.output else 0


def _take_all(chunk: Chunk) -> bool:
    """Have all chunks of an async document fetched at once: a parallel reading takes them before its first call."""
    return True
