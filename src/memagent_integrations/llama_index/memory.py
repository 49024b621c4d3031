"""A memory block for LlamaIndex's `Memory`: what leaves the chat history is folded into a memory of bounded size."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Unpack

from llama_index.core.llms import ChatMessage
from llama_index.core.memory import BaseMemoryBlock
from llama_index.core.utils import get_tokenizer
from pydantic import Field, PrivateAttr

from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.llama_index.synthesizer import Model, ReaderSettings, one_of, reader_over
from memagent_integrations.reader import Reader
from memagent_integrations.records import Chunk
from memagent_integrations.tokens import Counter, cut

QUESTION = (
    "What has to be remembered of this conversation to carry it on: who the user is and what they want, facts, names, numbers and dates that were "
    "told or found out, decisions, promises, and what is still open? Later words outweigh earlier ones."
)
_log = logging.getLogger(__name__)


class MemAgentMemoryBlock(BaseMemoryBlock[str]):
    """Remembers a conversation in a memory of at most `memory_tokens`, which the model rewrites when messages leave the chat history.

        Memory.from_defaults(memory_blocks=[MemAgentMemoryBlock(llm, memory_tokens=500)])

    Args:
        llm: a LlamaIndex LLM, a `Backend`, or a name that `load_backend` knows; default: `Settings.llm`, looked up when it is needed.
        model: another name for `llm`.
        tokenizer: of a LlamaIndex LLM, see `LLMBackend`.
        question: what the memory is kept for.
        name: of the block, as the prompt shows it.
        description: of the block.
        priority: 0, the block is never truncated, or the higher, the longer it is left whole when a prompt would be too long.
        accept_short_term_memory: take the messages that leave the chat history.
        memory: to go on from.
        pending: text of messages that are not folded yet, to go on from.
        settings: as in `Reader`, without `journal`.

    `model_dump` holds the memory and what is pending, not the model: `MemAgentMemoryBlock(llm, **dumped)` goes on. A failed fold loses
    nothing: the messages stay in `pending` and are folded with the next ones. An error that may pass by itself is logged; others are raised.

    Raises:
        UsageError: a setting is wrong; when messages are put, also what `Reader.read` raises.
    """

    name: str = "overwrite_memory"
    question: str = QUESTION
    memory: str = ""
    pending: str = ""
    reader: Reader = Field(exclude=True, repr=False)
    _lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = PrivateAttr(default=None)

    def __init__(
        self,
        llm: Model = None,
        *,
        model: Model = None,
        tokenizer: str | Counter | None = None,
        question: str = QUESTION,
        name: str = "overwrite_memory",
        description: str | None = None,
        priority: int = 0,
        accept_short_term_memory: bool = True,
        memory: str = "",
        pending: str = "",
        **settings: Unpack[ReaderSettings],
    ) -> None:
        if settings.get("journal") is not None:
            raise UsageError("a conversation is not recorded in a journal; keep the block's model_dump")
        if not question.strip():
            raise UsageError("the question is empty")
        fields: dict[str, Any] = {"question": question, "name": name, "description": description, "priority": priority}
        fields |= {"accept_short_term_memory": accept_short_term_memory, "memory": memory, "pending": pending}
        fields["reader"] = reader_over(one_of(llm, model), tokenizer, **settings)
        super().__init__(**fields)

    async def afold(self) -> None:
        """Fold what is pending into the memory, one fold at a time.

        Raises:
            MemAgentError: the model failed, or does not fit; what was not folded is still pending.
        """
        async with self._turn():
            while self.pending.strip():
                chunks = await asyncio.to_thread(list, self.reader.chunks(self.pending))
                if not await self._fold(chunks, self.pending):
                    return
            self.pending = ""

    async def _fold(self, chunks: list[Chunk], text: str) -> bool:
        """Fold these chunks of the text, with which `pending` begins. False: the last of them is to be tried again, with more text."""
        read = 0
        for chunk in chunks:
            memory = self.memory
            reading = await self.reader.amemorize(self.question, chunk, memory=memory)
            if self.memory != memory or not self.pending.startswith(text[read:]):
                return True  # somebody set the memory meanwhile: fold into that one
            if reading.steps[-1].outcome == "kept":
                _log.warning("the model's reply is no memory; the one of %s stays", self.name)
                if chunk is chunks[-1]:
                    return False
            self.memory, self.pending = reading.memory, self.pending[chunk.span.end - read :]
            read = chunk.span.end
        return True

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        """The memory."""
        return self.memory

    async def _aput(self, messages: list[ChatMessage]) -> None:
        self.pending += "".join(map(_told, messages))  # before anything is awaited: a put that is cancelled loses nothing
        try:
            await self.afold()
        except BackendError as error:
            if not error.retryable:
                raise
            _log.warning("%s could not be brought up to date, its messages wait for the next ones: %s", self.name, error)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """The memory without its last `tokens_to_truncate` tokens, by LlamaIndex's global tokenizer; None if nothing is left."""
        tokenizer = get_tokenizer()
        size = len(tokenizer(content)) if content else 0
        if size <= tokens_to_truncate:
            return None
        return cut(content, size - tokens_to_truncate, lambda text: len(tokenizer(text))).rstrip() or None

    def _turn(self) -> asyncio.Lock:
        """The lock of the running event loop: LlamaIndex's sync methods run each in a loop of their own."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = (loop, asyncio.Lock())
        return self._lock[1]


def _told(message: ChatMessage) -> str:
    """A message as it is read: who said what. Thinking is left out, a picture is named."""
    parts = [_part(block) for block in message.blocks if block.block_type not in ("thinking", "cache")]
    text = "\n".join(part for part in parts if part.strip())
    return f"{message.role.value}: {text}\n\n" if text else ""


def _part(block: Any) -> str:
    if block.block_type == "text":
        return str(block.text)
    if block.block_type == "tool_call":
        return f"[calls {block.tool_name} with {block.tool_kwargs}]"
    return f"[{block.block_type}]"
