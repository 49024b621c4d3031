"""What a failed call of somebody else's model client means: one of this package's errors, or a mistake in the code.

Recognised by shape (`status_code`, `code`, names of classes), so that no SDK has to be installed.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

from memagent_integrations.errors import BackendError, ContextOverflow, MemAgentError, UsageError

OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|maximum model length|context.?(?:size|length|window|overflow)"
    r"|prompt is too long|input is too long",
    re.IGNORECASE,
)
_MISTAKES = (  # of the code, not of the model
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    StopAsyncIteration,
    StopIteration,
    TypeError,
    ValueError,
    Warning,
)
_BROKEN = re.compile(
    r"Timeout|TimedOut|Connect|Network|RemoteProtocol|IncompleteRead|RateLimit|ServiceUnavailable|Overloaded"
)
_SECRET = re.compile(r"\b(?:(?:sk|gsk|xai|hf)[-_]|AIza)[\w-]{12,}")


def from_exception(error: Exception, name: str, *, secrets: Iterable[str] = ()) -> MemAgentError | None:
    """The error that `error`, raised by a call of the model `name`, amounts to; None for what is not the model's failure.

    A text that speaks of the context window decides first, then the status of the server, then whether the connection broke. What is left
    is the model's failure, but for Python's own errors of programming and for the control flow of LangGraph.
    """
    said = _hidden(_reason(error), secrets)[:500]
    status = _status(error)
    mistake = not status and isinstance(error, _MISTAKES)
    if mistake and not isinstance(error, ValueError):
        return None
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    if status in (None, 400, 413, 422) and OVERFLOW.search(
        f"{kinds} {getattr(error, 'code', '')} {getattr(error, 'type', '')} {said}"
    ):
        return ContextOverflow(
            f"the prompt does not fit into the window of {name}: {said}; lower chunk_tokens or memory_tokens"
        )
    if status:
        return _from_status(status, name, said, _retry_after(error))
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return BackendError(f"{name} sent what is not JSON: {said}", retryable=True)
    if isinstance(error, UnicodeEncodeError):
        return UsageError(
            f"the prompt cannot be sent to {name}: {said}; neutralise() in memagent_integrations.prompts replaces what no server takes"
        )
    if isinstance(error, ValueError) and (
        _told(error) or "No generation" in said
    ):  # LangChain's, for an answer without choices
        return BackendError(f"{name} failed: {said}", retryable=True)
    if mistake or type(error).__module__.partition(".")[0] == "langgraph":
        return None
    broken = isinstance(error, (ConnectionError, TimeoutError)) or bool(_BROKEN.search(kinds))
    return BackendError(f"{name} failed: {type(error).__name__}: {said}", retryable=broken)


@contextmanager
def translated(name: str, *, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Raise what the block raises as `from_exception` sees it, the original as its cause unless it shows one of the `secrets`."""
    try:
        yield
    except MemAgentError:
        raise
    except Exception as error:
        failure = from_exception(error, name, secrets=secrets)
        if failure is None:
            raise
        shown = "".join(traceback.format_exception(error))
        raise failure from (error if _hidden(shown, secrets) == shown else None)


def _hidden(text: str, secrets: Iterable[str]) -> str:
    """The text without keys and passwords."""
    for secret in filter(lambda secret: len(secret) > 4, secrets):
        text = text.replace(secret, "***")
    return _SECRET.sub("***", text)


def _told(error: Exception) -> dict[str, Any]:
    """What a server sent in place of an answer, where a client raises just that."""
    return error.args[0] if error.args and isinstance(error.args[0], dict) else {}


def _reason(error: Exception) -> str:
    """What happened; SDKs put it into the cause and say no more than "Connection error."."""
    said = str(error) or type(error).__name__
    cause = error.__cause__
    return f"{said} ({cause})" if cause and str(cause) and len(said) < 40 else said


def _from_status(status: int, name: str, said: str, retry_after: float | None) -> BackendError:
    if status in (401, 403):
        return BackendError(f"the server of {name} refused the API key ({status}); check it: {said}")
    if status == 404:
        return BackendError(f"the server does not know {name} ({status}); check the model name and the address: {said}")
    retryable = status in (408, 409, 425, 429) or status >= 500
    return BackendError(
        f"{name} failed with status {status}: {said}",
        retryable=retryable,
        retry_after=retry_after if retryable else None,
    )


def _retry_after(error: Exception) -> float | None:
    """The seconds that the server wants to be left alone, by its headers: a number or a date."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    if not isinstance(headers, Mapping):
        return None
    told = str(headers.get("retry-after", ""))
    with suppress(ValueError):
        return max(0.0, float(headers.get("retry-after-ms", "")) / 1000)
    with suppress(ValueError):
        return max(0.0, float(told))
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
    return None


def _status(error: Exception) -> int | None:
    """The HTTP status of the answer that the error reports, if it does."""
    response = getattr(error, "response", None)
    found: list[Any] = [
        getattr(holder, name, None)
        for holder in (error, response)
        for name in ("status_code", "http_status", "code", "status")
    ]
    if isinstance(response, dict):  # botocore
        found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    found.append(_told(error).get("code"))
    return next((status for status in found if isinstance(status, int) and 400 <= status < 600), None)
