"""What becomes of the errors of model clients: pauses of another clock, connections that are not safe."""

from __future__ import annotations

import ssl
import time
from email.utils import formatdate
from types import SimpleNamespace

import pytest

from memagent_integrations.backends.failures import from_exception
from memagent_integrations.errors import BackendError


class RateLimitError(Exception):
    def __init__(self, **headers: str) -> None:
        super().__init__("slow down")
        self.response = SimpleNamespace(status_code=429, headers=headers)


@pytest.mark.parametrize("ahead", [-86_400, -3600, 0, 3600, 86_400])
def test_a_pause_is_counted_by_the_clock_that_set_it(ahead: int) -> None:
    now = time.time() + ahead
    error = RateLimitError(**{"retry-after": formatdate(now + 7, usegmt=True), "date": formatdate(now, usegmt=True)})
    failure = from_exception(error, "m")
    assert isinstance(failure, BackendError)
    assert failure.retry_after == 7


@pytest.mark.parametrize("date", ["", "soon", "99"])
def test_a_server_that_does_not_tell_its_time(date: str) -> None:
    failure = from_exception(RateLimitError(**{"retry-after": formatdate(time.time() + 7), "date": date}), "m")
    assert isinstance(failure, BackendError)
    assert failure.retry_after == pytest.approx(7, abs=3)


class NotFoundError(Exception):
    status_code = 404


def test_an_address_without_a_path_is_told_to_lack_one() -> None:
    assert "address, which ends in /v1 as a rule:" in str(from_exception(NotFoundError("no"), "m at http://here:8000"))
    for name in ("m", "m at http://here:8000/v1/"):
        assert "check the model name and the address: no" in str(from_exception(NotFoundError("no"), name))


class APIConnectionError(Exception):
    pass


REFUSALS = [
    ssl.SSLCertVerificationError(
        1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
    ),
    ssl.SSLCertVerificationError(1, "Hostname mismatch, certificate is not valid for 'localhost'"),
    ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)"),
    ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["unknown", "of another host", "no TLS", "refused"])
@pytest.mark.parametrize("explicit", [True, False])
def test_a_connection_that_is_not_safe_is_not_tried_again(refusal: Exception, explicit: bool) -> None:
    inner, error = ConnectionError("connect"), APIConnectionError("Connection error.")
    inner.__cause__ = refusal
    if explicit:
        error.__cause__ = inner
    else:
        error.__context__ = inner
    for raised in (error, inner, refusal):
        failure = from_exception(raised, "m")
        assert isinstance(failure, BackendError)
        assert not failure.retryable
        assert "SSL_CERT_FILE" in str(failure)


def test_a_connection_that_broke_is_tried_again() -> None:
    error = APIConnectionError("Connection error.")
    error.__cause__ = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    failure = from_exception(error, "m")
    assert isinstance(failure, BackendError)
    assert failure.retryable
