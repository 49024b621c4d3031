"""The reading loop, once, as a generator that does no I/O, and the drivers that feed it.

    turns = reading_loop(...)      yields a Prompt, is sent a Reply, returns a Reading

A driver makes the calls. It never decides what becomes of a reply: only the loop does.
Source of the algorithm: MemAgent, arXiv:2507.02259, section 3.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace

from memagent_integrations.answers import AnswerStream
from memagent_integrations.errors import BackendError, EmptyDocument, InUse, MemAgentError, NoMemory, UsageError
from memagent_integrations.lineage import Lineage
from memagent_integrations.outputs import Output
from memagent_integrations.prompts import PromptSet, opened_by_template
from memagent_integrations.records import Budgets, Chunk, Event, Prompt, Reading, Reply, Step
from memagent_integrations.tokens import Counter, cut

Turns = Generator[Prompt, Reply, Reading]
Call = Callable[[Prompt], Iterator[str | Reply]]
"""Makes one call: yields the text in pieces if it streams, and the whole reply last."""
AsyncCall = Callable[[Prompt], AsyncGenerator[str | Reply]]
BatchCall = Callable[[Sequence[Prompt]], Sequence[Reply | MemAgentError]]


def reading_loop(
    question: str,
    chunks: Iterable[Chunk] | None,
    *,
    prompts: PromptSet,
    budgets: Budgets,
    count: Counter,
    model: str,
    answer_model: str | None = None,
    output: Output | None = None,
    check_answer: Callable[[Prompt], None] | None = None,
    memory: str = "",
    first: int = 0,
    answering: bool = True,
    strict: bool = False,
) -> Turns:
    """Read the chunks in order, then answer from the memory alone.

    Yields one prompt for each chunk and one for the answer. A `MemAgentError` that is thrown in, or that the chunks
    raise, ends the reading: it is returned with `error` set, and with the steps and the memory until then. An error
    never becomes memory.

    Args:
        question: what to answer.
        chunks: the chunks to read; None only answers from `memory`.
        prompts: the templates.
        budgets: the most tokens of a memory and of a reply.
        count: the tokenizer's count.
        model: the name for the reading to note.
        answer_model: the name of the model that answers, if it is another.
        output: what the answer has to be; None: a text.
        check_answer: called with the prompt for the answer before it is yielded; raises what is wrong with it.
        memory: the memory to start from.
        first: the number of the first step.
        answering: whether to answer; else the reading ends with the last chunk, its answer empty.
        strict: whether a reply that holds no memory is an error, not a step that keeps the old memory. What the
            server's content filter withheld is no error: it would withhold it again.
    """
    steps: list[Step] = []
    lineage = Lineage(memory)
    answer, failure = None, None
    try:
        for index, chunk in enumerate(chunks or (), start=first):
            messages = prompts.update_messages(
                question=question, memory=memory, section=chunk.text, memory_tokens=budgets.memory_tokens
            )
            reply = yield Prompt(
                index=index, phase="memory", messages=messages, max_tokens=budgets.output("memory"), after=_last(steps)
            )
            step = _update(index, chunk, memory, reply, prompts, budgets, count)
            steps.append(_noted(step, chunk.text, prompts, lineage))
            memory = steps[-1].memory
            if strict and steps[-1].outcome == "kept" and reply.finish_reason != "content_filter":
                raise NoMemory(
                    f"the model wrote no memory for section {index + 1}: its reply is empty or only thinking"
                )
        if not steps and chunks is not None:
            raise EmptyDocument
        answer = ""
        if answering:
            index, messages = first + len(steps), prompts.answer_messages(question=question, memory=memory)
            prompt = Prompt(
                index=index,
                phase="answer",
                messages=messages,
                max_tokens=budgets.output("answer"),
                schema=output.schema if output else None,
                after=_last(steps),
            )
            if check_answer:
                check_answer(prompt)
            reply = yield prompt
            steps.append(_answered(index, memory, reply))
            answer = _answer_in(reply, prompts, output)
    except MemAgentError as error:
        answer, failure = None, error
    return Reading(
        question=question,
        answer=answer,
        memory=memory,
        steps=tuple(steps),
        model=model,
        answer_model=answer_model if answering else None,
        budgets=budgets,
        error=failure,
    )


def _last(steps: Sequence[Step]) -> Step | None:
    return steps[-1] if steps else None


def _answered(index: int, memory: str, reply: Reply) -> Step:
    limited = reply.finish_reason == "length"
    return Step(
        index=index,
        phase="answer",
        span=None,
        memory_before=memory,
        memory=memory,
        reply=reply,
        outcome="answered",
        cut=limited,
    )


def _update(
    index: int, chunk: Chunk, old: str, reply: Reply, prompts: PromptSet, budgets: Budgets, count: Counter
) -> Step:
    """Return the step that the reply to a memory prompt makes."""
    new, unchanged = prompts.parse_memory(reply.text)
    step = Step(
        index=index,
        phase="memory",
        span=chunk.span,
        memory_before=old,
        memory=old,
        reply=reply,
        outcome="unchanged" if unchanged else "kept",
        cut=False,
    )
    if reply.edited is not None:
        return _edited(step, reply.edited, budgets.memory_tokens, count(reply.edited))
    if unchanged or not new or reply.finish_reason == "content_filter":
        return step
    memory = cut(new, budgets.memory_tokens, count)
    if not memory.strip():  # not even its first character fits
        return step
    return replace(step, memory=memory, outcome="updated", cut=memory != new or reply.finish_reason == "length")


def _edited(step: Step, memory: str, limit: int, tokens: int) -> Step:
    if tokens > limit:
        raise UsageError(
            f"the edited memory of step {step.index} has {tokens} tokens, its budget is {limit}; edit it anew, shorter"
        )
    return replace(step, memory=memory, outcome="updated")


def _answer_in(reply: Reply, prompts: PromptSet, output: Output | None) -> str:
    """Return the answer in a reply.

    Raises:
        BackendError: there is none, or it is not what `output` asks for.
    """
    answer = prompts.parse_answer(reply.text, structured=output is not None)
    if not answer:
        raise BackendError(_no_answer(reply))
    try:
        if output:
            output.parse(answer)
    except BackendError as error:
        if reply.finish_reason in ("length", "content_filter"):
            raise BackendError(_no_answer(reply)) from error
        raise
    return answer


def _noted(step: Step, section: str, prompts: PromptSet, lineage: Lineage) -> Step:
    """Return the step with the passages of what the model wrote into the memory; go on with the lineage."""
    edited = step.reply.edited is not None  # then the memory is no longer what the model wrote
    written = prompts.parse_memory(step.reply.text)[0] if edited else step.memory
    step = replace(step, passages=lineage.find(written, section))
    lineage.follow(step)
    return step


def _no_answer(reply: Reply) -> str:
    if reply.finish_reason == "length":
        return "the model used up its output before it came to an answer (thinking counts); raise output_tokens"
    if reply.finish_reason == "content_filter":
        return "the server's content filter withheld the answer"
    return "the model gave no answer: its reply is empty or only thinking"


def advance(turns: Turns, reply: Reply | Exception | None) -> Prompt | Reading:
    """Send the loop the reply to its last prompt, or throw in the error; return its next prompt, or the reading.

    A loop that has not begun is sent None. An error that is no `MemAgentError` is raised.
    """
    try:
        if isinstance(reply, Exception):
            return turns.throw(reply)
        return next(turns) if reply is None else turns.send(reply)
    except StopIteration as stop:
        reading: Reading = stop.value
        return reading


def replayed(reading: Reading) -> Turns:
    """Return a loop that gives the steps of a complete reading once more, with their recorded replies."""
    steps: list[Step] = []
    for step in reading.steps:
        reply = replace(step.reply, recorded=True)
        yield Prompt(
            index=step.index,
            phase=step.phase,
            messages=(),
            max_tokens=reading.budgets.output(step.phase),
            after=_last(steps),
            recorded=reply,
        )
        steps.append(replace(step, reply=reply))
    return replace(reading, steps=tuple(steps))


def exchange(prompt: Prompt) -> Generator[Prompt, Reply, Reply | MemAgentError]:
    """Yield a prompt to the driver, from a generator around a loop; return the reply, or the call's `MemAgentError`."""
    try:
        return (yield prompt)
    except MemAgentError as error:
        return error


