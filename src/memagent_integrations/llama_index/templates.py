"""LlamaIndex's prompt templates as those of a `PromptSet`, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate

from memagent_integrations.backends import Backend
from memagent_integrations.errors import UsageError
from memagent_integrations.llama_index.backend import LLMBackend
from memagent_integrations.prompts import PLACEHOLDERS, Template
from memagent_integrations.records import Message, Phase, Role

_THEIRS: dict[Phase, dict[str, str]] = {  # what LlamaIndex's own templates call our placeholders
    "memory": {
        "query_str": "question",
        "existing_answer": "memory",
        "context_str": "section",
        "context_msg": "section",
    },
    "answer": {
        "query_str": "question",
        "existing_answer": "memory",
        "context_str": "memory",
        "context_msg": "memory",
    },
}
_ROLES: dict[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def to_llama_index(template: Template) -> BasePromptTemplate:
    """Return a template as LlamaIndex has it: of one text, or of several messages."""
    if isinstance(template, str):
        return PromptTemplate(template)
    messages = [ChatMessage(role=MessageRole(message.role), content=message.content) for message in template]
    return ChatPromptTemplate(message_templates=messages)


def from_llama_index(template: Any, phase: Phase, backend: Backend) -> Template:
    """Return one of LlamaIndex's templates as ours, with its partial variables, mapped names and functions applied.

    Besides {question}, {memory}, {section} and {words} it may have the names of LlamaIndex's own templates:
    {query_str} is the question, {existing_answer} the memory, {context_str} and {context_msg} are the section in the
    prompt for the memory, and the memory in the prompt for the answer. A selector selects by the backend's LLM.

    Raises:
        UsageError: it is no template, or does more than to put texts in their places.
    """
    if not isinstance(template, BasePromptTemplate):
        raise UsageError(f"the prompts are LlamaIndex's prompt templates, not {type(template).__name__}")
    if template.output_parser is not None:
        raise UsageError("an answer is not given to an output parser; for objects pass output_cls")
    llm = None
    if isinstance(template, SelectorPromptTemplate) and isinstance(backend, LLMBackend):
        llm = backend.llm
    known = {name: name for name in PLACEHOLDERS} | _THEIRS[phase]
    names = {name: ours for name, ours in known.items() if name not in template.kwargs}
    messages = _formatted(template, names, _placeholder, llm)
    if [_put_back(message) for message in _formatted(template, names, _long_text, llm)] != messages:
        raise UsageError(
            "a template may put the texts in their places, and nothing else: this one computes from them, or is "
            "another each time (its functions and filters run once, not for each prompt)"
        )
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return tuple(messages)


def _placeholder(name: str) -> str:
    return f"{{{name}}}"


def _long_text(name: str) -> str:
    """Return a text that shows if anything is done with it: cut, counted, written in capitals."""
    return f"The {name}. " * 4000 + "End"


def _put_back(message: Message) -> Message:
    content = message.content
    for name in PLACEHOLDERS:
        content = content.replace(_long_text(name), _placeholder(name))
    return Message(role=message.role, content=content)


def _formatted(
    template: BasePromptTemplate, names: dict[str, str], value: Callable[[str], str], llm: LLM | None
) -> list[Message]:
    values: dict[str, Any] = {name: value(ours) for name, ours in names.items()}
    try:
        messages = template.format_messages(llm=llm, **values)
    except Exception as error:  # of a function, or of the template's own language
        raise UsageError(f"the template cannot be filled in: {type(error).__name__}: {error}") from error
    return list(map(_message, messages))


def _message(message: ChatMessage) -> Message:
    role = _ROLES.get(MessageRole(message.role))
    if role is None:
        raise UsageError(f"the messages of a prompt are of system, user or assistant, not of {message.role.value}")
    if other := next((block for block in message.blocks if not isinstance(block, TextBlock)), None):
        raise UsageError(f"the messages of a prompt are text; {type(other).__name__} is not")
    return Message(role=role, content="".join(cast("TextBlock", block).text for block in message.blocks))
