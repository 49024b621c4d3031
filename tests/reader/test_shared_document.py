"""A document that several readings share, each of which goes its own way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from memagent_integrations import BackendError, Reader, ScriptedBackend, UsageError
from memagent_integrations.reader.sharing import SharedDocument, SharedDocuments
from memagent_integrations.records import Chunk, Span

CHUNKS = [Chunk(span=Span(index=n, start=n, end=n + 1, tokens=1), text=f"{n}" * 1000) for n in range(50)]


class Cut:
    """Cuts a document into the chunks that it is a list of, and counts how often."""

    def __init__(self) -> None:
        self.begun = self.made = 0

    def __call__(self, document: list[Chunk | BaseException]) -> Iterator[Chunk]:
        self.begun += 1
        for item in document:
            if isinstance(item, BaseException):
                raise item
            self.made += 1
            yield item

    async def later(self, document: list[Chunk | BaseException]) -> AsyncGenerator[Chunk]:
        for chunk in self(document):
            await asyncio.sleep(0)
            yield chunk


def test_each_reading_gets_all_chunks_whenever_it_begins() -> None:
    shared, cut = SharedDocument(CHUNKS), Cut()
    with closing(shared):
        first = shared.chunks(cut)
        assert [next(first) for _ in range(3)] == CHUNKS[:3]
        assert cut.made == 3, "no chunk is made before a reading comes to it"
        assert list(shared.chunks(cut)) == CHUNKS
        assert list(first) == CHUNKS[3:]
        assert list(shared.chunks(cut)) == CHUNKS
        assert (cut.begun, cut.made) == (1, 50)


def test_readings_in_threads_get_them_too() -> None:
    shared, cut = SharedDocument(CHUNKS), Cut()
    with closing(shared):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: list(shared.chunks(cut)), range(16))) == [CHUNKS] * 16
        assert (cut.begun, cut.made) == (1, 50)


async def test_readings_of_an_async_document_get_them_too() -> None:
    shared, cut = SharedDocument(CHUNKS), Cut()

    async def read() -> list[Chunk]:
        return [chunk async for chunk in shared.achunks(cut.later)]

    assert await asyncio.gather(*(read() for _ in range(8))) == [CHUNKS] * 8
    assert (cut.begun, cut.made) == (1, 50)
    await shared.aclose()
    with pytest.raises(UsageError, match="have ended"):
        await read_all(shared.achunks(Cut().later))


async def read_all(chunks: AsyncGenerator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def test_an_error_comes_after_the_chunks_before_it_to_each_reading() -> None:
    shared, cut = SharedDocument([*CHUNKS[:2], BackendError("no tokens", retryable=True)]), Cut()
    with closing(shared):
        errors = []
        for _ in range(3):
            chunks = shared.chunks(cut)
            assert [next(chunks), next(chunks)] == CHUNKS[:2]
            with pytest.raises(BackendError, match="no tokens") as error:
                next(chunks)
            assert error.value.retryable
            errors.append(error.value)
        assert len({id(error) for error in errors}) == 3, "a reading leaves its steps on its error"
        assert cut.begun == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_reading_that_is_stopped_is_not_the_end_of_the_document(stop: BaseException) -> None:
    shared, cut = SharedDocument([CHUNKS[0], stop, CHUNKS[1]]), Cut()
    with closing(shared):
        chunks = shared.chunks(cut)
        next(chunks)
        with pytest.raises(type(stop)):
            next(chunks)
        with pytest.raises(UsageError, match="not read to its end"):
            list(shared.chunks(cut))


async def test_a_task_that_is_cancelled_is_not_the_end_of_the_document() -> None:
    shared, waiting = SharedDocument(CHUNKS), asyncio.Event()

    async def cut(document: list[Chunk]) -> AsyncGenerator[Chunk]:
        yield document[0]
        waiting.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(read_all(shared.achunks(cut)))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(UsageError, match="not read to its end"):
        await read_all(shared.achunks(cut))
    await shared.aclose()


def test_a_reader_takes_it_in_place_of_the_document() -> None:
    shared = SharedDocument(iter(["Some words. " * 60]))
    reader = Reader(ScriptedBackend(lambda prompt: "yes"), chunk_tokens=70, memory_tokens=50)
    readings = [reader.read(question, shared) for question in ("Who?", "Why?")]
    alone = reader.read("Who?", "Some words. " * 60)
    assert len(alone.steps) > 2
    assert [[step.span for step in reading.steps] for reading in readings] == [[step.span for step in alone.steps]] * 2
    shared.close()


def test_what_is_shared_is_dropped_when_the_last_of_its_readings_ends() -> None:
    alone, several = CHUNKS[:10], CHUNKS[:20]
    shared, cut = SharedDocuments([(several, 1), (alone, 1), (several, 1), (several, 2)]), Cut()
    documents: list[Any] = []
    for document, variant in ((alone, 1), (several, 2)):
        with shared.lent(document, variant) as itself:
            assert itself is document
    for _ in range(2):
        with shared.lent(several, 1) as lent:
            documents.append(lent)
            assert list(lent.chunks(cut)) == several
    assert documents[0] is documents[1]
    with pytest.raises(UsageError, match="have ended"):
        list(documents[0].chunks(cut))
    assert cut.begun == 1
    assert not SharedDocuments([("a", 1), ("b", 1), ("a", 2)])
