"""Clients of httpx that keep to limits: how long a call waits, how much it is sent, and who gets to see its secrets.

httpx starts its time limits anew with each byte, and a thread that waits for a socket hears of nothing else. So each
sync connection waits in slices, in the scope of its call. Of the async ones only the size of a reply is limited here,
because a task that is cancelled closes its connection.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import httpx

from memagent_integrations.backends.access import Access
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.scopes import check, deadline, slices

MOST_BYTES = 32 * 2**20
"""The longest reply, in bytes as they come: a stream has about 300 for each token."""
_CONNECTING = 10.0  # seconds: while the system connects, nothing is heard
_IDLE = 3.0  # seconds that a connection is kept without a call: servers (uvicorn, llama.cpp) close it after five
_LONGEST = 86400.0  # seconds: no system takes a time limit of any size
_PIECE = 2**16  # bytes of a request that are sent at once
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "memagent-integrations"}


def client(access: Access, *, timeout: float, kept: int, proxies: bool = True) -> httpx.Client:
    """Return a client for a server, which keeps `kept` connections open between calls; there is no limit of the others.

    It follows redirections, takes no reply that is compressed, logs no query, and uses the proxies that the environment
    names if it may.

    Raises:
        UsageError: the address or a proxy is none, or the certificates to trust cannot be read.
    """
    rules = _Rules(access)
    hooks = {"request": [rules.check_request], "response": [rules.check_response]}
    made: httpx.Client = _made(_Client, access, timeout, kept, proxies, hooks)
    for pool in _pools(made):
        pool._network_backend = _Network(pool._network_backend)
    return made


def async_client(access: Access, *, timeout: float, kept: int, proxies: bool = True) -> httpx.AsyncClient:
    """`client`, async."""
    rules = _Rules(access)

    async def check_request(request: httpx.Request) -> None:
        rules.check_request(request)

    async def check_response(response: httpx.Response) -> None:
        rules.check_response(response)

    hooks = {"request": [check_request], "response": [check_response]}
    made: httpx.AsyncClient = _made(httpx.AsyncClient, access, timeout, kept, proxies, hooks)
    for pool in _pools(made):
        pool._network_backend = _AsyncNetwork(pool._network_backend)
    return made


class _Client(httpx.Client):
    """Closes its connections when nobody needs it any more."""

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def _made(kind: Callable[..., Any], access: Access, timeout: float, kept: int, proxies: bool, hooks: Any) -> Any:
    try:
        return kind(
            base_url=access.url,
            headers=_HEADERS | access.headers,
            params=access.query,
            timeout=timeout,
            follow_redirects=True,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=_IDLE),
            verify=_trusted(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
            trust_env=proxies,
            event_hooks=hooks,
        )
    except (httpx.InvalidURL, ValueError, ImportError) as error:
        problem = "there is no client for base_url and the proxies that the environment names (HTTP_PROXY, NO_PROXY)"
        raise UsageError(f"{problem}: {type(error).__name__}: {error}") from None


def _pools(made: Any) -> list[Any]:
    transports = (made._transport, *made._mounts.values())
    return [transport._pool for transport in transports if hasattr(transport, "_pool")]


@cache
def _trusted(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return whom connections trust: those whom SSL_CERT_FILE or SSL_CERT_DIR name, else certifi and the system."""
    try:
        context = httpx.create_ssl_context()  # takes tens of milliseconds
    except OSError as error:
        raise UsageError(f"SSL_CERT_FILE ({file}) cannot be read as certificates: {error}") from None
    if not (file or folder):
        context.load_default_certs()
    return context


_MOVED = (301, 302, 303, 307, 308)
_MOVED_TO_GET = (301, 302, 303)
"""Redirections after which clients send a GET, without the prompt."""


class _Rules:
    """What holds for all requests to a server, and for those to which it redirects them."""

    def __init__(self, access: Access) -> None:
        self._url, self._private = httpx.URL(access.url), [*access.headers]

    def check_request(self, request: httpx.Request) -> None:
        """Let no other server have the keys, and have the client log the address without its query."""
        url, own = request.url, self._url
        if (url.host, url.port) != (own.host, own.port) or url.scheme not in (own.scheme, "https"):
            for name in self._private:
                request.headers.pop(name, None)
        if url.query:
            request.url = _QuietURL(url)

    def check_response(self, response: httpx.Response) -> None:
        """Refuse what would have to be unpacked (a few bytes may hold any number), and what would lose the prompt."""
        location = response.headers.get("Location")
        if (
            response.request.method == "POST"
            and response.status_code in _MOVED
            and (not location or response.status_code in _MOVED_TO_GET)
        ):
            place = response.url.join(location).copy_with(query=None, userinfo=b"") if location else "a place unnamed"
            raise BackendError(
                f"the server moved to {place} (status {response.status_code}); give its address there as base_url",
                status=response.status_code,
            )
        coding = response.headers.get("Content-Encoding", "identity")
        if coding.strip().lower() not in ("", "identity"):
            problem = f"the server sent a compressed reply ({coding[:20]!r}), although none was asked for"
            raise BackendError(f"{problem}; switch compression off there")


class _QuietURL(httpx.URL):
    """An address whose text has no query; what is sent has it."""

    def __str__(self) -> str:
        return str(self.copy_with(query=None))

    __repr__ = __str__


class _Wrapper:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Connection(_Wrapper):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._received, self._process = 0, os.getpid()

    def get_extra_info(self, info: str) -> Any:
        """As of the connection; in a forked child it is "readable", so that the pool, where it lies idle, drops it."""
        if info == "is_readable" and self._process != os.getpid():  # the parent would get the child's replies
            return True
        return self._inner.get_extra_info(info)

    def _counted(self, data: bytes) -> bytes:
        self._received += len(data)
        if self._received > MOST_BYTES:
            raise BackendError(f"the server sent a reply of more than {MOST_BYTES >> 20} MiB", retryable=True)
        return data


class _SyncConnection(_Connection):
    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        late: Exception = TimeoutError("timed out")
        for seconds in slices(timeout):
            try:
                return self._counted(self._inner.read(max_bytes, seconds))
            except Exception as error:
                if type(error).__name__ != "ReadTimeout":
                    raise
                late = error
        raise late

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._received = 0
        for start in range(0, len(buffer), _PIECE):
            self._inner.write(buffer[start : start + _PIECE], _left(timeout))

    def start_tls(self, *args: Any, **options: Any) -> _SyncConnection:
        return _SyncConnection(self._inner.start_tls(*args, **options))


class _AsyncConnection(_Connection):
    async def read(self, *args: Any, **options: Any) -> bytes:
        return self._counted(await self._inner.read(*args, **options))

    async def write(self, *args: Any, **options: Any) -> None:
        self._received = 0
        await self._inner.write(*args, **options)

    async def start_tls(self, *args: Any, **options: Any) -> _AsyncConnection:
        return _AsyncConnection(await self._inner.start_tls(*args, **options))


class _Network(_Wrapper):
    def connect_tcp(self, *args: Any, timeout: float | None = None, **options: Any) -> _SyncConnection:
        return _SyncConnection(self._inner.connect_tcp(*args, timeout=min(_left(timeout), _CONNECTING), **options))


class _AsyncNetwork(_Wrapper):
    async def connect_tcp(self, *args: Any, **options: Any) -> _AsyncConnection:
        return _AsyncConnection(await self._inner.connect_tcp(*args, **options))


def _left(seconds: float | None) -> float:
    """Return how many of the seconds the scope leaves; all of them if it sets no deadline."""
    check()
    return max(min(_LONGEST if seconds is None else seconds, deadline() - time.monotonic()), 0.001)
