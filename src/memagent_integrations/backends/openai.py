"""Any endpoint that speaks the OpenAI chat completions protocol, through the openai SDK (2.x and 3.x)."""

from __future__ import annotations

import asyncio
import base64
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

import openai

from memagent_integrations.backends.base import Backend, closed, digest
from memagent_integrations.backends.failures import translated
from memagent_integrations.backends.replies import ReplyBuilder, finish_reason
from memagent_integrations.checks import check_int, check_number, drop_none
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.records import Prompt, Reply, Usage
from memagent_integrations.sanitize import neutralise
from memagent_integrations.tokens import WAYS_OUT, Counter, load_counter, openai_counter

_COUNTING = 60.0  # seconds that counting may take at most
LimitParameter = Literal["max_tokens", "max_completion_tokens"]


class OpenAIBackend(Backend):
    """An OpenAI-compatible endpoint: OpenAI itself, vLLM, llama.cpp's server, Ollama, a gateway.

    `api_key` and `base_url` default to OPENAI_API_KEY and OPENAI_BASE_URL, as in the SDK. Tokens are counted by the endpoint's own
    `/tokenize` where it has one, else by tiktoken for OpenAI's models; `tokenizer` overrides that with a counter or a name that
    `load_counter` knows. What is left None is not sent, so the server's own default holds. The reader retries failed calls up to
    `max_retries` times. `concurrency` bounds the calls in flight of all threads, and those of each
    event loop; streams, which last as long as whoever reads them takes, come on top.

    Raises:
        UsageError: a setting is wrong, or there is neither an API key nor a `base_url` to do without one.
    """

    _proxies = True
    """Whether the proxies that the environment names are asked."""

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
            raise UsageError(
                f"limit_parameter has to be {' or '.join(get_args(LimitParameter))}, not {limit_parameter!r}"
            )
        if not isinstance(extra_body, Mapping | None):
            raise UsageError(f"extra_body has to be a mapping of names to JSON values, not {extra_body!r}")
        self.name = f"openai:{model}"
        self.model = model
        self.concurrency, self.max_retries = concurrency, max_retries
        self._timeout = timeout
        self._settings: dict[str, Any] = {"timeout": timeout, "max_retries": 0}
        access, secrets = _access(model, api_key, base_url or os.environ.get("OPENAI_BASE_URL") or None)
        self._settings |= access
        self._client = openai.OpenAI(**self._settings, **self._http(openai.DefaultHttpxClient))
        address = urlsplit(str(self._client.base_url))
        self._address = address.geturl()
        self._secrets = [self._client.api_key, *secrets, *map(str, self._settings["default_query"].values())]
        self._hosted = f".{address.hostname}".endswith(".openai.com")
        self._options = drop_none(temperature=temperature, top_p=top_p, seed=seed)
        self._extra_body = dict(extra_body or {})
        self._limit: LimitParameter = limit_parameter or ("max_completion_tokens" if self._hosted else "max_tokens")
        self._tokenizer, self._window = tokenizer, window
        self._counter_and_window: tuple[Counter, int | None] | None = None
        self._counting_lock, self._lock = threading.Lock(), threading.Lock()
        self._closed, self._calls = False, 0
        self._slots = threading.BoundedSemaphore(concurrency)
        self._async: dict[asyncio.AbstractEventLoop, AsyncGenerator[tuple[openai.AsyncOpenAI, asyncio.Semaphore]]] = {}

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """Context window as given, or as the endpoint's `/tokenize` tells it."""
        return self._window or (None if self._tokenizer else self._counting()[1])

    @property
    def identity(self) -> dict[str, Any]:
        """Sampling parameters, what else is sent as a digest, the tokenizer that was named, and the address."""
        more = digest(repr(sorted(self._extra_body.items()))) if self._extra_body else None
        tokenizer = self._tokenizer if isinstance(self._tokenizer, str) else None
        return {**self._options, "extra_body": more, "tokenizer": tokenizer, "base_url": self._address}

    def count(self, text: str) -> int:
        """Tokens of the text, by the endpoint or by the tokenizer that was given."""
        return self._counting()[0](text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """The reply of the endpoint."""
        received = _Answer()
        with self._slot(prompt), self._call():
            received.take(self._client.chat.completions.create(**self._request(prompt)))
        return received.reply()

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        received = _Answer()
        async with self._acall() as (client, slots), slots:
            with self._errors():
                received.take(await client.chat.completions.create(**self._request(prompt)))
        return received.reply()

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """The reply as the endpoint streams it; a stream that breaks off is an error, and is not repeated."""
        received = _Stream()
        with self._call(), self._client.chat.completions.create(**self._request(prompt, stream=True)) as events:
            for event in events:
                if text := received.add(event):
                    yield text
        yield received.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        received = _Stream()
        async with self._acall() as (client, _):
            with self._errors():
                async with await client.chat.completions.create(**self._request(prompt, stream=True)) as events:
                    async for event in events:
                        if text := received.add(event):
                            yield text
        yield received.reply()

    def close(self) -> None:
        """Take no more calls; once those in flight are through, close the connections. Those of async calls are closed by `aclose`."""
        if self._shut():
            self._free()

    async def aclose(self) -> None:
        """`close`, async; calls of other tasks in flight on this event loop are broken off."""
        idle = self._shut()
        with self._lock:
            connections = self._async.pop(asyncio.get_running_loop(), None)
        if connections:
            await connections.aclose()
        if idle:
            await asyncio.to_thread(self._free)

    def _http(self, kind: Callable[..., Any]) -> dict[str, Any]:
        return {} if self._proxies else {"http_client": kind(trust_env=False)}

    def _free(self) -> None:
        """Free what the calls needed; there are none any more."""
        self._client.close()

    @contextmanager
    def _slot(self, prompt: Prompt) -> Iterator[None]:
        """A place among the calls in flight. A call that nobody waits for any more gets none."""
        if not self._slots.acquire(timeout=_left(prompt)):
            raise BackendError(
                f"{self.name} has no place for another call (concurrency={self.concurrency})", retryable=True
            )
        try:
            if not _left(prompt):  # it became free this moment, and too late
                raise BackendError(f"{self.name} was not asked in time", retryable=True)
            yield
        finally:
            self._slots.release()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One call: what goes wrong is one of this package's errors, and the backend is not freed before its end."""
        self._begin()
        try:
            with self._errors():
                yield
        finally:
            if self._end():
                self._free()

    @asynccontextmanager
    async def _acall(self) -> AsyncGenerator[tuple[openai.AsyncOpenAI, asyncio.Semaphore]]:
        """`_call`, async; gives the client of this event loop, and what bounds its calls."""
        self._begin()
        try:
            yield await self._async_client()
        finally:
            if self._end():
                await asyncio.shield(asyncio.to_thread(self._free))

    def _shut(self) -> bool:
        """Take no more calls; whether none is in flight."""
        with self._lock:
            self._closed = True
            return not self._calls

    def _begin(self) -> None:
        with self._lock:
            if self._closed:
                raise closed(self.name)
            self._calls += 1

    def _end(self) -> bool:
        """One call less; whether it was the last one of a closed backend."""
        with self._lock:
            self._calls -= 1
            return self._closed and not self._calls

    def _errors(self) -> AbstractContextManager[None]:
        return translated(f"{self.model} at {self._address}", secrets=self._secrets)

    async def _async_client(self) -> tuple[openai.AsyncOpenAI, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()  # a connection belongs to the event loop that opened it
        with self._lock:
            for ended in [each for each in self._async if each.is_closed()]:
                del self._async[ended]
            connections = self._async.setdefault(loop, self._connections())
        return await connections.asend(None)

    async def _connections(self) -> AsyncGenerator[tuple[openai.AsyncOpenAI, asyncio.Semaphore]]:
        """The client of one event loop, and what bounds its calls. `asyncio.run` ends every async generator, and so closes the connections."""
        slots = asyncio.Semaphore(self.concurrency)
        async with openai.AsyncOpenAI(**self._settings, **self._http(openai.DefaultAsyncHttpxClient)) as client:
            while True:
                yield client, slots

    def _request(self, prompt: Prompt, *, stream: bool = False) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
            self._limit: prompt.max_tokens,
            "extra_body": self._extra_body,
            **self._options,
        }
        if prompt.deadline:
            request["timeout"] = self._seconds(prompt)
        return request | {"stream": True, "stream_options": {"include_usage": True}} if stream else request

    def _seconds(self, prompt: Prompt) -> float:
        """That a call may take."""
        return max(min(self._timeout, _left(prompt)), 0.001)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None) -> Any:
        """What the endpoint says to something that is no chat, in a JSON value or a text; without a body it is a GET."""
        options: Any = {"timeout": seconds or self._timeout}
        with self._call():
            if body is None:
                return self._client.get(path, cast_to=object, options=options)
            return self._client.post(path, body=body, cast_to=object, options=options)

    def _counting(self) -> tuple[Counter, int | None]:
        with self._counting_lock:
            self._counter_and_window = self._counter_and_window or self._find_counter()
            return self._counter_and_window

    def _find_counter(self) -> tuple[Counter, int | None]:
        if self._tokenizer is not None:
            return load_counter(self._tokenizer), None
        if self._hosted:
            return openai_counter(self.model), None
        try:
            _, window = self._tokenize("a")
        except BackendError as error:
            if error.retryable or self._closed or getattr(error.__context__, "status_code", None) in (401, 403):
                raise
            try:
                return openai_counter(self.model), None
            except UsageError:
                raise UsageError(
                    f"{self._address} has no /tokenize to count the tokens of {self.model}; {WAYS_OUT}"
                ) from error
        return lambda text: self._tokenize(text)[0], window

    def _tokenize(self, text: str) -> tuple[int, int | None]:
        """Tokens of the text and the model's window, by `/tokenize` (vLLM reads `prompt`, llama.cpp's server `content`)."""
        url = str(self._client.base_url).rstrip("/").removesuffix("/v1") + "/tokenize"
        text = neutralise(text)
        body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": False}
        answer = self._ask(url, body, seconds=min(self._timeout, _COUNTING))
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(tokens, list):
            raise BackendError(f"{self._address} did not answer /tokenize with tokens")
        return len(tokens), _int_or_none(answer.get("max_model_len"))


