"""A SQLite file that threads and processes share, written in transactions, with a lock for each name."""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from memagent_integrations import files
from memagent_integrations.errors import InUse, JournalError, UsageError

_OF_THE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


class Store:
    """An open SQLite file. It is created if it does not exist.

    Args:
        path: the file.
        application_id: the number in the file's header that says which program the file belongs to.
        schema: the SQL that makes the tables of each format out of the one before, by the number of the format, which
            is in the file's header. A file of an older one is brought up to date; with `readonly` it stays as it is.
        readonly: only read the file; then nothing has to be writable, not even its folder.

    Raises:
        JournalError: the file cannot be opened or written, is damaged, or belongs to another program.
    """

    def __init__(self, path: str | Path, *, application_id: int, schema: Mapping[int, str], readonly: bool) -> None:
        if not isinstance(path, str | Path):
            raise UsageError(f"the journal has to be a file's name, not {type(path).__name__}")
        if not str(path).strip():
            raise UsageError("the journal has to be a file's name, and this one is empty")
        self._lock, self._readonly = threading.RLock(), readonly
        self._settings: dict[str, Any] = {"application_id": application_id, "schema": schema, "readonly": readonly}
        with self.errors(path):
            self.path = _resolved(path)  # one path, and so one set of locks, for every name of the file
            if self.path.is_dir():
                raise JournalError(f"the journal {str(path)!r} is a folder; name a file in it")
            if not readonly:
                files.create(self.path)  # SQLite gives the files beside it, -wal and -shm, the same permissions
            mode = f"?mode={'ro' if readonly else 'rwc'}"
            unwritten = self.path.with_name(f"{self.path.name}-wal")
            if readonly and not (unwritten.exists() and unwritten.stat().st_size):
                mode += "&immutable=1"  # nobody is writing: SQLite then needs no file of its own in the folder
            self._database = sqlite3.connect(
                self.path.as_uri() + mode, uri=True, timeout=30, isolation_level=None, check_same_thread=False
            )
        try:
            with self.errors():
                self._prepare(application_id, schema)
                self._file = self._file_id()
        except BaseException:
            self._database.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Store, self.path, **self._settings), ()

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self._lock, self.errors():  # not in the middle of another thread's transaction
            return self._database.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query; None if it has none."""
        return next(iter(self.rows(query, *values)), None)

    def write(self, statement: str, *values: Any) -> None:
        """Execute a statement inside a `writing` block."""
        self._database.execute(statement, values)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the block as a transaction: at its end all of it is on the disk, or nothing."""
        with self._lock, self.errors():
            self._check_file()
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # a failed write has rolled back already
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def lock(self, name: str, *, timeout: float = 0.2, what: str | None = None) -> Iterator[str]:
        """Hold the lock of a name, which no other thread or process can hold at the same time.

        `timeout` is the number of seconds to wait for it; `is_locked` may hold it for a moment. `what` is locked, as an
        error names it; default: the run of that name.

        Raises:
            InUse: the lock is not free within `timeout`.
            JournalError: the lock file cannot be created.
        """
        file = self._lock_file(name)
        what = what or f"run {name}"
        busy = InUse(
            f"{what} is being read already, here or in another process; wait for it, or read under another name"
        )
        with ExitStack() as stack:
            try:
                file.parent.mkdir(files.OWNERS_FOLDER, exist_ok=True)
                stack.enter_context(files.lock(file, busy, timeout=timeout, remove=True))
            except OSError as error:
                raise JournalError(f"cannot lock {what} in {file.parent}: {files.reason(error)}") from error
            yield name

    def is_locked(self, name: str) -> bool:
        """Return whether the lock of a name is held; False where this cannot be found out."""
        if not self._lock_file(name).exists():
            return False
        try:
            with self.lock(name, timeout=0):
                return False
        except InUse:
            return True
        except JournalError:  # the folder is read-only
            return False

    def _lock_file(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}-locks") / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"

    def _file_id(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_dev, status.st_ino

    def _check_file(self) -> None:
        """Check that the path still names the file that was opened: what is written to a removed file is lost."""
        try:
            same = self._file_id() == self._file
        except OSError:
            same = False
        if not same:
            raise JournalError(f"the journal {self.path} has been removed or replaced; open it again")

    @contextmanager
    def errors(self, path: str | Path | None = None) -> Iterator[None]:
        """Turn failures of the database, and of reading what it holds, into `JournalError`s."""
        path = path or self.path
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise JournalError(
                f"another process has written to the same run in {path}; begin again to go on from there"
            ) from error
        except (sqlite3.Error, sqlite3.Warning, OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            full = getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_DISK
            advice = "; is the disk full, or its folder read-only?" if full else ""
            problem = f"the journal {str(path)!r} cannot be used: {type(error).__name__}: {error}{advice}"
            raise JournalError(problem) from error

    def _prepare(self, application_id: int, schema: Mapping[int, str]) -> None:
        """Check the header, and create the tables that the file lacks."""
        self._database.execute("PRAGMA trusted_schema = OFF")
        self._database.execute("PRAGMA foreign_keys = ON")
        tables = self._value("SELECT count(*) FROM sqlite_master")
        header_id, version = self._value("PRAGMA application_id"), max(schema)
        if (tables or header_id) and header_id != application_id:
            raise JournalError(f"{self.path} is a database of another program; give a file of its own")
        if self._readonly and not header_id:
            raise JournalError(f"{self.path} is no journal")
        self.version = self._value("PRAGMA user_version")
        if header_id and self.version not in schema:
            raise JournalError(
                f"{self.path} was written by another version of this package (format {self.version}, here {version}); "
                "use that version"
            )
        if self._readonly:
            self._check_tables(schema)
            return
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        if self.version != version:
            self._file = self._file_id()
            with self.writing():
                before = self._value("PRAGMA user_version")  # another process may have been first
                for statements in (schema[number] for number in sorted(schema) if number > before):
                    for statement in statements.split(";"):
                        self._database.execute(statement)
                self._database.execute(f"PRAGMA application_id = {application_id}")
                self._database.execute(f"PRAGMA user_version = {version}")
            self.version = version
        self._check_tables(schema)

    def _check_tables(self, schema: Mapping[int, str]) -> None:
        """Check that the file has the tables of its format and nothing else: a trigger or a view would be a program."""
        self._database.execute("BEGIN")  # another process may be bringing the file up to date
        self.version, found = self._value("PRAGMA user_version"), _definitions(self._database)
        self._database.execute("COMMIT")
        with closing(sqlite3.connect(":memory:")) as ours:
            ours.executescript(";".join(schema[number] for number in sorted(schema) if number <= self.version))
            if odd := found ^ _definitions(ours):
                raise JournalError(
                    f"{self.path} is no journal of this package: it differs in its {' '.join(min(odd)[:2])}"
                )

    def _value(self, query: str) -> int:
        (value,) = self._database.execute(query).fetchone()
        return int(value)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def __del__(self) -> None:
        if database := getattr(self, "_database", None):
            database.close()


def _definitions(database: sqlite3.Connection) -> set[tuple[str, ...]]:
    """Return the definitions of all tables, as SQLite keeps them but for white space."""
    query = r"SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite\_%' ESCAPE '\'"
    return {tuple(" ".join(str(part).split()) for part in row) for row in database.execute(query)}


def _resolved(path: str | Path) -> Path:
    try:
        return Path(path).resolve()
    except RuntimeError as error:  # its links lead to themselves
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
