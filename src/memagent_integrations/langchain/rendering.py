"""The prompts of a reading as LangChain's models take them: messages, and for models of plain text a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue

from memagent_integrations.records import Message

_MESSAGES: dict[str, type[BaseMessage]] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}


class _Either(ChatPromptValue):
    """Messages for a chat model, and the same as a text for one of plain text; LangChain asks for what it needs."""

    text: str

    def to_string(self) -> str:
        return self.text


def model_input(messages: Sequence[Message], models: Sequence[Any]) -> LanguageModelInput:
    """Return the messages in the form that all of these models take."""
    of_text = [isinstance(model, BaseLLM) for model in models]
    if all(of_text):
        return as_text(messages)
    chat = [_MESSAGES[message.role](content=message.content) for message in messages]
    return _Either(messages=chat, text=as_text(messages)) if any(of_text) else chat


def as_text(messages: Sequence[Message]) -> str:
    """Return the messages as the text that a model continues.

    Instructions and one question are a text as they are (LangChain would write "Human:" before it). A conversation
    has a name before each turn, and ends where the assistant goes on.
    """
    if all(message.role == "system" for message in messages[:-1]):
        return "\n\n".join(message.content for message in messages)
    names = {"system": "", "user": "User: ", "assistant": "Assistant: "}
    turns = [names[message.role] + message.content for message in messages]
    return "\n\n".join(turns if messages[-1].role == "assistant" else [*turns, "Assistant:"])