class _Answer(ReplyBuilder):
    """A completion. Nothing is taken for granted of what a server sends."""

    def take(self, completion: Any) -> None:
        """Take a completion that is not streamed."""
        choices = getattr(completion, "choices", None)
        if not choices or not isinstance(choices, list):
            said = getattr(completion, "error", None)
            code = said.get("code") if isinstance(said, dict) else None
            raise ValueError(
                {"message": f"the answer has no choices{f': {said}' if said else ''}", "code": code}
            )  # `failures` knows this form
        self.usage = _usage(getattr(completion, "usage", None))
        self._add(choices[0], getattr(choices[0], "message", None))

    def _add(self, choice: Any, message: Any) -> str:
        reason = finish_reason(getattr(choice, "finish_reason", None))
        self.finish_reason = "content_filter" if getattr(message, "refusal", None) else self.finish_reason or reason
        extra = getattr(message, "model_extra", None) or {}
        return self.note(
            _text(getattr(message, "content", None)),
            _text(extra.get("reasoning_content")) or _text(extra.get("reasoning")),
        )


class _Stream(_Answer):
    """A streamed completion."""

    def add(self, event: Any) -> str:
        """Take one event; return its text."""
        if usage := getattr(event, "usage", None):
            self.usage = _usage(usage)
        choices = getattr(event, "choices", None)
        return (
            self._add(choices[0], getattr(choices[0], "delta", None)) if choices and isinstance(choices, list) else ""
        )

    def reply(self) -> Reply:
        """The whole reply; a stream that was cut off has none."""
        if self.finish_reason is None:
            raise BackendError("the stream broke off before the reply was complete", retryable=True)
        return super().reply()


