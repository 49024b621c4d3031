"""A model for LlamaIndex memory blocks that follows a script."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage

from memagent_integrations import BackendError, ScriptedBackend
from memagent_integrations.llama_index.memory import MemAgentMemoryBlock
from memagent_integrations.records import Prompt

SIZES: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 30}
DOWN = BackendError("the server is down", retryable=True)


class MemoryModel:
    """Writes the number of the call into the memory, and keeps what it was shown.

    `replies` (`call_2="..."`) replace the reply to the call of that number, counted from 1.
    """

    def __init__(self, **replies: Any) -> None:
        self.sections: list[str] = []
        self.memories: list[str] = []
        self.replies = {int(name.removeprefix("call_")): reply for name, reply in replies.items()}
        self.prompts: list[str] = []
        self.backend = ScriptedBackend(self.reply)

    def reply(self, prompt: Prompt) -> Any:
        text = prompt.messages[0].content
        self.prompts.append(text)
        self.sections.append(text.partition("<section>\n")[2].partition("\n</section>")[0])
        self.memories.append(text.partition("<memory>\n")[2].partition("\n</memory>")[0])
        return self.replies.get(len(self.sections), f"note {len(self.sections)}")

    def block(self, **options: Any) -> MemAgentMemoryBlock:
        return MemAgentMemoryBlock(self.backend, **SIZES, **options)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)
