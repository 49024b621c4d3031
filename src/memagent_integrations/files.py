"""Read, write and lock files, with errors that name the file and the reason; say what is wrong with what was read."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from shutil import copymode
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import ValidationError

from memagent_integrations.errors import MemAgentError, UsageError

OWNER_ONLY, OWNERS_FOLDER = 0o600, 0o700
"""Permissions of the files and folders that hold readings and policies: those of their owner alone."""
_NOT_REPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
_DESCRIPTOR = re.compile(r"/dev/(?:std(?:in|out|err)|fd/\d+)|/proc/.*")
"""Names of open files: their readers and writers would not see a file that is put in their place."""


@contextmanager
def accessing(
    action: Literal["read", "write"], path: object, *, hint: str = "", also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn an error of the block into one that names `path`; `hint` is added to the message, to say what to do.

    Raises:
        UsageError: the block raised an OSError, a ValueError (the path holds a NUL or a lone surrogate), or one of
            `also`, which a library raises in place of an OSError.
    """
    failures: tuple[type[Exception], ...] = (OSError, ValueError, *also)
    try:
        yield
    except UsageError:
        raise
    except failures as error:
        raise UsageError(f"cannot {action} {str(path)!r}: {reason(error)}{hint and f'; {hint}'}") from error


def reason(error: Exception) -> str:
    """Return why the file could not be used, without its name, which our own message has."""
    return str(getattr(error, "strerror", None) or error)


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file.

    Raises:
        UsageError: the file cannot be read.
    """
    with accessing("read", path):
        return Path(path).read_bytes()


def check_regular(path: str | Path) -> None:
    """Check that what is there is a file, and no device or pipe, which may have no end.

    Raises:
        UsageError: it is another thing.
    """
    with accessing("read", path):
        if Path(path).exists() and not Path(path).is_file():
            raise UsageError(f"cannot read {str(path)!r}: it is no regular file")


def create(path: str | Path) -> None:
    """Create an empty file that its owner alone can read and write; a file that is there stays as it is.

    Raises:
        OSError: it cannot be created.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY))


def write(path: str | Path, content: str | bytes) -> None:
    """Replace the content of a file, all at once: after a crash it is the old one or the new one, never a part.

    Text is written as UTF-8. A new file is for its owner alone. Links are followed, and a file that is there keeps its
    permissions and, where that is allowed, its owner. Written to directly, and so not all at once, are pipes and
    devices such as `/dev/stdout`, and files that cannot be replaced: in a folder that is read-only, or mounted into a
    container.

    Raises:
        UsageError: the file cannot be written.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    with accessing("write", path):
        try:
            status = Path(path).stat()
        except FileNotFoundError:
            status = None
        if status and (not stat.S_ISREG(status.st_mode) or _DESCRIPTOR.fullmatch(str(Path(path).absolute()))):
            Path(path).write_bytes(data)
            return
        target = Path(path).resolve()
        try:
            _replace(target, status, data)
        except OSError as error:
            if not status or error.errno not in _NOT_REPLACEABLE:
                raise
            target.write_bytes(data)


def _replace(target: Path, status: os.stat_result | None, data: bytes) -> None:
    """Write a file beside `target`, like it in owner and permissions if `target` exists, and put it in its place."""
    if status:
        target.open("ab").close()  # raises for a write-protected file, which could be replaced all the same
    temporary = target.with_name(f".{target.name[:40]}.{token_hex(6)}")
    try:
        create(temporary)
        with temporary.open("r+b") as file:
            if status:
                with suppress(OSError, AttributeError):  # Windows has no chown
                    os.chown(temporary, status.st_uid, status.st_gid)
                copymode(target, temporary)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def lock(path: str | Path, busy: MemAgentError, *, timeout: float = 0, remove: bool = False) -> Iterator[None]:
    """Hold a lock that no other thread or process can hold at the same time. It is released when its process dies.

    Args:
        path: the lock file; it is created.
        busy: the error to raise when the lock is not free within `timeout`.
        timeout: seconds to wait; -1 waits without a limit.
        remove: remove the lock file at the end.

    Raises:
        MemAgentError: `busy`.
        OSError: the lock file cannot be created.
    """
    file_lock = FileLock(path, thread_local=False)  # different threads may run the generator that holds it
    try:
        file_lock.acquire(timeout=timeout)
    except Timeout:
        raise busy from None
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:  # a forked child has a copy of this generator, but not the lock
            if remove:  # while it is held, so that nobody gets a lock on a file that is gone
                with suppress(OSError):
                    Path(path).unlink()
            file_lock.release()


def first_error(error: ValidationError) -> str:
    """Describe the first problem that the validation found: where it is (list items are counted from 1), and what."""
    first = error.errors()[0]
    path = [str(key + 1) if isinstance(key, int) else str(key) for key in first["loc"]]
    if first["type"] == "unexpected_keyword_argument":
        return f"there is no key {path[-1]!r}" + (f" in {' '.join(path[:-1])}" if path[1:] else "")
    return f"{' '.join(path)}: {first['msg']}" if path else first["msg"]


def differences(then: Mapping[str, Any], now: Mapping[str, Any], ignored: Collection[str] = ()) -> str:
    """Describe the settings that changed, as "name: old, now new; ..."; empty if none did."""
    names = sorted({*then, *now} - {*ignored})
    changed = (name for name in names if then.get(name) != now.get(name))
    return "; ".join(f"{name}: {_shortened(then.get(name))}, now {_shortened(now.get(name))}" for name in changed)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:52]}...{text[-25:]}"
