"""The command line in this process and as a process of its own, and a document that the tests read with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner, Result

from helpers.loopback import Loopback
from memagent_integrations.cli import app

QUESTION = "What is the code of the north gate?"
DOCUMENT = "The harbour master noted the tide.\r\n\r\n" * 60 + "The code of the north gate is 7319.\r\n"
CHUNKED = ("--chunk-tokens", "200", "--memory-tokens", "60", "--output-tokens", "60")
CHUNKS = 4
PROGRAM = [sys.executable, "-c", "from memagent_integrations.cli import app; app()"]


def reply(prompt: str) -> str:
    """A model that finds the code in a section or in its memory."""
    if "<section>" in prompt:
        return "The code is 7319." if "7319" in prompt else "Nothing of the gate yet."
    return "It is 7319." if "7319" in prompt else "The memory does not say."


class SlowAtSecond:
    """A model that tells when it is at the second chunk, and goes on only when all is over."""

    def __init__(self, reply: Callable[[str], str] = reply) -> None:
        self._reply, self.reached, self.over = reply, threading.Event(), threading.Event()

    def __call__(self, prompt: str) -> str:
        if "Nothing of the gate yet." in prompt:
            self.reached.set()
            self.over.wait(60)
        return self._reply(prompt)


def at(server: Loopback) -> list[str]:
    return ["--model", "openai:tiny", "--base-url", f"{server.url}/v1"]


def prompts(server: Loopback) -> list[str]:
    return [body["messages"][0]["content"] for body in server.bodies("/v1/chat/completions")]


def run(*args: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def process(*args: object, closed: int | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Start the command line, with the file descriptor `closed` closed; standard output and error are pipes."""

    def prepare() -> None:
        # a shell that runs the tests in the background has them ignore SIGINT, and children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if closed is not None:
            os.close(closed)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*PROGRAM, *map(str, args)], preexec_fn=prepare, **(pipes | options))
