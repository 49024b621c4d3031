"""File chores: errors that name the file and the reason, atomic writes, locks, and what is wrong with what was read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from shutil import copymode
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import ValidationError

from memagent_integrations.errors import MemAgentError, UsageError


@contextmanager
def accessing(action: Literal["read", "write"], path: object, *, hint: str = "") -> Iterator[None]:
    """Turn a failure to read or write `path` into an error that names it; `hint` says what else to try.

    Raises:
        UsageError: the block raised an OSError, or a ValueError because the path holds a NUL or a lone surrogate.
    """
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot {action} {str(path)!r}: {reason(error)}{hint and f'; {hint}'}") from error


def reason(error: Exception) -> str:
    """The reason that an error about a file gives, without the file's name, which our own message has."""
    return str(getattr(error, "strerror", None) or error)


def read_bytes(path: str | Path) -> bytes:
    """The content of a file.

    Raises:
        UsageError: the file cannot be read.
    """
    with accessing("read", path):
        return Path(path).read_bytes()


def write(path: str | Path, content: str | bytes) -> None:
    """Write a whole file: a crash leaves the old content or the new one, never a part. Text is UTF-8.

    A link is followed, and what is not a regular file (a pipe, `/dev/stdout`) is written to as it is.

    Raises:
        UsageError: the file cannot be written.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    with accessing("write", path):
        target = Path(path)
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target = target.resolve()
        new = target.with_name(f".{target.name[:40]}.{token_hex(6)}")
        try:
            with new.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                copymode(target, new)
            new.replace(target)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise


@contextmanager
def lock(path: str | Path, busy: MemAgentError, *, patience: float = 0) -> Iterator[None]:
    """Hold the lock file `path`, which no other thread or process holds meanwhile. The system frees it when a process dies.

    Args:
        path: the lock file, which is made.
        busy: what to raise when somebody else holds the lock for longer than `patience`.
        patience: seconds to wait; -1 is for as long as it takes.

    Raises:
        MemAgentError: `busy`.
        OSError: the lock file cannot be made.
    """
    held = FileLock(path, thread_local=False)  # a generator that holds it may be run by one thread after another
    try:
        held.acquire(timeout=patience)
    except Timeout:
        raise busy from None
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:  # a forked child has a copy of this generator, but not the lock
            held.release()


def first_error(error: ValidationError) -> str:
    """The first thing that does not fit a record, after the place where it stands."""
    first = error.errors()[0]
    place = [str(part + 1) if isinstance(part, int) else str(part) for part in first["loc"]]
    if first["type"] == "unexpected_keyword_argument":
        return f"there is no key {place[-1]!r}" + (f" in {' '.join(place[:-1])}" if place[1:] else "")
    return f"{' '.join(place)}: {first['msg']}" if place else first["msg"]


def differences(then: Mapping[str, Any], now: Mapping[str, Any], ignored: Collection[str] = ()) -> str:
    """The settings that changed, for an error to name: "name: old, now new"; empty where all are the same."""
    names = sorted({*then, *now} - {*ignored})
    changed = (name for name in names if then.get(name) != now.get(name))
    return "; ".join(f"{name}: {then.get(name)!r}, now {now.get(name)!r}" for name in changed)
