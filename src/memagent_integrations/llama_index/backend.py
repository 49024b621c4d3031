"""A backend over any LlamaIndex LLM."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from functools import cached_property
from inspect import getattr_static
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, MessageRole, ThinkingBlock
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import LLM, CustomLLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.settings import Settings
from pydantic import ValidationError

from memagent_integrations.backends.base import Backend, digest
from memagent_integrations.backends.failures import translated
from memagent_integrations.backends.replies import ReplyBuilder, finish_reason
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.records import Phase, Prompt, Reply, Usage
from memagent_integrations.tokens import Counter, estimated, load_counter

_LIMITS = dict.fromkeys(
    ("OpenAI", "Anthropic", "BedrockConverse", "Cohere", "LiteLLM", "LlamaCPP", "MistralAI"), "max_tokens"
)
_LIMITS["OpenAIResponses"] = "max_output_tokens"


class LLMBackend(Backend):
    """A backend that calls a LlamaIndex LLM; by default `Settings.llm`, looked up at the first call.

    The LLM itself is never changed: with `callback_manager` a copy of it is called. Every prompt begins with the LLM's
    `system_prompt`. The output limit is passed to the LLM classes known to take one; for others name the keyword
    argument with `limit_parameter`.

    `tokenizer` counts tokens: a counter, or a name that `load_counter` knows. The default is LlamaIndex's global
    tokenizer (`Settings.tokenizer`; unless set, that of GPT-3.5, which comes with llama-index-core); for exact chunk
    sizes pass the model's own. `window` defaults to the LLM's `metadata.context_window`, unless that is 3,900,
    LlamaIndex's value for an unknown window.

    Raises:
        UsageError: the tokenizer cannot be loaded; at the first call: there is no LLM, or it does not know its model.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        tokenizer: str | Counter | None = None,
        window: int | None = None,
        limit_parameter: str | None = None,
        callback_manager: CallbackManager | None = None,
        concurrency: int = 8,
    ) -> None:
        check_int(concurrency=concurrency, **drop_none(window=window))
        if not isinstance(llm, LLM | None):
            raise UsageError(f"llm has to be a LlamaIndex LLM, not {type(llm).__name__}")
        self._llm, self._window, self._limit, self._callbacks = llm, window, limit_parameter, callback_manager
        self._count = _counter(tokenizer)
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self.concurrency = concurrency

    @cached_property
    def llm(self) -> LLM:
        """The LLM that is called."""
        try:
            llm = self._llm or Settings.llm
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"no model was given, and Settings.llm cannot be made; pass model=... or set Settings.llm ({error})"
            ) from error
        return llm if self._callbacks is None else llm.model_copy(update={"callback_manager": self._callbacks})

    @property
    def name(self) -> str:  # type: ignore[override]
        """The LLM's class and model."""
        model = self._metadata.model_name
        return f"llama-index:{self.llm.class_name()}" + ("" if model == "unknown" else f":{model}")

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of the LLM's settings as LlamaIndex serialises them."""
        settings = json.dumps(self.llm.to_dict(), sort_keys=True, default=lambda value: type(value).__name__)
        return {"settings": digest(settings)}

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """The context window: the `window` argument, else what the LLM's metadata reports."""
        reported = self._metadata.context_window
        return self._window or (reported if reported > 0 and reported != DEFAULT_CONTEXT_WINDOW else None)

    @property
    def template_tokens(self) -> int:  # type: ignore[override]
        """Tokens that the chat template and the LLM's system prompt add to a prompt."""
        return Backend.template_tokens + self.count(self.llm.system_prompt or "")

    def count(self, text: str) -> int:
        """Return the number of tokens in `text`."""
        return self._count(text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """Return the LLM's reply."""
        builder, llm = _ChatReply(), self._llm_for(prompt.phase)
        with self._errors(llm):
            builder.add_whole(llm.chat(self._messages(prompt), **self._options(llm, prompt)))
        return builder.reply()

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async; in a thread if the LLM is only synchronous, or has been used in another event loop."""
        builder, llm = _ChatReply(), self._llm_for(prompt.phase)
        if _is_sync(llm, "achat") or self._is_elsewhere():
            return await super().acomplete(prompt)
        with self._errors(llm):
            builder.add_whole(await llm.achat(self._messages(prompt), **self._options(llm, prompt)))
        return builder.reply()

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply as the LLM streams it."""
        builder, llm = _ChatReply(), self._llm_for(prompt.phase)
        with self._errors(llm):
            stream = llm.stream_chat(self._messages(prompt), **self._options(llm, prompt))
            with closing(_closable(stream)) as responses:
                for response in responses:
                    if text := builder.add(response):
                        yield text
        yield builder.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async; in threads as `acomplete`."""
        builder, llm = _ChatReply(), self._llm_for(prompt.phase)
        if _is_sync(llm, "astream_chat") or self._is_elsewhere():
            async with aclosing(super().astream(prompt)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        with self._errors(llm):
            stream = await llm.astream_chat(self._messages(prompt), **self._options(llm, prompt))
            async with aclosing(_aclosable(stream)) as responses:
                async for response in responses:
                    if text := builder.add(response):
                        yield text
        yield builder.reply()

    def _is_elsewhere(self) -> bool:
        """Return whether this is another event loop than the first: an SDK's async connections belong to that one."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or weakref.ref(loop)
        return self._loop() is not loop

    @property
    def _metadata(self) -> LLMMetadata:
        try:
            return self.llm.metadata
        except ValueError as error:  # LlamaIndex's OpenAI class raises it for an unknown model
            raise UsageError(
                f"{self.llm.class_name()} has no metadata of its model; use OpenAILike for such a model ({error})"
            ) from error

    @contextmanager
    def _errors(self, llm: LLM) -> Iterator[None]:
        with translated(self.name, secrets=(str(getattr(self.llm, "api_key", None) or ""),)):
            try:
                yield
            except ValidationError as error:  # of a structured answer, or of LlamaIndex's own events
                reasons = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
                raise UnfitAnswer(f"what it said is no {error.title}: {'; '.join(reasons)}") from error
            except ValueError as error:  # LlamaIndex raises it when there was no JSON, or no tool call
                if type(error) is ValueError and isinstance(llm, StructuredLLM):
                    raise UnfitAnswer(f"what it said is no {llm.output_cls.__name__}: {error}") from error
                raise

    def _llm_for(self, phase: Phase) -> LLM:
        return self.llm.llm if phase == "memory" and isinstance(self.llm, StructuredLLM) else self.llm

    def _messages(self, prompt: Prompt) -> list[ChatMessage]:
        messages = [ChatMessage(role=MessageRole(message.role), content=message.content) for message in prompt.messages]
        if self.llm.system_prompt:
            messages.insert(0, ChatMessage(role=MessageRole.SYSTEM, content=self.llm.system_prompt))
        return messages

    def _options(self, llm: LLM, prompt: Prompt) -> dict[str, Any]:
        known = (_LIMITS[kind.__name__] for kind in type(llm).__mro__ if kind.__name__ in _LIMITS)
        limit = self._limit or next(known, None)
        return {limit: prompt.max_tokens} if limit else {}


class UnfitAnswer(Exception):
    """The LLM answered with something unusable. It reaches callers as the cause of a `BackendError`."""


class _ChatReply(ReplyBuilder):
    """A reply put together from LlamaIndex chat responses."""

    _text_so_far = ""

    def add_whole(self, response: ChatResponse) -> None:
        """Add a response that is not streamed."""
        self._add_details(response)
        self.note(response.message.content or "", _reasoning(response))

    def add(self, response: ChatResponse) -> str:
        """Add one part of a stream; return its text. Without a delta the part holds the whole text so far."""
        self._add_details(response)
        content = response.message.content or ""
        text = content.removeprefix(self._text_so_far) if response.delta is None else response.delta
        self._text_so_far += text
        return self.note(text, _field(response.additional_kwargs, "thinking_delta") or "")

    def _add_details(self, response: ChatResponse) -> None:
        if not isinstance(response, ChatResponse):
            raise UnfitAnswer(f"an LLM answers with ChatResponses; this one gave {type(response).__name__}")
        if (usage := _usage(response)) != Usage():
            self.usage = usage
        self.finish_reason = _finish_reason(response.raw) or self.finish_reason


def _closable(responses: Any) -> Any:
    """Return the stream of an LLM as an iterator that can be closed."""
    if not isinstance(responses, Iterable):
        raise UnfitAnswer(f"an LLM streams an iterator of ChatResponses; this one gave {type(responses).__name__}")
    return responses if hasattr(responses, "close") else (response for response in responses)


def _aclosable(responses: Any) -> Any:
    """`_closable`, async."""
    if not isinstance(responses, AsyncIterable):
        raise UnfitAnswer(
            f"an LLM streams an async iterator of ChatResponses; this one gave {type(responses).__name__}"
        )
    return responses if hasattr(responses, "aclose") else (response async for response in responses)


def _counter(tokenizer: str | Counter | None) -> Counter:
    if tokenizer is not None:
        return load_counter(tokenizer)
    try:
        encode = Settings.tokenizer
    except Exception as error:  # a failed import or download
        reason = f"LlamaIndex's own tokenizer cannot be loaded ({type(error).__name__}: {error})"
        return estimated("the LLM", reason)
    return lambda text: len(encode(text))


def _is_sync(llm: LLM, method: str) -> bool:
    """Return whether the async method is that of `CustomLLM`, which calls the sync one and blocks the event loop."""
    return getattr_static(type(llm), method) is getattr_static(CustomLLM, method)


def _field(holder: Any, *names: str) -> Any:
    """Return the first of these fields of an object or mapping that is there and not None, else None."""
    values = (holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _usage(response: ChatResponse) -> Usage:
    usage = _field(response.raw, "usage", "usage_metadata") or response.additional_kwargs
    cached = _field(_field(usage, "prompt_tokens_details", "input_tokens_details"), "cached_tokens")
    if cached is None:
        cached = _field(usage, "cache_read_input_tokens", "cached_content_token_count")
    return Usage(
        prompt_tokens=_field(usage, "prompt_tokens", "input_tokens", "prompt_token_count"),
        completion_tokens=_field(usage, "completion_tokens", "output_tokens", "candidates_token_count"),
        cached_tokens=cached,
    )


def _finish_reason(raw: Any) -> str | None:
    choices = _field(raw, "choices")
    reason = _field(choices[0] if choices else raw, "finish_reason", "stop_reason", "done_reason")
    return finish_reason(reason or _field(_field(raw, "incomplete_details"), "reason"))  # OpenAI's Responses API


def _reasoning(response: ChatResponse) -> str:
    blocks = [block.content or "" for block in response.message.blocks if isinstance(block, ThinkingBlock)]
    return "".join(blocks) or str(_field(response.message.additional_kwargs, "reasoning_content", "thinking") or "")
