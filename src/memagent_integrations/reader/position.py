"""Where a reading in parts stands in its document."""

from __future__ import annotations

from collections.abc import Iterator

from memagent_integrations.chunking import running_digest
from memagent_integrations.errors import EmptyDocument, MemAgentError, UsageError
from memagent_integrations.records import Chunk


class Position:
    """The chunk that comes next, and a digest of those before it: what a graph or a workflow keeps of the document between two parts.

    `number` counts the chunks that were read, `digest` stands for their text ("" for none).

    Args:
        chunks: those of the document, from its beginning. Those before `number` are passed over.
        number: how many were read before.
        digest: of those.

    Raises:
        UsageError: the chunks passed over are not those that were read.
        MemAgentError: the document cannot be read as far as that.
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
        """Whether anything comes here; the end of the document is known before, so that no step is made in vain."""
        return bool(self._next or self._error)

    @property
    def chunk(self) -> Chunk:
        """The chunk that comes next.

        Raises:
            EmptyDocument: the document has no text.
            UsageError: the document ends here.
            MemAgentError: it cannot be read.
        """
        if self._error:
            raise self._error
        if self._next is None:
            raise (
                UsageError(f"the document ends at chunk {self.number}, where it went on before; begin anew")
                if self.number
                else EmptyDocument
            )
        return self._next

    def advance(self) -> None:
        """The chunk has been read."""
        self.number, self.digest = self.number + 1, running_digest(self.digest, self.chunk)
        self._fetch()

    def _fetch(self) -> None:
        self._next: Chunk | None = None
        self._error: MemAgentError | None = None
        try:
            self._next = next(self._chunks, None)
        except MemAgentError as error:  # the chunk before it counts all the same
            self._error = error
