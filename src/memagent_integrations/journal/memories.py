"""Memories with a name: each reading goes on from what the one before it left, and no document is read twice."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from memagent_integrations.errors import UsageError
from memagent_integrations.journal.store import Store
from memagent_integrations.records import Chunk, Reading

_SPACE = re.compile(r"\s")
_BEGINNING = 200
"""The number of characters by which the documents are found that may be the same."""


class NamedMemory:
    """A memory that a journal keeps under a name (`Journal.memory`).

    Given to a reader with the same journal as `memory=`, it is what the reading starts from, and then what the reading
    has left. A document that was read with it for the same question is not read again, whatever the settings are now:
    the recorded reading is returned. A reading that fails leaves the memory as it was; begun again, it resumes. Only
    one thread or process can read with a memory at a time.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self.name = store, name

    @property
    def text(self) -> str:
        """What the memory holds now; "" if nothing has been read with it."""
        texts = self._rows("text", "ORDER BY number DESC LIMIT 1")
        with self._store.errors():
            return next((str(json.loads(text)) for (text,) in texts), "")

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of the runs that were read with it, in their order."""
        return tuple(run for (run,) in self._rows("run", "AND run IS NOT NULL ORDER BY number"))

    @property
    def journal_path(self) -> Path:
        """The file of the journal."""
        return self._store.path

    def set(self, text: str) -> None:
        """Replace the text by one that a person wrote. What was read stays read.

        Raises:
            UsageError: it is not text.
            InUse: a reader is reading with the memory.
            JournalError: the journal cannot be written.
        """
        if not isinstance(text, str):
            raise UsageError(f"the memory has to be text, not {type(text).__name__}")
        with self.lock():
            _add(self._store, self.name, text)

    def delete(self) -> None:
        """Remove the memory, and what is known of the documents that were read with it. Their runs stay.

        Raises:
            UsageError: there is no such memory.
            InUse: a reader is reading with it.
            JournalError: the journal cannot be written.
        """
        with self.lock():
            if not self._rows("number", "LIMIT 1"):
                raise UsageError(f"{self.journal_path} holds no memory {self.name!r}")
            with self._store.writing():
                self._store.write("DELETE FROM memory WHERE name = ?", self.name)

    def lock(self) -> AbstractContextManager[str]:
        """Hold the memory, so that nobody else reads with it or changes it.

        Raises:
            InUse: somebody does.
        """
        return self._store.lock(f"\0{self.name}", what=f"memory {self.name}")  # no run can have this name

    def search(self, question: str) -> Search:
        """Return a search for a document among those that were read with the memory for a question."""
        return Search(self._store, self.name, question)

    def _rows(self, columns: str, condition: str) -> list[tuple[Any, ...]]:
        return _rows(self._store, f"SELECT {columns} FROM memory WHERE name = ? {condition}", self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedMemory) and (other.journal_path, other.name) == (self.journal_path, self.name)

    def __hash__(self) -> int:
        return hash((self.journal_path, self.name))

    def __repr__(self) -> str:
        return f"<NamedMemory {self.name!r} in {self.journal_path}>"


class Search:
    """Looks for a document, chunk after chunk, among those that were read with a named memory for a question.

    The text counts, not how it is cut into chunks; of white space, which may be left out of the chunks, only how much
    there is between two words. No more is taken of a document than it has in common with one that was read, and a
    chunk.
    """

    def __init__(self, store: Store, name: str, question: str) -> None:
        self._store, self._name, self._question = store, name, question
        self._beginning, self._length, self._digest = "", 0, hashlib.sha256()
        self._end = 0  # of the text so far
        self._space = ""  # at that end: it counts once a word follows
        self._read: list[tuple[str, int, str]] | None = None

    def more(self, chunk: Chunk) -> bool:
        """Take the next chunk; return whether it takes another one to know if the document was read."""
        self._add(chunk)
        return self._length < _BEGINNING or any(length >= self._length for _, length, _ in self._alike())

    def run(self) -> str | None:
        """Return the run that has read the text so far, no less and no more."""
        document = (self._length, self._digest.hexdigest())
        return next((run for run, *known in self._alike() if tuple(known) == document), None)

    def rest(self, source: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks that come after, and take them."""
        for chunk in source:
            self._add(chunk)
            yield chunk

    def leave(self, run: str, reading: Reading) -> None:
        """Have the memory hold what the reading of this document has left."""
        digest = self._digest.hexdigest()
        _add(self._store, self._name, reading.memory, run, self._beginning_digest(), self._length, digest)

    def _add(self, chunk: Chunk) -> None:
        gap, overlap = max(chunk.span.start - self._end, 0), max(self._end - chunk.span.start, 0)
        self._end = chunk.span.end
        text = self._space + " " * gap + _SPACE.sub(" ", chunk.text[overlap:])
        self._space = text[len(text.rstrip(" ")) :]
        text = text.rstrip(" ")
        self._beginning = (self._beginning + text)[:_BEGINNING]
        self._length += len(text)
        self._digest.update(_encoded(text))

    def _alike(self) -> list[tuple[str, int, str]]:
        """Return the run, the length and the digest of the documents that begin like this one."""
        if self._read is None:
            query = "SELECT run, length, digest FROM memory WHERE name = ? AND beginning = ? ORDER BY number"
            rows = _rows(self._store, query, self._name, self._beginning_digest())
            self._read = [(run, length, digest) for run, length, digest in rows]
        return self._read

    def _beginning_digest(self) -> str:
        return hashlib.sha256(_encoded(f"{self._question}\0{self._beginning}")).hexdigest()


def names_of_memories(store: Store) -> list[str]:
    """Return the names of the memories in a journal."""
    return [name for (name,) in _rows(store, "SELECT DISTINCT name FROM memory ORDER BY name")]


def memory_with(store: Store, run: str) -> str | None:
    """Return the name of a memory that a run was read with."""
    return next((name for (name,) in _rows(store, "SELECT name FROM memory WHERE run = ? LIMIT 1", run)), None)


def _rows(store: Store, query: str, *values: Any) -> list[tuple[Any, ...]]:
    return store.rows(query, *values) if store.version >= 3 else []  # an older file that is only read


def _add(store: Store, name: str, text: str, *document: str | int) -> None:
    with store.writing():
        number = "(SELECT ifnull(max(number) + 1, 0) FROM memory WHERE name = ?)"
        values = (name, name, json.dumps(text), *(document or (None,) * 4))  # with \\u escapes, as the steps are
        store.write(f"INSERT INTO memory VALUES (?, {number}, ?, ?, ?, ?, ?)", *values)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
