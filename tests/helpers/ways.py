"""The ways to read a document with a reader, to call a runnable with many inputs, and to wait for other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

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


async def batch(subject: Any, how: str, inputs: list[Any], config: Any = None, **options: Any) -> list[Any]:
    """Return the outputs of a runnable for many inputs, in their order."""
    if how == "batch":
        return list(subject.batch(inputs, config, **options))
    if how == "abatch":
        return list(await subject.abatch(inputs, config, **options))
    if how == "batch_as_completed":
        pairs = list(subject.batch_as_completed(inputs, config, **options))
    else:
        pairs = [pair async for pair in subject.abatch_as_completed(inputs, config, **options)]
    return [output for _, output in sorted(pairs, key=lambda pair: pair[0])]


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
