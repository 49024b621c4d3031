"""Any endpoint that speaks the OpenAI chat completions protocol, through the openai SDK (2.x and 3.x)."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import openai

from memagent_integrations.backends import connections
from memagent_integrations.backends.access import access
from memagent_integrations.backends.base import Backend, digest
from memagent_integrations.backends.completions import CompletionBuilder, StreamBuilder, int_or_none
from memagent_integrations.backends.failures import redacted, translated
from memagent_integrations.backends.replies import unusable_answer
from memagent_integrations.backends.schemas import response_format
from memagent_integrations.checks import check_int, check_number, drop_none
from memagent_integrations.errors import BackendClosed, BackendError, UsageError
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.redaction import secrets_in
from memagent_integrations.sanitize import neutralise
from memagent_integrations.scopes import Scope, acquired
from memagent_integrations.tokens import Counter, counter_of, load_counter

_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_PATH = "/chat/completions"
_COUNTING_TIMEOUT = 60.0  # seconds
LimitParameter = Literal["max_tokens", "max_completion_tokens"]


class OpenAIBackend(Backend):
    """An OpenAI-compatible endpoint: OpenAI itself, vLLM, llama.cpp's server, Ollama, a gateway.

    `api_key` and `base_url` default to OPENAI_API_KEY and OPENAI_BASE_URL, as in the SDK. Tokens are counted by the
    endpoint's own `/tokenize` where it has one, by tiktoken for OpenAI's models, else they are estimated, with a
    warning; `tokenizer` overrides that with a counter or a name that `load_counter` knows. A setting left None is not
    sent, so the server's default holds. The reader retries failed calls up to `max_retries` times. `concurrency` limits
    the calls in flight, once for all threads together and once for each event loop; streams, which last as long as
    their consumers take, are not counted.

    Raises:
        UsageError: a setting is wrong, or there is neither an API key nor a `base_url` to do without one.
    """

    structured = True
    caches_prefixes = True
    _proxies = True
    """Whether requests go through the proxies that the environment names."""

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
        check_int(concurrency=concurrency, **drop_none(window=window))
        check_int(least=0, max_retries=max_retries)
        check_number(timeout=timeout, **drop_none(temperature=temperature, top_p=top_p))
        if limit_parameter not in (None, *get_args(LimitParameter)):
            allowed = " or ".join(get_args(LimitParameter))
            raise UsageError(f"limit_parameter has to be {allowed}, not {limit_parameter!r}")
        if not _is_json(extra_body):
            raise UsageError(f"extra_body has to be a mapping of names to JSON values, not {type(extra_body).__name__}")
        self.name = f"openai:{model}"
        self.model = model
        self.concurrency, self.max_retries = concurrency, max_retries
        self._timeout = timeout
        self._settings: dict[str, Any] = {"timeout": timeout, "max_retries": 0}
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        self._settings |= access(model, api_key, base_url)
        self._client = openai.OpenAI(**self._settings, **self._http(openai.DefaultHttpxClient))
        connections.limit(self._client._client)
        address = urlsplit(str(self._client.base_url))
        self._address = address.geturl()
        self._secrets = [self._client.api_key, *secrets_in({"base_url": base_url, "extra_body": extra_body})]
        self._hosted = f".{address.hostname}".endswith(".openai.com")
        self.takes_any_length = self._hosted
        self._options = drop_none(temperature=temperature, top_p=top_p, seed=seed)
        self._extra_body = dict(extra_body or {})
        self._limit: LimitParameter = limit_parameter or ("max_completion_tokens" if self._hosted else "max_tokens")
        self._tokenizer, self._window = tokenizer, window
        self._counting: tuple[Counter, int | None] | None = None
        self._counting_lock, self._lock = threading.Lock(), threading.Lock()
        self._closed, self._calls = False, 0
        self._slots = threading.BoundedSemaphore(concurrency)
        self._async: dict[asyncio.AbstractEventLoop, AsyncGenerator[tuple[openai.AsyncOpenAI, asyncio.Semaphore]]] = {}

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """Context window: the constructor's, or the one that the endpoint's `/tokenize` reports."""
        return self._window or (None if self._tokenizer else self._counter_and_window()[1])

    @property
    def identity(self) -> dict[str, Any]:
        """Sampling parameters, a digest of `extra_body`, the tokenizer's name if it has one, and the address."""
        extra_body = digest(repr(sorted(self._extra_body.items()))) if self._extra_body else None
        tokenizer = self._tokenizer if isinstance(self._tokenizer, str) else None
        return {**self._options, "extra_body": extra_body, "tokenizer": tokenizer, "base_url": self._address}

    def count(self, text: str) -> int:
        """Return the number of tokens in the text, by the endpoint or by the constructor's tokenizer."""
        return self._counter_and_window()[0](text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """Return the endpoint's reply."""
        builder = CompletionBuilder()
        with self._slot(prompt), self._call():
            builder.take(self._client.post(_PATH, **self._request(prompt)))
        return builder.reply()

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        builder = CompletionBuilder()
        async with self._acall() as (client, slots), slots:
            with self._errors():
                builder.take(await client.post(_PATH, **self._request(prompt)))
        return builder.reply()

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply as the endpoint streams it; a stream that breaks off is an error, and is not repeated."""
        builder = StreamBuilder()
        with self._call(), self._client.post(_PATH, **self._request(prompt, openai.Stream)) as events:
            connections.limit_lines(events.response)
            for event in events:
                if text := builder.add(event):
                    yield text
        yield builder.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        builder = StreamBuilder()
        async with self._acall() as (client, _):
            with self._errors():
                async with await client.post(_PATH, **self._request(prompt, openai.AsyncStream)) as events:
                    connections.limit_lines(events.response)
                    async for event in events:
                        if text := builder.add(event):
                            yield text
        yield builder.reply()

    def close(self) -> None:
        """Refuse further calls, and close the connections when those in flight have ended.

        The connections of async calls are closed by `aclose`.
        """
        if self._refuse_calls():
            self._free()

    async def aclose(self) -> None:
        """`close`, async; calls of other tasks in flight on this event loop are broken off."""
        idle = self._refuse_calls()
        with self._lock:
            connections = self._async.pop(asyncio.get_running_loop(), None)
        if connections:
            await connections.aclose()
        if idle:
            await asyncio.to_thread(self._free)

    def _http(self, client: Callable[..., Any]) -> dict[str, Any]:
        return {} if self._proxies else {"http_client": client(trust_env=False)}

    def _free(self) -> None:
        """Free what calls need, after the last of them."""
        self._client.close()

    @contextmanager
    def _slot(self, prompt: Prompt) -> Iterator[None]:
        """Hold one of the `concurrency` slots during a call.

        Raises:
            BackendError: no slot became free before the prompt's deadline.
        """
        if not acquired(self._slots, _seconds_left(prompt)):
            raise BackendError(
                f"{self.name} has no place for another call (concurrency={self.concurrency})", retryable=True
            )
        try:
            if not _seconds_left(prompt):  # the slot became free at the last moment
                raise BackendError(f"{self.name} was not asked in time", retryable=True)
            yield
        finally:
            self._slots.release()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Run one call: translate its errors, and keep the backend from being freed before the call ends."""
        self._begin()
        try:
            with self._errors():
                yield
        finally:
            if self._end():
                contextvars.Context().run(self._free)  # whose calls do not end with this one's scope

    @asynccontextmanager
    async def _acall(self) -> AsyncGenerator[tuple[openai.AsyncOpenAI, asyncio.Semaphore]]:
        """`_call`, async, without translating errors; yield this event loop's client and the semaphore of its calls."""
        self._begin()
        try:
            yield await self._async_client()
        finally:
            if self._end():
                await asyncio.shield(asyncio.to_thread(self._free))

    def _refuse_calls(self) -> bool:
        """Refuse calls from now on; return whether none is in flight."""
        with self._lock:
            self._closed = True
            return not self._calls

    def _begin(self) -> None:
        with self._lock:
            if self._closed:
                raise BackendClosed(self.name)
            self._calls += 1

    def _end(self) -> bool:
        """Count one call less; return whether it was the last one of a closed backend."""
        with self._lock:
            self._calls -= 1
            return self._closed and not self._calls

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate what the SDK raises in the block. What it cannot read, it meets with errors of many classes."""
        name = f"{self.model} at {self._address}"
        with redacted(self._secrets):
            try:
                with translated(name, secrets=self._secrets):
                    yield
            except _UNREADABLE as error:
                raise unusable_answer(error, name, self._secrets) from error

    async def _async_client(self) -> tuple[openai.AsyncOpenAI, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()  # a connection belongs to the event loop that opened it
        with self._lock:
            for closed_loop in [each for each in self._async if each.is_closed()]:
                del self._async[closed_loop]
            connections = self._async.setdefault(loop, self._connections())
        return await connections.asend(None)

    async def _connections(self) -> AsyncGenerator[tuple[openai.AsyncOpenAI, asyncio.Semaphore]]:
        """Yield one event loop's client and the semaphore of its calls, again and again.

        This is a generator because `asyncio.run` closes every async generator at its end, and so the connections.
        """
        slots = asyncio.Semaphore(self.concurrency)
        async with openai.AsyncOpenAI(**self._settings, **self._http(openai.DefaultAsyncHttpxClient)) as client:
            connections.limit(client._client)
            while True:
                yield client, slots

    def _request(self, prompt: Prompt, stream: type[Any] | None = None) -> dict[str, Any]:
        """Return the arguments of the SDK's `post`; `stream` is the class of its streams, for a reply that is streamed.

        `chat.completions.create` would first look through the request for what JSON does not have: a millisecond.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
            self._limit: prompt.max_tokens,
            **self._options,
        }
        if prompt.schema is not None:
            body["response_format"] = response_format(prompt.schema, hosted=self._hosted)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return {
            "body": body | self._extra_body,
            "options": {"timeout": self._seconds(prompt)} if prompt.deadline else {},
            "cast_to": object,  # decoded JSON: the SDK's models would take a quarter of the call's time
            **({"stream": True, "stream_cls": stream[object]} if stream else {}),
        }

    def _seconds(self, prompt: Prompt) -> float:
        """Return how many seconds a call for this prompt may take."""
        return max(min(self._timeout, _seconds_left(prompt)), 0.001)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None) -> Any:
        """Return the endpoint's decoded answer to a request other than a chat: a POST if it has a body, else a GET.

        It has to come within the time limit as a whole.
        """
        seconds = seconds or self._timeout
        options: Any = {"timeout": seconds}
        with self._call(), Scope(time.monotonic() + seconds):
            if body is None:
                return self._client.get(path, cast_to=object, options=options)
            return self._client.post(path, body=body, cast_to=object, options=options)

    def _counter_and_window(self) -> tuple[Counter, int | None]:
        if self._counting:
            return self._counting
        if not acquired(self._counting_lock):
            raise BackendError(f"{self.name} was not asked in time", retryable=True)
        try:
            self._counting = self._counting or self._find_counter()
            return self._counting
        finally:
            self._counting_lock.release()

    def _find_counter(self) -> tuple[Counter, int | None]:
        """Return a counter, and the window if the endpoint reports it.

        Raises:
            BackendError: `/tokenize` failed for a reason that says nothing about whether the endpoint has it.
            UsageError: the tokenizer that was named cannot be loaded.
        """
        if self._tokenizer is not None:
            return load_counter(self._tokenizer), None
        if self._hosted:
            return counter_of(self.model), None
        try:
            _, window = self._tokenize("a")
        except BackendError as error:
            if error.retryable or self._closed or getattr(error.__context__, "status_code", None) in (401, 403):
                raise
            return counter_of(self.model), None
        return lambda text: self._tokenize(text)[0], window

    def _tokenize(self, text: str) -> tuple[int, int | None]:
        """Return the number of tokens and the model's window, from `/tokenize`.

        vLLM reads the text from `prompt`, llama.cpp's server from `content`.
        """
        url = str(self._client.base_url).rstrip("/").removesuffix("/v1") + "/tokenize"
        text = neutralise(text)
        body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": False}
        answer = self._ask(url, body, seconds=min(self._timeout, _COUNTING_TIMEOUT))
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(tokens, list):
            raise BackendError(f"{self._address} did not answer /tokenize with tokens")
        return len(tokens), int_or_none(answer.get("max_model_len"))


def _is_json(extra_body: Any) -> bool:
    try:
        json.dumps(dict(extra_body or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(extra_body, Mapping | None)


def _seconds_left(prompt: Prompt) -> float:
    """Return the seconds until the prompt's deadline."""
    return max(prompt.deadline - time.monotonic(), 0) if prompt.deadline else threading.TIMEOUT_MAX
