"""Any endpoint that speaks the OpenAI chat completions protocol, over httpx."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from typing import Any, Literal, get_args

import httpx
from pydantic_core import to_json

from memagent_integrations.backends import connections
from memagent_integrations.backends.access import access
from memagent_integrations.backends.base import Backend, digest
from memagent_integrations.backends.completions import CompletionBuilder, StreamBuilder, int_or_none
from memagent_integrations.backends.failures import redacted, translated
from memagent_integrations.backends.http_replies import Events, decoded, successful
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
_COUNTING_TIMEOUT = 60.0  # seconds
_LAST_BYTES = 0.1  # seconds that a stream may go on after its last event, if its connection is to be used again
_NO_MATTER = (BackendError, TimeoutError, httpx.HTTPError)  # in those seconds
_Client = httpx.Client | httpx.AsyncClient
LimitParameter = Literal["max_tokens", "max_completion_tokens"]


class OpenAIBackend(Backend):
    """An OpenAI-compatible endpoint: OpenAI itself, vLLM, llama.cpp's server, Ollama, a gateway.

    `api_key` and `base_url` default to OPENAI_API_KEY and OPENAI_BASE_URL; as OpenAI's own client does, it also sends
    the headers of OPENAI_ORG_ID, OPENAI_PROJECT_ID and OPENAI_CUSTOM_HEADERS. Tokens are counted by the endpoint's own
    `/tokenize` where it has one, by tiktoken for OpenAI's models, else they are estimated, with a warning; `tokenizer`
    overrides that with a counter or a name that `load_counter` knows. A setting left None is not sent, so the server's
    default holds. The reader retries failed calls up to `max_retries` times. `concurrency` limits the calls in flight,
    once for all threads together and once for each event loop; streams, which last as long as their consumers take, are
    not counted.

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
        self._access = access(model, api_key, base_url)
        self._http: dict[str, Any] = {"timeout": timeout, "kept": max(concurrency, 100), "proxies": self._proxies}
        self._client = connections.client(self._access, **self._http)
        address = self._client.base_url
        self._address = str(address)
        self._chat = address.join("chat/completions")  # made once: for every call it would take 0.1 ms
        self._secrets = [*self._access.secrets, *secrets_in({"extra_body": extra_body})]
        self._hosted = f".{address.host}".endswith(".openai.com")
        self.takes_any_length = self._hosted
        self._options = drop_none(temperature=temperature, top_p=top_p, seed=seed)
        self._extra_body = dict(extra_body or {})
        self._limit: LimitParameter = limit_parameter or ("max_completion_tokens" if self._hosted else "max_tokens")
        self._tokenizer, self._window = tokenizer, window
        self._counting: tuple[Counter, int | None] | None = None
        self._counting_lock, self._lock = threading.Lock(), threading.Lock()
        self._closed, self._calls = False, 0
        self._slots = threading.BoundedSemaphore(concurrency)
        self._async: dict[asyncio.AbstractEventLoop, AsyncGenerator[tuple[httpx.AsyncClient, asyncio.Semaphore]]] = {}

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
            builder.take(decoded(self._client.send(self._request(self._client, prompt))))
        return builder.reply()

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        builder = CompletionBuilder()
        async with self._acall() as (client, slots), slots:
            with self._errors():
                builder.take(decoded(await client.send(self._request(client, prompt))))
        return builder.reply()

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply as the endpoint streams it; a stream that breaks off is an error, and is not repeated."""
        builder, events = StreamBuilder(), Events()
        with self._call(), closing(self._sent(prompt)) as response:
            pieces = successful(response).iter_bytes()
            for piece in pieces:
                for event in events.decoded(piece):
                    if text := builder.add(event):
                        yield text
                if events.ended:
                    break
            if (whole := events.whole()) is not None:
                yield builder.take(whole)
            if _keeps(response):
                with suppress(*_NO_MATTER), Scope(time.monotonic() + _LAST_BYTES):
                    deque(pieces, maxlen=0)
        yield builder.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        builder, events = StreamBuilder(), Events()
        async with self._acall() as (client, _):
            with self._errors():
                async with aclosing(await self._asent(client, prompt)) as response:
                    pieces = successful(response).aiter_bytes()
                    async for piece in pieces:
                        for event in events.decoded(piece):
                            if text := builder.add(event):
                                yield text
                        if events.ended:
                            break
                    if (whole := events.whole()) is not None:
                        yield builder.take(whole)
                    if _keeps(response):
                        with suppress(*_NO_MATTER):
                            async with asyncio.timeout(_LAST_BYTES):
                                async for _ in pieces:
                                    pass
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

    def _free(self) -> None:
        """Free what calls need, after the last of them."""
        self._client.close()

    def _sent(self, prompt: Prompt) -> httpx.Response:
        """Return the answer to a request for a stream, unread unless it is an error."""
        response = self._client.send(self._request(self._client, prompt, stream=True), stream=True)
        if not response.is_success:
            response.read()
        return response

    async def _asent(self, client: httpx.AsyncClient, prompt: Prompt) -> httpx.Response:
        """`_sent`, async."""
        response = await client.send(self._request(client, prompt, stream=True), stream=True)
        if not response.is_success:
            await response.aread()
        return response

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
    async def _acall(self) -> AsyncGenerator[tuple[httpx.AsyncClient, asyncio.Semaphore]]:
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
        """Translate what the block raises; what cannot be read, the decoders meet with errors of many classes."""
        name = f"{self.model} at {self._address}"
        with redacted(self._secrets):
            try:
                with translated(name, secrets=self._secrets):
                    yield
            except _UNREADABLE as error:
                raise unusable_answer(error, name, self._secrets) from error

    async def _async_client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()  # a connection belongs to the event loop that opened it
        with self._lock:
            for closed_loop in [each for each in self._async if each.is_closed()]:
                del self._async[closed_loop]
            connections = self._async.setdefault(loop, self._connections())
        return await connections.asend(None)

    async def _connections(self) -> AsyncGenerator[tuple[httpx.AsyncClient, asyncio.Semaphore]]:
        """Yield one event loop's client and the semaphore of its calls, again and again.

        This is a generator because `asyncio.run` closes every async generator at its end, and so the connections.
        """
        slots = asyncio.Semaphore(self.concurrency)
        async with connections.async_client(self._access, **self._http) as client:
            while True:
                yield client, slots

    def _request(self, client: _Client, prompt: Prompt, *, stream: bool = False) -> httpx.Request:
        seconds = self._seconds(prompt) if prompt.deadline else self._timeout
        return _post(client, self._chat, self._body(prompt, stream=stream), seconds)

    def _body(self, prompt: Prompt, *, stream: bool = False) -> dict[str, Any]:
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
        return body | self._extra_body

    def _seconds(self, prompt: Prompt) -> float:
        """Return how many seconds a call for this prompt may take."""
        return max(min(self._timeout, _seconds_left(prompt)), 0.001)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None) -> Any:
        """Return the endpoint's decoded answer to a request other than a chat: a POST if it has a body, else a GET.

        It has to come within the time limit as a whole.
        """
        seconds = seconds or self._timeout
        with self._call(), Scope(time.monotonic() + seconds):
            if body is None:
                return decoded(self._client.get(path, timeout=seconds))
            return decoded(self._client.send(_post(self._client, path, body, seconds)))

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
            if error.retryable or self._closed or error.status in (401, 403):
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


def _post(client: _Client, path: httpx.URL | str, body: Any, seconds: float) -> httpx.Request:
    """Return a request with a body, to a path below the client's address or to an address of its own."""
    try:
        content = to_json(body)  # ten times as fast
    except ValueError:  # but this says what is wrong
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json"}
    return client.build_request("POST", path, content=content, headers=headers, timeout=seconds)


def _keeps(response: httpx.Response) -> bool:
    """Return whether the server leaves a connection open after a stream: llama.cpp closes it, and does not say so."""
    server: str | None = response.headers.get("Server")
    return server != "llama.cpp"


def _is_json(extra_body: Any) -> bool:
    try:
        json.dumps(dict(extra_body or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(extra_body, Mapping | None)


def _seconds_left(prompt: Prompt) -> float:
    """Return the seconds until the prompt's deadline."""
    return max(prompt.deadline - time.monotonic(), 0) if prompt.deadline else threading.TIMEOUT_MAX
