from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from helpers.contract import BackendContract, ask
from helpers.endpoint import KEY, answer, endpoint, keeping, problem
from helpers.loopback import Loopback, Request, Response, chat, completion, events

from memagent_integrations import Backend, BackendError, ContextOverflow, MemAgentError, UsageError, load_backend
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.records import Reply, Usage

pytestmark = pytest.mark.heavy

HTML = {"Content-Type": "text/html"}
JSON = {"Content-Type": "application/json"}
EVENTS = {"Content-Type": "text/event-stream"}


@pytest.fixture
def backend() -> Iterator[Backend]:
    server, loaded = endpoint(keeping(chat(answer), '{"name": "Jupiter", "gas": true}'))
    with server, loaded:
        yield loaded


class TestEndpoint(BackendContract):
    pass


def test_keys_and_addresses_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Loopback(chat(["fine"]))
    monkeypatch.setenv("OPENAI_BASE_URL", f" {server.url}/v1\n")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with server, load_backend("openai:m") as backend:
        assert backend.complete(ask("hello")).text == "fine"
    assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"


def test_further_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"X-Gateway: {KEY}-2\nauthorization: Bearer {KEY}-3\nnonsense")
    server, backend = endpoint(lambda request: problem(400, f"{request.headers['x-gateway']} is no gateway"))
    with server, backend, pytest.raises(BackendError) as caught:
        backend.complete(ask("hello"))
    sent = server.requests[0].headers
    assert [sent[name] for name in ("OpenAI-Organization", "OpenAI-Project")] == ["org-1", "proj-1"]
    assert [sent[name] for name in ("X-Gateway", "Authorization")] == [f"{KEY}-2", f"Bearer {KEY}-3"]
    assert "*** is no gateway" in str(caught.value)
    for wrong in ("a b: c", "a: ü"):
        monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", wrong)
        with pytest.raises(UsageError, match="OPENAI_CUSTOM_HEADERS"):
            OpenAIBackend("m", api_key=KEY)


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirection_that_would_lose_the_prompt_is_told(status: int) -> None:
    def moved(request: Request) -> Response:
        return Response(status=status, headers={"Location": f"/new{request.path}?key={KEY}"})

    server, backend = endpoint(moved, tokenizer="approximate")
    with server, pytest.raises(BackendError, match=rf"moved to {server.url}/new/v1/\S+ \(status {status}\)") as caught:
        backend.complete(ask("hello"))
    assert KEY not in str(caught.value)
    assert {request.method for request in server.requests} == {"POST"}


def test_a_redirection_to_nowhere_is_told() -> None:
    server, backend = endpoint(lambda _: Response(status=307), tokenizer="approximate")
    with server, pytest.raises(BackendError, match="moved to a place unnamed"):
        backend.complete(ask("hello"))


async def test_a_redirection_is_followed_and_no_key_goes_to_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"X-Gateway: {KEY}")
    other = Loopback(chat(["from another"]))
    here = chat(["from here"])

    def redirect(request: Request) -> Response:
        if request.path == "/v1/chat/completions":
            return Response(status=307, headers={"Location": "/moved/v1/chat/completions"})
        if request.path == "/moved/v1/chat/completions" and "elsewhere" in str(request.body):
            return Response(status=308, headers={"Location": f"{other.url}/v1/chat/completions"})
        return here(replace(request, path="/v1/chat/completions"))

    server, backend = endpoint(redirect, api_key=KEY)
    with server, other:
        assert backend.complete(ask("hello")).text == "from here"
        assert (await backend.acomplete(ask("elsewhere"))).text == "from another"
        assert next(backend.stream(ask("elsewhere"))) == "from"
        await backend.aclose()
    assert all(request.headers["Authorization"] == f"Bearer {KEY}" for request in server.requests)
    assert len(other.requests) == 2
    for request in other.requests:
        assert KEY not in str(request.headers)
        assert request.body["messages"][0]["content"] == "elsewhere"


def test_a_proxy_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "nonsense://127.0.0.1:1")
    with pytest.raises(UsageError, match="proxies that the environment names"):
        OpenAIBackend("m", api_key=KEY)


def test_calls_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server, good = Loopback(lambda request: good(replace(request, path="/v1/chat/completions"))), chat(["fine"])
    with server:
        monkeypatch.setenv("HTTP_PROXY", server.url.replace("//", "//me:pass-word@"))
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with OpenAIBackend("m", base_url="http://a.test/v1", tokenizer="approximate") as backend:
            assert backend.complete(ask("hello")).text == "fine"
    [request] = server.requests
    assert request.path == "http://a.test/v1/chat/completions"
    assert request.headers["Proxy-Authorization"].startswith("Basic ")


