"""LangChain's prompt templates as templates of this package."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate, StringPromptTemplate

from memagent_integrations.errors import UsageError
from memagent_integrations.prompts import PLACEHOLDERS, Template
from memagent_integrations.records import Message, Role

_ROLES: dict[str, Role] = {"system": "system", "human": "user", "ai": "assistant"}


def template_of(template: str | BasePromptTemplate[Any], name: str) -> Template:
    """Return the template in this package's form; `name` is the setting, for messages.

    A `PromptTemplate` gives a text, a `ChatPromptTemplate` as many messages as it has. Any of LangChain's formats will
    do, since the template itself is filled, with its placeholders as values.

    Raises:
        UsageError: it has another variable than {question}, {memory}, {section}, {words}, or a message that is not
            text of the system, the user or the assistant.
    """
    if isinstance(template, str):
        return template
    if unknown := sorted(set(template.input_variables) - set(PLACEHOLDERS)):
        known = ", ".join(f"{{{placeholder}}}" for placeholder in PLACEHOLDERS)
        raise UsageError(f"{name} has the variable {unknown[0]!r}; fill it with partial(...): it may have {known}")
    try:
        value = template.format_prompt(**{name: f"{{{name}}}" for name in template.input_variables})
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{name} cannot be filled: {type(error).__name__}: {error}") from error
    if isinstance(template, StringPromptTemplate):
        return value.to_string()
    return tuple(_message(message, name) for message in value.to_messages())


def _message(message: BaseMessage, name: str) -> Message:
    content: Any = message.content
    if isinstance(content, list) and all(isinstance(block, dict) and block.get("type") == "text" for block in content):
        content = str(message.text)
    if message.type not in _ROLES or not isinstance(content, str):
        raise UsageError(f"{name} takes texts of the system, the user and the assistant, no other messages")
    return Message(role=_ROLES[message.type], content=content)
