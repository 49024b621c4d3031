"""The prompts of a reading as LlamaIndex's LLMs take them: messages, or a text in the LLM's own template."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.llms.structured_llm import StructuredLLM

from memagent_integrations.llama_index.llms import completes
from memagent_integrations.records import Message


def chat_messages(system_prompt: str | None, messages: Sequence[Message]) -> list[ChatMessage]:
    """Return the messages of a prompt after the LLM's system prompt, in one system message at the beginning.

    Chat templates of many models know only one. A system prompt that the messages begin with is not said twice.
    """
    texts = [message.content for message in messages if message.role == "system"]
    if system_prompt and not (texts and texts[0].startswith(system_prompt)):
        texts.insert(0, system_prompt)
    system = [ChatMessage(role=MessageRole.SYSTEM, content="\n\n".join(texts))] if texts else []
    others = (message for message in messages if message.role != "system")
    return system + [ChatMessage(role=MessageRole(message.role), content=message.content) for message in others]


def completion_prompt(llm: LLM, metadata: LLMMetadata, messages: Sequence[Message]) -> str:
    """Return the text of a prompt for `complete`, formatted by the templates that the LLM has.

    One message is formatted as `LLM.predict` does: `completion_to_prompt`, then system prompt and query wrapper.
    Several are formatted by `messages_to_prompt`, as is one for a chat model, and where this is the only template.
    """
    by_messages = metadata.is_chat_model
    if not by_messages and len(messages) > 1:
        by_messages = _has_messages_template(llm) or not _has_completion_template(llm)
    elif not by_messages:
        by_messages = _has_messages_template(llm) and not _has_completion_template(llm)
    if by_messages:
        to_prompt = llm.messages_to_prompt or generic_messages_to_prompt
        return str(to_prompt(chat_messages(llm.system_prompt, messages)))
    text = "\n\n".join(str(message.content) for message in chat_messages(None, messages))
    text = text.removeprefix(llm.system_prompt or "").lstrip("\n") if len(messages) > 1 else text
    return llm._extend_prompt((llm.completion_to_prompt or default_completion_to_prompt)(text))


def _has_completion_template(llm: LLM) -> bool:
    """Return whether the LLM has a template for a single prompt."""
    wrapper = llm.query_wrapper_prompt
    wraps = wrapper is not None and wrapper.format(query_str="\0") != "\0"
    return wraps or llm.completion_to_prompt not in (None, default_completion_to_prompt)


def _has_messages_template(llm: LLM) -> bool:
    """Return whether the LLM has a template of its own for messages; a tokenizer of a base model has none."""
    own = llm.messages_to_prompt not in (None, generic_messages_to_prompt)
    return own and getattr(getattr(llm, "_tokenizer", None), "chat_template", True) is not None


def template_text(llm: LLM, metadata: LLMMetadata) -> str:
    """Return what the LLM's templates and its system prompt add to a prompt of one message."""
    inner = llm.llm if isinstance(llm, StructuredLLM) else llm
    if not completes(inner, metadata):
        return inner.system_prompt or ""
    return completion_prompt(inner, metadata, [Message(role="user", content="")])
