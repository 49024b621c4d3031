"""How a server is reached: its address, and the key, user and password that nobody else may see."""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from memagent_integrations.checks import drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.redaction import secrets_of_address, without_account

OPENAI = "https://api.openai.com/v1"
_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_HEADERS = {"OPENAI_ORG_ID": "OpenAI-Organization", "OPENAI_PROJECT_ID": "OpenAI-Project"}


@dataclass(frozen=True, kw_only=True)
class Access:
    """An address without secrets, and the headers and the query that are sent there with every request."""

    url: str
    headers: dict[str, str] = field(repr=False)
    query: dict[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    """The keys and passwords among all that."""


def access(model: str, key: str | None, url: str | None) -> Access:
    """Return how a server is reached, by an address and a key, or those in OPENAI_BASE_URL and OPENAI_API_KEY.

    Further headers come from the variables that OpenAI's own client reads: OPENAI_ORG_ID, OPENAI_PROJECT_ID, and
    OPENAI_CUSTOM_HEADERS ("Name: value", one a line). A user and a password in the address are sent in a header, and
    taken out of the address, because httpx logs addresses.

    Raises:
        UsageError: the key or another value cannot stand in a header, the address is not one, or both are missing.
    """
    for name, value in drop_none(api_key=key, base_url=url).items():
        if not isinstance(value, str):
            raise UsageError(f"{name} has to be a text, not {type(value).__name__}")
    key = (key or os.environ.get("OPENAI_API_KEY") or "").strip()
    if not _fits_header(key):
        raise UsageError(
            "the API key holds characters that no key has (a line end, or letters beyond ASCII); "
            "check where it was copied from"
        )
    url = (url or os.environ.get("OPENAI_BASE_URL") or "").strip()
    if not (key or url):
        raise UsageError(
            f"no API key for {model}: set OPENAI_API_KEY or pass api_key, or pass the base_url of a local server"
        )
    parts = _split_url(url or OPENAI)
    named, custom = _headers_of_environment()
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | named | custom
    if parts.username or parts.password:
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        basic = base64.b64encode(f"{user}:{password}".encode()).decode()
        headers["Authorization"] = f"Basic {basic}"
    secrets = [key, *secrets_of_address(url or OPENAI)]
    secrets += [word for value in custom.values() for word in (value, *value.split())]
    query = dict(parse_qsl(parts.query))
    return Access(url=without_account(url or OPENAI), headers=headers, query=query, secrets=tuple(secrets))


def _headers_of_environment() -> tuple[dict[str, str], dict[str, str]]:
    """Return the headers that the variables of OpenAI's own client ask for: who pays, and others, which may be secret.

    Raises:
        UsageError: one of them is no header.
    """
    named = {header: os.environ[name].strip() for name, header in _HEADERS.items() if os.environ.get(name)}
    lines = [line.partition(":") for line in os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")]
    custom = {name.strip().title(): value.strip() for name, colon, value in lines if colon}
    for name, value in (named | custom).items():
        if not (_NAME.fullmatch(name) and _fits_header(value)):
            problem = "OPENAI_ORG_ID, OPENAI_PROJECT_ID and OPENAI_CUSTOM_HEADERS have to hold what a header may"
            raise UsageError(f"{problem}; {name!r} is none")
    return named, custom


def _fits_header(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.port != 0 and url.isprintable() and " " not in parts.netloc
        usable = usable and bool((parts.hostname or "").encode("idna"))  # which is what the name is looked up by
    except ValueError:
        usable = False
    if not usable:
        raise UsageError("base_url has to be an address such as http://127.0.0.1:8000/v1")
    return parts
