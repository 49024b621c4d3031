"""The input of the runnable: a question, a document and a memory, in whatever form a chain brings them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NotRequired

from langchain_core.documents.base import Blob
from langchain_core.messages import BaseMessage, BaseMessageChunk, convert_to_messages, get_buffer_string
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from typing_extensions import TypedDict

from memagent_integrations.errors import UsageError

_KEYS = ("question", "context", "memory")
_KNOWN = "'question' and 'context', and 'memory' if there is one"
_BIND = "or bind the question: reader.bind(question=...), or the document: reader.bind(context=...)"


class ReaderInput(TypedDict):
    """The input of `MemAgentReader`: a question, and a document of any length to answer it from.

    `question` is text, a message, several, or the value of a prompt template (see `question_text`). `context` is what
    `documents.pieces` takes (text, a `Path`, `Document`s, `Blob`s, a loader, an iterator, in async calls an async
    one), or a retriever or any other runnable, which is invoked with the question. `memory` is the memory to start
    from.
    """

    question: str
    context: Any
    memory: NotRequired[Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to read for which question, from which memory on."""

    question: str
    context: Any
    memory: Any = ""

    def document(self, config: RunnableConfig) -> Any:
        """Return the document; a runnable is invoked for it."""
        return self.context.invoke(self.question, config) if isinstance(self.context, Runnable) else self.context

    async def adocument(self, config: RunnableConfig) -> Any:
        """`document`, async."""
        return await self.context.ainvoke(self.question, config) if isinstance(self.context, Runnable) else self.context


def task_of(value: Any, bound: Mapping[str, Any], settings: Collection[str] = ()) -> Task:
    """Return the task of an input and of what is bound besides; `settings` are those of the reader, for the message.

    Raises:
        UsageError: a part is missing, given twice, unknown, or no question.
    """
    if unknown := sorted(bound.keys() - set(_KEYS)):
        raise UsageError(_cannot_be_bound(unknown[0], settings))
    given = _named(value, bound)
    if unknown := sorted(map(str, given.keys() - set(_KEYS))):
        raise UsageError(f"the reader takes no {', '.join(map(repr, unknown))} in its input, but {_KNOWN}")
    if twice := sorted(given.keys() & bound.keys()):
        raise UsageError(f"the {twice[0]} is in the input, and it is bound as well; give it once")
    parts = {**bound, **given}
    if not {"question", "context"} <= parts.keys():
        missing = "question" if "question" not in parts else "context"
        raise UsageError(f"the input has no {missing}; it has to be a dict with {_KNOWN}; {_BIND}")
    question, memory = question_text(parts["question"]), parts.get("memory")
    return Task(question=question, context=parts["context"], memory="" if memory is None else memory)


def _cannot_be_bound(name: str, settings: Collection[str]) -> str:
    if name in settings:
        return f"{name} is a setting of the reader, not a part of its input: MemAgentReader(..., {name}=...)"
    return (
        f"the reader takes no {name}, its input is {_KNOWN}; bind an argument of the model to the model: "
        f"MemAgentReader(model.bind({name}=...)), or for a model given by name backend_options={{{name!r}: ...}}"
    )


def _named(value: Any, bound: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the parts of an input by name: beside a bound question it may be the context alone, or the reverse."""
    if isinstance(value, Mapping):
        return dict(value)
    missing = [name for name in ("question", "context") if name not in bound]
    if value is None and not missing:
        return {}
    if len(missing) != 1:
        raise UsageError(f"the input has to be a dict with {_KNOWN}, not {type(value).__name__}; {_BIND}")
    return {missing[0]: value}


def question_text(question: Any) -> str:
    """Return the text of a question: a text, a message, a list of messages, or the value of a prompt template.

    The texts of several messages are joined by blank lines, and nothing is left out. If a model or a tool speaks among
    them, each text begins with who said it ("Human: ...").

    Raises:
        UsageError: it is nothing of this kind, or holds something that is no text (an image, a tool call).
    """
    if isinstance(question, str):
        return question
    messages = _messages(question)
    for message in messages:
        if not isinstance(message.content, str) and any(map(_is_no_text, message.content)):
            raise UsageError("the question holds something that is no text; the reader takes questions in text alone")
        if getattr(message, "tool_calls", None):
            raise UsageError("the question holds a call of a tool; take the messages that ask something")
    if len({message.type for message in messages} - {"system", "human"}) == 0 or len(messages) == 1:
        return "\n\n".join(str(message.text) for message in messages)
    return get_buffer_string(messages)


def _messages(question: Any) -> list[BaseMessage]:
    if isinstance(question, PromptValue):
        return question.to_messages()
    if isinstance(question, BaseMessage):
        return [question]
    if isinstance(question, list) and question and not any(isinstance(item, str) for item in question):
        try:
            return convert_to_messages(question)
        except (ValueError, NotImplementedError) as error:
            raise UsageError(f"the question is a list, but not one of messages: {error}") from error
    raise UsageError(
        "the question has to be text, not "
        f"{type(question).__name__}; a message, a list of messages and the value of a prompt template will do too"
    )


def _is_no_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") not in ("text", "reasoning", "thinking")


def merged(pieces: list[Any]) -> Any:
    """Return the input that the preceding runnable streamed: texts of a question joined, parts of a context listed.

    Raises:
        UsageError: the pieces are not such dicts, or hold more than one question.
    """
    if not pieces:
        raise UsageError("the stream brings no question and no context to read")
    if not any(isinstance(piece, Mapping) for piece in pieces):
        return _one(pieces, "input")
    question: list[Any] = []
    contexts: list[Any] = []
    rest: dict[Any, list[Any]] = {}
    for piece in pieces:
        if not isinstance(piece, Mapping):
            raise UsageError(f"a stream to read has to bring dicts with {_KNOWN}; {_BIND}")
        is_whole = "context" in piece and "question" in piece
        if is_whole and question not in ([], [piece["question"]]):
            raise UsageError("the stream brings more than one question")
        if "question" in piece:
            question = [piece["question"]] if is_whole else [*question, piece["question"]]
        if "context" in piece:
            contexts.append(piece["context"])
        for name in piece.keys() - {"question", "context"}:
            rest.setdefault(name, []).append(piece[name])
    value = {name: _one(parts, name) for name, parts in rest.items()}
    value |= {"question": _one(question, "question")} if question else {}
    return value | ({"context": contexts[0] if len(contexts) == 1 else contexts} if contexts else {})


def _one(parts: list[Any], name: str) -> Any:
    """Return the value that was streamed in parts."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    if all(isinstance(part, BaseMessageChunk) for part in parts):
        return reduce(add, parts)
    raise UsageError(
        f"the stream brings {len(parts)} values for the {name}, which cannot be joined; bring one, {_BIND}"
    )


class Elided(str):
    """What stands for a text in a trace."""

    __slots__ = ()


def elided(value: Any) -> Elided:
    """Return a short description that stands for a document in traces."""
    if isinstance(value, Elided):
        return value
    if isinstance(value, str):
        return Elided(f"<{len(value):,} characters>")
    if isinstance(value, (Path, Blob)):
        return Elided(value if isinstance(value, Path) else value.source or "<Blob>")
    return Elided(f"<{type(value).__name__}" + (f" of {len(value):,}>" if isinstance(value, Sequence) else ">"))


def elided_input(value: Any, bound: Mapping[str, Any]) -> Any:
    """Return an input with its document and memory elided."""
    if isinstance(value, Mapping):
        return {name: part if name == "question" else elided(part) for name, part in value.items() if name in _KEYS}
    return value if "context" in bound else elided(value)
