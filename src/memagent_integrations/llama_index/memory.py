"""A memory block for LlamaIndex's `Memory`: folds the messages that leave the chat history into a bounded memory."""

from __future__ import annotations

import asyncio
import logging
import threading
from copy import deepcopy
from typing import Any, Self, Unpack

from llama_index.core.llms import ChatMessage
from llama_index.core.memory import BaseMemoryBlock
from llama_index.core.utils import get_tokenizer
from pydantic import Field, PrivateAttr

from memagent_integrations.checks import check_question
from memagent_integrations.conversation import QUESTION
from memagent_integrations.errors import BackendError, ContextOverflow, MemAgentError, NoMemory, UsageError
from memagent_integrations.llama_index.settings import Model, ReaderSettings, reader_over
from memagent_integrations.llama_index.transcripts import transcript_of
from memagent_integrations.reader import Reader
from memagent_integrations.reader.folding import is_about_the_section
from memagent_integrations.records import Step
from memagent_integrations.sanitize import harmless
from memagent_integrations.tokens import Counter, cut

_log = logging.getLogger(__name__)
_TRIES = 3  # folds in which a section may fail before it is passed over


class MemAgentMemoryBlock(BaseMemoryBlock[str]):
    """Remembers a conversation in at most `memory_tokens`, rewritten when messages leave the chat history.

        Memory.from_defaults(memory_blocks=[MemAgentMemoryBlock(llm, memory_tokens=500)])

    Args:
        llm: a LlamaIndex LLM, a `Backend`, or a name that `load_backend` knows; default: `Settings.llm`, looked up for
            each reading.
        tokenizer: counts the tokens of a LlamaIndex LLM, see `LLMBackend`.
        question: what the memory is for.
        name: the block's name in the prompt.
        description: a description of the block.
        priority: 0: the block is never truncated; else the higher, the longer it stays whole when a prompt is too long.
        accept_short_term_memory: whether to take the messages that leave the chat history.
        memory: an earlier memory to start from.
        pending: an earlier block's text of messages that are not folded yet.
        settings: as in `Reader`, without `journal`.

    `model_dump` holds the memory and the pending text, not the model: `MemAgentMemoryBlock(llm, **dumped)` resumes. A
    failed fold loses nothing: the messages stay in `pending` and are folded with the next ones. A retryable error is
    logged, others are raised. But no section holds up the chat for ever: one that the server's content filter withholds
    is skipped, as it would be withheld again, and so is one for which the model wrote no memory, or with which it
    failed for good, three times. What is skipped is in the log as a warning.

    Raises:
        UsageError: a setting is wrong; when messages are put, also what `Reader.read` raises.
    """

    name: str = "overwrite_memory"
    question: str = QUESTION
    memory: str = ""
    pending: str = ""
    reader: Reader = Field(exclude=True, repr=False)
    _lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = PrivateAttr(default=None)
    # guards `memory`, `pending` and `_folding`; never held during a call of the model
    _changing: threading.Lock = PrivateAttr(default_factory=threading.Lock)
    _folding: bool = PrivateAttr(default=False)
    # the section that failed last, the beginning of `pending`, and how often; only the folding call uses it
    _failed: tuple[str, int] = PrivateAttr(default=("", 0))

    def __init__(
        self,
        llm: Model = None,
        *,
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
        if settings.get("answer_llm") is not None or settings.get("output_cls") is not None:
            raise UsageError("a memory block answers nothing; answer_llm and output_cls are for a query engine")
        check_question(question)
        fields: dict[str, Any] = {"question": question, "name": name, "description": description, "priority": priority}
        fields |= {"accept_short_term_memory": accept_short_term_memory, "memory": memory, "pending": pending}
        fields["reader"] = reader_over(llm, tokenizer, **settings)
        super().__init__(**fields)

    async def afold(self) -> None:
        """Fold the pending text into the memory. If another thread is folding, that one folds this text too.

        Raises:
            MemAgentError: the model failed, or the prompt does not fit its window; the rest of the text is still
                pending.
        """
        async with self._turn():
            if not self._begin():
                return
            try:
                while text := self._next_text():
                    await self._fold(text)
            except BaseException:
                self._folding = False
                raise

    async def _fold(self, text: str) -> None:
        """Fold `text`, the beginning of `pending`. Stop early if the memory is set from outside meanwhile."""
        memory, folded = self.memory, 0  # the memory that the model was given; characters of `text` in it

        def apply(step: Step) -> None:
            nonlocal memory, folded
            end = step.span.end if step.span else folded
            with self._changing:
                if self.memory != memory or not self.pending.startswith(text[folded:]):
                    raise _ChangedMeanwhile
                self.memory, self.pending = step.memory, self.pending[end - folded :]
            if step.problem:
                _log.warning("%s is not brought up to date, a section is lost: %s", self.name, step.problem)
            memory, folded = step.memory, end

        try:
            await self.reader.amemorize(self.question, text, memory=memory, progress=apply)
        except _ChangedMeanwhile:
            return
        except (BackendError, ContextOverflow) as error:
            if not await asyncio.to_thread(self._skip, text[folded:], error):
                raise

    def _skip(self, text: str, error: MemAgentError) -> bool:
        """Note that the first section of `text` failed; return whether it is skipped, as it did so often enough."""
        if not is_about_the_section(error, self.reader, self.question):
            return False
        section = next((chunk.text for chunk in self.reader.chunks(text)), "")
        before, times = self._failed
        self._failed = (before, times + 1) if before and section.startswith(before) else (section, 1)
        section, times = self._failed
        withheld = isinstance(error, NoMemory) and not error.retryable
        if times < _TRIES and not withheld:
            return False
        self._failed = ("", 0)
        with self._changing:
            if not self.pending.startswith(section):
                return False
            self.pending = self.pending.removeprefix(section)
        _log.warning(
            "%s passes over %s characters of the conversation, which failed; what they say is lost: %s",
            self.name,
            len(section),
            error,
        )
        return True

    def _begin(self) -> bool:
        """Return whether this call may fold, which is so unless another one is folding."""
        with self._changing:
            was_folding, self._folding = self._folding, True
            return not was_folding

    def _next_text(self) -> str:
        """Return the pending text; if there is none, end the folding."""
        with self._changing:
            if not self.pending.strip():
                self.pending, self._folding = "", False
            return self.pending

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        """Return the memory, unable to close the tags that LlamaIndex puts it between."""
        return harmless(self.memory, ("memory", self.name))

    async def _aput(self, messages: list[ChatMessage]) -> None:
        text = transcript_of(messages)
        with self._changing:
            self.pending += text  # before anything is awaited: a put that is cancelled loses nothing
        try:
            await self.afold()
        except BackendError as error:
            if not error.retryable:
                raise
            _log.warning(
                "%s could not be brought up to date, its messages wait for the next ones: %s", self.name, error
            )

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Return `content` without its last tokens (by LlamaIndex's global tokenizer), None if nothing is left."""
        tokenizer = get_tokenizer()
        size = len(tokenizer(content)) if content else 0
        if size <= tokens_to_truncate:
            return None
        return cut(content, size - tokens_to_truncate, lambda text: len(tokenizer(text))).rstrip() or None

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state for a pickle: without locks, and with what is being folded still pending."""
        state = super().__getstate__()
        private = {**state["__pydantic_private__"], "_lock": None, "_changing": None, "_folding": False}
        return state | {"__pydantic_private__": private}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self._changing = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        block = type(self).__new__(type(self))
        block.__setstate__(deepcopy(self.__getstate__(), memo))
        return block

    def _turn(self) -> asyncio.Lock:
        """The lock of the running event loop: LlamaIndex's sync methods run each in a loop of their own."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = (loop, asyncio.Lock())
        return self._lock[1]


class _ChangedMeanwhile(Exception):
    """The block's memory is no longer the one that the model was given."""
