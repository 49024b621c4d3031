"""Any endpoint that speaks the OpenAI chat completions protocol, through the openai SDK (2.x and 3.x)."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal

import openai

from memagent_integrations.backends.base import Backend, at_least_one
from memagent_integrations.backends.failures import translated
from memagent_integrations.backends.replies import Received, finish_reason
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.prompts import neutralise
from memagent_integrations.records import Prompt, Reply, Usage
from memagent_integrations.tokens import WAYS_OUT, Counter, load_counter, openai_counter

LimitParameter = Literal["max_tokens", "max_completion_tokens"]


class OpenAIBackend(Backend):
    """An OpenAI-compatible endpoint: OpenAI itself, vLLM, llama.cpp's server, Ollama, a gateway.

    `api_key` and `base_url` default to OPENAI_API_KEY and OPENAI_BASE_URL, as in the SDK. Tokens are counted by the endpoint's own
    `/tokenize` where it has one, else by tiktoken for OpenAI's models; `tokenizer` overrides that with a counter or a name that
    `load_counter` knows. What is left None is not sent, so the server's own default holds. Failed calls are repeated up to `max_retries`
    times by the SDK, with backoff and after what Retry-After says. `concurrency` bounds the calls in flight.

    Raises:
        UsageError: no API key and no `base_url` to do without one.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        tokenizer: str | Counter | None = None,
        window: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        limit_parameter: LimitParameter | None = None,
        timeout: float = 600.0,
        max_retries: int = 5,
        concurrency: int = 8,
    ) -> None:
        self.name = f"openai:{model}"
        self.model = model
        self.concurrency = at_least_one(concurrency=concurrency)
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        if base_url and not (api_key or os.environ.get("OPENAI_API_KEY")):
            api_key = "none"  # local servers want no key, the SDK wants one
        self._settings: dict[str, Any] = {"base_url": base_url, "api_key": api_key, "timeout": timeout, "max_retries": max_retries}
        try:
            self._client = openai.OpenAI(**self._settings)
        except openai.OpenAIError as error:
            raise UsageError(f"no API key for {model}: set OPENAI_API_KEY or pass api_key, or pass the base_url of a local server") from error
        self._hosted = f".{self._client.base_url.host}".endswith(".openai.com")
        self._options = {key: value for key, value in (("temperature", temperature), ("top_p", top_p), ("seed", seed)) if value is not None}
        self._extra_body = dict(extra_body or {})
        self._limit: LimitParameter = limit_parameter or ("max_completion_tokens" if self._hosted else "max_tokens")
        self._tokenizer, self._window = tokenizer, window
        self._lock = threading.Lock()
        self._in_flight = threading.BoundedSemaphore(concurrency)
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[openai.AsyncOpenAI, asyncio.Semaphore]] = weakref.WeakKeyDictionary()

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """Context window as given, or as the endpoint's `/tokenize` tells it."""
        return self._window or (None if self._tokenizer else self._counting[1])

    def count(self, text: str) -> int:
        """Tokens of the text, by the endpoint or by the tokenizer that was given."""
        return self._counting[0](text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """The reply of the endpoint; failed calls have been repeated by then."""
        received = Received()
        with self._in_flight, self._errors():
            completion = self._client.chat.completions.create(**self._request(prompt))
        return _reply(completion, received)

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        received = Received()
        client, in_flight = self._async_client()
        async with in_flight:
            with self._errors():
                completion = await client.chat.completions.create(**self._request(prompt))
        return _reply(completion, received)

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """The reply as the endpoint streams it; a stream that breaks off is an error, and is not repeated."""
        received = _Stream()
        with self._in_flight, self._errors(), self._client.chat.completions.create(**self._request(prompt, stream=True)) as events:
            for event in events:
                if text := received.add(event):
                    yield text
        yield received.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        received = _Stream()
        client, in_flight = self._async_client()
        async with in_flight:
            with self._errors():
                async with await client.chat.completions.create(**self._request(prompt, stream=True)) as events:
                    async for event in events:
                        if text := received.add(event):
                            yield text
        yield received.reply()

    def close(self) -> None:
        """Close the connections of the sync client."""
        self._client.close()

    async def aclose(self) -> None:
        """Close all connections that this event loop uses."""
        client, _ = self._async_client()
        await client.close()
        self.close()

    def _async_client(self) -> tuple[openai.AsyncOpenAI, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()  # a connection belongs to the event loop that opened it
        if loop not in self._async:
            self._async[loop] = openai.AsyncOpenAI(**self._settings), asyncio.Semaphore(self.concurrency)
        return self._async[loop]

    def _request(self, prompt: Prompt, *, stream: bool = False) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
            self._limit: prompt.max_tokens,
            "extra_body": self._extra_body,
            **self._options,
        }
        return request | {"stream": True, "stream_options": {"include_usage": True}} if stream else request

    @property
    def _counting(self) -> tuple[Counter, int | None]:
        with self._lock:
            return self._counter_and_window

    @cached_property
    def _counter_and_window(self) -> tuple[Counter, int | None]:
        if self._tokenizer is not None:
            return load_counter(self._tokenizer), None
        if self._hosted:
            return openai_counter(self.model), None
        try:
            _, window = self._tokenize("a")
        except BackendError as error:
            if error.retryable:
                raise
            try:
                return openai_counter(self.model), None
            except UsageError:
                raise UsageError(f"{self._client.base_url} has no /tokenize to count the tokens of {self.model}; {WAYS_OUT}") from error
        return lambda text: self._tokenize(text)[0], window

    def _tokenize(self, text: str) -> tuple[int, int | None]:
        """Tokens of the text and the model's window, by `/tokenize` (vLLM reads `prompt`, llama.cpp's server `content`)."""
        url = str(self._client.base_url).rstrip("/").removesuffix("/v1") + "/tokenize"
        text = neutralise(text)
        body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": False}
        with self._in_flight, self._errors():
            answer = self._client.post(url, body=body, cast_to=object)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(tokens, list):
            raise BackendError(f"{url} did not answer with tokens")
        return len(tokens), answer.get("max_model_len")

    def _errors(self) -> AbstractContextManager[None]:
        return translated(f"{self.model} at {self._client.base_url}", secret=self._client.api_key)


class _Stream(Received):
    """A streamed completion."""

    def add(self, event: Any) -> str:
        """Take one event; return its text."""
        self.usage = _usage(event.usage) if event.usage else self.usage
        if not event.choices:
            return ""
        choice = event.choices[0]
        self.finish_reason = "content_filter" if getattr(choice.delta, "refusal", None) else self.finish_reason or finish_reason(choice.finish_reason)
        return self.note(choice.delta.content or "", _reasoning(choice.delta))

    def reply(self) -> Reply:
        """The whole reply; a stream that was cut off has none."""
        if self.finish_reason is None:
            raise BackendError("the stream broke off before the reply was complete", retryable=True)
        return super().reply()


def _reply(completion: Any, received: Received) -> Reply:
    choices = getattr(completion, "choices", None)
    if not choices:
        raise BackendError("the server answered without choices", retryable=True)
    message = choices[0].message
    received.note(message.content or "", _reasoning(message))
    received.usage = _usage(completion.usage)
    received.finish_reason = "content_filter" if getattr(message, "refusal", None) else finish_reason(choices[0].finish_reason)
    return received.reply()


def _reasoning(message: Any) -> str:
    extra = message.model_extra or {}
    return extra.get("reasoning_content") or extra.get("reasoning") or ""


def _usage(usage: Any) -> Usage:
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=getattr(usage, "prompt_tokens", None),
        completion_tokens=getattr(usage, "completion_tokens", None),
        cached_tokens=getattr(details, "cached_tokens", None),
    )