def test_counts_by_what_it_is_given() -> None:
    server, backend = endpoint(["fine"], tokenizer=len, window=99)
    with server:
        assert (backend.count("four"), backend.window) == (4, 99)
        assert OpenAIBackend("m", base_url=server.url, tokenizer="tiktoken:o200k_base").count("hello") == 1
    assert server.requests == []


def test_a_tokenize_that_fails_for_now_is_not_taken_for_none() -> None:
    server, backend = endpoint(lambda request: problem(503))
    with server, pytest.raises(BackendError) as caught:
        backend.count("hello")
    assert caught.value.retryable


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_told_before_the_first_call(status: int) -> None:
    server, backend = endpoint(lambda request: problem(status))
    with server, pytest.raises(BackendError, match=rf"refused the API key \({status}\)"):
        backend.count("hello")


def test_refused_calls_leave_no_client_behind() -> None:
    server, backend = endpoint(["fine"])

    async def refused() -> None:
        await backend.aclose()
        for attempt in (backend.acomplete(ask("hello")), anext(backend.astream(ask("hello")))):
            with pytest.raises(BackendError, match="is closed"):
                await attempt

    with server:
        asyncio.run(refused())
    assert not backend._async


async def test_the_last_call_frees_a_closed_backend_without_holding_up_the_event_loop() -> None:
    """The in-process server needs this, because freeing it takes time."""
    freed, ticked = threading.Event(), threading.Event()

    class Slow(OpenAIBackend):
        def _free(self) -> None:
            ticked.wait(10)
            super()._free()
            freed.set()

    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()

    def reply(prompt: str) -> str:
        loop.call_soon_threadsafe(arrived.set)
        return "fine"

    with Loopback(chat(reply)) as server:
        backend = Slow("m", base_url=f"{server.url}/v1", max_retries=0)
        call = asyncio.create_task(backend.acomplete(ask("hello")))
        await arrived.wait()
        backend.close()
        loop.call_later(0.05, ticked.set)
        assert (await call).text == "fine"
        await asyncio.to_thread(freed.wait, 10)
        await backend.aclose()


@pytest.mark.parametrize("body", [{"tokens": "no"}, [], {"count": 3}, b"text"])
def test_a_tokenize_that_answers_something_else(body: Any) -> None:
    server = Loopback(lambda request: Response(body=body))
    with server, pytest.warns(UserWarning, match="the tokens of mine are estimated"):
        assert OpenAIBackend("mine", base_url=f"{server.url}/v1", max_retries=0).count("hello") == 2


@pytest.mark.parametrize(
    ("line", "kind", "message", "retryable"),
    [
        (problem(401, f"Incorrect API key provided: {KEY}"), BackendError, r"refused the API key \(401\)", False),
        (problem(403), BackendError, r"refused the API key \(403\)", False),
        (problem(404, "The model `m` does not exist"), BackendError, "does not know m at http", False),
        (problem(400, "bad temperature"), BackendError, "status 400: .*bad temperature", False),
        (problem(400, "maximum context length is 5 tokens"), ContextOverflow, "lower chunk_tokens", None),
        (
            problem(400, "big", code="context_length_exceeded"),
            ContextOverflow,
            "does not fit into the window of m",
            None,
        ),
        (problem(400, "has 9 tokens", type="exceed_context_size_error"), ContextOverflow, "9 tokens", None),
        (problem(409), BackendError, "status 409", True),
        (problem(429), BackendError, "status 429", True),
        (problem(500), BackendError, "status 500", True),
        (problem(503), BackendError, "status 503", True),
        (Response(body=completion("x") | {"choices": []}), BackendError, "no choices", True),
        (Response(body=b"<html>sign in</html>", headers=HTML), BackendError, "no choices", True),
        (Response(body=b"{broken", headers=JSON), BackendError, "JSON", True),
        (Response(body=completion("a long reply"), broken_after=40), BackendError, "Connection|peer closed", True),
    ],
)
async def test_failures(line: Response, kind: type[MemAgentError], message: str, retryable: bool | None) -> None:
    server, backend = endpoint([line], api_key=KEY)
    with server:
        with pytest.raises(kind, match=message) as caught:
            backend.complete(ask("hello"))
        with pytest.raises(kind, match=message) as caught_async:
            await backend.acomplete(ask("hello"))
        await backend.aclose()
    for error in (caught.value, caught_async.value):
        assert getattr(error, "retryable", None) == retryable
        assert KEY not in str(error)
        assert error.__context__ is not None or "choices" in str(error) or "html" in repr(line.body)


