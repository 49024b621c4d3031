"""Calls within limits: what is retried, what is given up, what is refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import pytest
from helpers import ways
from helpers.loopback import Loopback, Request, Response, chat
from helpers.ways import HOW, wait_until

from memagent_integrations import (
    BackendError,
    ContextOverflow,
    Limits,
    MemAgentError,
    Reader,
    Reading,
    ScriptedBackend,
    UsageError,
)
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.records import Prompt, Reply

DOCUMENT = ("The harbour master noted the tide and the weather. " * 38).strip()
SIZES: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 60}
QUESTION = "What was noted?"
ANSWER = 4  # the number of the call, counted from 0
PATIENCE = 10
DOWN = BackendError("the server is down", retryable=True)


def read(reader: Reader, how: str) -> Reading:
    return ways.read(reader, how, QUESTION, DOCUMENT)


def scripted(script: Any, retries: int = 0, **options: Any) -> ScriptedBackend:
    backend = ScriptedBackend(script, **options)
    backend.max_retries = retries
    return backend


def failing(times: int, error: MemAgentError = DOWN, at: int = 1) -> Callable[[Prompt], str | MemAgentError]:
    """A script that fails `times` times at the call number `at`."""
    left = iter([error] * times)
    return lambda prompt: next(left, "a note") if prompt.index == at else "a note"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("at", [1, 4])
def test_a_call_that_fails_is_retried(how: str, at: int) -> None:
    backend = scripted(failing(2, at=at), retries=2)
    reading = read(Reader(backend, **SIZES), how)
    assert [prompt.index for prompt in backend.prompts].count(at) == 3
    assert (len(reading.steps), reading.answer) == (5, "a note")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("error", "tries"),
    [(DOWN, 3), (BackendError("a wrong key"), 1), (ContextOverflow("too long"), 1), (UsageError("a wrong setting"), 1)],
)
def test_only_what_may_succeed_is_retried_and_not_for_ever(how: str, error: MemAgentError, tries: int) -> None:
    backend = scripted(failing(9, error), retries=2)
    with pytest.raises(type(error), match=str(error)):
        read(Reader(backend, **SIZES), how)
    assert [prompt.index for prompt in backend.prompts].count(1) == tries


def test_the_pause_is_what_the_server_asks_for() -> None:
    backend = scripted(failing(1, BackendError("busy", retryable=True, retry_after=0.2)), retries=1)
    started = time.monotonic()
    Reader(backend, **SIZES).read(QUESTION, DOCUMENT)
    assert time.monotonic() - started >= 0.2


def test_a_server_that_wants_to_be_left_alone_for_long_is() -> None:
    backend = scripted(failing(1, BackendError("come back tomorrow", retryable=True, retry_after=86400)), retries=5)
    with pytest.raises(BackendError, match="tomorrow"):
        Reader(backend, **SIZES).read(QUESTION, DOCUMENT)


def read_many(reader: Reader, how: str, documents: int = 20) -> list[Reading]:
    jobs = [(f"Question {number}?", DOCUMENT) for number in range(documents)]
    return reader.read_many(jobs) if how == "read_many" else asyncio.run(reader.aread_many(jobs))


@pytest.mark.parametrize("how", ["read_many", "aread_many"])
def test_the_budget_of_retries_is_shared(how: str) -> None:
    backend = scripted(lambda prompt: DOWN, retries=100)
    reader = Reader(backend, limits=Limits(breaker_threshold=1000, retry_ratio=0.5), **SIZES)
    assert all(isinstance(reading.error, BackendError) for reading in read_many(reader, how))
    retries = len(backend.prompts) - 20
    assert 10 <= retries <= 10 + 20 * 0.5
    before = len(backend.prompts)
    read_many(reader, how)
    assert before + 20 <= len(backend.prompts) <= before + 20 + 10, (
        "calls go on to earn retries, and those that were refused cost none"
    )


def test_a_long_good_time_earns_no_storm() -> None:
    backend = scripted(lambda prompt: "a note", retries=100)
    reader = Reader(backend, limits=Limits(retry_ratio=5), **SIZES)
    read_many(reader, "read_many", 50)
    before = len(backend.prompts)
    backend._script = lambda prompt: DOWN
    with pytest.raises(BackendError):
        reader.read(QUESTION, DOCUMENT)
    assert len(backend.prompts) - before == 1 + 10


def test_limits_may_set_the_retries_of_any_backend() -> None:
    for backend, limits, tries in (
        (scripted(failing(9)), Limits(max_retries=1), 2),
        (scripted(failing(9), retries=5), Limits(max_retries=0), 1),
    ):
        with pytest.raises(BackendError):
            Reader(backend, limits=limits, **SIZES).read(QUESTION, DOCUMENT)
        assert [prompt.index for prompt in backend.prompts].count(1) == tries


@pytest.mark.parametrize("how", ["read_many", "aread_many"])
def test_a_server_that_is_down_is_not_asked_by_every_document(how: str) -> None:
    is_down = True
    backend = scripted(lambda prompt: DOWN if is_down else "a note", concurrency=4)
    reader = Reader(backend, limits=Limits(breaker_threshold=5, breaker_cooldown=0.2), **SIZES)
    readings = read_many(reader, how, 50)
    assert 5 <= len(backend.prompts) < 5 + 4
    messages = [str(reading.error) for reading in readings]
    assert messages[0] == "the server is down"
    assert sum("was not asked: its last 5 calls failed" in message for message in messages) > 40
    assert all(isinstance(reading.error, BackendError) and reading.error.retryable for reading in readings)
    is_down = False

    wait_until(lambda: not failure(reader))
    assert reader.read(QUESTION, DOCUMENT).answer == "a note"


def test_one_call_is_let_through_and_decides() -> None:
    """However many calls come at the same time."""
    may_fail, calls_at_once = threading.Event(), 8

    def script(prompt: Prompt) -> BackendError:
        may_fail.wait(PATIENCE)
        return DOWN

    backend = scripted(script)
    reader = Reader(backend, limits=Limits(breaker_threshold=2, breaker_cooldown=0.05), **SIZES)
    may_fail.set()
    assert [failure(reader), failure(reader)] == ["the server is down"] * 2
    may_fail.clear()
    with ThreadPoolExecutor(calls_at_once) as pool:
        wait_until(lambda: reader.calls._breaker._open_until < time.monotonic())
        tries = [pool.submit(failure, reader) for _ in range(calls_at_once)]
        wait_until(lambda: sum(future.done() for future in tries) == calls_at_once - 1)
        may_fail.set()
        messages = sorted(future.result() for future in tries)
    assert [message.partition(":")[0] for message in messages] == ["scripted was not asked"] * 7 + [
        "the server is down"
    ]
    assert len(backend.prompts) == 2 + 1
    assert "was not asked" in failure(reader), "the call that was let through failed"


def failure(reader: Reader) -> str:
    try:
        reader.read(QUESTION, DOCUMENT)
    except BackendError as error:
        return str(error)
    return ""


def test_what_is_about_one_prompt_opens_no_breaker() -> None:
    for error in (ContextOverflow("too long"), UsageError("a wrong setting"), BackendError("a bad request")):
        backend = scripted(lambda prompt, error=error: error, concurrency=1)
        readings = read_many(Reader(backend, limits=Limits(breaker_threshold=2), **SIZES), "read_many", 10)
        assert {str(reading.error) for reading in readings} == {str(error)}


def test_calls_that_nobody_waits_for_tell_nothing_of_the_server(slow: Callable[..., Slow]) -> None:
    backend = slow(0)
    reader = Reader(backend, limits=Limits(breaker_threshold=2), **SIZES)

    async def impatient() -> None:
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.aread(QUESTION, DOCUMENT), 0.05)

    asyncio.run(impatient())
    backend.go.set()
    assert reader.read(QUESTION, DOCUMENT).answer == "a note"


def test_the_end_of_a_readings_time_says_nothing_of_the_server() -> None:
    backend = scripted(lambda prompt: threading.Event().wait(0.03) or "a note", concurrency=4)
    readings = read_many(Reader(backend, limits=Limits(run_timeout=0.05, breaker_threshold=2), **SIZES), "read_many")
    assert all("run_timeout" in str(reading.error) for reading in readings)


@pytest.mark.heavy
def test_a_server_that_cannot_count_is_not_asked_by_every_document() -> None:
    with Loopback(lambda request: Response(status=503, body={"error": {"message": "down"}})) as server:
        backend = OpenAIBackend("m", base_url=f"{server.url}/v1", max_retries=0)
        readings = read_many(Reader(backend, limits=Limits(breaker_threshold=3), **SIZES), "read_many")
        assert all(isinstance(reading.error, BackendError) and reading.error.retryable for reading in readings)
        assert len(server.requests) < 3 + backend.concurrency


@pytest.mark.heavy
def test_a_call_that_was_given_up_waits_for_no_place() -> None:
    """Otherwise it would be made when nobody wants its reply, and hold up a call that somebody waits for."""
    go, arrived, good = threading.Event(), threading.Semaphore(0), chat(["a note"])

    def respond(request: Request) -> Response:
        arrived.release()
        go.wait(10)
        return good(request)

    with Loopback(respond) as server:
        backend = OpenAIBackend("m", base_url=f"{server.url}/v1", tokenizer="approximate", max_retries=0, concurrency=2)
        reader = Reader(backend, limits=Limits(call_timeout=0.3), **SIZES)
        with ThreadPoolExecutor(6) as pool:
            holding = [pool.submit(Reader(backend, **SIZES).read, "Who holds both places?", DOCUMENT) for _ in range(2)]
            assert all(arrived.acquire(timeout=10) for _ in range(2))
            assert all(list(pool.map(lambda _: failure(reader), range(4))))
            go.set()
            assert all(future.result().answer for future in holding)
        reading = reader.read(QUESTION, DOCUMENT)
        backend.close()
        calls = sum(QUESTION in str(request.body) for request in server.requests)
        assert calls == len(reading.steps), "a call that was given up is not made later"


class Slow(ScriptedBackend):
    """Waits for `go` in one call, or between two pieces of its answer; async as well."""

    def __init__(self, at: int, *, pieces: bool = False, **options: Any) -> None:
        super().__init__(lambda prompt: "a note", **options)
        self.at, self.pieces, self.go = at, pieces, threading.Event()
        self.cancelled = self.tries = 0

    def wait(self, prompt: Prompt, *, pieces: bool = False) -> None:
        if prompt.index == self.at and pieces == self.pieces:
            self.go.wait(5)

    def complete(self, prompt: Prompt) -> Reply:
        self.tries += prompt.index == self.at
        self.wait(prompt)
        return super().complete(prompt)

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        for piece in super().stream(prompt):
            yield piece
            self.wait(prompt, pieces=True)

    async def await_(self, prompt: Prompt, *, pieces: bool = False) -> None:
        if prompt.index == self.at and pieces == self.pieces and not self.go.is_set():
            await asyncio.Event().wait()

    async def acomplete(self, prompt: Prompt) -> Reply:
        try:
            await self.await_(prompt)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return super().complete(prompt)

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        await self.acomplete(prompt)
        for piece in super().stream(prompt):
            yield piece
            await self.await_(prompt, pieces=True)


@pytest.fixture
def slow() -> Iterator[Callable[..., Slow]]:
    backends: list[Slow] = []

    def make(at: int, **options: Any) -> Slow:
        backends.append(Slow(at, **options))
        return backends[-1]

    yield make
    for backend in backends:
        backend.go.set()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("limit", "message"), [("call_timeout", "no reply within 0.1 s"), ("run_timeout", "took more than its 0.1 s")]
)
@pytest.mark.parametrize("at", [1, 4])
def test_a_call_that_takes_too_long_is_given_up(
    slow: Callable[..., Slow], how: str, limit: str, message: str, at: int
) -> None:
    backend, started = slow(at), time.monotonic()
    with pytest.raises(BackendError, match=message) as caught:
        read(Reader(backend, limits=Limits(**{limit: 0.1}), **SIZES), how)
    assert caught.value.retryable
    assert time.monotonic() - started < 4
    assert backend.cancelled == how.startswith("a")


@pytest.mark.parametrize("how", ["stream", "astream"])
def test_a_stream_that_stalls_is_given_up(slow: Callable[..., Slow], how: str) -> None:
    reader = Reader(slow(4, pieces=True), limits=Limits(call_timeout=0.2), **SIZES)
    with pytest.raises(BackendError, match="no reply within"):
        read(reader, how)


@pytest.mark.parametrize("how", HOW)
def test_time_limits_that_are_kept_change_nothing(how: str) -> None:
    script = ["a", "b", "c", "d", "the answer"]
    plain = read(Reader(scripted(script), **SIZES), how)
    assert read(Reader(scripted(script), limits=Limits(call_timeout=30, run_timeout=60), **SIZES), how) == plain


def test_a_stream_with_a_time_limit_that_is_left_is_closed() -> None:
    closed: list[bool] = []

    class Closing(ScriptedBackend):
        def stream(self, prompt: Prompt) -> Generator[str | Reply]:
            try:
                yield from super().stream(prompt)
            finally:
                closed.append(True)

    reader = Reader(Closing(lambda prompt: "some words of a note"), limits=Limits(call_timeout=30), **SIZES)
    with closing(reader.stream(QUESTION, DOCUMENT)) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, str):
                break
    assert closed == [True]


def test_a_call_that_takes_too_long_is_retried(slow: Callable[..., Slow]) -> None:
    backend = slow(1)
    reader = Reader(backend, limits=Limits(call_timeout=0.2, max_retries=1), **SIZES)
    assert "no reply within" in failure(reader)
    assert backend.tries == 2


@pytest.mark.parametrize("how", ["stream", "astream"])
def test_a_slow_reader_of_a_stream_makes_the_model_no_slower(how: str) -> None:
    reader = Reader(scripted(lambda prompt: "some words of a note"), limits=Limits(call_timeout=0.3), **SIZES)
    if how == "stream":
        for event in reader.stream(QUESTION, DOCUMENT):
            threading.Event().wait(0.1 if isinstance(event, str) else 0)
    else:

        async def slowly() -> None:
            async for event in reader.astream(QUESTION, DOCUMENT):
                await asyncio.sleep(0.1 if isinstance(event, str) else 0)

        asyncio.run(slowly())
    assert event.answer == "some words of a note" if how == "stream" else True


def test_a_stream_that_was_given_up_is_closed(slow: Callable[..., Slow]) -> None:
    closed = threading.Event()

    class Closing(Slow):
        def stream(self, prompt: Prompt) -> Generator[str | Reply]:
            try:
                yield from super().stream(prompt)
            finally:
                if prompt.phase == "answer":
                    closed.set()

    backend = Closing(ANSWER, pieces=True)
    with pytest.raises(BackendError, match="no reply within"):
        read(Reader(backend, limits=Limits(call_timeout=0.1), **SIZES), "stream")
    backend.go.set()
    assert closed.wait(PATIENCE)


def test_a_stream_has_one_context() -> None:
    name: ContextVar[str] = ContextVar("name", default="")

    class Aware(ScriptedBackend):
        def stream(self, prompt: Prompt) -> Generator[str | Reply]:
            token = name.set("mine")
            try:
                yield from super().stream(prompt)
                assert name.get() == "mine"
            finally:
                name.reset(token)

    reader = Reader(Aware(lambda prompt: "some words of a note"), limits=Limits(call_timeout=30), **SIZES)
    assert read(reader, "stream").answer == "some words of a note"
    assert not name.get()


def test_an_interrupt_ends_the_retries_of_all() -> None:
    """The other readings pause between two tries, in threads that the interpreter would wait for."""

    def script(prompt: Prompt) -> BackendError:
        if "Question 2?" in prompt.messages[0].content:
            wait_until(lambda: len(backend.prompts) == 3)
            raise KeyboardInterrupt
        return BackendError("busy", retryable=True, retry_after=60)

    backend = scripted(script, retries=5, concurrency=3)
    before = {thread.ident for thread in threading.enumerate()}
    with pytest.raises(KeyboardInterrupt):
        read_many(Reader(backend, **SIZES), "read_many", 3)
    wait_until(lambda: {thread.ident for thread in threading.enumerate()} <= before)


def test_no_retry_beyond_the_end_of_a_reading() -> None:
    backend = scripted(failing(9, BackendError("busy", retryable=True, retry_after=5)), retries=5)
    started = time.monotonic()
    with pytest.raises(BackendError, match="busy"):
        Reader(backend, limits=Limits(run_timeout=1), **SIZES).read(QUESTION, DOCUMENT)
    assert time.monotonic() - started < 4


class Batches(ScriptedBackend):
    """Computes batches, the first of them slowly."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__(lambda prompt: "a note", batch_size=4)
        self.seconds = iter(seconds)

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        threading.Event().wait(next(self.seconds, 0))
        return super().complete_batch(prompts)