def _left(prompt: Prompt) -> float:
    """Seconds until nobody waits for the reply any more."""
    return max(prompt.deadline - time.monotonic(), 0) if prompt.deadline else threading.TIMEOUT_MAX


def _access(model: str, key: str | None, url: str | None) -> tuple[dict[str, Any], list[str]]:
    """The SDK's settings for an address and a key, which goes into a header and may therefore hold no line end; and what of them is secret.

    A user and a password go from the address into a header, as httpx would send them, because httpx writes addresses into its log.
    """
    for name, value in drop_none(api_key=key, base_url=url).items():
        if not isinstance(value, str):
            raise UsageError(f"{name} has to be a text, not {type(value).__name__}")
    key = (key or os.environ.get("OPENAI_API_KEY") or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            "the API key holds characters that no key has (a line end, or letters beyond ASCII); check where it was copied from"
        )
    if not (key or url):
        raise UsageError(
            f"no API key for {model}: set OPENAI_API_KEY or pass api_key, or pass the base_url of a local server"
        )
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    secrets: list[str] = []
    if url:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise UsageError("base_url has to be an address such as http://127.0.0.1:8000/v1")
        query, url = (
            dict(parse_qsl(parts.query)),
            parts._replace(query="", fragment="", netloc=parts.netloc.rpartition("@")[2]).geturl(),
        )
        if parts.username or parts.password:
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            basic = base64.b64encode(f"{user}:{password}".encode()).decode()
            headers, secrets = {"Authorization": f"Basic {basic}"}, [parts.password or "", password, basic]
    # local servers want no key, the SDK wants one
    return {"api_key": key or "none", "base_url": url, "default_query": query, "default_headers": headers}, secrets


def _text(content: Any) -> str:
    """The text in what a server sends as content: a text, or parts of which some are text."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _usage(usage: Any) -> Usage:
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=_int_or_none(getattr(usage, "prompt_tokens", None)),
        completion_tokens=_int_or_none(getattr(usage, "completion_tokens", None)),
        cached_tokens=_int_or_none(getattr(details, "cached_tokens", None)),
    )


def _int_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) else None