def step_made(state: Prompt | Reading, prompt: Prompt) -> Step | None:
    """Return the step that the reply to `prompt` made, None if the call failed; `state` is what the loop gave next."""
    step = state.after if isinstance(state, Prompt) else _last(state.steps)
    return step if step and step.index == prompt.index else None


class PendingCall:
    """A call in progress: its outcome for the loop and, with `prompts`, the text of the answer as it comes."""

    def __init__(self, prompt: Prompt, prompts: PromptSet | None) -> None:
        self.outcome: Reply | Exception = BackendError("the backend ended without a reply")
        self._answer: AnswerStream | None = None
        if prompts and prompt.phase == "answer":
            thinking = prompt.after is not None and opened_by_template(prompt.after.reply.text)
            self._answer = AnswerStream(prompts, thinking=thinking, structured=prompt.schema is not None)

    def take(self, piece: str | Reply) -> Iterator[str]:
        """Take a piece of the reply, or the whole; yield what is certain of the answer by now."""
        if isinstance(piece, Reply):
            self.outcome = piece
            if self._answer:
                yield from self._answer.finish(piece.text)
        elif self._answer:
            yield from self._answer.feed(piece)


def drive(turns: Turns, call: Call, prompts: PromptSet | None = None) -> Generator[Event]:
    """Run a loop to its end: yield each step when it is done, and the reading last.

    With `prompts`, which are those of the loop, it also yields the text of the answer as it comes.
    """
    with closing(turns):  # even if the caller still refers to the loop, so that a journal releases its run
        state = advance(turns, None)
        while isinstance(state, Prompt):
            pending = PendingCall(state, prompts)
            try:
                for piece in (state.recorded,) if state.recorded else call(state):
                    yield from pending.take(piece)
            except Exception as error:
                pending.outcome = error
            state = advance(turns, pending.outcome)
            yield from _new_step(state)
        yield state


