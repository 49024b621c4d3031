"""The web application over real sockets: what it shows, what it changes, and whom it refuses."""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from helpers.serving import CHUNKS, PATIENCE, QUESTION, HeldModel, until

from memagent_integrations import Journal, Reader, RunPaused, UsageError
from memagent_integrations.serve import Server

pytestmark = pytest.mark.heavy


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {server.token}"}
    with httpx.Client(base_url=server.address, headers=headers, timeout=PATIENCE) as client:
        yield client


def state(client: httpx.Client, name: str = "first") -> str:
    return str(client.get("/api/run", params={"name": name}).json()["run"]["state"])


def test_runs_and_their_readings_are_shown(read: Callable[..., Any], client: httpx.Client, book: Path) -> None:
    assert client.get("/api/runs").json() == []
    reading = read()
    (run,) = client.get("/api/runs").json()
    assert {name: run[name] for name in ("name", "state", "question", "steps", "files", "failure")} == {
        "name": "first",
        "state": "finished",
        "question": QUESTION,
        "steps": CHUNKS + 1,
        "files": [str(book)],
        "failure": None,
    }
    shown = client.get("/api/run", params={"name": "first"}).json()["reading"]
    assert (shown["answer"], len(shown["steps"]), shown["tokens"][0]) == ("Anna.", CHUNKS, reading.usage.prompt_tokens)
    news = client.get("/api/run", params={"name": "first", "have": 4}).json()["reading"]
    assert [step["index"] for step in news["steps"]] == [4, 5, 6, 7, 8]
    assert client.get("/api/run", params={"name": "first", "have": CHUNKS + 1}).json()["reading"] is None


def test_a_page_with_more_steps_than_the_run_gets_an_answer(
    read: Callable[..., Any], client: httpx.Client, journal: Journal
) -> None:
    """The run was deleted, and its name belongs to a shorter one."""
    read()
    name = journal.edit("first", 2)
    for have in (4, CHUNKS + 1):
        answer = client.get("/api/run", params={"name": name, "have": have}).json()
        assert (answer["run"]["steps"], answer["reading"]) == (3, None)


def test_a_journal_that_lacks_a_step_is_shown_without_it(
    read: Callable[..., Any], client: httpx.Client, journal: Journal, tmp_path: Path
) -> None:
    read()
    name = journal.edit("first", 4)
    with closing(sqlite3.connect(tmp_path / "runs.db")) as database:
        database.execute("DELETE FROM step WHERE number = 1")
        database.commit()
    for run, indices in (("first", [0, 2, 3, 4, 5, 6, 7, 8]), (name, [0, 2, 3, 4])):
        shown = client.get("/api/run", params={"name": run}).json()["reading"]
        assert [step["index"] for step in shown["steps"]] == indices


def test_a_request_that_does_not_end_is_given_up(
    server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memagent_integrations.serve.app._MOST_SECONDS", 0.2)

    host = server.address.removeprefix("http://")
    head = f"POST /api/pause HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.token}\r\n"
    with socket.create_connection(("127.0.0.1", int(host.partition(":")[2])), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}Content-Length: 2\r\n\r\n{{".encode())
        assert connection.recv(99).startswith(b"HTTP/1.1 408")
    assert client.get("/api/runs").json() == []


@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("begun", ["", "GET /api/runs HTTP/1.1\r\nHost: "])
def test_a_connection_without_a_whole_head_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch, whole: int, begun: str
) -> None:
    """The first on it, and one after a request that was answered."""
    monkeypatch.setattr("memagent_integrations.serve.app._MOST_SECONDS", 0.1)
    host = server.address.removeprefix("http://")
    with socket.create_connection(("127.0.0.1", int(host.partition(":")[2])), timeout=PATIENCE) as connection:
        for _ in range(whole):
            connection.sendall(f"GET /api/runs HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 401")
        connection.sendall(begun.encode())
        with suppress(ConnectionError):
            assert connection.recv(1 << 16) == b""


def test_a_connection_whose_client_does_not_read_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers to more requests than the system's buffers hold."""
    monkeypatch.setattr("memagent_integrations.serve.app._MOST_SECONDS", 0.1)
    host = server.address.removeprefix("http://")
    whole = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(host.partition(":")[2])), timeout=PATIENCE) as connection:
        with suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(whole)
        until(lambda: not server._server.server_state.connections)


