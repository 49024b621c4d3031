"""Constructed readings to show a policy: the memory holds the gold facts seen so far, the answer is the gold one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.diagnostics import fact_places
from memagent_integrations.evaluation.samples import Fact, Sample, Task
from memagent_integrations.loop import advance, reading_loop
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Chunk, Message, Phase, Prompt, Reply


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt of a reading, and the reply that the model should give.

    A training shows the examples of a lower `stage` first, the first time that it shows them.
    """

    messages: tuple[Message, ...]
    target: str
    phase: Phase
    stage: int = 0


def examples(task: Task, sample: Sample, reader: Reader) -> Iterator[Example]:
    """Yield the prompts of a sample's reading in order, each with its target reply; the model is not called.

    The target memory after a chunk has one line for each gold fact whose end has been read: its text, or only its keys
    where the texts of all facts together do not fit the memory (the facts that save most are shortened first). A
    superseded fact has a line until the end of the next fact has been read. A chunk that changes no line has the prompt
    set's "no change" as its target, or the memory again where the set has none. The prompts equal those of
    `Reader.read`: the same loop runs, and gets the targets as replies.

    Raises:
        UsageError: the sample has no gold facts (and is not about what the document does not tell), their keys do not
            fit the memory, or the document is empty.
    """
    if not sample.facts and (sample.metric or task.metric) != "abstention":
        problem = f"the sample {sample.id} has no gold facts, so nobody knows what its memory should hold"
        raise UsageError(f"{problem}; leave {task.name} out")
    memory, chunks = _TargetMemory(sample, reader), _Chunks(reader.chunks(sample.document()))
    turns = reading_loop(
        sample.question,
        chunks,
        prompts=reader.prompts,
        budgets=reader.budgets,
        count=reader.count,
        model=reader.backend.name,
    )
    with closing(turns):
        state = advance(turns, None)
        while isinstance(state, Prompt):
            if state.phase == "answer":
                target = _format_answer(task.gold(sample), reader.prompts)
            else:
                target = memory.after(chunks.end)
            yield Example(messages=state.messages, target=target, phase=state.phase)
            state = advance(turns, Reply(text=target, finish_reason="stop"))
    if state.error:
        raise state.error


class _Chunks:
    """Pass chunks on, and remember in `end` where the last one ends (in characters of the document)."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = chunks
        self.end = 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            self.end = chunk.span.end
            yield chunk


class _TargetMemory:
    """What the memory should hold, chunk by chunk."""

    def __init__(self, sample: Sample, reader: Reader) -> None:
        facts = (*sample.superseded, *sample.facts)
        places = fact_places(replace(sample, facts=facts))
        by_place = sorted(zip(places, facts, strict=True), key=lambda pair: pair[0])
        self._ends = [place + len(fact.text) for place, fact in by_place]
        self._lines = _memory_lines([fact for _, fact in by_place], reader)
        self._superseded = [fact in sample.superseded for _, fact in by_place]
        self._prompts = reader.prompts
        self._facts_read = 0

    def after(self, end: int) -> str:
        """Return the target reply to a chunk that ends at this character of the document."""
        facts_read = sum(place <= end for place in self._ends)
        changed, self._facts_read = facts_read > self._facts_read, facts_read
        if not changed and self._prompts.no_change:
            return self._prompts.no_change
        last = facts_read - 1
        current = [line for n, line in enumerate(self._lines[:facts_read]) if n == last or not self._superseded[n]]
        return "\n".join(current) or self._prompts.empty_memory


def _memory_lines(facts: Sequence[Fact], reader: Reader) -> list[str]:
    """Return a line for each fact: its text, or its keys (the largest savings first) until all lines fit the memory."""
    limit = min(reader.budgets.memory_tokens, reader.budgets.output("memory"))
    harmless = reader.prompts.harmless  # facts as the prompt of the chunk shows them
    lines = [harmless(" ".join(fact.text.split())) for fact in facts]
    short = [harmless(", ".join(fact.keys)) or line for fact, line in zip(facts, lines, strict=True)]
    by_saving = sorted(range(len(facts)), key=lambda n: len(short[n]) - len(lines[n]))
    for n in by_saving:
        if reader.count("\n".join(lines)) <= limit:
            break
        lines[n] = short[n]
    if (tokens := reader.count("\n".join(lines))) > limit:
        problem = f"the keys of the gold facts have {tokens} tokens, and the memory holds {limit}"
        raise UsageError(f"{problem}; raise memory_tokens or output_tokens")
    return lines


def _format_answer(answer: str, prompts: PromptSet) -> str:
    return f"\\boxed{{{answer}}}" if prompts.answer_format == "boxed" else answer