def test_no_server_there() -> None:
    server = Loopback(chat([]))
    with server:
        url = server.url
    backend = OpenAIBackend("m", base_url=f"{url}/v1", max_retries=0)
    with pytest.raises(BackendError, match=r"127\.0\.0\.1") as caught:
        backend.complete(ask("hello"))
    assert caught.value.retryable


def test_a_server_that_hangs() -> None:
    done = threading.Event()

    def hang(request: Request) -> Response:
        done.wait(20)
        return problem(500)

    server, backend = endpoint(hang, timeout=0.2)
    with server:
        with pytest.raises(BackendError, match=r"[Tt]imed? ?out") as caught:
            backend.complete(ask("hello"))
        done.set()
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "-3"}, 0),
        ({"Retry-After": "an hour from now"}, 3600),
        ({"Retry-After": "9", "Retry-After-Ms": "250"}, 0.25),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
def test_a_server_says_when_to_ask_again(headers: dict[str, str], seconds: float | None) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    sent = {name: date if value == "an hour from now" else value for name, value in headers.items()}
    server, backend = endpoint([Response(status=429, body={"error": {}}, headers=sent)])
    with server, pytest.raises(BackendError) as caught:
        backend.complete(ask("hello"))
    assert caught.value.retryable
    expected = None if seconds is None else pytest.approx(seconds, abs=60 if seconds > 60 else 0.001)
    assert caught.value.retry_after == expected
    assert len(server.requests) == 1, "it is the reader that retries"


def test_thinking_usage_and_refusals() -> None:
    thinking = completion("ten", "a prompt", reasoning="five and five")
    server, backend = endpoint([Response(body=thinking)])
    with server:
        reply = backend.complete(ask("hello"))
    assert (reply.text, reply.reasoning) == ("ten", "five and five")
    assert reply.usage == Usage(prompt_tokens=2, completion_tokens=1, cached_tokens=0)
    bare = completion("x") | {"usage": None}
    bare["choices"][0]["message"] = {"role": "assistant", "content": None, "refusal": "I will not."}
    server, backend = endpoint([Response(body=bare)])
    with server:
        assert (reply := backend.complete(ask("hello"))).finish_reason == "content_filter"
    assert (reply.text, reply.usage) == ("", Usage())


def broken_stream(after: int) -> Iterator[bytes]:
    for number, event in enumerate(events(completion("one two three four"))):
        if number == after:
            return
        yield event


async def test_a_connection_is_used_again_and_opened_again_after_the_server_closed_it() -> None:
    server, backend = endpoint(["one two"])
    with server:
        for _ in range(3):
            list(backend.stream(ask("hello")))
            backend.complete(ask("hello"))
            [connection] = server.connections
        connection.shutdown(socket.SHUT_RDWR)
        assert backend.complete(ask("hello")).text == "one two"
        [piece async for piece in backend.astream(ask("hello"))]
        await backend.acomplete(ask("hello"))
        for connection in server.connections:
            connection.shutdown(socket.SHUT_RDWR)
        assert (await backend.acomplete(ask("hello"))).text == "one two"
        await backend.aclose()


async def test_no_connection_is_used_again_after_a_stream_of_llama_cpp_which_closes_it_without_a_word() -> None:
    used: list[set[socket.socket]] = []

    def respond(request: Request) -> Response:
        used.append(set(server.connections))
        response = answered(request)
        return replace(response, headers={**response.headers, "Server": "llama.cpp"})

    answered = chat(["one two"])
    server, backend = endpoint(respond)
    with server:
        list(backend.stream(ask("hello")))
        backend.complete(ask("hello"))
        [piece async for piece in backend.astream(ask("hello"))]
        await backend.acomplete(ask("hello"))
        await backend.aclose()
    assert used[1] - used[0]
    assert used[3] - used[2]


def test_a_forked_process_opens_its_own_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    server, backend = endpoint(["one two"])
    with server:
        backend.complete(ask("hello"))
        [parents] = server.connections
        child = os.getpid() + 1
        monkeypatch.setattr(os, "getpid", lambda: child)
        for _ in range(2):
            assert backend.complete(ask("hello")).text == "one two"
            list(backend.stream(ask("hello")))
            assert len(set(server.connections) - {parents}) == 1


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", missing)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with pytest.raises(UsageError, match=r"SSL_CERT_FILE \(.*ca\.pem\) cannot be read as certificates: .*No such file"):
        OpenAIBackend("m", base_url="http://127.0.0.1:9/v1")