def test_a_run_is_followed_paused_and_goes_on(read: Callable[..., Any], client: httpx.Client, model: HeldModel) -> None:
    model.hold()
    with ThreadPoolExecutor() as pool:  # a run that the server does not read
        reading = pool.submit(read)
        until(lambda: model.prompts)
        assert state(client) == "reading", "before anything of it is recorded"
        model.passes.release()
        until(lambda: len(model.prompts) == 2)
        assert state(client) == "reading"
        assert client.post("/api/pause", json={"name": "first"}).json() == {"name": None}
        assert state(client) == "pausing"
        model.passes.release(100)
        with pytest.raises(RunPaused, match="was paused after 2 steps; read again to resume"):
            reading.result()
    assert state(client) == "paused"
    assert client.post("/api/resume", json={"name": "first"}).status_code == 200
    until(lambda: state(client) == "finished")
    assert len(model.prompts) == CHUNKS + 1, "no call was made twice"


def test_an_edited_memory_is_gone_on_with_as_a_branch(
    read: Callable[..., Any], client: httpx.Client, model: HeldModel, journal: Journal
) -> None:
    before = read().steps
    calls = len(model.prompts)
    edit = {"name": "first", "step": 2, "memory": "Berta has the key, says a person."}
    name = client.post("/api/branch", json=edit).json()["name"]
    assert (name, state(client, name)) == ("first.1", "unfinished")
    assert client.post("/api/resume", json={"name": name}).status_code == 200
    until(lambda: state(client, name) == "finished")
    assert len(model.prompts) - calls == CHUNKS + 1 - 3
    assert "Berta has the key, says a person." in model.prompts[calls]
    branch = journal.reading(name)
    assert [step.memory for step in branch.steps[:2]] == [step.memory for step in before[:2]]
    assert branch.steps[2].reply.edited == branch.steps[2].memory == "Berta has the key, says a person."
    assert journal.reading("first").steps == before, "what is recorded stays"
    other = client.post("/api/branch", json={"name": "first", "step": 1, "memory": None}).json()["name"]
    assert journal.reading(other).steps == before[:2]
    assert client.post("/api/resume", json={"name": "first"}).json()["error"].startswith("the run first is finished")


def test_what_goes_wrong_is_told(
    read: Callable[..., Any], client: httpx.Client, model: HeldModel, journal: Journal, book: Path
) -> None:
    read()
    name = journal.edit("first", 1, memory="another note")
    model.broken = True
    client.post("/api/resume", json={"name": name})
    failure = until(lambda: client.get("/api/run", params={"name": name}).json()["run"]["failure"])
    assert "out of order" in failure
    model.broken = False
    book.unlink()
    client.post("/api/resume", json={"name": name})
    until(lambda: "book.txt" in (client.get("/api/run", params={"name": name}).json()["run"]["failure"] or ""))
    read("text", "Some words, and no file. " * 60)
    name = journal.edit("text", 1, memory="another note")
    assert "memagent runs resume text.1 FILE" in client.post("/api/resume", json={"name": name}).json()["error"]


