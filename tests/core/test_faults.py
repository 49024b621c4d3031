"""Every fault of a server has one right outcome: the table in docs/reliability.md, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers.loopback import Loopback, Request, Response, chat, completion, events

from memagent_integrations import BackendError, Reader, Reading
from memagent_integrations.backends.openai import OpenAIBackend

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = "Some words of a long document. " * 60
QUESTION = "Why?"
MEMORY_CALL, ANSWER_CALL, CALLS = 1, 3, 4  # counted from 0: the second of three chunks, the answer
TIMEOUT = 0.5


def reply(prompt: str) -> str:
    if "<section>" not in prompt:
        return "the answer"
    before = prompt.rpartition("<memory>\n")[2].partition("\n")[0]
    return f"{before} and more" if before.startswith("note") else "note"


def problem(status: int, **headers: str) -> Callable[[dict[str, Any], bool], Response]:
    return lambda good, stream: Response(status=status, body={"error": {"message": "an error text"}}, headers=headers)


def changed(finish_reason: str = "stop", **message: Any) -> Callable[[dict[str, Any], bool], Response]:
    """Send the reply with another message."""

    def respond(good: dict[str, Any], stream: bool) -> Response:
        choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish_reason}
        if not stream:
            return Response(body=good | {"choices": [choice]})
        lines = [
            {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]},
        ]
        return sse(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines)

    return respond


def body(text: bytes, kind: str = "application/json") -> Callable[[dict[str, Any], bool], Response]:
    return lambda good, stream: Response(body=text, headers={"Content-Type": kind})


def sse(lines: Any) -> Response:
    return Response(body=iter(lines), headers={"Content-Type": "text/event-stream"})


def broken(good: dict[str, Any], stream: bool) -> Response:
    if stream:
        return replace(sse(itertools.islice(events(good), 1)), broken_after=0)
    return Response(body=json.dumps(good).encode(), headers={"Content-Type": "application/json"}, broken_after=40)


def hang(good: dict[str, Any], stream: bool) -> Response:
    threading.Event().wait(TIMEOUT * 3)
    return Response(status=500)


def drip(good: dict[str, Any], stream: bool) -> Response:
    text = b"".join(events(good)) if stream else json.dumps(good).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(text), 40):
            threading.Event().wait(0.01)
            yield text[start : start + 40]

    return Response(body=pieces(), headers={"Content-Type": "text/event-stream" if stream else "application/json"})


def huge(good: dict[str, Any], stream: bool) -> Response:
    return changed(content="note " * 10_000_000)(good, stream)


def old(good: dict[str, Any], stream: bool) -> Response:
    return replace(sse(events(good)) if stream else Response(body=good), old=True)


def no_end(good: dict[str, Any], stream: bool) -> Response:
    return sse(list(events(good))[:-3]) if stream else Response(body=good)


def twice(good: dict[str, Any], stream: bool) -> Response:
    if not stream:
        return Response(body=good)
    *text, finish, usage, done = events(good)
    return sse([*text, finish, finish, usage, usage, done, done])


Outcome = Literal["the reply", "retried", "the reply, cut"] | tuple[str, bool]
"""Or an error: a part of its message, and whether it is retryable."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    respond: Callable[[dict[str, Any], bool], Response]
    memory: Outcome
    answer: Outcome
    streamed: Outcome
    times: int = 1
    """In how many calls, one after the other."""


def fault(
    respond: Callable[[dict[str, Any], bool], Response],
    memory: Outcome,
    answer: Outcome | None = None,
    streamed: Outcome | None = None,
    *,
    times: int = 1,
) -> Fault:
    streamed, answer = streamed or answer or memory, answer or memory
    return Fault(respond=respond, memory=memory, answer=answer, streamed=streamed, times=times)


