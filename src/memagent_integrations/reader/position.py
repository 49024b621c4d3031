"""The position of a reading in parts in its document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from inspect import iscoroutine
from typing import Any

from memagent_integrations.documents import is_async
from memagent_integrations.errors import EmptyDocument, MemAgentError, UsageError
from memagent_integrations.records import Chunk


class Position:
    """A number of chunks read, with a digest of their text: what a graph or a workflow keeps of its document.

    `number` counts the chunks that were read; `digest` stands for their text ("" for none).

    Args:
        chunks: the chunks of the document, from its beginning.
        number: how many of them were read before; they are skipped.
        digest: the digest of those.

    Raises:
        UsageError: the skipped chunks are not the ones that were read.
        MemAgentError: the document cannot be read that far.
    """

    def __init__(self, chunks: Iterator[Chunk], number: int = 0, digest: str = "") -> None:
        self._chunks = chunks
        self.number, self.digest = 0, ""
        self._fetch()
        while self.number < number and self._next:
            self.advance()
        if (self.number, self.digest) != (number, digest):
            raise self._error or UsageError(
                f"the text before chunk {number} is not what was read: the document or the settings changed; begin anew"
            )

    @property
    def more(self) -> bool:
        """Whether there is another chunk (or an error in its place): the end is known before a step is made in vain."""
        return bool(self._next or self._error)

    @property
    def chunk(self) -> Chunk:
        """The next chunk.

        Raises:
            EmptyDocument: the document has no text.
            UsageError: the document ends here.
            MemAgentError: the next chunk cannot be read.
        """
        if self._error:
            raise self._error
        if self._next:
            return self._next
        if not self.number:
            raise EmptyDocument
        raise UsageError(f"the document ends at chunk {self.number}, where it went on before; begin anew")

    def advance(self) -> None:
        """Move on to the next chunk: this one has been read."""
        self.number, self.digest = self.number + 1, running_digest(self.digest, self.chunk)
        self._fetch()

    def _fetch(self) -> None:
        self._next: Chunk | None = None
        self._error: MemAgentError | None = None
        try:
            self._next = next(self._chunks, None)
        except MemAgentError as error:  # the chunk before it counts all the same
            self._error = error


def running_digest(before: str, chunk: Chunk) -> str:
    """Return the digest of the chunks up to this one, from that of the chunks before it ("" for none)."""
    return sha256(f"{before}\0{chunk.text}".encode("utf-8", "surrogatepass")).hexdigest()


def loaded_document(load: Callable[[], Any]) -> Iterator[Any]:
    """Yield what `load` returns, which is called when the document is needed.

    Raises:
        UsageError: it returns nothing, or what cannot be read again later.
    """
    document = load()
    if document is None:
        raise UsageError("load gave no document for its reference, but None")
    if iscoroutine(document):
        document.close()
        raise UsageError("load has to be a plain function, not an async one; it is called in a thread")
    if is_async(document):
        raise UsageError(
            "a reading in parts needs a document that can be read again at any time, not an async iterator"
        )
    yield document