async def test_a_stream_that_does_not_end_after_its_last_event_is_left() -> None:
    done = threading.Event()

    def stream() -> Iterator[bytes]:
        yield from events(completion("one two"))
        done.wait(20)

    server, backend = endpoint(lambda request: Response(body=stream(), headers=EVENTS), timeout=60.0)
    started = time.monotonic()
    with server:
        assert list(backend.stream(ask("hello")))[:-1] == ["one", " two"]
        assert [each async for each in backend.astream(ask("hello"))][:-1] == ["one", " two"]
        assert time.monotonic() - started < 15
        done.set()
        await backend.aclose()


@pytest.mark.parametrize(
    ("error", "message", "retryable"),
    [
        ({"message": "out of memory", "code": 503}, "status 503: out of memory", True),
        ({"message": "out of memory", "type": "server_error"}, "failed: .*out of memory", False),
        ("out of memory", "failed: .*out of memory", False),
        ({"code": "context_length_exceeded"}, "does not fit into the window", None),
    ],
)
async def test_an_error_in_the_midst_of_a_stream(error: Any, message: str, retryable: bool | None) -> None:
    def stream(request: Request) -> Response:
        sent = [*broken_stream(2), f"data: {json.dumps({'error': error})}\n\n".encode()]
        return Response(body=iter(sent), headers=EVENTS)

    server, backend = endpoint(stream)
    with server:
        pieces = backend.stream(ask("hello"))
        assert [next(pieces), next(pieces)] == ["one", " two"]
        with pytest.raises(MemAgentError, match=message) as caught:
            next(pieces)
        with pytest.raises(MemAgentError, match=message):
            [piece async for piece in backend.astream(ask("hello"))]
        await backend.aclose()
    assert getattr(caught.value, "retryable", None) == retryable


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (Response(status=400, body=b"no such thing"), "status 400: no such thing"),
        (Response(status=400, body={"error": "no such thing"}), "status 400: no such thing"),
        (Response(status=400, body={"message": "no such thing", "code": 7}), "status 400: no such thing"),
        (Response(status=400, body={"detail": "no such thing"}), r'status 400: {"detail": "no such thing"}'),
        (Response(status=502, body=b"<html>a page</html>", headers=HTML), "status 502: Bad Gateway"),
        (Response(status=500), "status 500: Internal Server Error"),
    ],
)
def test_what_the_server_says_is_told(response: Response, message: str) -> None:
    server, backend = endpoint([response])
    with server, pytest.raises(BackendError, match=message) as caught:
        backend.complete(ask("hello"))
    assert "for url" not in str(caught.value)


async def test_a_server_that_does_not_stream_is_understood() -> None:
    """Some gateways ignore `stream`, and answer with the whole completion."""
    server, backend = endpoint(lambda request: Response(body=completion("the answer", "a prompt")))
    with server:
        whole = backend.complete(ask("hello"))
        text, streamed = backend.stream(ask("hello"))
        assert (text, streamed) == ("the answer", replace(whole, seconds=streamed.seconds))
        assert [piece async for piece in backend.astream(ask("hello"))][:1] == ["the answer"]
        await backend.aclose()


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (Response(body=b"<html>Log in</html>", headers=HTML), "the answer has no choices"),
        (Response(body={"error": {"message": "no such thing"}}), "no such thing"),
        (Response(body=b'{"choices": [{"mess'), "Unterminated string"),
        (Response(body=b": still here\n\n", headers=EVENTS), "broke off"),
    ],
)
def test_what_comes_in_place_of_a_stream_is_told(response: Response, message: str) -> None:
    server, backend = endpoint([response])
    with server, pytest.raises(BackendError, match=message):
        list(backend.stream(ask("hello")))


def test_a_stream_may_begin_with_a_byte_order_mark() -> None:
    marked = b"\xef\xbb\xbf" + b"".join(events(completion("the answer", "a prompt")))
    server, backend = endpoint([Response(body=marked, headers=EVENTS)])
    with server:
        assert list(backend.stream(ask("hello")))[-1].text == "the answer"


