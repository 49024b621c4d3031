"""Whatever a server sends ends as a reply or as an error of this package, for its own reading alone, within bounds."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.contract import ask
from helpers.fuzz import one_in
from helpers.loopback import Loopback, Request, Response, chat, completion, events
from hypothesis import given
from hypothesis import strategies as st

from memagent_integrations import BackendError, Limits, MemAgentError, Reader
from memagent_integrations.backends import connections
from memagent_integrations.backends.failures import from_exception
from memagent_integrations.backends.http_replies import Events
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.records import Reply, Usage

pytestmark = pytest.mark.heavy

JSON = {"Content-Type": "application/json"}
EVENTS = {"Content-Type": "text/event-stream"}
GOOD = completion("a note", "a prompt")


class Endpoint:
    """A server that answers everything with `response`, and a backend for it."""

    def __init__(self) -> None:
        self.response = Response()
        self.server = Loopback(lambda request: self.response)
        self.backend = OpenAIBackend("m", base_url=f"{self.server.url}/v1", max_retries=0, timeout=10)

    def outcomes(self, response: Response) -> list[Reply | int | MemAgentError]:
        """Return what a call, a streamed call and a count of tokens make of a response; any other error is raised."""
        self.response = response
        backend = OpenAIBackend("m", base_url=f"{self.server.url}/v1", max_retries=0, timeout=10)
        found: list[Reply | int | MemAgentError] = []
        with backend:
            for call in (
                lambda: backend.complete(ask("hello")),
                lambda: list(backend.stream(ask("hello")))[-1],
                lambda: backend._tokenize("hello")[0],
            ):
                try:
                    found.append(call())  # type: ignore[arg-type]
                except MemAgentError as error:
                    found.append(error)
        return found


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    with made.server, made.backend:
        yield made


def body(value: Any, **headers: str) -> Response:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Response(body=content, headers=JSON | headers)


def sse(*lines: bytes) -> Response:
    return Response(body=b"".join(b"data: " + line + b"\n\n" for line in lines), headers=EVENTS)


def piece(text: Any, index: Any = 0, finish: Any = None, **more: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return json.dumps({"object": "chat.completion.chunk", "choices": [choice]} | more).encode()


NESTED = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
UNREADABLE = {
    "nested": body(NESTED),
    "nested a little": body(b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "nested objects": body(b'{"choices": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001),
    "a number of many digits": body(b'{"choices": [], "created": ' + b"9" * 5000 + b"}"),
    "an error, nested": Response(status=400, body=b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}", headers=JSON),
    "events, nested": sse(NESTED),
    "events, nested a little": sse(b'{"choices": [' + b'{"delta":' * 400 + b"1" + b"}" * 400 + b"]}"),
    "events, a number of many digits": sse(b'{"choices": [], "created": ' + b"9" * 5000 + b"}"),
    "events that are no objects": sse(b"null", b"[]", b"1", b'"text"', b"[DONE]"),
    "an event with an error": sse(b'{"error": {"message": ["x"], "code": 10}}'),
    "an event with a nested error": sse(b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "null": body(b"null"),
    "a text": body(b'"text"'),
    "choices that are none": body({"choices": [None, 1, "x"]}),
    "nothing": body(b""),
    "an unknown charset": Response(body=b"\xff\xfe", headers={"Content-Type": "text/html; charset=nonsense"}),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_an_error_of_this_package(endpoint: Endpoint, name: str) -> None:
    for outcome in endpoint.outcomes(UNREADABLE[name]):
        assert isinstance(outcome, BackendError) or (isinstance(outcome, Reply) and not outcome.text)


@pytest.mark.parametrize("name", ["nested", "a number of many digits"])
def test_it_ends_its_own_reading_alone(name: str) -> None:
    good = chat(["a note"])

    def respond(request: Request) -> Response:
        return UNREADABLE[name] if "Question 1?" in str(request.body) and "chat" in request.path else good(request)

    with Loopback(respond) as server, OpenAIBackend("m", base_url=f"{server.url}/v1", concurrency=3) as backend:
        reader = Reader(backend, chunk_tokens=100, memory_tokens=60, limits=Limits(max_retries=0))
        readings = reader.read_many([(f"Question {number}?", "Some words. " * 20) for number in range(3)])
    assert [reading.answer for reading in readings] == ["a note", None, "a note"]
    assert isinstance(readings[1].error, BackendError)


@cache
def packed(layers: int, megabytes: int = 200) -> bytes:
    deflate, blank = zlib.compressobj(1, wbits=31), b" " * 2**20
    content = b"".join(deflate.compress(blank) for _ in range(megabytes)) + deflate.flush()
    for _ in range(layers - 1):
        content = gzip.compress(content)
    return content


@pytest.mark.parametrize(("coding", "layers"), [("gzip", 1), ("gzip, gzip", 2), ("GZIP", 1), ("x-gzip", 1), ("br", 1)])
def test_a_reply_that_would_have_to_be_unpacked_is_refused(endpoint: Endpoint, coding: str, layers: int) -> None:
    for status, kind in ((200, JSON), (200, EVENTS), (500, JSON)):
        response = Response(status=status, body=packed(layers), headers=kind | {"Content-Encoding": coding})
        tracemalloc.start()
        try:
            outcomes = endpoint.outcomes(response)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert all(isinstance(outcome, BackendError) and "compressed" in str(outcome) for outcome in outcomes)
        assert peak < 50 * 2**20
    assert endpoint.server.requests[-1].headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("headers", [JSON, EVENTS], ids=["whole", "streamed"])
async def test_a_reply_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]) -> None:
    monkeypatch.setattr(connections, "MOST_BYTES", 2**20)
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 30 * 2**20:
            sent += 2**16
            yield b": " + b"x" * 2**16 + b"\n\n"

    with Loopback(lambda request: Response(body=endless(), headers=headers)) as server:
        backend = OpenAIBackend("m", base_url=f"{server.url}/v1", max_retries=0)
        with pytest.raises(BackendError, match="more than 1 MiB"):
            await asyncio.to_thread(lambda: list(backend.stream(ask("hello"))))
        with pytest.raises(BackendError, match="more than 1 MiB"):
            await asyncio.to_thread(backend.complete, ask("hello"))
        with pytest.raises(BackendError, match="more than 1 MiB"):
            await backend.acomplete(ask("hello"))
        with pytest.raises(BackendError, match="more than 1 MiB"):
            [each async for each in backend.astream(ask("hello"))]
        await backend.aclose()
    assert sent < 4 * 8 * 2**20


@pytest.mark.parametrize("line", [b"data: a\n", b":\r\n", b"id\r", b"data: x"])
async def test_an_event_without_an_end_costs_what_its_bytes_cost(line: bytes) -> None:
    """What copied the event with each of its lines, or a line with each piece, would take minutes for a megabyte."""

    def pieces() -> Iterator[bytes]:
        yield from (line * 1000 for _ in range(150))
        yield from (line for _ in range(2000))

    with Loopback(lambda _: Response(body=pieces(), headers=EVENTS)) as server:
        backend = OpenAIBackend("m", base_url=f"{server.url}/v1", max_retries=0, timeout=20)
        with pytest.raises(BackendError, match="broke off"):
            await asyncio.to_thread(lambda: list(backend.stream(ask("hello"))))
        with pytest.raises(BackendError, match="broke off"):
            [each async for each in backend.astream(ask("hello"))]
        await backend.aclose()


def test_a_long_line_in_very_small_pieces_is_copied_once() -> None:
    """Copied with each piece, this megabyte would be half a terabyte."""
    events, line = Events(), b'data: "' + b"x" * 2**20 + b'"\n\n'
    started = time.process_time()
    found = [event for start in range(len(line)) for event in events.decoded(line[start : start + 1])]
    assert time.process_time() - started < 30
    assert found == ["x" * 2**20]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_are_the_same_however_a_stream_is_cut(end: bytes) -> None:
    lines = [
        b": hello",
        b"",
        b"event: x",
        b"data: [1,",
        b"data:2]",
        b"id: 7",
        b"",
        b"",
        b'data: "a\xe2\x80\xa8b"',
        b"",
    ]
    stream = end.join([*lines, b"data: 3", b"", b"data: [DONE]", b"", b"data: 4", b"", b""])
    for size in range(1, len(stream) + 1):
        events = Events()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        found = []
        for piece in pieces:
            found += events.decoded(piece)
            if events.ended:
                break
        assert found == [[1, 2], "a\u2028b", 3]
        assert events.ended


def test_many_replies_over_one_connection_may_be_long_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_BYTES", 2**20)
    with (
        Loopback(chat(["word " * 50_000])) as server,
        OpenAIBackend("m", base_url=f"{server.url}/v1") as backend,
    ):
        assert all(backend.complete(ask("hello", max_tokens=10**6)).text for _ in range(10))


@pytest.mark.parametrize(
    "lines",
    [
        [piece("a"), piece("X", 1), piece(" note"), piece("Y", 1, "stop"), piece("", 0, "length")],
        [piece("a", 3), piece("X", 0, "stop"), piece(" note", 3, "length")],
        [piece("a", None), piece(" note", 0, "length"), piece("X", 1)],
    ],
)
def test_of_several_choices_in_a_stream_one_counts(endpoint: Endpoint, lines: list[bytes]) -> None:
    reply = endpoint.outcomes(sse(*lines))[1]
    assert isinstance(reply, Reply)
    assert (reply.text, reply.finish_reason) == ("a note", "length")


@pytest.mark.parametrize("number", [-1, 2**31, 10**400, 1.5, None, [3]])
def test_what_is_no_number_of_tokens_is_unknown(endpoint: Endpoint, number: Any) -> None:
    usage = {"prompt_tokens": number, "completion_tokens": number, "prompt_tokens_details": {"cached_tokens": number}}
    [whole, *_] = endpoint.outcomes(body(GOOD | {"usage": usage}))
    _, streamed, _ = endpoint.outcomes(sse(piece("a", finish="stop"), piece("", usage=usage)))
    for reply in (whole, streamed):
        assert isinstance(reply, Reply)
        assert reply.usage == Usage()


def test_extra_body_has_to_be_json() -> None:
    for extra_body in ({"a": {1}}, {"a": float("nan")}, [1]):
        with pytest.raises(MemAgentError, match="extra_body has to be a mapping"):
            OpenAIBackend("m", base_url="http://127.0.0.1:1/v1", extra_body=extra_body)  # type: ignore[arg-type]


NUMBERS = st.one_of(st.integers(), st.integers(-(10**600), 10**600), st.floats(), st.booleans(), st.none())
TEXTS = st.text(max_size=20) | st.sampled_from(["<think>", "</think>", "\ud800", "\x00", "stop", "length", "data: "])
VALUES = st.recursive(
    NUMBERS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.sampled_from(["index", "text"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """Draw something like the value: parts of it are replaced, left out or doubled."""
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    if isinstance(value, dict):
        kept = {name: draw(changed(part)) for name, part in value.items() if draw(st.integers(0, 9))}
        return kept | (draw(st.dictionaries(TEXTS, VALUES, max_size=1)) if draw(st.booleans()) else {})
    if isinstance(value, list):
        return [draw(changed(part)) for part in value for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2])))]
    return value


CHUNKS = [json.loads(line[6:]) for line in list(events(GOOD))[:-1]]
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Retry-After", "Retry-After-Ms", "Content-Type", "Content-Encoding", "X-Should-Retry", "Location"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
    | st.sampled_from(["inf", "nan", "1e999", "-1", "gzip", "text/event-stream", "application/json", "text/plain"]),
    max_size=3,
)


def as_events(values: list[Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)


BODIES = st.one_of(
    st.binary(max_size=200),
    changed(GOOD).map(lambda value: json.dumps(value).encode()),
    changed(CHUNKS).filter(lambda value: isinstance(value, list)).map(as_events),
    st.builds(
        lambda start, text, at: start[:at] + text + start[at:],
        st.just(as_events(CHUNKS)),
        st.binary(max_size=20),
        st.integers(0, 400),
    ),
)


@pytest.mark.fuzz
@one_in(2)
@given(BODIES, st.sampled_from([JSON, EVENTS, {}]), HEADERS, st.sampled_from([200, 200, 200, 204, 301, 400, 429, 500]))
def test_any_reply_is_a_reply_or_an_error(
    endpoint: Endpoint, content: bytes, kind: dict[str, str], headers: dict[str, str], status: int
) -> None:
    for outcome in endpoint.outcomes(Response(status=status, body=content, headers=kind | headers)):
        if isinstance(outcome, Reply):
            usage = outcome.usage
            counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
            assert all(count is None or count >= 0 for count in counts)
            assert isinstance(outcome.text, str)
            assert outcome.finish_reason is None or len(outcome.finish_reason) <= 64


@pytest.mark.fuzz
@given(HEADERS, st.sampled_from([400, 401, 404, 413, 422, 429, 500, 503]), VALUES)
def test_any_headers_of_an_error_are_read(headers: dict[str, str], status: int, value: Any) -> None:
    error = RuntimeError("it failed")
    error.response = SimpleNamespace(headers={name.lower(): text for name, text in headers.items()})  # type: ignore[attr-defined]
    error.status_code = status  # type: ignore[attr-defined]
    error.code = value  # type: ignore[attr-defined]
    with suppress(BackendError):
        failure = from_exception(error, "m")
        assert isinstance(failure, MemAgentError)
        assert not getattr(failure, "retry_after", None) or failure.retry_after >= 0  # type: ignore[attr-defined]


@pytest.mark.fuzz
@one_in(10)
@given(st.lists(changed(GOOD), min_size=3, max_size=3))
def test_a_reading_of_any_replies_ends(endpoint: Endpoint, replies: list[Any]) -> None:
    """And has text that every file takes."""
    good, left = chat(["a note"]), iter(replies)

    def respond(request: Request) -> Response:
        return body(next(left, GOOD)) if "chat" in request.path else good(request)

    with Loopback(respond) as server, OpenAIBackend("m", base_url=f"{server.url}/v1", max_retries=0) as backend:
        [reading] = Reader(backend, chunk_tokens=100, memory_tokens=60).read_many([("Why?", "Some words. " * 60)])
    reading.to_json().encode()
