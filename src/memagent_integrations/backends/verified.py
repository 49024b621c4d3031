"""Files of the cache: written by one process at a time, and hashed once.

Beside a file it is noted what hash it had at which size and time; while these stay the same it counts as unchanged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from memagent_integrations import files
from memagent_integrations.errors import BackendError, UsageError


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Hold the lock of a file or folder, once it is free; create the cache.

    Raises:
        UsageError: the cache cannot be written.
    """
    busy = BackendError(f"another process is writing {target}", retryable=True)
    with files.accessing("write", target.parent, hint="MEMAGENT_CACHE names another folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.lock(f"{target}.lock", busy, timeout=-1):
            yield


def is_whole(file: Path, sha256: str) -> bool:
    """Return whether a file has this hash, and note it if it has."""
    try:
        stamp = _stamp(file, sha256)
        with suppress(OSError):
            if _stamp_file(file).read_bytes() == stamp:
                return True
        if _digest(file) != sha256:
            return False
    except OSError:
        return False
    with suppress(UsageError):  # in a read-only cache the file is hashed each time
        _write(file, stamp)
    return True


def is_as_noted(file: Path) -> bool:
    """Return whether a file has the hash that it had at its `note`."""
    try:
        sha256 = json.loads(_stamp_file(file).read_bytes())["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return is_whole(file, sha256)


def note(file: Path) -> None:
    """Note the hash of a file."""
    _write(file, _stamp(file, _digest(file)))


def _write(file: Path, stamp: bytes) -> None:
    with files.accessing("write", _stamp_file(file)):
        files.write(_stamp_file(file), stamp)
        shutil.copymode(file, _stamp_file(file))  # for all who may read the file


def _stamp(file: Path, sha256: str) -> bytes:
    stat = file.stat()
    return json.dumps({"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}).encode()


def _stamp_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.verified")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
