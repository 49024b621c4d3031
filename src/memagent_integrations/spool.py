"""Chunks kept in a temporary file, to be read from any place on."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from tempfile import SpooledTemporaryFile
from typing import Any, Self

from memagent_integrations.errors import UsageError
from memagent_integrations.records import Chunk

_IN_MEMORY = 1 << 22  # bytes; more goes to the disk


class Spool:
    """The chunks of a document, of which a number for each stays in memory. The file is removed when it is closed."""

    def __init__(self) -> None:
        self._file: SpooledTemporaryFile[bytes] = SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        self._places: list[int] = []

    def fill(self, source: Iterable[Chunk]) -> None:
        """Add the chunks of `source`, to its end.

        Raises:
            UsageError: the disk is full.
        """
        for chunk in source:
            with _errors():
                self._places.append(self._file.seek(0, 2))
                pickle.dump(chunk, self._file)

    def __len__(self) -> int:
        return len(self._places)

    def between(self, start: int, stop: int) -> Iterator[Chunk]:
        """Yield the chunks with the numbers from `start` to `stop` (exclusive)."""
        for place in self._places[start:stop]:
            with _errors():
                self._file.seek(place)
                chunk: Chunk = pickle.load(self._file)
            yield chunk

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Replayable:
    """Chunks that come from `source` the first time, which is to its end, and from the spool after that."""

    def __init__(self, source: Iterable[Chunk], spool: Spool) -> None:
        self._source, self._spool = source, spool

    def __iter__(self) -> Iterator[Chunk]:
        if self._spool:
            yield from self._spool.between(0, len(self._spool))
            return
        for chunk in self._source:
            self._spool.fill([chunk])
            yield chunk


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"the text of the document cannot be kept in a temporary file: {error}") from error
