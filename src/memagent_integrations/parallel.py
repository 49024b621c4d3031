"""The parallel reading: segments of the document are read side by side, their memories merged in order.

It is made of reading loops: one for each segment, and one that reads the memories of the segments in place of sections,
with prompts that say so, and answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from memagent_integrations.errors import MemAgentError
from memagent_integrations.lineage import memory_after
from memagent_integrations.loop import Turns, advance, exchange, failing, step_made
from memagent_integrations.records import Chunk, Prompt, Reading, Reply, Span, Step
from memagent_integrations.rounds import Round
from memagent_integrations.spool import Spool
from memagent_integrations.tokens import Counter


def parallel_loop(
    source: Iterable[Chunk],
    segments: int,
    *,
    part: Callable[..., Turns],
    final: Callable[..., Turns],
    count: Counter,
    memory: str = "",
) -> Turns:
    """Read a document in so many segments, or as many as it has chunks; merge their memories, and answer.

    The whole document is cut into chunks before the first call. The steps have an order that the number of chunks
    decides: the first chunks of all segments, the second ones and so on, the merges, the answer. A memory that stayed
    empty is not merged.

    Args:
        source: the chunks.
        segments: the most segments.
        part: gives the loop that reads chunks from a `memory` on, and does not answer.
        final: gives the loop that merges memories (as chunks; or None) into `memory` and answers; `first` is the number
            of its first step.
        count: the tokenizer's count.
        memory: the memory that the first segment starts from.
    """
    with Spool() as spool:
        try:
            spool.fill(source)
        except MemAgentError as error:
            return (yield from part(failing(error), memory=memory))
        segments = max(min(segments, len(spool)), 1)  # one of nothing: its loop says that the document is empty
        size, longer = divmod(len(spool), segments)
        bounds = [number * size + min(number, longer) for number in range(segments + 1)]
        loops = [
            part(_of_segment(number, spool.between(*ends)), memory="" if number else memory)
            for number, ends in enumerate(itertools.pairwise(bounds))
        ]
        steps: list[Step] = []
        readings = yield from _side_by_side(loops, steps)
    if readings[-1].error:
        return replace(readings[-1], memory=memory_after(steps), steps=tuple(steps))
    noted = [number for number, reading in enumerate(readings) if reading.memory] or [0]
    merged = [_memory_of(number, readings[number], count) for number in noted[1:]]
    turns = final(merged or None, memory=readings[noted[0]].memory, first=len(steps))
    return (yield from _continued(turns, steps))


def _side_by_side(loops: Sequence[Turns], steps: list[Step]) -> Generator[Prompt, Reply, list[Reading]]:
    """Run the loops of the segments to their end, in rounds, and collect their steps; return the readings.

    If one fails, that is the end, and its reading the only one.
    """
    with ExitStack() as closing_all:
        for turns in loops:
            closing_all.enter_context(closing(turns))
        states = [advance(turns, None) for turns in loops]
        while prompts := {number: state for number, state in enumerate(states) if isinstance(state, Prompt)}:
            in_round = Round()
            in_round.prompts = [
                replace(prompt, index=len(steps) + place, round=in_round)
                for place, prompt in enumerate(prompts.values())
            ]
            for number, prompt in zip(prompts, in_round.prompts, strict=True):
                states[number] = yield from _turn(loops[number], prompts[number], prompt, steps)
                state = states[number]
                if isinstance(state, Reading) and state.error:
                    return [state]
        return [state for state in states if isinstance(state, Reading)]


def _turn(turns: Turns, own: Prompt, prompt: Prompt, steps: list[Step]) -> Generator[Prompt, Reply, Prompt | Reading]:
    """Ask a loop's `own` prompt, which is `prompt` in the whole reading, until it makes a step; return what follows."""
    while True:
        state = advance(turns, (yield from exchange(replace(prompt, after=steps[-1] if steps else None))))
        if step := step_made(state, own):
            steps.append(replace(step, index=prompt.index))
        if step or isinstance(state, Reading):
            return state
        prompt = replace(prompt, again=state.again)


def _continued(turns: Turns, steps: Sequence[Step]) -> Turns:
    """Return the loop that comes after these steps, as the end of one reading with them."""
    with closing(turns):
        state = advance(turns, None)
        while isinstance(state, Prompt):
            state = advance(turns, (yield from exchange(replace(state, after=state.after or steps[-1]))))
    return replace(state, steps=(*steps, *state.steps))


def _of_segment(number: int, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks as those of a segment."""
    for chunk in chunks:
        yield replace(chunk, span=replace(chunk.span, segment=number))


def _memory_of(number: int, segment: Reading, count: Counter) -> Chunk:
    """Return the memory of a segment as a chunk, whose span is the segment."""
    first, last = (segment.steps[place].span for place in (0, -1))
    assert first
    assert last
    text = segment.memory
    span = Span(index=number, start=first.start, end=last.end, tokens=count(text), segment=number, merge=True)
    return Chunk(span=span, text=text)
