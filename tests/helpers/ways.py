"""The ways to read a document with a reader, and to wait for what happens in other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from memagent_integrations import Reader, Reading

HOW = ("read", "aread", "stream", "astream", "read_many", "aread_many")


def read(reader: Reader, how: str, question: str, document: str) -> Reading:
    """Return the reading; raise the error that ended it."""
    if how == "read":
        return reader.read(question, document)
    if how == "read_many":
        return _raised(reader.read_many([(question, document)])[0])
    if how == "stream":
        *_, last = reader.stream(question, document)
        assert isinstance(last, Reading)
        return last

    async def read_async() -> Reading:
        if how == "aread":
            return await reader.aread(question, document)
        if how == "aread_many":
            return _raised((await reader.aread_many([(question, document)]))[0])
        *_, last = [event async for event in reader.astream(question, document)]
        assert isinstance(last, Reading)
        return last

    return asyncio.run(read_async())


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, at most ten seconds."""
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition never held")


def _raised(reading: Reading) -> Reading:
    if reading.error:
        raise reading.error
    return reading
