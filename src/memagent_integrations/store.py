"""A SQLite file that threads and processes share: opened, brought up to date, written in transactions, with a lock for each name."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from memagent_integrations.errors import JournalError, UsageError


class InUse(JournalError):
    """Somebody else has the lock."""


class Store:
    """The file, which is made if it is not there.

    `owner` is the number in its header that says whose it is; `versions` are the statements that lead from one version of its tables to the
    next. With `readonly` it can be looked at, also where nothing may be written.

    Raises:
        JournalError: the file cannot be opened or written, is damaged, or belongs to another program.
    """

    def __init__(self, path: str | Path, *, owner: int, versions: Sequence[str], readonly: bool) -> None:
        if not isinstance(path, str | Path):
            raise UsageError(f"the journal has to be a file's name, not {type(path).__name__}")
        self._lock = threading.RLock()
        with self.errors(path):
            self.path = Path(path).resolve()  # the locks go by the file, whatever it is called, and wherever the process goes
            mode = f"?mode={'ro' if readonly else 'rwc'}"
            if readonly and not self.path.with_name(f"{self.path.name}-wal").exists():
                mode += "&immutable=1"  # nobody writes: then not even the folder has to be writable
            self._database = sqlite3.connect(self.path.as_uri() + mode, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
        try:
            with self.errors():
                self._prepare(owner, versions, readonly=readonly)
                found = self.path.stat()
                self._file = found.st_dev, found.st_ino
        except BaseException:
            self._database.close()
            raise

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a query finds."""
        with self.errors():
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
    def alone(self, name: str, *, patience: float = 0) -> Iterator[str]:
        """The name, which no other process or thread has meanwhile; the system frees the lock of a process that dies.

        Raises:
            InUse: another has it, for `patience` seconds and more.
        """
        process, file = os.getpid(), self._lock_file(name)
        lock = FileLock(file, thread_local=False)  # a loop is run by one thread after another
        try:
            file.parent.mkdir(exist_ok=True)
            lock.acquire(timeout=patience)
        except Timeout as error:
            raise InUse(f"run {name} is being read already, here or in another process; wait for it, or read under another name") from error
        except OSError as error:
            raise JournalError(f"cannot lock {name} in {file.parent}: {error.strerror or error}") from error
        try:
            yield name
        finally:
            if os.getpid() == process:  # a forked child has a copy of this generator, but not the lock
                with suppress(OSError):  # while the lock is held, so that nobody is left with a lock on a file that is gone
                    file.unlink()
                lock.release()

    def taken(self, name: str) -> bool:
        """Whether somebody has the lock of this name."""
        if not self._lock_file(name).exists():
            return False
        try:
            with self.alone(name):
                return False
        except InUse:
            return True

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
            raise JournalError(f"another process has written to the same run in {path}; begin again to go on from there") from error
        except (sqlite3.Error, sqlite3.Warning, OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise JournalError(f"the journal {str(path)!r} cannot be used: {type(error).__name__}: {error}") from error

    def _prepare(self, owner: int, versions: Sequence[str], *, readonly: bool) -> None:
        """See that the file is ours, or make it so."""
        database = self._database
        database.execute("PRAGMA foreign_keys = ON")
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        found, version = self._header()
        if (tables or found) and found != owner:
            raise JournalError(f"{self.path} is a database of another program; give a file of its own")
        if readonly and not found:
            raise JournalError(f"{self.path} is no journal")
        if version > len(versions):
            raise JournalError(f"{self.path} was written by a newer version of this package (format {version}); update the package")
        if readonly:
            if version < len(versions):
                raise JournalError(f"{self.path} was written by an older version of this package (format {version}); read with it once to update it")
            return
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        if version < len(versions):
            self._update(owner, versions)

    def _update(self, owner: int, versions: Sequence[str]) -> None:
        found = self.path.stat()
        self._file = found.st_dev, found.st_ino
        with self.writing():
            _, version = self._header()  # another process may have been first
            for statement in ";".join(versions[version:]).split(";"):
                self._database.execute(statement)
            self._database.execute(f"PRAGMA application_id = {owner}")
            self._database.execute(f"PRAGMA user_version = {len(versions)}")

    def _header(self) -> tuple[int, int]:
        """Whose file it is, and the version of its tables."""
        (owner,) = self._database.execute("PRAGMA application_id").fetchone()
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        return owner, version

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def __del__(self) -> None:
        if database := getattr(self, "_database", None):
            database.close()
