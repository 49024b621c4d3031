"""LlamaIndex's messages as the text of a conversation: who speaks, and what is readable in the message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llama_index.core.llms import ChatMessage

from memagent_integrations.conversation import transcript


def transcript_of(messages: Iterable[ChatMessage]) -> str:
    """Return the messages as one text: without thinking, and with the kind of each block that is no text."""
    return transcript((message.role.value, body) for message in messages if (body := _body(message)))


def _body(message: ChatMessage) -> str:
    parts = [part for block in message.blocks if (part := _part(block))]
    parts += [f"[calls {call}]" for call in message.additional_kwargs.get("tool_calls") or ()]
    return "\n".join(parts)


def _part(block: Any) -> str:
    match block.block_type:
        case "thinking" | "cache":
            return ""
        case "text":
            return str(block.text)
        case "tool_call":
            return f"[calls {block.tool_name} with {block.tool_kwargs}]"
        case "citable":
            return "\n".join([_title(block), *map(_part, block.content)])
        case "citation":
            return "\n".join([_title(block), _part(block.cited_content)])
        case "document" if block.data and (block.document_mimetype or "").startswith("text/"):
            text = block.resolve_document().read().decode("utf-8", "replace")
            return "\n".join([_title(block), text])
        case kind:
            return f"[{kind}]"


def _title(block: Any) -> str:
    return f"[{block.title or block.block_type}]"
