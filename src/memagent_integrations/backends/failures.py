"""Translate the errors of third-party model clients into those of this package.

Failures are recognised by shape (`status_code`, `code`, names of classes), so that no SDK has to be installed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

from memagent_integrations.errors import BackendError, ContextOverflow, MemAgentError, UsageError, is_control_flow
from memagent_integrations.redaction import cause_without, without_secrets

OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|maximum model length"
    r"|context.?(?:size|length|window|overflow)|prompt is too long|input is too long",
    re.IGNORECASE,
)
_SCHEMA_REFUSED = re.compile(r"response_?format|json.?schema|structured.?output|guided|grammar", re.IGNORECASE)
_ROLES_REFUSED = re.compile(
    r"(?:system|assistant|developer).{0,20}\broles?\b|\broles?\b.{0,40}(?:alternate|supported)|(?:chat|jinja).?template"
    r"|no user query",
    re.IGNORECASE,
)
_PROGRAMMING_ERRORS = (  # a ValueError may be one, or an answer that a client cannot take
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
    Warning,
)
_CONNECTION_FAILURES = re.compile(
    r"Timeout|TimedOut|Connect|Network|Proxy|RemoteProtocol|IncompleteRead|RateLimit|ServiceUnavailable|Overloaded"
)
_UNTRUSTED = re.compile(
    r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSLCertVerificationError|CertificateError"
    r"|WRONG_VERSION_NUMBER|wrong version number|UNSUPPORTED_PROTOCOL|NO_SHARED_CIPHER|HANDSHAKE_FAILURE|UNKNOWN_CA",
)
"""What another try will not change about an encrypted connection."""
WITHHELD = re.compile(
    r"content_?filter|content_?policy|ContentManagementPolicy|ResponsibleAIPolicy|RefusalError|ModelRefusal"
    r"|BlockedPrompt|ResponseBlocked|data_inspection_failed|Content Exists Risk",
    re.IGNORECASE,
)


def from_exception(error: Exception, name: str, *, secrets: Iterable[str] = ()) -> MemAgentError | None:
    """Return this package's error for `error`, raised by a call of the model `name`; None if the model did not fail.

    A message about the context window decides first, then the server's status, then whether the connection broke.
    Everything else is the model's failure, except Python's own programming errors and LangGraph's control flow.
    """
    message = without_secrets(_message(error), secrets)[:500]
    status = _status(error)
    if _is_bug(error, status):
        return None
    if status in (None, 400, 413, 422) and OVERFLOW.search(_description(error, message)):
        advice = "lower chunk_tokens or memory_tokens"
        return ContextOverflow(f"the prompt does not fit into the window of {name}: {message}; {advice}")
    if status in (400, 422, 500, 501) and (way := way_out(message)):
        return UsageError(f"the server of {name} refuses the request ({status}); {way}: {message}")
    if status:
        return _from_status(status, name, message, _retry_after(error))
    if untrusted := next(filter(_UNTRUSTED.search, _chain(error)), None):
        refusal = without_secrets(untrusted, secrets)[:300]
        return BackendError(
            f"there is no safe connection to {name}: {refusal}; check the address (https:// or http://?) and the "
            "server's certificate (SSL_CERT_FILE names the file of your own authority's)"
        )
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return BackendError(f"{name} sent what is not JSON: {message}", retryable=True)
    if isinstance(error, UnicodeEncodeError):
        advice = "neutralise() in memagent_integrations.sanitize replaces what no server takes"
        return UsageError(f"the prompt cannot be sent to {name}: {message}; {advice}")
    # LangChain raises a ValueError for an answer without choices
    if isinstance(error, ValueError) and (_error_body(error) or "No generation" in message):
        return BackendError(f"{name} failed: {message}", retryable=True)
    if isinstance(error, ValueError) or is_control_flow(error):
        return None
    disconnected = isinstance(error, (ConnectionError, TimeoutError)) or bool(
        _CONNECTION_FAILURES.search(_classes(error))
    )
    kind = type(error).__name__
    what = message if message.startswith(kind) else f"{kind}: {message}"  # an error without a text is its name
    return BackendError(f"{name} failed: {what}", retryable=disconnected)


def is_withheld(error: Exception) -> bool:
    """Return whether a provider says by this error that its filter withheld the answer, or that the model refused."""
    status = _status(error)
    if isinstance(error, MemAgentError) or _is_bug(error, status) or status not in (None, 400, 403, 422):
        return False
    return bool(WITHHELD.search(_description(error, _message(error)[:500])))


@contextmanager
def translated(name: str, *, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Raise what the block raises as `from_exception` translates it, `redacted`.

    The original error is the cause, unless its traceback shows one of the `secrets`.
    """
    with redacted(secrets):
        try:
            yield
        except (MemAgentError, CancelledError):
            raise
        except Exception as error:
            if isinstance(error.__cause__, MemAgentError | CancelledError):  # raised below an SDK, which wraps all
                raise error.__cause__ from None
            failure = from_exception(error, name, secrets=secrets)
            if failure is None:
                raise
            raise failure from cause_without(error, secrets)


