"""Calls that are given up (a time limit, a cancelled task, Ctrl-C) end, whatever the server does."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from helpers import ways
from helpers.endpoint import endpoint
from helpers.loopback import Loopback, Request, Response, chat
from helpers.ways import wait_until

from memagent_integrations import BackendError, Limits, Reader, Reading, ScriptedBackend
from memagent_integrations.backends.openai import OpenAIBackend

pytestmark = pytest.mark.heavy

DOCUMENT = "The harbour master noted the tide and the weather. " * 20
QUESTION = "What was noted?"
SIZES: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 60}
LIMIT = 0.5  # seconds
PATIENCE = 20
SOON = 6  # seconds: a quarter of one, on a machine that has nothing else to do


class Stuck:
    """Takes part in an endpoint: the first `times` requests to a path get stuck there, until the client goes away."""

    def __init__(self, path: str, way: str, times: int = 1000) -> None:
        self.path, self.way, self.left = path, way, times
        self.arrived, self.end, self.gone = threading.Event(), threading.Event(), 0
        self.good = chat(["a note"])

    def __call__(self, request: Request) -> Response:
        if request.path != self.path or self.left <= 0:
            return self.good(request)
        self.left -= 1
        if self.way == "silence":
            self.arrived.set()
            self.end.wait(PATIENCE * 2)
            return Response(reset=True)
        streamed = bool((request.body or {}).get("stream"))
        kind = "text/event-stream" if streamed else "application/json"
        return Response(body=self.drip(b": still there\n\n" if streamed else b" "), headers={"Content-Type": kind})

    def drip(self, piece: bytes) -> Iterator[bytes]:
        try:
            self.arrived.set()
            while not self.end.wait(0.02):
                yield piece
        finally:
            self.gone += 1


MakeStuck = Callable[..., tuple[Stuck, OpenAIBackend]]


@pytest.fixture
def make_stuck() -> Iterator[MakeStuck]:
    """Return a function that makes an endpoint that gets stuck, and a backend for it."""
    made: list[tuple[Stuck, Loopback, OpenAIBackend]] = []

    def make(path: str, way: str, times: int = 1000, **options: Any) -> tuple[Stuck, OpenAIBackend]:
        server = Stuck(path, way, times)
        made.append((server, *endpoint(server, **({"timeout": PATIENCE} | options))))
        made[-1][1].__enter__()
        return server, made[-1][2]

    yield make
    for server, loopback, backend in made:
        server.end.set()
        backend.close()
        loopback.__exit__()


CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"


def read(reader: Reader, how: str) -> Reading:
    return ways.read(reader, how, QUESTION, DOCUMENT)


def own_threads() -> set[threading.Thread]:
    """Return the threads that are not the server's."""
    return {thread for thread in threading.enumerate() if "process_request" not in thread.name}


@pytest.mark.parametrize(
    ("how", "path", "way"),
    [
        ("read", CHAT, "drip"),
        ("stream", CHAT, "drip"),
        ("read_many", CHAT, "silence"),
        ("read", TOKENIZE, "silence"),
        ("aread", TOKENIZE, "drip"),
        ("astream", TOKENIZE, "drip"),
        ("aread_many", TOKENIZE, "drip"),
        ("read_many", TOKENIZE, "drip"),
    ],
)
def test_a_server_that_was_stuck_and_recovers_is_asked_again(
    make_stuck: MakeStuck, how: str, path: str, way: str
) -> None:
    """With one place for calls: those that were given up have left it."""
    server, backend = make_stuck(path, way, times=1, concurrency=1, max_retries=5)
    assert read(Reader(backend, limits=Limits(call_timeout=2 * LIMIT), **SIZES), how).answer == "a note"
    wait_until(lambda: server.gone == 1 or way != "drip")


@pytest.mark.parametrize(
    ("how", "path", "limit"),
    [
        *((how, CHAT, "call_timeout") for how in ("read", "stream", "read_many")),
        *((how, TOKENIZE, "call_timeout") for how in ("read", "aread")),
        *((how, TOKENIZE, "run_timeout") for how in ("read", "aread", "astream", "read_many", "aread_many")),
    ],
)
def test_the_limits_hold_for_calls_and_for_counting(make_stuck: MakeStuck, how: str, path: str, limit: str) -> None:
    server, backend = make_stuck(path, "drip")
    before, started = own_threads(), time.monotonic()
    with pytest.raises(BackendError, match=rf"0.5 s \({limit}\)") as caught:
        read(Reader(backend, limits=Limits(**{limit: LIMIT}), **SIZES), how)
    assert time.monotonic() - started < LIMIT + SOON
    assert caught.value.retryable
    wait_until(lambda: server.gone > 0 and own_threads() <= before)