async def adrive(
    turns: Turns, call: AsyncCall, prompts: PromptSet | None = None, chunks: AsyncChunks | None = None
) -> AsyncGenerator[Event]:
    """`drive`, async. The loop itself (tokenizing, reading sync documents) runs in a thread.

    Async `chunks`, if the loop reads such, are awaited and closed here.
    """
    lock = threading.Lock()  # a cancelled reading may go on while the thread still advances its loop
    try:
        state = await _aadvance(turns, None, chunks, lock)
        while isinstance(state, Prompt):
            pending, leaving = PendingCall(state, prompts), False
            try:
                async with aclosing(_at_once(state.recorded) if state.recorded else call(state)) as pieces:
                    async for piece in pieces:
                        for text in pending.take(piece):
                            leaving = True
                            yield text
                            leaving = False
            except Exception as error:
                if leaving:  # the caller has left, and closing the call failed: nobody takes another event
                    raise
                pending.outcome = error
            state = await _aadvance(turns, pending.outcome, chunks, lock)
            for step in _new_step(state):
                yield step
        yield state
    finally:
        if chunks:
            await chunks.aclose()
        closing = asyncio.create_task(asyncio.to_thread(_close, turns, lock))
        try:
            await asyncio.shield(closing)
        finally:
            await asyncio.wait([closing])  # cancelled once more meanwhile: nothing is left running behind the reading


def drive_batch(loops: Iterable[Turns], complete: BatchCall, size: int) -> Generator[tuple[int, Step | Reading]]:
    """Run many loops side by side, at most `size` at a time, and answer their prompts together.

    Yields (number of the loop, step or reading) as they come. A loop that fails leaves the others untouched.
    """
    waiting = enumerate(loops)
    active: dict[int, tuple[Turns, Prompt]] = {}
    try:
        yield from _batches(waiting, active, complete, size)
    finally:
        for turns, _ in active.values():
            turns.close()


def _batches(
    waiting: Iterator[tuple[int, Turns]], active: dict[int, tuple[Turns, Prompt]], complete: BatchCall, size: int
) -> Iterator[tuple[int, Step | Reading]]:
    while True:
        calls = {n: prompt for n, (_, prompt) in active.items() if not prompt.recorded}
        replies = dict(zip(calls, complete(list(calls.values())) if calls else (), strict=True))
        states = [(n, turns, advance(turns, prompt.recorded or replies[n])) for n, (turns, prompt) in active.items()]
        for n, turns in itertools.islice(waiting, size - sum(isinstance(state, Prompt) for *_, state in states)):
            states.append((n, turns, advance(turns, None)))
        if not states:
            return
        active.clear()
        active.update({n: (turns, state) for n, turns, state in states if isinstance(state, Prompt)})
        for n, _, state in states:
            yield from ((n, step) for step in _new_step(state))
            if isinstance(state, Reading):
                yield n, state


class AsyncChunks:
    """Chunks of an async document for the loop, which is synchronous: each is fetched before the turn that needs it.

    `more` is called with the chunks of the beginning, in a thread, until it returns False: these are fetched at once.
    """

    def __init__(self, source: AsyncGenerator[Chunk], more: Callable[[Chunk], bool] | None = None) -> None:
        self._source, self._more = source, more
        self.aclose = source.aclose
        self._fetched: deque[Chunk | MemAgentError | None] = deque()  # None is the end

    async def fetch(self) -> None:
        """Fetch the chunk that `next` will return, if there is one left."""
        while not self._fetched or self._more:
            try:
                chunk = await anext(self._source, None)
                ahead = bool(self._more and chunk and await asyncio.to_thread(self._more, chunk))
                self._fetched.append(chunk)
            except MemAgentError as error:
                ahead = False
                self._fetched.append(error)
            if not ahead:
                self._more = None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if not self._fetched:
            raise InUse("the journal has changed while the document was fetched; read it again")
        item = self._fetched.popleft()
        if item is None:
            self._fetched.append(None)
            raise StopIteration
        if isinstance(item, MemAgentError):
            raise item
        return item


async def _at_once(reply: Reply) -> AsyncGenerator[Reply]:
    yield reply


async def _aadvance(
    turns: Turns, reply: Reply | Exception | None, chunks: AsyncChunks | None, lock: threading.Lock
) -> Prompt | Reading:
    if chunks and not isinstance(reply, Exception):  # a failed call does not wait for text
        await chunks.fetch()

    def locked_advance() -> Prompt | Reading:
        with lock:
            return advance(turns, reply)

    return await asyncio.to_thread(locked_advance)


def _close(turns: Turns, lock: threading.Lock) -> None:
    with lock:
        turns.close()


def _new_step(state: Prompt | Reading) -> Iterator[Step]:
    """Yield the step that has just been made: none if the call failed."""
    if isinstance(state, Prompt):
        if state.after:
            yield state.after
    elif state.steps and (state.steps[-1].phase == "answer" or not state.error):
        yield state.steps[-1]
