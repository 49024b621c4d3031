"""The error tree. The class of an error says who has to act on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memagent_integrations.records import Reading


class MemAgentError(Exception):
    """Base of every error that this package raises on purpose.

    `reading` holds what had been read when a reading raised it (the steps and the memory so far), else None. The readings of
    `read_many` are not raised: there it is the reading that holds the error.
    """

    reading: Reading | None = None


class UsageError(MemAgentError):
    """The caller has to change something: an argument, a setting, or the document."""


class QuestionError(UsageError):
    """The question is empty, or longer than its budget."""


class EmptyDocument(UsageError):
    """The document has no text."""

    def __init__(self, message: str = "the document is empty: there is no text to read") -> None:
        super().__init__(message)


class MissingExtra(MemAgentError, ImportError):
    """A package has to be installed. `command` is the line that does it."""

    def __init__(self, what: str, *, command: str) -> None:
        super().__init__(f"{what} is not installed; run: {command}")
        self.command = command

    @classmethod
    def extra(cls, what: str, extra: str) -> MissingExtra:
        """The error for a missing module `what` that the optional dependency group `extra` brings."""
        return cls(what, command=f"pip install 'memagent-integrations[{extra}]'")

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle, (type(self), self.args), self.__dict__)


class BackendError(MemAgentError):
    """The model or its server failed. `retryable` tells whether the same call may succeed later.

    `retry_after`: after how many seconds at the earliest, where the server said so.
    """

    retryable: bool
    retry_after: float | None = None

    def __init__(self, message: str, *, retryable: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after


class JournalError(MemAgentError):
    """The journal's file cannot be read or written, or the run is in use. What is recorded is safe."""


class RunPaused(JournalError):
    """The run was paused (`Journal.pause`). Read it again to resume."""


class JournalMismatch(JournalError):
    """The document or the settings changed under a run that is being resumed."""


class ContextOverflow(MemAgentError):
    """A prompt would not fit, or did not fit, into the model's context window."""


def _unpickle(kind: type[MemAgentError], args: tuple[object, ...]) -> MemAgentError:
    return kind.__new__(kind, *args)


def why(error: Exception) -> str:
    """What an error about a file says, without the file's name: that stands in our message."""
    return str(getattr(error, "strerror", None) or error)
