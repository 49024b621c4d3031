"""The reading loop, once, as a generator that does no I/O, and what generators around it have in common.

    turns = reading_loop(...)      yields a Prompt, is sent a Reply, returns a Reading

A driver (`drivers`) makes the calls. It never decides what becomes of a reply: only the loop does.
Source of the algorithm: MemAgent, arXiv:2507.02259, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from memagent_integrations.errors import BackendError, EmptyDocument, MemAgentError, NoMemory, UsageError
from memagent_integrations.lineage import Lineage
from memagent_integrations.outputs import Output
from memagent_integrations.prompts import PromptSet, is_insufficient
from memagent_integrations.records import Budgets, Chunk, Message, OnLostSection, Phase, Prompt, Reading, Reply, Step
from memagent_integrations.sanitize import visible
from memagent_integrations.tokens import Counter, cut

Turns = Generator[Prompt, Reply, Reading]


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
    look_up: Callable[[], Chunk | None] = lambda: None,
    memory: str = "",
    first: int = 0,
    answering: bool = True,
    empty_retries: int = 0,
    on_lost_section: OnLostSection = "error",
    reread: int = 0,
) -> Turns:
    """Read the chunks in order, then answer from the memory alone.

    Yields one prompt for each chunk and one for the answer, and the same prompt again where the reply to it is of no
    use; the step has the last of its replies, with the usage and the seconds of all. A `MemAgentError` that is thrown
    in, or that the chunks raise, ends the reading: it is returned with `error` set, and with the steps and the memory
    until then. An error never becomes memory.

    Args:
        question: what to answer.
        chunks: the chunks to read; None only answers from `memory`. With `reread` they can be iterated over again.
        prompts: the templates.
        budgets: the most tokens of a memory and of a reply.
        count: the tokenizer's count.
        model: the name for the reading to note.
        answer_model: the name of the model that answers, if it is another.
        output: what the answer has to be; None: a text.
        check_answer: called with the prompt for the answer before it is yielded; raises what is wrong with it.
        look_up: called before the answer; returns the passages to show beside the memory, if there are any.
        memory: the memory to start from.
        first: the number of the first step.
        answering: whether to answer; else the reading ends with the last chunk, its answer empty.
        empty_retries: how often a prompt is yielded again. After a reply that the server's content filter withheld it
            is not: that would be withheld again.
        on_lost_section: whether a section without a usable reply ends the reading with `NoMemory`, or leaves the old
            memory as it is.
        reread: how often the chunks are read once more, from the memory as it is then, and the question asked again,
            because the answer says that the memory does not suffice. The last answer is asked for as without it.
    """
    steps: list[Step] = []
    lineage = Lineage(memory)
    answer, failure = None, None
    try:
        for passes_left in range(reread, -1, -1):
            before = len(steps)
            for chunk in chunks or ():
                messages = prompts.update_messages(
                    question=question, memory=memory, section=chunk.text, memory_tokens=budgets.memory_tokens
                )
                prompt = _prompt("memory", messages, budgets, first, steps)
                update = partial(_update, prompt.index, chunk, memory, prompts=prompts, budgets=budgets, count=count)
                step = yield from _asked(prompt, update, empty_retries)
                steps.append(_noted(step, chunk.text, prompts, lineage))
                memory = steps[-1].memory
                if step.outcome == "kept" and on_lost_section == "error":
                    raise _no_memory(step, step.index - before)
            if not steps and chunks is not None:
                raise EmptyDocument
            if not answering:
                answer = ""
                break
            found, rereads = look_up(), passes_left > 0
            messages = prompts.answer_messages(
                question=question, memory=memory, passages=found.text if found else "", reread=rereads
            )
            prompt = replace(_prompt("answer", messages, budgets, first, steps, output), rereads=rereads)
            if check_answer:
                check_answer(prompt)
            answered = partial(_answered, prompt, memory, found, prompts=prompts, lineage=lineage)
            step = yield from _asked(prompt, answered, empty_retries)
            steps.append(step)
            if step.is_answer:
                answer = _answer_in(step.reply, prompts, output)
                break
    except MemAgentError as error:
        answer, failure = None, error
    return Reading(
        question=question if isinstance(question, str) else repr(question),  # `failure` says that it is no text
        answer=answer,
        memory=memory,
        steps=tuple(steps),
        model=model,
        answer_model=answer_model if answering else None,
        budgets=budgets,
        error=failure,
    )


def _prompt(
    phase: Phase,
    messages: tuple[Message, ...],
    budgets: Budgets,
    first: int,
    steps: Sequence[Step],
    output: Output | None = None,
) -> Prompt:
    """Return the prompt for the step that comes after `steps`."""
    return Prompt(
        index=first + len(steps),
        phase=phase,
        messages=messages,
        max_tokens=budgets.output(phase),
        schema=output.schema if output else None,
        after=_last(steps),
    )


def _last(steps: Sequence[Step]) -> Step | None:
    return steps[-1] if steps else None


def _asked(prompt: Prompt, made: Callable[[Reply], Step], retries: int) -> Generator[Prompt, Reply, Step]:
    """Yield a prompt until its reply is of use, but not more than `retries` times again; return the step it makes."""
    step = made((yield prompt))
    for _ in range(retries):
        if step.outcome != "kept" or step.reply.recorded or step.reply.finish_reason == "content_filter":
            break
        before, reply = step.reply, (yield replace(prompt, again=True))
        usage, seconds = before.usage + reply.usage, before.seconds + reply.seconds
        step = made(replace(reply, usage=usage, seconds=seconds, tries=before.tries + 1))
    return step


def _answered(
    prompt: Prompt, memory: str, found: Chunk | None, reply: Reply, *, prompts: PromptSet, lineage: Lineage
) -> Step:
    """Return the step that the reply to the prompt for the answer makes; `found` was looked up for it."""
    answer = prompts.parse_answer(reply.text, structured=prompt.schema is not None)
    again = prompt.rereads and is_insufficient(answer)
    return Step(
        index=prompt.index,
        phase="answer",
        span=None,
        memory_before=memory,
        memory=memory,
        reply=reply,
        outcome="insufficient" if again else "answered" if answer else "kept",
        cut=reply.finish_reason == "length",
        passages=lineage.find(answer, found.text) if found else None,
        lookup=found.span if found else None,
    )


def _update(
    index: int, chunk: Chunk, old: str, reply: Reply, *, prompts: PromptSet, budgets: Budgets, count: Counter
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
    if not visible(memory):  # not even its first character fits
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


def _no_memory(step: Step, number: int) -> NoMemory:
    how = "read again to ask for it once more"
    if step.reply.recorded:
        how = "the journal has it so; read under another name"
    elif step.reply.finish_reason == "content_filter":
        how = "it would be withheld again; leave the section out"
    span = step.span
    what = f"section {number + 1}"
    if span and span.segment is not None:  # whose own numbers nobody sees
        what = f"the memory of segment {span.segment + 1}" if span.merge else f"section {span.index + 1}"
    return NoMemory(
        f'{what} is lost: {step.problem}; {how}, or go on without it: on_lost_section="skip" (--on-lost-section skip)',
        retryable=not step.reply.recorded and step.reply.finish_reason != "content_filter",
    )


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


def failing(error: MemAgentError) -> Iterator[Chunk]:
    """Return a document that cannot be read, so that the loop ends with the error."""
    raise error
    yield


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
