"""The drivers of a loop: they make the calls that it asks for, and send it the replies.

They differ in how calls are made: one after the other, async, or those of many loops together. What becomes of a reply
the loop decides alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing

from memagent_integrations.answers import AnswerStream
from memagent_integrations.errors import BackendError, InUse, MemAgentError
from memagent_integrations.loop import Turns, advance, step_made
from memagent_integrations.prompts import PromptSet, opened_by_template
from memagent_integrations.records import Chunk, Event, Prompt, Reading, Reply, Step
from memagent_integrations.schedule import Schedule, Task
from memagent_integrations.scopes import in_thread

Call = Callable[[Prompt], Iterator[str | Reply]]
"""Makes one call: yields the text in pieces if it streams, and the whole reply last."""
AsyncCall = Callable[[Prompt], AsyncGenerator[str | Reply]]
BatchCall = Callable[[Sequence[Prompt]], Sequence[Reply | MemAgentError]]


class PendingCall:
    """A call in progress: its outcome for the loop and, with `prompts`, the text of the answer as it comes.

    A recorded answer comes as a whole, as the loop took it from its reply: with other prompts perhaps than `prompts`.
    """

    def __init__(self, prompt: Prompt, prompts: PromptSet | None) -> None:
        self.outcome: Reply | Exception = BackendError("the backend ended without a reply")
        self._prompt = prompt
        self._answer: AnswerStream | None = None
        self._recorded_answer = prompts is not None and prompt.phase == "answer" and prompt.recorded is not None
        if prompts and prompt.phase == "answer" and not prompt.recorded:
            thinking = prompt.after is not None and opened_by_template(prompt.after.reply.text)
            self._answer = AnswerStream(
                prompts, thinking=thinking, structured=prompt.schema is not None, rereads=prompt.rereads
            )

    def take(self, piece: str | Reply) -> Iterator[str]:
        """Take a piece of the reply, or the whole; yield what is certain of the answer by now."""
        if isinstance(piece, Reply):
            self.outcome = piece
            if self._answer:
                yield from self._answer.finish(piece.text)
        elif self._answer:
            yield from self._answer.feed(piece)

    def ended(self, state: Prompt | Reading) -> Iterator[str | Step]:
        """Yield what the call has brought, now that the loop has its outcome and gave `state`."""
        if self._recorded_answer and isinstance(state, Reading) and state.answer:
            yield state.answer
        yield from _new_step(state, self._prompt)


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
            yield from pending.ended(state)
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
            for event in pending.ended(state):
                yield event
        yield state
    finally:
        if chunks:
            await chunks.aclose()
        closing = asyncio.create_task(asyncio.to_thread(_close, turns, lock))
        try:
            await asyncio.shield(closing)
        finally:
            await asyncio.wait([closing])  # cancelled once more meanwhile: nothing is left running behind the reading


def drive_batch(
    loops: Iterable[Turns], complete: BatchCall, size: int, schedule: Schedule | None = None
) -> Generator[tuple[int, Step | Reading]]:
    """Run many loops side by side, and answer the prompts of at most `size` of them together.

    The `schedule` says which are next; by default the first ones, each to its end. Yields (number of the loop, step or
    reading) as they come. A loop that fails leaves the others untouched.
    """
    loops = list(loops)
    schedule = schedule or Schedule(range(len(loops)))
    waiting: dict[int, Prompt] = {}
    try:
        while not schedule.done:
            batch: dict[Task, Prompt] = {}
            while len(batch) < size and (task := schedule.take()):
                state = waiting.pop(task.number, None) or advance(loops[task.number], None)
                if isinstance(state, Prompt):
                    batch[task] = task.resumed(state)
                else:  # it ended before the first call
                    schedule.remove(task)
                    yield task.number, state
            yield from _answered(loops, complete, schedule, batch, waiting)
    finally:
        for turns in loops:
            turns.close()


def _answered(
    loops: Sequence[Turns],
    complete: BatchCall,
    schedule: Schedule,
    batch: Mapping[Task, Prompt],
    waiting: dict[int, Prompt],
) -> Iterator[tuple[int, Step | Reading]]:
    """Answer the prompts of a batch together, and yield what became of them; `waiting` gets the prompts after them."""
    calls = {task: prompt for task, prompt in batch.items() if not prompt.recorded}
    replies = dict(zip(calls, complete(list(calls.values())) if calls else (), strict=True))
    states = {task: advance(loops[task.number], prompt.recorded or replies[task]) for task, prompt in batch.items()}
    for task, state in states.items():
        if isinstance(state, Prompt):
            waiting[task.number] = state
            schedule.put_back(task, state.index)
        else:
            schedule.remove(task)
    for task, state in states.items():
        yield from ((task.number, step) for step in _new_step(state, batch[task]))
        if isinstance(state, Reading):
            yield task.number, state


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
                ahead = bool(self._more and chunk and await in_thread(self._more, chunk))
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

    return await in_thread(locked_advance)


def _close(turns: Turns, lock: threading.Lock) -> None:
    with lock:
        turns.close()


def _new_step(state: Prompt | Reading, prompt: Prompt | None) -> Iterator[Step]:
    """Yield the step that the reply to `prompt` made: none if the call failed, or if the prompt is asked again."""
    step = step_made(state, prompt) if prompt else None
    if step and (step.phase == "answer" or isinstance(state, Prompt) or not state.error):
        yield step