NO_MEMORY: Outcome = ("section 2 is lost: the model wrote no memory", True)
NO_ANSWER: Outcome = ("no answer", False)
FAULTS = {
    "429": fault(problem(429), "retried"),
    "429 with Retry-After": fault(problem(429, **{"Retry-After": "0.01"}), "retried"),
    "500": fault(problem(500), "retried"),
    "502": fault(problem(502), "retried"),
    "503": fault(problem(503), "retried"),
    "401": fault(problem(401), ("refused the API key", False)),
    "the connection is reset before the reply": fault(lambda good, stream: Response(reset=True), "retried"),
    "the connection breaks in the middle of the reply": fault(
        broken, "retried", streamed=("peer closed connection", True)
    ),
    "no reply within the timeout": fault(hang, "retried"),
    "the reply drips in slowly": fault(drip, "the reply"),
    "a reply of 50 MB": fault(huge, "retried"),
    "HTTP/1.0": fault(old, "the reply"),
    "invalid JSON": fault(body(b"{broken"), "retried"),
    "JSON that is not UTF-8": fault(body(b'{"a": "\xff"}'), "retried"),
    "another content type": fault(body(b"<html>sign in</html>", "text/html"), "retried"),
    "no choices": fault(lambda good, stream: Response(body=good | {"choices": []}), "retried"),
    "an error with status 200": fault(
        lambda good, stream: Response(body={"error": {"message": "an error text"}}), "retried"
    ),
    "null content": fault(changed(content=None), "retried"),
    "empty content": fault(changed(content=""), "retried"),
    "only zero-width characters": fault(changed(content="\u200b\u2060"), "retried"),
    "only thinking": fault(changed(content="<think>hm"), "retried"),
    "null content three times": fault(changed(content=None), NO_MEMORY, NO_ANSWER, times=3),
    "only thinking three times": fault(changed(content="<think>hm"), NO_MEMORY, NO_ANSWER, times=3),
    "finish_reason length": fault(changed("length", content="note that is cut"), "the reply, cut"),
    "finish_reason content_filter": fault(changed("content_filter", content=""), ("content filter", False)),
    "a stream without its last events": fault(no_end, "the reply", streamed=("broke off", True)),
    "the last events twice": fault(twice, "the reply"),
}
HOW = ("read", "aread", "stream", "astream")


def run(how: str, backend: OpenAIBackend, journal: Path | None) -> Reading:
    with Reader(backend, chunk_tokens=250, memory_tokens=60, window=2000, journal=journal) as reader:
        if how == "read":
            return reader.read(QUESTION, DOCUMENT)
        if how == "stream":
            *_, last = reader.stream(QUESTION, DOCUMENT)
            assert isinstance(last, Reading)
            return last

        async def read_async() -> Reading:
            async with backend:
                if how == "aread":
                    return await reader.aread(QUESTION, DOCUMENT)
                *_, last = [event async for event in reader.astream(QUESTION, DOCUMENT)]
                assert isinstance(last, Reading)
                return last

        return asyncio.run(read_async())


CASES = [
    (name, call, how)
    for name in FAULTS
    for call in (MEMORY_CALL, ANSWER_CALL)
    for how in HOW
    if "50 MB" not in name or how in ("read", "astream")
]


@pytest.mark.parametrize(("name", "call", "how"), CASES)
def test_a_fault_has_its_outcome(name: str, call: int, how: str, tmp_path: Path) -> None:
    fault, call_numbers = FAULTS[name], itertools.count()
    stream = "stream" in how and call == ANSWER_CALL
    outcome = fault.memory if call == MEMORY_CALL else fault.streamed if stream else fault.answer
    good = chat(reply)

    def respond(request: Request) -> Response:
        if not call <= next(call_numbers) < call + fault.times:
            return good(request)
        prompt = request.body["messages"][0]["content"]
        return fault.respond(completion(reply(prompt), prompt), bool(request.body.get("stream")))

    def backend(server: Loopback) -> OpenAIBackend:
        return OpenAIBackend(
            "m",
            base_url=f"{server.url}/v1",
            tokenizer="approximate",
            timeout=TIMEOUT if name.startswith("no reply") else 30,
            max_retries=2,
        )

    journal = tmp_path / "runs.db"
    with Loopback(good) as healthy:
        plain = run(how, backend(healthy), None)
    assert len(plain.steps) == CALLS
    with Loopback(respond) as server:
        if isinstance(outcome, tuple):
            with pytest.raises(BackendError, match=outcome[0]) as caught:
                run(how, backend(server), journal)
            assert caught.value.retryable == outcome[1]
            assert caught.value.reading is not None
            assert "error text" not in caught.value.reading.memory
        reading = run(how, backend(server), journal)  # resumes, if it failed before
    calls = next(call_numbers)
    if outcome in ("the reply", "retried") or isinstance(outcome, tuple):
        assert (reading.answer, reading.memory) == (plain.answer, plain.memory)
        assert calls == CALLS + (fault.times if outcome != "the reply" else 0)
    else:
        step = reading.steps[call]
        assert (step.outcome, step.cut) == ("updated" if call == MEMORY_CALL else "answered", True)


def test_the_table_in_the_docs_is_this_one() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| (.+ \| .+ \| .+?) \|$", page, re.MULTILINE))

    def words(outcome: Outcome) -> str:
        return outcome if isinstance(outcome, str) else "error, worth another try" if outcome[1] else "error"

    for name, fault in FAULTS.items():
        assert rows.get(name) == " | ".join(map(words, (fault.memory, fault.answer, fault.streamed))), name