async def test_a_stream_that_breaks_off_is_no_reply() -> None:
    server, backend = endpoint(lambda request: Response(body=broken_stream(2), headers=EVENTS))
    with server:
        pieces = backend.stream(ask("hello"))
        assert [next(pieces), next(pieces)] == ["one", " two"]
        with pytest.raises(BackendError, match="broke off") as caught:
            next(pieces)
        with pytest.raises(BackendError, match="broke off"):
            [piece async for piece in backend.astream(ask("hello"))]
        await backend.aclose()
    assert caught.value.retryable


def test_calls_in_flight_are_bounded() -> None:
    flying: list[int] = []
    peak = 0

    def reply(prompt: str) -> str:
        nonlocal peak
        flying.append(1)
        peak = max(peak, len(flying))
        flying.pop()
        return "fine"

    server, backend = endpoint(chat(reply), concurrency=2)

    async def all_at_once() -> list[Reply]:
        replies = await asyncio.gather(*(backend.acomplete(ask("hello")) for _ in range(20)))
        await backend.aclose()
        return replies

    with server:
        assert len(asyncio.run(all_at_once())) == 20
    assert peak <= 2


def test_each_event_loop_has_its_own_connections_and_they_go_with_it() -> None:
    server, backend = endpoint(["fine"])

    async def once() -> str:
        return (await backend.acomplete(ask("hello"))).text

    with server, backend:
        assert [asyncio.run(once()) for _ in range(3)] == ["fine"] * 3
        assert len(backend._async) == 1
        gc.collect()


async def test_a_closed_backend_takes_no_calls_but_ends_those_in_flight() -> None:
    arrived, go = threading.Event(), threading.Event()

    def wait(prompt: str) -> str:
        arrived.set()
        go.wait(10)
        return "fine"

    server, backend = endpoint(chat(wait))
    with server:
        call = asyncio.create_task(asyncio.to_thread(backend.complete, ask("hello")))
        await asyncio.to_thread(arrived.wait, 10)
        backend.close()
        for attempt in (backend.complete, backend.stream):
            with pytest.raises(BackendError, match="openai:m is closed"):
                list(attempt(ask("hello")))  # type: ignore[operator]
        with pytest.raises(BackendError, match="openai:m is closed"):
            await backend.acomplete(ask("hello"))
        with pytest.raises(BackendError, match="openai:m is closed"):
            backend.count("hello")
        go.set()
        assert (await call).text == "fine"
        await backend.aclose()
    assert len(server.requests) == 1


async def test_an_open_stream_blocks_no_other_call() -> None:
    """Neither a count nor a call nor another stream, although only one call may be in flight at a time."""
    server, backend = endpoint(["one two three"], concurrency=1)
    with server:
        first, second = backend.stream(ask("hello")), backend.stream(ask("hello"))
        assert [next(first), next(second), backend.count("a b")] == ["one", "one", 2]
        assert backend.complete(ask("hello")).text == "one two three"
        assert [len(list(first)), len(list(second))] == [3, 3]
        afirst, asecond = backend.astream(ask("hello")), backend.astream(ask("hello"))
        assert [await anext(afirst), await anext(asecond)] == ["one", "one"]
        assert (await backend.acomplete(ask("hello"))).text == "one two three"
        await afirst.aclose()
        await asecond.aclose()
        await backend.aclose()


def test_a_tokenize_that_hangs_holds_up_no_other_endpoint() -> None:
    arrived, go = threading.Event(), threading.Event()

    def hang(request: Request) -> Response:
        arrived.set()
        go.wait(10)
        return problem(500)

    (slow_server, slow), (server, backend) = endpoint(hang), endpoint(["fine"])
    with slow_server, server:
        with ThreadPoolExecutor() as pool:
            counting = pool.submit(slow.count, "hello")
            assert arrived.wait(10)
            assert backend.count("a b") == 2
            go.set()
        assert isinstance(counting.exception(), BackendError)


def test_no_secret_shows() -> None:
    backend = OpenAIBackend("m", api_key=KEY)
    assert KEY not in repr(backend) + str(backend) + backend.name


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}\t"])
def test_space_around_a_key_is_no_part_of_it(key: str) -> None:
    server, backend = endpoint(["fine"], api_key=key)
    with server:
        backend.complete(ask("hello"))
    assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", [f"{KEY}\n{KEY}", "schlüssel-123456", "a\tb", "a\x00b"])
def test_a_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(UsageError, match="the API key holds characters") as caught:
        OpenAIBackend("m", api_key=key)
    assert key not in str(caught.value)


