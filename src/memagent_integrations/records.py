"""The records that pass between the modules. All are frozen and keyword-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from memagent_integrations import errors, files
from memagent_integrations.changes import marked
from memagent_integrations.checks import Number, check_int, check_number, drop_none
from memagent_integrations.citations import Citation, cite
from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.lineage import Lineage, Origin, looked_up
from memagent_integrations.passages import Passage
from memagent_integrations.rounds import Round
from memagent_integrations.sanitize import encodable, visible

Phase = Literal["memory", "answer"]
Layout = Literal["memory-first", "section-first", "section-shared"]
Role = Literal["system", "user", "assistant"]
Strategy = Literal["sequential", "parallel"]
"""How a document is read: chunk by chunk, or its segments side by side."""
Outcome = Literal["updated", "unchanged", "kept", "answered", "insufficient"]
OnLostSection = Literal["error", "skip"]
"""What becomes of a reading when the model wrote no memory for a section."""
_MOST_PLACES = 5
"""The number of lost sections whose places a warning gives."""


def _error_to_json(error: MemAgentError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    # a subclass from elsewhere is saved as the class of this package that it inherits from
    name = next(base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base)
    return {"type": name, "message": str(error), "retryable": getattr(error, "retryable", False)}


def _error_from_json(value: Any) -> MemAgentError | None:
    if value is None or isinstance(value, MemAgentError):
        return value
    error_class = getattr(errors, str(value["type"]), MemAgentError)
    if not (isinstance(error_class, type) and issubclass(error_class, MemAgentError)):
        raise ValueError(f"{value['type']} is not an error of this package")
    error = error_class.__new__(error_class, value["message"])
    if isinstance(error, errors.MissingExtra):
        error.command = str(error).rpartition("run: ")[2]
    if isinstance(error, errors.BackendError):
        error.retryable = bool(value["retryable"])
    return error


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Sizes in tokens of the backend's tokenizer.

    The defaults are those of the MemAgent paper (arXiv:2507.02259): a window of 8,192 tokens holds the question, a
    chunk, the memory and the output. `output_tokens` limits what the model may write in one call, thinking included;
    None means `memory_tokens` for a memory update and 1,024 for the answer.

    Raises:
        UsageError: a budget is not a positive number, or the overlap leaves no room for new text.
    """

    chunk_tokens: Number[int] = 5000
    memory_tokens: Number[int] = 1024
    question_tokens: Number[int] = 1024
    output_tokens: Number[int | None] = None
    overlap_tokens: Number[int] = 0

    def __post_init__(self) -> None:
        check_int(
            chunk_tokens=self.chunk_tokens, memory_tokens=self.memory_tokens, question_tokens=self.question_tokens
        )
        check_int(**drop_none(output_tokens=self.output_tokens))
        check_int(least=0, overlap_tokens=self.overlap_tokens)
        most = self.chunk_tokens // 2
        if self.overlap_tokens > most:
            raise UsageError(
                f"overlap_tokens has to lie between 0 and half of chunk_tokens ({most}), not {self.overlap_tokens!r}"
            )

    def output(self, phase: Phase) -> int:
        """Return how many tokens the model may write in one call of this phase."""
        return self.output_tokens or (self.memory_tokens if phase == "memory" else 1024)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where some text came from: characters `start` to `end` (exclusive) of the document `document_id`.

    `page` is the page that its metadata name, if they do. `offset` is where the text begins in its chunk.
    """

    document_id: str
    start: int
    end: int
    page: str | None = None
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where a chunk lies: characters `start` to `end` (exclusive) of the whole text; its size and its sources.

    `segment` is that of a parallel reading; with `merge` the chunk is the memory of this segment.
    """

    index: int
    start: int
    end: int
    tokens: int
    sources: tuple[Source, ...] = ()
    segment: int | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One section of the document, as the model sees it."""

    span: Span
    text: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a chat prompt."""

    role: Role
    content: str


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one or more calls; None where the server did not report them.

    `cached_tokens` is the part of `prompt_tokens` that came from a prefix cache.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def __add__(self, other: Usage) -> Usage:
        """Return the sum; a number that is unknown on either side is unknown in the sum."""

        def add(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else a + b

        return Usage(
            prompt_tokens=add(self.prompt_tokens, other.prompt_tokens),
            completion_tokens=add(self.completion_tokens, other.completion_tokens),
            cached_tokens=add(self.cached_tokens, other.cached_tokens),
        )


NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model wrote for one prompt, and the `seconds` that the call took.

    After replies that held nothing it is the last one, with the usage and the seconds of all `tries`.

    `reasoning` is the thinking, where the server returns it apart from the text. `edited` is the memory that a person
    put in place of the one in the reply, or None. `recorded`: the reply comes from a journal, without a call. `model`:
    which model wrote it, as its server says, or None; behind fallbacks it may be another one.
    """

    text: str
    reasoning: str = ""
    usage: Usage = Usage()
    finish_reason: str | None = None
    seconds: float = 0.0
    edited: str | None = None
    recorded: bool = field(default=False, compare=False)
    model: str | None = None
    tries: int = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of the model, and its effect on the memory.

    `index` counts the steps of a reading from 0; `span` is the chunk that was read, None for the answer.

    `outcome`: "updated" (the reply is the new memory), "unchanged" (the model said that nothing is new), "kept" (no
    reply was of use, so the old memory was kept, and the section is lost), "answered" (the last step), "insufficient"
    (the answer says that the memory does not suffice, and the document is read once more). `cut`: the end of the text
    was lost, because the reply reached the output limit or the memory its budget.

    `passages` are the places in the chunk that new statements of the memory came from; None where nobody looked for
    them, as in a journal of an older version. `lookup` is where the text lies that was looked up for an answer; its
    `passages` are the places in that text.
    """

    index: int
    phase: Phase
    span: Span | None
    memory_before: str
    memory: str
    reply: Reply
    outcome: Outcome
    cut: bool
    passages: tuple[Passage, ...] | None = None
    lookup: Span | None = None

    def __post_init__(self) -> None:
        if self.passages is not None:
            object.__setattr__(self, "passages", tuple(self.passages))

    @property
    def is_answer(self) -> bool:
        """Whether this is the answer of the reading, and not one that the document is read once more for."""
        return self.phase == "answer" and self.outcome != "insufficient"

    @property
    def problem(self) -> str | None:
        """Why the section is not in the memory; None if the reply was of use."""
        if self.outcome != "kept" or self.phase == "answer":
            return None
        if self.reply.finish_reason == "content_filter":
            return "the server's content filter withheld the memory"
        if self.reply.finish_reason == "length":
            return "the model used up its output before it came to a memory (thinking counts); raise output_tokens"
        return "the model wrote no memory, its reply is empty or only thinking"

    def _repr_html_(self) -> str:
        """Return the step for a notebook: the memory, with what changed in it."""
        if self.phase == "answer":
            return f"<p><b>{escape(self.reply.text)}</b></p>"
        chunk = self.span.index + 1 if self.span else self.index
        return f"<p>chunk {chunk}: memory {self.outcome}</p>{marked(self.memory_before, self.memory)}"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One call to make: the messages, the output limit, and `after`, the step made from the previous reply.

    `schema` is the JSON Schema that the reply has to fit, None for a text; only an answer has one. `rereads`: the reply
    may say that the memory does not suffice; it is then no answer, and the document is read once more.

    `recorded` is the reply that a journal holds: send it to the loop instead of making the call. `deadline` is the time
    (by `time.monotonic`) at which the call is given up, `context` the OpenTelemetry context that it belongs to, `round`
    the prompts to ask side by side with it. `again` says that the last reply to the same prompt was of no use: no cache
    may give it once more.
    """

    index: int
    phase: Phase
    messages: tuple[Message, ...]
    max_tokens: int
    schema: Mapping[str, Any] | None = field(default=None, hash=False)
    after: Step | None = None
    recorded: Reply | None = None
    deadline: float | None = None
    again: bool = field(default=False, compare=False)
    rereads: bool = False
    context: object | None = field(default=None, compare=False, repr=False)
    round: Round | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a reading will cost, computed before the first call.

    `prompt_tokens` and `completion_tokens` are upper bounds; `document_tokens` is the sum over the chunks, in which
    overlapping text counts twice.
    """

    chunks: int
    calls: int
    document_tokens: int
    prompt_tokens: int
    completion_tokens: int

    def price(self, *, prompt: float, completion: float) -> float:
        """Return the most that the calls cost, given the prices of a million prompt and completion tokens.

        Raises:
            UsageError: a price is not a number of at least 0.
        """
        check_number(prompt=prompt, completion=completion)
        return (self.prompt_tokens * prompt + self.completion_tokens * completion) / 1e6


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of reading a document for one question.

    `answer` is None if and only if `error` is set; the steps and the memory are then those up to the failure.
    `model` wrote the memory, and the answer too unless `answer_model` names another that did.
    """

    question: str
    answer: str | None
    memory: str
    steps: tuple[Step, ...] = field(repr=False)
    model: str
    answer_model: str | None = None
    budgets: Budgets
    error: Annotated[MemAgentError | None, PlainValidator(_error_from_json), PlainSerializer(_error_to_json)] = None

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.error is None):
            raise UsageError("a reading has either an answer or an error")
        object.__setattr__(self, "steps", tuple(self.steps))  # a store of records may have made lists of tuples

    @property
    def usage(self) -> Usage:
        """The tokens of all steps together; a number that is unknown for one call is unknown here."""
        return sum((step.reply.usage for step in self.steps), NO_USAGE)

    @property
    def new_usage(self) -> Usage:
        """The tokens of the calls that this reading made: those of steps from a journal are left out."""
        return sum((step.reply.usage for step in self.steps if not step.reply.recorded), NO_USAGE)

    @property
    def seconds(self) -> float:
        """The seconds that the model took, over all steps."""
        return sum(step.reply.seconds for step in self.steps)

    @property
    def lost_sections(self) -> tuple[Span, ...]:
        """The sections that are not in the memory, because the model wrote none for them (the outcome "kept")."""
        first, again = self._passes
        noted = {step.span for step in again if step.outcome != "kept"}
        return tuple(step.span for step in first if step.span and step.outcome == "kept" and step.span not in noted)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What one has to know about the answer: lost sections, texts that were cut, an empty memory."""
        places = [(span.start, span.end) for span in self.lost_sections]
        answer = next((step for step in reversed(self.steps) if step.is_answer), None)
        found = warnings_of(places, self.sections, self.memory, self.answer, cut=answer is not None and answer.cut)
        cut = [step.cut for step in self.steps if step.phase == "memory"]
        if not any(cut):
            return found
        advice = "raise memory_tokens, and output_tokens with it"
        return (*found, f"memories cut off at their limit: {sum(cut):,} of {len(cut):,}; {advice}")

    @property
    def sections(self) -> int:
        """The number of sections that were read, each counted once."""
        return sum(step.phase == "memory" and not (step.span and step.span.merge) for step in self._passes[0])

    @property
    def _passes(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The steps until the answer that the document was read once more for, and those from there on."""
        end = next((n for n, step in enumerate(self.steps) if step.outcome == "insufficient"), len(self.steps))
        return self.steps[:end], self.steps[end:]

    @cached_property
    def origins(self) -> dict[str, tuple[Origin, ...]]:
        """The statements of the final memory, each with where it came from (nothing, if no text is known to say it)."""
        return Lineage.of(self.steps).statements

    @cached_property
    def citations(self) -> tuple[Citation, ...]:
        """The places in the documents that the statements of the final memory rest on, and those of a looked-up answer.

        Those of the statements that share most with the answer, and then with the question, come first. What was in the
        memory before the reading, what a person wrote, and what no text says, has no place.
        """
        spans = {step.index: span for step in self.steps if (span := step.span or step.lookup)}
        origins = self.origins | looked_up(self.steps)
        return tuple(cite(origins, spans, self.question, self.answer))

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the reading as JSON, for `from_json`, with citations and warnings. A lone surrogate becomes U+FFFD."""
        value = _adapter().dump_python(self) | {
            "citations": list(map(asdict, self.citations)),
            "lost_sections": list(map(asdict, self.lost_sections)),
            "warnings": self.warnings,
        }
        return _json().dump_json(encodable(value), indent=indent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Reading:
        """Return the reading that `to_json` wrote.

        Raises:
            UsageError: the text is not such JSON.
        """
        try:
            return _adapter().validate_json(text)
        except (ValidationError, LookupError, TypeError) as error:
            problem = files.first_error(error) if isinstance(error, ValidationError) else "its error is not one"
            if len(text.split(maxsplit=1)) > 1 and "trailing" in problem:
                problem += "; of a file with a reading on each line give one line"
            raise UsageError(f"this is not a reading saved by to_json: {problem}") from error

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file.

        Raises:
            UsageError: the file cannot be written.
        """
        files.write(path, self.to_json(indent=1))

    def _repr_html_(self) -> str:
        """Return the reading for a notebook: the answer, and each memory in a fold."""
        result = f"<p><b>{escape(self.answer)}</b></p>" if self.answer else f"<p>{escape(str(self.error))}</p>"
        updates = (step for step in self.steps if step.phase == "memory")
        folds = "".join(
            f"<details><summary>chunk {(step.span or step).index + 1}: memory {step.outcome}</summary>"
            f"{marked(step.memory_before, step.memory)}</details>"
            for step in updates
        )
        return str(encodable(f"<div><p>{escape(self.question)}</p>{result}{folds}</div>"))

    def failed(self, error: MemAgentError) -> Reading:
        """Return this reading as one that `error` ended."""
        return replace(self, answer=None, error=error)


Event = Step | str | Reading
"""What a streamed reading yields: each step, pieces of the answer's text, and the whole reading last."""


def warnings_of(
    lost: Sequence[tuple[int, int]], sections: int, memory: str, answer: str | None, *, cut: bool = False
) -> tuple[str, ...]:
    """Return the warnings of a reading of so many sections, of which some were lost: where they begin and end.

    `cut`: the answer reached its limit.
    """
    warnings = []
    if lost:
        places = ", ".join(f"{start:,}-{end:,}" for start, end in lost[:_MOST_PLACES])
        more = ", ..." if len(lost) > _MOST_PLACES else ""
        warnings.append(
            f"sections lost: {len(lost):,} of {sections:,}, for which the model wrote no memory "
            f"(characters {places}{more})"
        )
    if answer and not visible(memory):
        warnings.append("the answer rests on an empty memory: nothing was noted")
    if answer and cut:
        warnings.append("the answer is cut off at its limit; raise output_tokens")
    return tuple(warnings)


@cache
def _adapter() -> TypeAdapter[Reading]:
    return TypeAdapter(Reading)


@cache
def _json() -> TypeAdapter[Any]:
    return TypeAdapter(Any)