async def test_the_limits_hold_for_counting_an_async_document(make_stuck: MakeStuck) -> None:
    async def document() -> AsyncIterator[str]:
        yield DOCUMENT * 10

    _, backend = make_stuck(TOKENIZE, "drip")
    started = time.monotonic()
    with pytest.raises(BackendError, match=r"0.5 s \(run_timeout\)"):
        await Reader(backend, limits=Limits(run_timeout=LIMIT), **SIZES).aread(QUESTION, document())
    assert time.monotonic() - started < LIMIT + SOON
    await backend.aclose()


@pytest.mark.parametrize(
    ("how", "path", "way", "limits"),
    [
        ("read", CHAT, "silence", Limits(call_timeout=60)),
        ("read_many", CHAT, "silence", Limits(call_timeout=60)),
        ("read_many", CHAT, "drip", Limits()),
        ("read", TOKENIZE, "silence", Limits()),
        ("read_many", TOKENIZE, "silence", Limits()),
        ("aread", TOKENIZE, "silence", Limits()),
        ("aread_many", TOKENIZE, "drip", Limits(call_timeout=60)),
    ],
)
def test_an_interrupt_is_heard(make_stuck: MakeStuck, how: str, path: str, way: str, limits: Limits) -> None:
    server, backend = make_stuck(path, way)
    before, main, interrupted = own_threads(), threading.get_ident(), list[float]()

    def interrupt() -> None:
        server.arrived.wait(PATIENCE)
        threading.Event().wait(0.1)  # until the client waits
        interrupted.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        read(Reader(backend, limits=limits, **SIZES), how)
    assert time.monotonic() - interrupted[0] < SOON
    wait_until(lambda: own_threads() <= before)


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_a_cancelled_task_ends(make_stuck: MakeStuck, path: str) -> None:
    server, backend = make_stuck(path, "silence")
    task = asyncio.create_task(Reader(backend, **SIZES).aread(QUESTION, DOCUMENT))
    await asyncio.to_thread(server.arrived.wait, PATIENCE)
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < SOON
    await backend.aclose()


def test_a_job_that_raises_does_not_wait_for_the_others(
    make_stuck: MakeStuck,
) -> None:
    class Stop(Exception):
        pass

    def progress(number: int, step: Any) -> None:
        raise Stop

    _, backend = make_stuck(CHAT, "silence", times=1, concurrency=2)
    started = time.monotonic()
    with pytest.raises(Stop):
        Reader(backend, **SIZES).read_many([("a?", DOCUMENT), ("b?", DOCUMENT)], progress=progress)
    assert time.monotonic() - started < SOON


def test_a_model_that_hears_nothing_keeps_no_reading_from_ending() -> None:
    """As a client that waits in C code, or forever."""
    go, arrived = threading.Event(), threading.Event()

    def hang(prompt: Any) -> str:
        arrived.set()
        go.wait(PATIENCE)
        return "a note"

    reader, main = Reader(ScriptedBackend(hang, concurrency=2), **SIZES), threading.get_ident()
    threading.Thread(target=lambda: arrived.wait(PATIENCE) and signal.pthread_kill(main, signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        reader.read_many([("a?", DOCUMENT), ("b?", DOCUMENT)])
    assert time.monotonic() - started < SOON
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("memagent"))
    go.set()


def test_the_time_of_one_reading_is_not_that_of_the_others(
    make_stuck: MakeStuck,
) -> None:
    """They share the document, whose cutting one of them began."""
    _, backend = make_stuck(CHAT, "drip", times=1, concurrency=2)
    document = [DOCUMENT]
    reader = Reader(backend, limits=Limits(call_timeout=6 * LIMIT, max_retries=0), **SIZES)
    readings = reader.read_many([("a?", document), ("b?", document), ("c?", document)])
    assert sorted(reading.answer or "" for reading in readings) == ["", "a note", "a note"]
