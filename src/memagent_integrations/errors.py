"""The errors of this package. The class of an error says who can fix it.

MemAgentError
├── UsageError              the caller changes an argument, a setting or the document
│   ├── QuestionError       ... the question
│   └── EmptyDocument       ... the document, which has no text
├── MissingExtra            a package has to be installed (also an ImportError)
├── BackendError            the model or its server failed; `retryable` says whether to try again
│   ├── BackendClosed       ... the backend was closed; make a new one
│   ├── NoMemory            ... the model wrote no memory for a section
│   └── CallTimeout         ... a call took too long
│       └── RunTimeout      ... the whole reading took too long
├── JournalError            the journal cannot be used; what it holds is safe
│   ├── InUse               ... another thread or process is reading the run
│   ├── RunPaused           ... the run was paused; read it again to resume
│   └── JournalMismatch     ... the document or the settings changed since the run began
└── ContextOverflow         a prompt does not fit the window: lower a budget or use a larger model
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from memagent_integrations.records import Reading

_PACKAGE = "memagent-integrations"


class MemAgentError(Exception):
    """The base class of every error that this package raises on purpose.

    Where a reading raised the error, `reading` holds the steps and the memory up to then; otherwise it is None.
    `read_many` raises no such error: each failed reading that it returns holds its own.
    """

    reading: Reading | None = None


class UsageError(MemAgentError):
    """The caller has to change an argument, a setting, or the document."""


class QuestionError(UsageError):
    """The question is empty, or longer than its budget."""


class EmptyDocument(UsageError):
    """The document has no text."""

    def __init__(self, message: str = "the document is empty: there is no text to read") -> None:
        super().__init__(message)


class MissingExtra(MemAgentError, ImportError):
    """A package has to be installed; `command` is the command line that installs it."""

    def __init__(self, what: str, *, command: str) -> None:
        super().__init__(f"{what} is not installed; run: {command}")
        self.command = command

    @classmethod
    def extra(cls, what: str, extra: str) -> MissingExtra:
        """Return the error for a missing module `what` that the optional dependency group `extra` installs."""
        return cls(what, command=f"pip install {_requirement(extra)}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle, (type(self), self.args), self.__dict__)


class BackendError(MemAgentError):
    """The model or its server failed.

    `retryable` says whether the same call may succeed later; `retry_after` is the number of seconds that the server
    asked to wait first, and `status` the HTTP status of its answer, if there was one.
    """

    retryable: bool
    retry_after: float | None = None
    status: int | None = None

    def __init__(
        self, message: str, *, retryable: bool = False, retry_after: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after
        self.status = status


class BackendClosed(BackendError):
    """A call was made of a backend that has been closed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is closed; make a new backend")

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle, (type(self), self.args), self.__dict__)


class NoMemory(BackendError):
    """The model wrote no memory for a section, however often it was asked (see `on_lost_section` of `Reader`).

    It is retryable, unless the server's content filter withheld the memory: it would withhold it again.
    """

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message, retryable=retryable)


class CallTimeout(BackendError):
    """A call took longer than its limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class RunTimeout(CallTimeout):
    """The whole reading took longer than its limit. This says nothing about the server."""


class JournalError(MemAgentError):
    """The journal's file cannot be read or written, or the run is in use. Steps already recorded are safe."""


class InUse(JournalError):
    """Another thread or process is reading the run."""


class RunPaused(JournalError):
    """The run was paused (`Journal.pause`). Read it again to resume."""


class JournalMismatch(JournalError):
    """The document or the settings changed since the run that is being resumed began."""


class ContextOverflow(MemAgentError):
    """A prompt does not fit into the model's context window."""


def is_control_flow(error: BaseException) -> bool:
    """Return whether LangGraph leads a run by this exception: an interrupt, a jump to another node, its limits."""
    return any(kind.__module__.partition(".")[0] == "langgraph" for kind in type(error).__mro__)


def _requirement(extra: str) -> str:
    """Return what pip installs this package with an extra from: the folder that it was installed from, if there is one.

    A name in a registry may be that of another package, or of none.
    """
    from urllib.request import url2pathname  # it imports what talks HTTP

    try:
        origin = json.loads(metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")  # PEP 610
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    folder = url2pathname(urlsplit(origin.get("url", "")).path)
    if "dir_info" not in origin or not Path(folder).is_dir():
        return f"'{_PACKAGE}[{extra}]'"
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f"{editable}{quote(f'{folder}[{extra}]')}"


def _unpickle(error_class: type[MemAgentError], args: tuple[object, ...]) -> MemAgentError:
    return error_class.__new__(error_class, *args)
