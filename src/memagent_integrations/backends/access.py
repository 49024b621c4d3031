"""How a server is reached: its address, and the key, user and password that nobody else may see."""

from __future__ import annotations

import base64
import os
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from memagent_integrations.checks import drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.redaction import without_account


def access(model: str, key: str | None, url: str | None) -> dict[str, Any]:
    """Return the SDK's settings for an address and a key.

    A user and a password in the address are sent in a header, as httpx would send them, and taken out of the address,
    because httpx logs addresses.

    Raises:
        UsageError: the key cannot stand in a header, the address is not one, or both are missing.
    """
    for name, value in drop_none(api_key=key, base_url=url).items():
        if not isinstance(value, str):
            raise UsageError(f"{name} has to be a text, not {type(value).__name__}")
    key = (key or os.environ.get("OPENAI_API_KEY") or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            "the API key holds characters that no key has (a line end, or letters beyond ASCII); "
            "check where it was copied from"
        )
    if not (key or url):
        raise UsageError(
            f"no API key for {model}: set OPENAI_API_KEY or pass api_key, or pass the base_url of a local server"
        )
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    if url:
        parts = _split_url(url)
        query = dict(parse_qsl(parts.query))
        if parts.username or parts.password:
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            basic = base64.b64encode(f"{user}:{password}".encode()).decode()
            headers = {"Authorization": f"Basic {basic}"}
        url = without_account(url)
    # local servers need no key, but the SDK insists on one
    return {"api_key": key or "none", "base_url": url, "default_query": query, "default_headers": headers}


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
