"""Marks of what this user's own programs wrote on this machine, which nobody else can make.

A file that somebody sent may name servers, models and documents. What it names is used by itself only if it has such a
mark; else the caller is asked to name it again.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path

import platformdirs

_SIZE = 32  # bytes


def mark(*parts: str) -> str | None:
    """Return the mark of these texts; None where no key can be kept, so that nothing has a mark."""
    key = _key(_key_file())
    return hmac.digest(key, json.dumps(parts).encode(), "sha256").hex() if key else None


def is_marked(given: object, *parts: str) -> bool:
    """Return whether `given` is the mark of these texts."""
    expected = mark(*parts)
    return bool(expected and isinstance(given, str)) and hmac.compare_digest(
        str(given).encode(), str(expected).encode()
    )


def unknown() -> str:
    """Return in words why something has no mark."""
    if mark() is None:
        return f"nobody knows whether it is yours, because no key can be kept in {_key_file()}"
    return "it is not known that you read it on this machine"


def _key_file() -> Path:
    return platformdirs.user_state_path("memagent-integrations") / "own.key"


@cache
def _key(file: Path) -> bytes | None:
    """Return the key in a file, which is made if there is none; None if others may know it, or it cannot be made."""
    with suppress(OSError):
        if not file.exists():
            _make(file)
        status = file.stat()
        ours = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o077)
        key = file.read_bytes()
        return key if ours and len(key) == _SIZE else None
    return None


def _make(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(6)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(secrets.token_bytes(_SIZE))
        with suppress(FileExistsError):  # another process was first
            os.link(temporary, file)
    finally:
        with suppress(OSError):
            temporary.unlink()
