"""An API key never appears in errors, logs, readings, traces, journals, pages or pickles."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from helpers.loopback import Loopback, Request, Response, chat

from memagent_integrations import Journal, MemAgentError, Reader, Reading, save_trace
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.trace import page

pytestmark = pytest.mark.heavy

KEY = "a-key-that-nobody-may-see-0123456789"
DOCUMENT = "Some words of a long document. " * 60


def error(status: int) -> Callable[[str], Response]:
    return lambda text: Response(status=status, body={"error": {"message": text}})


ECHOES: dict[str, Callable[[str], Response]] = {
    "a refusal": error(401),
    "a failure": error(500),
    "a bad request": error(400),
    "an unknown model": error(404),
    "a window that is too small": lambda text: error(400)(f"maximum context length {text}"),
    "an error with status 200": error(200),
    "no JSON": lambda text: Response(body=f"{{{text}".encode(), headers={"Content-Type": "application/json"}),
    "a page": lambda text: Response(body=text.encode(), headers={"Content-Type": "text/html"}),
    "a header": lambda text: Response(status=429, body={}, headers={"Retry-After": text, "X-Request-Id": text}),
    "a header that is none": lambda text: Response(status=200, body=b"", headers={"Broken\n": text}),
    "a redirection": lambda text: Response(status=302, body=b"", headers={"Location": f"http://127.0.0.1:1/{text}"}),
}


@pytest.mark.parametrize("how", ["read", "stream", "aread", "astream"])
@pytest.mark.parametrize("echo", ECHOES)
def test_a_server_that_gives_the_key_away(
    echo: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, calls = chat(["a note", "another note", "the answer"]), iter(range(100))

    def respond(request: Request) -> Response:
        return good(request) if next(calls) < 2 else ECHOES[echo](f"you said {request.headers['Authorization']} {KEY}")

    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "memagent_integrations")
    with Loopback(respond) as server:
        backend = OpenAIBackend("m", base_url=f"{server.url}/v1", api_key=KEY, tokenizer="approximate", max_retries=0)
        with (
            Reader(backend, chunk_tokens=250, memory_tokens=60, window=2000, journal=tmp_path / "runs.db") as reader,
            pytest.raises(MemAgentError) as caught,
        ):
            read(reader, how)
        assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    failure, reading = caught.value, caught.value.reading
    assert reading is not None
    assert len(reading.steps) == 2
    saved = (tmp_path / "saved.json", tmp_path / "page.html")
    reading.save(saved[0])
    save_trace(reading, saved[1])
    texts = [
        str(failure),
        repr(failure),
        repr(backend),
        repr(reader),
        repr(reading),
        reading.to_json(),
        page(reading),
        reading._repr_html_(),
        caplog.text,
    ]
    for text in texts:
        assert KEY not in text
    assert KEY not in str(failure.args)
    assert KEY.encode() not in pickle.dumps(failure.with_traceback(None)) + pickle.dumps(reading)
    for file in (*saved, *tmp_path.glob("runs.db*")):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    assert KEY not in "".join(traceback.format_exception(failure))


def read(reader: Reader, how: str) -> Reading | None:
    if how == "read":
        return reader.read("Why?", DOCUMENT)
    if how == "stream":
        for _ in reader.stream("Why?", DOCUMENT):
            pass
        return None

    async def read_async() -> None:
        async with reader:
            if how == "aread":
                await reader.aread("Why?", DOCUMENT)
            async for _ in reader.astream("Why?", DOCUMENT):
                pass

    asyncio.run(read_async())
    return None


def test_a_journal_of_a_reading_with_a_key(tmp_path: Path) -> None:
    good = chat(["a note", "the answer"])
    with Loopback(lambda request: good(replace(request, path=request.path.partition("?")[0]))) as server:
        url = server.url.replace("//", f"//me:{KEY}@")
        options = {
            "base_url": f"{url}/v1?token={KEY}",
            "api_key": KEY,
            "tokenizer": "approximate",
            "extra_body": {"password": KEY},
        }
        sizes = {"window": 2000, "chunk_tokens": 400, "memory_tokens": 60}
        with Reader("openai:m", backend_options=options, journal=tmp_path / "runs.db", **sizes) as reader:
            reading = reader.read("Why?", DOCUMENT, run="mine")
    with Journal(tmp_path / "runs.db") as journal:
        assert journal.reading("mine") == reading
        texts = [
            repr(journal.settings("mine")),
            repr(journal.runs()),
            page(journal.reading("mine")),
            reading.to_json(),
            repr(pickle.dumps(journal)),
        ]
    assert KEY not in "".join(texts)
    for file in tmp_path.glob("runs.db*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()


SECRET = "p/w+of a s&rver-0123456789"
PLACES: dict[str, Callable[[str], str]] = {
    "the password": lambda url: url.replace("//", f"//me:{quote(SECRET, safe='')}@"),
    "the user": lambda url: url.replace("//", f"//{quote(SECRET, safe='')}@"),
    "the query": lambda url: f"{url}?token={quote(SECRET, safe='')}",
}
SENT_BACK: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "percent-encoded": lambda key: quote(key, safe=""),
    "as a form": quote_plus,
    "percent-encoded in small letters": lambda key: quote(key, safe="").lower(),
    "in base64": lambda key: base64.b64encode(f"me:{key}".encode()).decode(),
    "in the user's base64": lambda key: base64.b64encode(f"{key}:".encode()).decode(),
}


@pytest.mark.parametrize("how", ["read", "astream"])
@pytest.mark.parametrize("form", SENT_BACK)
@pytest.mark.parametrize("place", PLACES)
def test_a_server_that_gives_away_what_its_address_holds(
    place: str, form: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    echo = SENT_BACK[form](SECRET)
    caplog.set_level(logging.INFO)
    with Loopback(lambda request: error(400)(f"{request.path} with {echo} is refused")) as server:
        url = PLACES[place](f"{server.url}/v1")
        backend = OpenAIBackend("m", base_url=url, tokenizer="approximate", window=2000, max_retries=0)
        with Reader(backend, chunk_tokens=250, memory_tokens=60) as reader, pytest.raises(MemAgentError) as caught:
            read(reader, how)
        asked = server.requests[0]
        assert quote_plus(SECRET) in asked.path or "Basic " in asked.headers["Authorization"]
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(backend.identity) + repr(reader)
    assert "is refused" in shown
    for hidden in (echo, *(form(SECRET) for form in SENT_BACK.values())):
        assert hidden not in shown
