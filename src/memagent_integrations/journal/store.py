"""A SQLite file that threads and processes share: opened, brought up to date, written in transactions, with a lock for each name."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from memagent_integrations.errors import JournalError, UsageError


class InUse(JournalError):
    """Somebody else has the lock."""


class Store:
    """The file, which is made if it is not there.

    `owner` and `version` are the numbers in its header that say whose it is, and what tables it has: those of `schema`. With `readonly` it
    can be looked at, also where nothing may be written.

    Raises:
        JournalError: the file cannot be opened or written, is damaged, or belongs to another program.
    """

    def __init__(self, path: str | Path, *, owner: int, version: int, schema: str, readonly: bool) -> None:
        if not isinstance(path, str | Path):
            raise UsageError(f"the journal has to be a file's name, not {type(path).__name__}")
        self._lock, self._readonly = threading.RLock(), readonly
        with self.errors(path):
            self.path = Path(
                path
            ).resolve()  # the locks go by the file, whatever it is called, and wherever the process goes
            mode = f"?mode={'ro' if readonly else 'rwc'}"
            if readonly and not self.path.with_name(f"{self.path.name}-wal").exists():
                mode += "&immutable=1"  # nobody writes: then not even the folder has to be writable
            self._database = sqlite3.connect(
                self.path.as_uri() + mode, uri=True, timeout=30, isolation_level=None, check_same_thread=False
            )
        try:
            with self.errors():
                self._prepare(owner, version, schema)
                found = self.path.stat()
                self._file = found.st_dev, found.st_ino
        except BaseException:
            self._database.close()
            raise

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a query finds."""
        with self._lock, self.errors():  # not in the middle of another thread's transaction
            return self._database.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row that a query finds."""
        return next(iter(self.rows(query, *values)), None)

    def write(self, statement: str, *values: Any) -> None:
        """Execute a statement, in a block of `writing`."""
        self._database.execute(statement, values)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction: all of it is on the disk in the end, or nothing."""
        with self._lock, self.errors():
            self._look()
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # a failed write has rolled back already
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def lock(self, name: str, *, patience: float = 0.2) -> Iterator[str]:
        """The name, which no other process or thread has meanwhile; the system frees the lock of a process that dies.

        Raises:
            InUse: another has it, for `patience` seconds and more. Who asks whether it is `taken` has it for a moment.
        """
        process, file = os.getpid(), self._lock_file(name)
        lock = FileLock(file, thread_local=False)  # a loop is run by one thread after another
        try:
            file.parent.mkdir(exist_ok=True)
            lock.acquire(timeout=patience)
        except Timeout as error:
            raise InUse(
                f"run {name} is being read already, here or in another process; wait for it, or read under another name"
            ) from error
        except OSError as error:
            raise JournalError(f"cannot lock {name} in {file.parent}: {error.strerror or error}") from error
        try:
            yield name
        finally:
            if os.getpid() == process:  # a forked child has a copy of this generator, but not the lock
                with suppress(
                    OSError
                ):  # while the lock is held, so that nobody is left with a lock on a file that is gone
                    file.unlink()
                lock.release()

    def is_locked(self, name: str) -> bool:
        """Whether somebody has the lock of this name; False where that cannot be found out."""
        if not self._lock_file(name).exists():
            return False
        try:
            with self.lock(name, patience=0):
                return False
        except InUse:
            return True
        except JournalError:  # nothing may be written here
            return False

    def _lock_file(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}-locks") / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"

    def _look(self) -> None:
        """See that the file is still the one that was opened: what is written to a file that is gone is lost."""
        try:
            found = self.path.stat()
        except OSError:
            found = None
        if not found or (found.st_dev, found.st_ino) != self._file:
            raise JournalError(f"the journal {self.path} has been removed or replaced; open it again")

    @contextmanager
    def errors(self, path: str | Path | None = None) -> Iterator[None]:
        """What goes wrong with the file, and with what stands in it, is a `JournalError`."""
        path = path or self.path
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise JournalError(
                f"another process has written to the same run in {path}; begin again to go on from there"
            ) from error
        except (sqlite3.Error, sqlite3.Warning, OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise JournalError(f"the journal {str(path)!r} cannot be used: {type(error).__name__}: {error}") from error

    def _prepare(self, owner: int, version: int, schema: str) -> None:
        """See that the file is ours, or make it so."""
        database = self._database
        database.execute("PRAGMA foreign_keys = ON")
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (found,) = database.execute("PRAGMA application_id").fetchone()
        (format,) = database.execute("PRAGMA user_version").fetchone()
        if (tables or found) and found != owner:
            raise JournalError(f"{self.path} is a database of another program; give a file of its own")
        if self._readonly and not found:
            raise JournalError(f"{self.path} is no journal")
        if found and format != version:
            raise JournalError(
                f"{self.path} was written by another version of this package (format {format}, here {version}); use that version"
            )
        if self._readonly:
            return
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        if not found:
            status = self.path.stat()
            self._file = status.st_dev, status.st_ino
            with self.writing():
                if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[
                    0
                ]:  # another process may have been first
                    for statement in schema.split(";"):
                        database.execute(statement)
                    database.execute(f"PRAGMA application_id = {owner}")
                    database.execute(f"PRAGMA user_version = {version}")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def __del__(self) -> None:
        if database := getattr(self, "_database", None):
            database.close()
