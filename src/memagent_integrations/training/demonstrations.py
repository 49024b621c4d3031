"""Readings as they should go, to warm a model up on: the gold facts seen so far are the memory, the gold answer is the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.diagnostics import fact_places
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.loop import advance, reading_loop
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Chunk, Message, Phase, Prompt, Reply


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt of a reading, and what the model should reply to it."""

    messages: tuple[Message, ...]
    target: str
    phase: Phase


def examples(task: Task, sample: Sample, reader: Reader) -> Iterator[Example]:
    """The prompts of a sample's reading in their order, each with its target; the reader's model is not asked.

    After each chunk the memory is a line for each gold fact whose end was read until then: its text, or only its keys where the texts of all facts
    together do not fit the memory (those that save most are shortened first). A chunk without a gold fact has the prompt set's "no change" as its
    target, and where the set has none the memory again. The prompts are those of `Reader.read`: the loop is sent the targets as replies.

    Raises:
        UsageError: the sample has no gold facts, or their keys do not fit the memory; or the document is empty.
    """
    if not sample.facts:
        raise UsageError(
            f"the sample {sample.id} has no gold facts, so nobody knows what its memory should hold; leave {task.name} out"
        )
    notes, seen = _Notes(sample, reader), _Seen(reader.chunks(sample.document()))
    turns = reading_loop(
        sample.question,
        seen,
        prompts=reader.prompts,
        budgets=reader.budgets,
        count=reader.count,
        model=reader.backend.name,
    )
    with closing(turns):
        state = advance(turns, None)
        while isinstance(state, Prompt):
            target = _boxed(task.gold(sample), reader.prompts) if state.phase == "answer" else notes.after(seen.end)
            yield Example(messages=state.messages, target=target, phase=state.phase)
            state = advance(turns, Reply(text=target, finish_reason="stop"))
    if state.error:
        raise state.error


class _Seen:
    """The chunks, and where the last one that was taken ends."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = chunks
        self.end = 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            self.end = chunk.span.end
            yield chunk


class _Notes:
    """What the memory should hold, from chunk to chunk."""

    def __init__(self, sample: Sample, reader: Reader) -> None:
        placed = sorted(zip(fact_places(sample), sample.facts, strict=True), key=lambda pair: pair[0])
        self._ends = [place + len(fact.text) for place, fact in placed]
        self._lines = _lines([fact for _, fact in placed], reader)
        self._prompts = reader.prompts
        self._read = 0

    def after(self, end: int) -> str:
        """The reply to a chunk that ends at this character of the document."""
        read = sum(place <= end for place in self._ends)
        new, self._read = read > self._read, read
        if not new and self._prompts.no_change:
            return self._prompts.no_change
        return "\n".join(self._lines[:read]) or self._prompts.empty_memory


def _lines(facts: Sequence[Fact], reader: Reader) -> list[str]:
    """A line for each fact, all of them within the memory: texts, which become keys, the longest first, as long as they do not fit."""
    limit = min(reader.budgets.memory_tokens, reader.budgets.output("memory"))
    harmless = reader.prompts.harmless  # as the chunk shows them
    lines = [harmless(" ".join(fact.text.split())) for fact in facts]
    short = [harmless(", ".join(fact.keys)) or line for fact, line in zip(facts, lines, strict=True)]
    by_saving = sorted(range(len(facts)), key=lambda n: len(short[n]) - len(lines[n]))
    for n in by_saving:
        if reader.count("\n".join(lines)) <= limit:
            break
        lines[n] = short[n]
    if (tokens := reader.count("\n".join(lines))) > limit:
        raise UsageError(
            f"the keys of the gold facts have {tokens} tokens, and the memory holds {limit}; raise memory_tokens or output_tokens"
        )
    return lines


def _boxed(answer: str, prompts: PromptSet) -> str:
    return f"\\boxed{{{answer}}}" if prompts.answer_format == "boxed" else answer
