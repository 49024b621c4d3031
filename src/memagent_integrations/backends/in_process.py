"""Prompts as token ids, by a Hugging Face tokenizer and its chat template, and the backends that compute batches of them in this process."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from memagent_integrations.backends.base import Backend
from memagent_integrations.errors import ContextOverflow, MemAgentError, UsageError
from memagent_integrations.records import Message, Prompt, Reply
from memagent_integrations.sanitize import neutralise


class ChatTokenizer:
    """Counts text and turns prompts into token ids. `options` go to the chat template, for instance `{"enable_thinking": False}`.

    What looks like a control sign in a message is text here, never a control token: `prompts.neutralise` sees to the usual ones, and a
    special token of this tokenizer is broken up by a zero-width space. A tokenizer without a chat
    template, that of a base model, gets the messages as plain text with an empty line between them. `remember`: of how many texts the tokens are
    kept, for readings that are given the same ones.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None, *, remember: int = 0) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._length, self._ids = lru_cache(remember)(self._counted), lru_cache(remember // 64)(self._encoded)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self.template_tokens = len(self._ids((Message(role="user", content=""),)))

    def count(self, text: str) -> int:
        """Tokens of the text, without any that begin or end a sequence."""
        return self._length(text) if text else 0

    def encode(self, prompt: Prompt, window: int | None) -> list[int]:
        """The token ids of a prompt.

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

    def _counted(self, text: str) -> int:
        return len(self._tokenizer(self._plain(text), add_special_tokens=False, verbose=False)["input_ids"])

    def _plain(self, text: str) -> str:
        return self._special.sub(lambda token: f"{token[0][0]}\u200b{token[0][1:]}", neutralise(text))

    def _encoded(self, messages: tuple[Message, ...]) -> list[int]:
        chat = [{"role": message.role, "content": self._plain(message.content)} for message in messages]
        if getattr(self._tokenizer, "chat_template", "") is None:
            return list(
                self._tokenizer("\n\n".join(message["content"] for message in chat), verbose=False)["input_ids"]
            )
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, tokenize=True, return_dict=False, **self._options
                )
            )
        except Exception as error:  # a template is a program, it may raise anything
            raise UsageError(f"the model's chat template refuses the messages: {one_line(error)}") from error


class BatchBackend(Backend):
    """A backend whose calls are all batches. A subclass sets `_chat` and `_identity`."""

    _chat: ChatTokenizer
    _identity: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """Sampling parameters and the adapter."""
        return self._identity

    @property
    def template_tokens(self) -> int:  # type: ignore[override]
        """Tokens that the model's own chat template adds to a message."""
        return self._chat.template_tokens

    def count(self, text: str) -> int:
        """Tokens of the text, by the model's own tokenizer."""
        return self._chat.count(text)

    def complete(self, prompt: Prompt) -> Reply:
        """The reply to one prompt."""
        [outcome] = self.complete_batch([prompt])
        if isinstance(outcome, MemAgentError):
            raise outcome
        return outcome

    @abstractmethod
    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """The replies to many prompts, in their order; where one failed, its error."""


def one_line(error: BaseException) -> str:
    """What an error of a library says, short enough to be a part of ours."""
    said = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
