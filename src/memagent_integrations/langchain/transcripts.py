"""LangChain's messages as the text of a conversation: who speaks, and what is readable in the message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from memagent_integrations.conversation import transcript

_CALLS = ("tool_use", "tool_call", "tool_call_chunk", "function_call")  # `_body` lists the calls of a message itself
_SKIPPED_BLOCKS = ("reasoning", "thinking", "redacted_thinking", *_CALLS)
_SKIPPED_FIELDS = ("type", "id", "index", "extras", "cache_control", "base64", "signature", "encrypted_content")
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_BINARY = re.compile(r"data:[^,]{0,200},.*|[A-Za-z0-9+/]{512,}={0,2}", re.DOTALL)


def transcript_of(messages: Iterable[BaseMessage]) -> str:
    """Return the messages as one text: with their tool calls, without thinking and the bytes of pictures."""
    return transcript((_speaker(message), _body(message)) for message in messages)


def _speaker(message: BaseMessage) -> str:
    if isinstance(message, ToolMessage):
        return f"Tool, {'error' if message.status == 'error' else 'result'} of call {message.tool_call_id}"
    role = {"human": "User", "ai": "Assistant"}.get(message.type, message.type)
    return f"{role} ({message.name})" if message.name else role


def _body(message: BaseMessage) -> str:
    content = message.content if isinstance(message.content, list) else [message.content]
    lines = [line for block in content if (line := _line(block))]
    if isinstance(message, AIMessage):
        for call in (*message.tool_calls, *message.invalid_tool_calls):
            arguments = call["args"] if isinstance(call["args"], str) else _json(call["args"])
            lines.append(f"calls {call['name']}({arguments}), call {call['id']}")
    return "\n".join(lines) or "(nothing)"


def _line(block: Any) -> str:
    """Return a block of a message as a line: its text, else its kind and what is readable in it."""
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in ("text", "text-plain") and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind in _SKIPPED_BLOCKS:
        return ""
    return f"[{kind}] {_json(_readable(block))}".removesuffix(" {}")


def _readable(value: Any) -> Any:
    """Return the part of a block that a model can read: no bytes of pictures and files, no fields for the provider."""
    if isinstance(value, dict):
        fields = {name: _readable(item) for name, item in value.items() if name not in _SKIPPED_FIELDS}
        return {name: item for name, item in fields.items() if item not in _NOTHING}
    if isinstance(value, list):
        return [item for item in map(_readable, value) if item not in _NOTHING]
    return None if isinstance(value, str) and _BINARY.fullmatch(value) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