@contextmanager
def redacted(secrets: Iterable[str]) -> Iterator[None]:
    """Raise this package's errors without the secrets; one that shows them in its traceback too, without its cause."""
    try:
        yield
    except MemAgentError as error:
        if cause_without(error, secrets):
            raise
        error.args = tuple(without_secrets(each, secrets) if isinstance(each, str) else each for each in error.args)
        raise error from None


def _is_bug(error: Exception, status: int | None) -> bool:
    return not status and isinstance(error, _PROGRAMMING_ERRORS)


def _error_body(error: BaseException) -> dict[str, Any]:
    """Return the error object that a server sent, where the client raises just that."""
    return error.args[0] if error.args and isinstance(error.args[0], dict) else {}


def _message(error: BaseException) -> str:
    """Return what happened, with the cause where the error itself says little ("Connection error." of an SDK)."""
    message, cause = str(_error_body(error).get("message") or error) or type(error).__name__, error.__cause__
    while cause and (not str(cause) or str(cause) in message):  # a framework's error around the SDK's says it once more
        cause = cause.__cause__
    return f"{message} ({cause})" if cause and len(message) < 40 else message


def _chain(error: BaseException | None) -> Iterator[str]:
    """Yield what an error says, with its class, and what the errors say that it was raised from."""
    seen: set[int] = set()
    while error and id(error) not in seen:
        seen.add(id(error))
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__


def _classes(error: Exception) -> str:
    return " ".join(kind.__name__ for kind in type(error).__mro__)


def _description(error: Exception, message: str) -> str:
    return f"{_classes(error)} {getattr(error, 'code', '')} {getattr(error, 'type', '')} {message}"


def _from_status(status: int, name: str, message: str, retry_after: float | None) -> BackendError:
    if status in (401, 403):
        return BackendError(f"the server of {name} refused the API key ({status}); check it: {message}", status=status)
    if status == 404:
        advice = "check the model name and the address" + (", which ends in /v1 as a rule" * _is_bare(name))
        return BackendError(f"the server does not know {name} ({status}); {advice}: {message}", status=status)
    retryable = status in (408, 409, 425, 429) or status >= 500
    wait = f"; it asks to wait {retry_after:.0f} s" if retryable and retry_after else ""
    return BackendError(
        f"{name} failed with status {status}: {message}{wait}",
        retryable=retryable,
        retry_after=retry_after if retryable else None,
        status=status,
    )


def _is_bare(name: str) -> bool:
    """Return whether a model's name ends with an address that has no path."""
    return bool(re.search(r" at https?://[^/]+/?$", name))


def way_out(message: str) -> str | None:
    """Return what to do about a request that a server refuses for its schema or its roles; None: for something else."""
    if _SCHEMA_REFUSED.search(message):
        return (
            "it does not take the schema of the answer: simplify output, or pass an answer_model whose server takes it "
            "(OpenAI, vLLM, llama.cpp and Ollama do)"
        )
    if _ROLES_REFUSED.search(message):
        return "its chat template does not take these messages: use prompts of one text, or without that role"
    return None


def _retry_after(error: Exception) -> float | None:
    """Return the seconds to wait that the server's headers ask for, as a number or a date; None if they do not."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    if not isinstance(headers, Mapping):
        return None
    value = str(headers.get("retry-after", ""))
    with suppress(ValueError):
        return max(0.0, float(headers.get("retry-after-ms", "")) / 1000)
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - _clock(headers))
    return None


def _clock(headers: Mapping[str, Any]) -> float:
    """Return the time of the server, by whose clock it says when to come back; ours if it does not tell its own."""
    with suppress(ValueError, OverflowError):
        return parsedate_to_datetime(str(headers.get("date", ""))).timestamp()
    return time.time()


def _status(error: Exception) -> int | None:
    """Return the HTTP status that the error reports, if it does."""
    response = getattr(error, "response", None)
    candidates: list[Any] = [
        getattr(holder, name, None)
        for holder in (error, response)
        for name in ("status_code", "http_status", "code", "status")
    ]
    if isinstance(response, dict):  # botocore
        candidates.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    candidates.append(_error_body(error).get("code"))
    return next((status for status in candidates if isinstance(status, int) and 400 <= status < 600), None)
