"""A memory block for LlamaIndex's `Memory`: what leaves the chat history is folded into a memory of bounded size."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any, Unpack

from llama_index.core.llms import ChatMessage
from llama_index.core.memory import BaseMemoryBlock
from llama_index.core.utils import get_tokenizer
from pydantic import Field, PrivateAttr

from memagent_integrations.conversation import QUESTION, transcript
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.llama_index.synthesizer import Model, ReaderSettings, one_of, reader_over
from memagent_integrations.reader import Reader
from memagent_integrations.records import Step
from memagent_integrations.sanitize import harmless
from memagent_integrations.tokens import Counter, cut

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
    nothing: the messages stay in `pending` and are folded with the next ones. An error that may pass by itself is logged; others are raised. A
    section that the server's content filter withholds would be withheld again: it is passed over, with a warning in the log.

    Raises:
        UsageError: a setting is wrong; when messages are put, also what `Reader.read` raises.
    """

    name: str = "overwrite_memory"
    question: str = QUESTION
    memory: str = ""
    pending: str = ""
    reader: Reader = Field(exclude=True, repr=False)
    _lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = PrivateAttr(default=None)
    _changing: threading.Lock = PrivateAttr(
        default_factory=threading.Lock
    )  # held for changes of memory and pending, and never for long
    _folding: bool = PrivateAttr(default=False)

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
        if not isinstance(question, str) or not question.strip():
            raise UsageError("the question is empty")
        fields: dict[str, Any] = {"question": question, "name": name, "description": description, "priority": priority}
        fields |= {"accept_short_term_memory": accept_short_term_memory, "memory": memory, "pending": pending}
        fields["reader"] = reader_over(one_of(llm, model), tokenizer, **settings)
        super().__init__(**fields)

    async def afold(self) -> None:
        """Fold what is pending into the memory. What another thread is folding by now, it folds to the end, with all that came after.

        Raises:
            MemAgentError: the model failed, or does not fit; what was not folded is still pending.
        """
        async with self._turn():
            if not self._begin():
                return
            try:
                while text := self._next():
                    await self._fold(text)
            except BaseException:
                self._folding = False
                raise

    async def _fold(self, text: str) -> None:
        """Fold this text, with which `pending` begins; left early when somebody set the memory meanwhile, to fold into that one."""
        memory, read = self.memory, 0

        def taken(step: Step) -> None:
            nonlocal memory, read
            end = step.span.end if step.span else read
            with self._changing:
                if self.memory != memory or not self.pending.startswith(text[read:]):
                    raise _ChangedMeanwhile
                self.memory, self.pending = step.memory, self.pending[end - read :]
            if step.outcome == "kept":
                _log.warning(
                    "the server's content filter withheld the memory of %s; what it left out is lost", self.name
                )
            memory, read = step.memory, end

        try:
            await self.reader.amemorize(self.question, text, memory=memory, strict=True, progress=taken)
        except _ChangedMeanwhile:
            return

    def _begin(self) -> bool:
        """Whether it is ours to fold, and nobody is at it."""
        with self._changing:
            mine, self._folding = not self._folding, True
            return mine

    def _next(self) -> str:
        """The text to fold; without any the folding has ended."""
        with self._changing:
            if not self.pending.strip():
                self.pending, self._folding = "", False
            return self.pending

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        """The memory, unable to close the tags that LlamaIndex puts it between."""
        return harmless(self.memory, ("memory", self.name))

    async def _aput(self, messages: list[ChatMessage]) -> None:
        told = transcript((message.role.value, said) for message in messages if (said := _said(message)))
        with self._changing:
            self.pending += told  # before anything is awaited: a put that is cancelled loses nothing
        try:
            await self.afold()
        except BackendError as error:
            if not error.retryable:
                raise
            _log.warning(
                "%s could not be brought up to date, its messages wait for the next ones: %s", self.name, error
            )

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


class _ChangedMeanwhile(Exception):
    """The memory that is being folded into is no longer the block's."""


def _said(message: ChatMessage) -> str:
    """What a message says. Thinking is left out, a picture is named."""
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
            return "\n".join([f"[{block.title or block.block_type}]", *map(_part, block.content)])
        case "citation":
            return "\n".join([f"[{block.title or block.block_type}]", _part(block.cited_content)])
        case "document" if block.data and (block.document_mimetype or "").startswith("text/"):
            return "\n".join(
                [f"[{block.title or block.block_type}]", block.resolve_document().read().decode("utf-8", "replace")]
            )
        case kind:
            return f"[{kind}]"