@pytest.mark.parametrize("limit", ["call_timeout", "run_timeout"])
def test_batches_have_the_limits_too(limit: str) -> None:
    jobs = [(f"Question {number}?", DOCUMENT) for number in range(3)]
    assert all(reading.answer for reading in Reader(Batches([]), limits=Limits(**{limit: 30}), **SIZES).read_many(jobs))
    late = Reader(Batches([0, 0.6]), limits=Limits(**{limit: 0.3}), **SIZES).read_many(jobs)
    for reading in late:
        assert isinstance(reading.error, BackendError)
        assert limit in str(reading.error)
        assert len(reading.steps) == 1


def test_with_a_journal_a_reading_goes_on_where_its_time_was_up(tmp_path: Any, slow: Callable[..., Slow]) -> None:
    backend = slow(2)
    reader = Reader(backend, limits=Limits(run_timeout=0.2), journal=tmp_path / "runs.db", **SIZES)
    with pytest.raises(BackendError, match="read again to resume"):
        reader.read(QUESTION, DOCUMENT)
    backend.go.set()
    reading = reader.read(QUESTION, DOCUMENT)
    assert [step.reply.recorded for step in reading.steps] == [True, True, False, False, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"call_timeout": 0},
        {"call_timeout": float("nan")},
        {"run_timeout": -1},
        {"run_timeout": "1"},
        {"run_timeout": 1e300},
        {"max_retries": -1},
        {"retry_ratio": -0.1},
        {"breaker_threshold": 0},
        {"breaker_cooldown": float("inf")},
    ],
)
def test_limits_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Limits(**wrong)


async def test_a_client_whose_own_time_limit_comes_first_tells_whose_limit_it_was() -> None:
    def script(prompt: Prompt) -> str:
        assert prompt.deadline
        threading.Event().wait(prompt.deadline - time.monotonic() - 0.02)
        raise BackendError("the client timed out", retryable=True)

    reader = Reader(ScriptedBackend(script), limits=Limits(run_timeout=0.3, max_retries=0), **SIZES)
    with pytest.raises(BackendError, match=r"took more than its 0.3 s \(run_timeout\)"):
        reader.read(QUESTION, DOCUMENT)
    with pytest.raises(BackendError, match=r"took more than its 0.3 s \(run_timeout\)"):
        await reader.aread(QUESTION, DOCUMENT)
