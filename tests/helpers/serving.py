"""What tests of the web application share: a model whose calls can be held back, and waiting for a condition."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from helpers.loopback import Response

QUESTION = "Who has the key?"
CHUNKS = 9
PATIENCE = 20
"""Seconds that a test waits at most."""


class HeldModel:
    """An endpoint that notes its prompts. After `hold`, each call waits for `passes` to be released."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.broken = False
        self.let_through()

    def hold(self) -> None:
        self.passes = threading.Semaphore(0)

    def let_through(self) -> None:
        self.passes = threading.Semaphore(10_000)

    def __call__(self, prompt: str) -> str | Response:
        self.prompts.append(prompt)
        self.passes.acquire(timeout=PATIENCE)
        if self.broken:
            return Response(status=400, body={"error": {"message": "out of order"}})
        return f"Note {len(self.prompts)}. Anna has the key." if "<section>" in prompt else "Anna."


def until(condition: Callable[[], Any]) -> Any:
    """Return what `condition` gives as soon as that is true."""
    for _ in range(PATIENCE * 50):
        if value := condition():
            return value
        threading.Event().wait(0.02)
    raise AssertionError(f"the condition was not met within {PATIENCE} s")
