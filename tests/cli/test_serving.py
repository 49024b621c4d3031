"""`memagent serve` as a process: signals end it, whatever its clients and its readings are at."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.command_line import CHUNKED, QUESTION, at, process, run
from helpers.loopback import Loopback, chat
from helpers.serving import PATIENCE, HeldModel, until

from memagent_integrations import Journal

pytestmark = pytest.mark.heavy


@pytest.fixture
def model() -> Iterator[HeldModel]:
    model = HeldModel()
    yield model
    model.passes.release(100)


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 0, []), (signal.SIGTERM, 143, ["memagent: terminated"])]
)
def test_a_signal_ends_it(
    model: HeldModel, document: Path, tmp_path: Path, number: signal.Signals, code: int, said: list[str]
) -> None:
    """A client that sends half a head, one that sends half a body, an idle one, and a reading under way."""
    file = tmp_path / "runs.db"
    with Loopback(chat(model)) as endpoint, Journal(file) as journal:
        run("read", "-q", QUESTION, document, *at(endpoint), *CHUNKED, "--journal", file, "--run", "gate")
        journal.edit("gate", 0, memory="Nobody knows.", name="resumed")
        calls = len(model.prompts)
        model.hold()
        serving = process("serve", "--journal", file)
        try:
            assert serving.stdout
            address, _, token = serving.stdout.readline().decode().strip().partition("/#token=")
            host, authorization = address.removeprefix("http://"), {"Authorization": f"Bearer {token}"}
            head = f"HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n"
            clients = []
            for sent in (
                "GET /api/runs HTTP/1.1\r\nHost: ",
                f"POST /api/pause {head}Content-Length: 99\r\n\r\n{{",
                "",
            ):
                clients.append(socket.create_connection(("127.0.0.1", int(host.partition(":")[2])), timeout=PATIENCE))
                clients[-1].sendall(sent.encode())
            httpx.post(f"{address}/api/resume", json={"name": "resumed"}, headers=authorization).raise_for_status()
            until(lambda: len(model.prompts) > calls)
        finally:
            serving.send_signal(number)
            out, err = serving.communicate(timeout=PATIENCE)
            for client in clients:
                client.close()
            model.passes.release(100)
        assert (serving.returncode, out) == (code, b"")
        lines = [line for line in err.decode().splitlines() if not line.startswith("Cancel ")]  # uvicorn's
        assert lines == said
        assert journal.run("resumed").state == "unfinished"