def test_two_do_not_read_one_run(
    read: Callable[..., Any], client: httpx.Client, model: HeldModel, journal: Journal
) -> None:
    read()
    name = journal.edit("first", 1, memory="another note")
    model.hold()
    assert client.post("/api/resume", json={"name": name}).status_code == 200
    assert "is being read" in client.post("/api/resume", json={"name": name}).json()["error"]
    until(lambda: state(client, name) == "reading")
    assert "is being read" in client.post("/api/resume", json={"name": name}).json()["error"]
    model.passes.release(100)
    until(lambda: state(client, name) == "finished")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/run?name=nobody", None, 400),
        ("/api/run?name=first&have=x", None, 400),
        ("/api/run?name=first&have=-1", None, 400),
        ("/api/run?name=first&have=99999999999999999999", None, 400),
        ("/api/nothing", None, 404),
        ("/api/pause", None, 405),
        ("/api/pause", b"{", 400),
        ("/api/pause", b"\xff", 400),
        ("/api/pause", b"[]", 400),
        ("/api/pause", b'{"name": 3}', 400),
        ("/api/pause", b'{"name": "nobody"}', 400),
        ("/api/pause", b'{"name": "first"}', 400),
        ("/api/resume", b'{"name": "nobody"}', 400),
        ("/api/branch", b'{"name": "first", "step": 1, "memory": ""}', 400),
        ("/api/branch", b'{"name": "first", "step": 1, "memory": 7}', 400),
        ("/api/branch", b'{"name": "first", "step": 99, "memory": null}', 400),
        ("/api/branch", b'{"name": "first", "step": -1, "memory": null}', 400),
        ("/api/branch", b'{"name": "first", "step": true, "memory": null}', 400),
        ("/api/branch", b'{"name": "first", "step": 1e400, "memory": null}', 400),
        ("/api/branch", b"[" * 100_000, 400),
        ("/api/branch", b" " * (1 << 20) + b"{}", 413),
        ("/api/branch", iter([b"{}"]), 411),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    read: Callable[..., Any], client: httpx.Client, path: str, body: bytes | Iterator[bytes] | None, status: int
) -> None:
    read()
    answer = client.get(path) if body is None else client.post(path, content=body)
    assert answer.status_code == status
    assert answer.json()["error"]
    assert state(client) == "finished"


def test_the_page_is_for_everybody_and_holds_no_data(read: Callable[..., Any], server: Server) -> None:
    read()
    answer = httpx.get(server.address)
    assert answer.status_code == 200
    assert "Anna" not in answer.text
    assert server.token not in answer.text
    assert "connect-src 'self'" in unescape(answer.text)
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer \u00e9".encode("latin-1")}, 401),
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": "elsewhere.example"}, 403),
        ({"Host": "127.0.0.1"}, 403),
    ],
)
def test_others_are_refused(
    read: Callable[..., Any], client: httpx.Client, headers: dict[str, Any], status: int
) -> None:
    read()
    for answer in (
        client.get("/api/runs", headers=headers),
        client.post("/api/pause", json={"name": "first"}, headers=headers),
    ):
        assert answer.status_code == status
        assert "first" not in answer.text
        assert "access-control-allow-origin" not in answer.headers


def test_it_listens_on_the_loopback_interface_alone(server: Server, journal: Journal) -> None:
    port = int(server.address.rpartition(":")[2])
    assert {
        bound.laddr.ip
        for bound in psutil.Process().net_connections("tcp")
        if bound.laddr.port == port and bound.status == "LISTEN"
    } == {"127.0.0.1"}
    for wrong, said in ((port, "cannot listen on port"), (70000, "port"), (-1, "port")):
        with pytest.raises(UsageError, match=said):
            Server(journal, Reader.from_run, port=wrong)


def test_hostile_text_arrives_as_it_is(read: Callable[..., Any], client: httpx.Client, journal: Journal) -> None:
    hostile = "</script><img src=x onerror=alert(1)> \u2028 \ud800 \x00"
    read()
    body = json.dumps({"name": "first", "step": 1, "memory": hostile})
    name = client.post("/api/branch", content=body).json()["name"]
    assert journal.reading(name).memory == hostile
    answer = client.get("/api/run", params={"name": name})
    assert answer.headers["Content-Type"] == "application/json"
    assert "<img" in "".join(text for _, text in answer.json()["reading"]["steps"][1]["diff"])