def test_what_is_secret_in_an_address_is_sent_and_not_shown() -> None:
    with Loopback(lambda request: problem(403)) as server:
        url = server.url.replace("//", "//me:pass-word@") + "/v1?token=query-secret"
        backend = OpenAIBackend("m", base_url=url, max_retries=0)
        for call in (backend.complete, lambda prompt: backend.count("hello")):
            with pytest.raises((BackendError, UsageError), match=r"127\.0\.0\.1") as caught:
                call(ask("hello"))
            shown = str(caught.value) + str(caught.value.__cause__)
            assert "pass-word" not in shown
            assert "query-secret" not in shown
    assert server.requests[0].path == "/v1/chat/completions?token=query-secret"
    assert server.requests[0].headers["Authorization"].startswith("Basic ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url has to be an address"),
        ({"base_url": "ftp://host/v1"}, "base_url has to be an address"),
        ({"base_url": "http://"}, "base_url has to be an address"),
        ({"base_url": "http://[half/v1"}, "base_url has to be an address"),
        ({"base_url": "http://host:port/v1"}, "base_url has to be an address"),
        ({"temperature": float("nan")}, "temperature has to be a number"),
        ({"temperature": -1}, "temperature has to be a number"),
        ({"top_p": "x"}, "top_p has to be a number"),
        ({"timeout": -1}, "timeout has to be a number"),
        ({"max_retries": -1}, "max_retries has to be a whole number of at least 0"),
        ({"concurrency": True}, "concurrency has to be a whole number"),
        ({"window": "8"}, "window has to be a whole number"),
        ({"window": 0}, "window has to be a whole number"),
        ({"window": 10**400}, "not such a large number"),
        ({"extra_body": 5}, "extra_body has to be a mapping"),
        ({"limit_parameter": "x"}, "limit_parameter has to be max_tokens or max_completion_tokens"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OpenAIBackend("m", **({"api_key": KEY} | options))


def odd(**message: Any) -> dict[str, Any]:
    return completion("x") | {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (odd(content=[{"type": "text", "text": "one"}, {"type": "image"}, 5, {"text": " two"}]), "one two"),
        (odd(content="fine", reasoning={"a": 1}, reasoning_content=["b"]), "fine"),
        (odd(content=None), ""),
        (odd(content=7), ""),
        (completion("x") | {"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]}, ""),
        (odd(content="fine") | {"usage": {"prompt_tokens": "3", "completion_tokens": None}}, "fine"),
    ],
)
async def test_odd_answers(body: dict[str, Any], text: str) -> None:
    server, backend = endpoint([Response(body=body)])
    with server:
        assert backend.complete(ask("hello")).text == text
        assert (await backend.acomplete(ask("hello"))).text == text
        await backend.aclose()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (Response(body={"error": {"message": "out of credit"}}), "out of credit"),
        (Response(body=[]), "failed: the answer has no choices$"),
        (Response(body=None), "no choices"),
        (Response(body={"choices": 5}), "no choices"),
        (Response(body=b'{"a": "\xff"}', headers=JSON), "not JSON"),
    ],
)
def test_answers_that_are_none(body: Response, message: str) -> None:
    server, backend = endpoint([body])
    with server, pytest.raises(BackendError, match=message):
        backend.complete(ask("hello"))


def test_odd_events_of_a_stream() -> None:
    def stream(request: Request) -> Response:
        lines = [
            {"choices": [{"index": 0, "delta": None}]},
            {"choices": [{"index": 0}]},
            {"choices": [{"index": 0, "delta": {"content": ["x"]}}]},
            {"choices": [{"index": 0, "delta": {"content": "fine"}, "finish_reason": "stop"}]},
            {},
        ]
        sent = "data: null\n\n" + "".join(f"data: {json.dumps(line)}\n\n" for line in lines)
        return Response(body=sent.encode(), headers=EVENTS)

    server, backend = endpoint(stream)
    with server:
        *texts, reply = backend.stream(ask("hello"))
    assert texts == ["fine"]
    assert isinstance(reply, Reply)


def test_a_window_that_is_no_number_is_none() -> None:
    server, backend = endpoint(lambda request: Response(body={"tokens": [1], "max_model_len": "big"}))
    with server:
        assert backend.window is None


def test_text_that_cannot_be_sent() -> None:
    server, backend = endpoint(["fine"])
    with server, pytest.raises(UsageError, match="cannot be sent"):
        backend.complete(ask("a\ud800b"))
