"""Real HTTP servers on the loopback interface, for tests of whatever speaks HTTP.

`Loopback(respond)` serves any function from `Request` to `Response`; `chat(reply)` returns such a function for an
OpenAI-compatible endpoint.

    with Loopback(chat(["a memory", "an answer"])) as server:
        OpenAIBackend("m", base_url=server.url + "/v1")
    server.requests        # every request, in order
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

TOKEN = re.compile(r" ?\w+|[^\w]")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client sent. `body` is decoded JSON, or None."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any = None


@dataclass(frozen=True, kw_only=True)
class Response:
    """What to answer. A body of bytes is sent as it is, an iterator piece by piece without a length, others as JSON.

    `broken_after`: the connection breaks off after this many bytes of the body (for an iterator, after all its pieces
    but before the end mark). `reset`: it breaks off before anything is sent. `old`: the response is HTTP/1.0.
    """

    status: int = 200
    body: Any = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    broken_after: int | None = None
    reset: bool = False
    old: bool = False


Respond = Callable[[Request], Response]
Line = str | dict[str, Any] | Response
"""A text, a whole completion, or any other response."""


class Loopback:
    """A server that runs in a thread while the `with` block does."""

    def __init__(self, respond: Respond) -> None:
        self.requests: list[Request] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.respond, self._server.requests = respond, self.requests
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def connections(self) -> list[socket.socket]:
        """The connections that are open."""
        return list(self._server.connections)

    def bodies(self, path: str) -> list[Any]:
        """Return the bodies of the requests to a path."""
        return [request.body for request in self.requests if request.path == path]

    def __enter__(self) -> Loopback:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:  # kept-alive connections end with the server
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    respond: Respond
    requests: list[Request]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: set[socket.socket] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the end of each reply waits 40 ms for the client to confirm its beginning

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def _handle(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_json = "json" in self.headers.get("Content-Type", "")
        request = Request(
            method=self.command, path=self.path, headers=self.headers, body=json.loads(content) if is_json else None
        )
        self.server.requests.append(request)
        self._send(self.server.respond(request))

    do_GET = do_POST = _handle  # noqa: N815

    def _send(self, response: Response) -> None:
        if response.reset:
            closing_sends_rst = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, closing_sends_rst)
            self.connection.close()
            self.close_connection = True
            return
        body, headers = response.body, dict(response.headers)
        if not isinstance(body, (bytes, Iterator)):
            body, headers = json.dumps(body).encode(), {"Content-Type": "application/json"} | headers
        chunked = not isinstance(body, bytes) and not response.old
        if isinstance(body, bytes):
            headers = {"Content-Length": str(len(body))} | headers
            body = iter([body[: response.broken_after]])
        elif chunked:
            headers = {"Transfer-Encoding": "chunked"} | headers
        self.protocol_version = "HTTP/1.0" if response.old else "HTTP/1.1"
        self.close_connection |= response.old or response.broken_after is not None
        self.send_response_only(response.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in body:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            self.wfile.flush()
        if chunked and response.broken_after is None:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: `Loopback.requests` has them."""


def chat(reply: Iterable[Line] | Callable[[str], Line], *, window: int = 8192) -> Respond:
    """Return an endpoint with `/v1/chat/completions`, streamed on request, and `/tokenize`.

    It replies with the lines of `reply` one after the other (repeating the last one), or with what `reply(prompt)`
    returns. Its tokens are words with the space before them, and single signs; a reply beyond `max_tokens` is cut.
    """
    lines = list(reply) if not callable(reply) else []
    numbers = count()

    def respond(request: Request) -> Response:
        if request.path == "/tokenize":
            tokens = len(TOKEN.findall(request.body["prompt"]))
            return Response(body={"tokens": [0] * tokens, "count": tokens, "max_model_len": window})
        if request.path != "/v1/chat/completions":
            return Response(status=404, body={"error": {"message": f"no route {request.path}"}})
        prompt = "\n".join(message["content"] for message in request.body["messages"])
        line = reply(prompt) if callable(reply) else lines[min(next(numbers), len(lines) - 1)]
        if isinstance(line, Response):
            return line
        limit = request.body.get("max_tokens") or request.body.get("max_completion_tokens")
        whole = line if isinstance(line, dict) else completion(line, prompt, limit)
        if request.body.get("stream"):
            return Response(body=events(whole), headers={"Content-Type": "text/event-stream"})
        return Response(body=whole)

    return respond


def completion(
    text: str, prompt: str = "", limit: int | None = None, *, reasoning: str | None = None
) -> dict[str, Any]:
    """Return a chat completion as an endpoint sends it."""
    tokens = TOKEN.findall(text)
    prompt_tokens, written = len(TOKEN.findall(prompt)), tokens[:limit]
    message = {"role": "assistant", "content": "".join(written)}
    if reasoning:
        message["reasoning_content"] = reasoning
    finish_reason = "stop" if len(written) == len(tokens) else "length"
    return {
        "id": "completion-1",
        "object": "chat.completion",
        "created": 1,
        "model": "loopback",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(written),
            "total_tokens": prompt_tokens + len(written),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def events(whole: dict[str, Any]) -> Iterator[bytes]:
    """Yield a completion as server-sent events, one for each token, with the usage at the end."""
    choice = whole["choices"][0]
    rest = {"object": "chat.completion.chunk"} | {name: whole[name] for name in ("id", "created", "model")}

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return _event(rest | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    if reasoning := choice["message"].get("reasoning_content"):
        yield event({"reasoning_content": reasoning})
    for token in TOKEN.findall(choice["message"]["content"]):
        yield event({"content": token})
    yield event({}, choice["finish_reason"])
    yield _event(rest | {"choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
