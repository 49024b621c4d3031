"""Connections of the OpenAI SDK's HTTP clients that keep to limits: how long a call waits, and how much it is sent.

httpx starts its time limits anew with each byte, and a thread that waits for a socket hears of nothing else. So each
sync connection waits in slices, in the scope of its call. Of the async ones only the size of a reply is limited here,
because a task that is cancelled closes its connection.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

from memagent_integrations.errors import BackendError
from memagent_integrations.scopes import check, deadline, slices

MOST_BYTES = 32 * 2**20
"""The longest reply, in bytes as they come: a stream has about 300 for each token."""
_MOST_LINES = 2000
"""The most lines of an event: the SDK may copy what it has of an event with each line of it."""
_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
_END_OF_EVENT = re.compile(rb"\n\n|\r\r|\r\n\r\n")  # what the SDK takes for one
_CONNECTING = 10.0  # seconds: while the system connects, nothing is heard
_LONGEST = 86400.0  # seconds: no system takes a time limit of any size
_PIECE = 2**16  # bytes of a request that are sent at once


def limit(client: Any) -> None:
    """Make a client of httpx or httpx2, sync or async, keep to the limits, and log no query.

    It takes no reply that is compressed.
    """
    is_async = hasattr(client, "aclose")
    client.headers["Accept-Encoding"] = "identity"
    client.event_hooks = {
        "request": [_ahide_query if is_async else _hide_query],
        "response": [_acheck_response if is_async else _check_response],
    }
    for transport in (client._transport, *client._mounts.values()):
        if pool := getattr(transport, "_pool", None):
            pool._network_backend = (_AsyncNetwork if is_async else _Network)(pool._network_backend)


def limit_lines(response: Any) -> None:
    """Make a response that is about to be read as a stream of events end at one of very many lines."""
    lines, pieces, apieces = _EventLines(), response.iter_bytes, response.aiter_bytes
    response.iter_bytes = lambda: lines.checked(pieces())
    response.aiter_bytes = lambda: lines.achecked(apieces())


def _hide_query(request: Any) -> None:
    """Let the HTTP client log the address of a request without its query, which may hold a secret."""
    kind: Any = type(request.url)
    if request.url.query:
        request.url = _quiet(kind)(request.url)


async def _ahide_query(request: Any) -> None:
    """`_hide_query`, for an async client."""
    _hide_query(request)


@cache
def _quiet(kind: Any) -> Any:
    """Return the client's class of addresses, whose texts have no query; what is sent has it."""

    def text(url: Any) -> str:
        return str(kind(url).copy_with(query=None))

    return type(kind.__name__, (kind,), {"__str__": text, "__repr__": text})


def _check_response(response: Any) -> None:
    """Refuse what would have to be unpacked: a few bytes may hold any number."""
    coding = response.headers.get("Content-Encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        problem = f"the server sent a compressed reply ({coding[:20]!r}), although none was asked for"
        raise BackendError(f"{problem}; switch compression off there")


async def _acheck_response(response: Any) -> None:
    _check_response(response)


class _EventLines:
    """Counts the lines since the end of the last event in a stream, whose pieces it hands on."""

    def __init__(self) -> None:
        self._lines = 0
        self._ends = b""  # of lines, with which the last piece ended: the next one may go on with them

    def checked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield self._counted(piece)

    async def achecked(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            yield self._counted(piece)

    def _counted(self, piece: bytes) -> bytes:
        self._lines -= len(_END_OF_LINE.findall(self._ends))
        for number, part in enumerate(_END_OF_EVENT.split(self._ends + piece)):
            self._lines = (0 if number else self._lines) + len(_END_OF_LINE.findall(part))
            self._ends = part[len(part.rstrip(b"\r\n")) :][-3:]
            if self._lines > _MOST_LINES:
                raise BackendError(f"the server sent an event of more than {_MOST_LINES:,} lines", retryable=True)
        return piece


class _Wrapper:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Connection(_Wrapper):
    _received = 0

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
