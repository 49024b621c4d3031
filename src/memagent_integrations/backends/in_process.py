"""Prompts as token ids, through a Hugging Face tokenizer and its chat template, for backends that compute batches."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from memagent_integrations.backends.base import Backend
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import ContextOverflow, MemAgentError, UsageError
from memagent_integrations.records import Message, Prompt, Reply
from memagent_integrations.sanitize import neutralise


class ChatTokenizer:
    """Counts text and turns prompts into token ids.

    `options` go to the chat template, for instance `{"enable_thinking": False}`. `remember` is the number of texts
    whose tokens are cached, for readings that share their texts.

    What looks like a control sign in a message is encoded as text, never as a control token: `sanitize.neutralise`
    replaces the usual signs, and a zero-width space breaks up this tokenizer's own special tokens. A tokenizer without
    a chat template, that of a base model, gets the messages as plain text with an empty line between them.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None, *, remember: int = 0) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._length = lru_cache(remember)(self._count)
        self._ids = lru_cache(remember // 64)(self._encode)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self.template_tokens = len(self._ids((Message(role="user", content=""),)))

    def count(self, text: str) -> int:
        """Return the number of tokens in the text, without any that begin or end a sequence."""
        return self._length(text) if text else 0

    def encode(self, prompt: Prompt, window: int | None) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            ContextOverflow: they and the longest reply do not fit into the window.
            UsageError: the chat template refuses the messages, or they are empty.
        """
        ids = self._ids(prompt.messages)
        if not ids:
            raise UsageError("the prompt is empty")
        total = len(ids) + prompt.max_tokens
        if window and total > window:
            raise ContextOverflow(
                f"prompt {len(ids)} + output {prompt.max_tokens} = {total} tokens, but the window holds {window}; "
                "lower chunk_tokens, memory_tokens or output_tokens"
            )
        return ids

    def _count(self, text: str) -> int:
        return len(self._tokenizer(self._plain(text), add_special_tokens=False, verbose=False)["input_ids"])

    def _plain(self, text: str) -> str:
        return self._special.sub(lambda token: f"{token[0][0]}\u200b{token[0][1:]}", neutralise(text))

    def _encode(self, messages: tuple[Message, ...]) -> list[int]:
        chat = [{"role": message.role, "content": self._plain(message.content)} for message in messages]
        if getattr(self._tokenizer, "chat_template", "") is None:
            text = "\n\n".join(message["content"] for message in chat)
            return list(self._tokenizer(text, verbose=False)["input_ids"])
        try:
            ids = self._tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False, **self._options
            )
            return list(ids)
        except Exception as error:  # a template is a program, it may raise anything
            raise UsageError(
                f"the model's chat template refuses the messages: {one_line(error)}; "
                "use prompts of one text, or without that role"
            ) from error


class BatchBackend(Backend):
    """A backend whose calls are all batches. A subclass defines `complete_batch` and sets `_chat`."""

    _chat: ChatTokenizer

    def __init__(
        self,
        name: str,
        *,
        batch_size: int,
        window: int | None,
        adapter: str | Path | None,
        temperature: float,
        top_p: float,
        seed: int | None,
    ) -> None:
        check_int(batch_size=batch_size, **drop_none(window=window))
        self.name = name
        self.batch_size, self.window = batch_size, window
        self._sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        self._identity: dict[str, Any] = {**self._sampling, "adapter": str(adapter) if adapter else None}

    @property
    def identity(self) -> dict[str, Any]:
        """Sampling parameters and the adapter."""
        return self._identity

    @property
    def template_tokens(self) -> int:  # type: ignore[override]
        """Tokens that the model's own chat template adds to a message."""
        return self._chat.template_tokens

    def count(self, text: str) -> int:
        """Return the number of tokens in the text, by the model's own tokenizer."""
        return self._chat.count(text)

    def complete(self, prompt: Prompt) -> Reply:
        """Return the reply to one prompt."""
        [outcome] = self.complete_batch([prompt])
        if isinstance(outcome, MemAgentError):
            raise outcome
        return outcome

    @abstractmethod
    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to many prompts, in their order; a prompt that failed has its error instead."""


def one_line(error: BaseException) -> str:
    """Return an error's class and message on one line, short enough to quote in another error."""
    message = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
