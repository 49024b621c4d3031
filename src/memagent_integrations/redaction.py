"""Keep keys and passwords out of what is shown: find them in settings and addresses, and replace them in texts."""

from __future__ import annotations

import base64
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from html import escape
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

HIDDEN = "***"
"""What stands in the place of a secret."""
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:api_?key|key|secret|passw(?:or)?d|token|credentials?|auth|authorization|headers?|cookies?)(?:_|$)"
    r"|^(?:default_|extra_)?query$"
)
_WELL_KNOWN = re.compile(r"\b(?:(?:sk|gsk|xai|hf)[-_]|AIza)[\w-]{12,}")
_ACCOUNT = re.compile(r"(?<=://)[^\s/?#@'\"<>]+@")
_SHORTEST = 5
"""Characters of a secret that is looked for in texts: a shorter one may be a word."""


def is_secret(name: str) -> bool:
    """Return whether a setting of this name holds a secret: `api_key`, `hfToken`, `default-headers`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return _SECRET_NAME.search(words) is not None


def secrets_in(settings: Any, *, secret: bool = False) -> list[str]:
    """Return the keys and passwords in settings: what stands under a secret's name, and in addresses.

    `settings` are a mapping, a list, or a value of these, which is a `secret` itself or not.
    """
    if isinstance(settings, Mapping):
        return [
            text
            for name, value in settings.items()
            for text in secrets_in(value, secret=secret or is_secret(str(name)))
        ]
    if isinstance(settings, list | tuple):
        return [text for value in settings for text in secrets_in(value, secret=secret)]
    if callable(reveal := getattr(settings, "get_secret_value", None)):  # pydantic's SecretStr
        return [str(reveal())]
    if isinstance(settings, bytes):
        settings = settings.decode("utf-8", "replace")
    if not isinstance(settings, str) or not settings:
        return []
    return [settings] if secret else secrets_of_address(settings)


class Secrets(Iterable[str]):
    """The keys and passwords that `find` returns: looked for only when an error has to be shown without them."""

    def __init__(self, find: Callable[[], Iterable[str]]) -> None:
        self._find = find

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())


def secrets_of_address(address: str) -> list[str]:
    """Return the user, the password and the values of the query of an address, as they are and decoded."""
    try:
        parts = urlsplit(address)
        user, password = parts.username or "", parts.password or ""
    except ValueError:
        return []
    if not parts.scheme or not parts.netloc:
        return []
    basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode() if user or password else ""
    values = [value for _, value in parse_qsl(parts.query)]
    return [text for text in (user, password, unquote(user), unquote(password), basic, *values) if text]


def without_account(address: str) -> str:
    """Return an address without its user and password, its query and its fragment; any other text as it is."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return address
    if not parts.scheme or not parts.netloc:
        return address
    return parts._replace(query="", fragment="", netloc=parts.netloc.rpartition("@")[2]).geturl()


def shown(settings: Any) -> Any:
    """Return settings to be looked at: with `***` for secrets, and addresses without them."""
    if isinstance(settings, Mapping):
        return {name: HIDDEN if _held(name, value) else shown(value) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [shown(value) for value in settings]
    return without_account(settings) if isinstance(settings, str) else settings


def saved(settings: Any) -> Any:
    """Return settings to be kept: without secrets, and addresses without them."""
    if isinstance(settings, Mapping):
        return {name: saved(value) for name, value in settings.items() if not _held(name, value)}
    if isinstance(settings, list | tuple):
        return [saved(value) for value in settings]
    return without_account(settings) if isinstance(settings, str) else settings


def without_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text with `***` for keys and passwords: as they are, percent-encoded, in base64 or in hexadecimal.

    Found are the `secrets` of at least 5 characters, keys of the usual forms, and the account in any address.
    """
    for secret in sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True):
        text = _forms(secret).sub(HIDDEN, text)
    return _ACCOUNT.sub(f"{HIDDEN}@", _WELL_KNOWN.sub(HIDDEN, text))


def cause_without(error: BaseException, secrets: Iterable[str]) -> BaseException | None:
    """Return the error as the cause of another one; None if its traceback shows one of the secrets."""
    text = "".join(traceback.format_exception(error))
    return error if without_secrets(text, list(secrets)) == text else None


def _held(name: Any, value: Any) -> bool:
    """Return whether this setting holds a secret; a number is none."""
    return is_secret(str(name)) and value is not None and not isinstance(value, bool | int | float)


@lru_cache(64)
def _forms(secret: str) -> re.Pattern[str]:
    """Return the pattern of a secret in every form that a server may send it back in."""
    signs = "".join(_sign(sign) for sign in secret)
    data = secret.encode("utf-8", "surrogatepass")
    inside = "|".join(sorted(_in_base64(data)))
    return re.compile(rf"{signs}|[\w+/-]*(?:{inside})[\w+/-]*=*|(?i:{data.hex()})")


def _sign(sign: str) -> str:
    """Return the pattern of a character, as it is or as an address or a page writes it."""
    octets = "".join(f"(?i:%(?:25)*{octet:02x})" for octet in sign.encode("utf-8", "surrogatepass"))
    others = {re.escape(sign), octets, re.escape(escape(sign))} | ({r"\+"} if sign == " " else set())
    return f"(?:{'|'.join(sorted(others))})"


def _in_base64(data: bytes) -> Iterator[str]:
    """Yield what of some data stands in base64 whatever comes before and after it."""
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + data).decode().rstrip("=")
        certain = whole[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]
        yield from {re.escape(certain), re.escape(certain.replace("+", "-").replace("/", "_"))}
