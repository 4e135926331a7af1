"""What a server keeps between requests: one SQLite database, in memory or in a folder, with a thread of its own."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from ..errors import StorageError
from ..storage import writing

T = TypeVar("T")

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, previous TEXT, status TEXT NOT NULL,
    response BLOB NOT NULL, items BLOB NOT NULL, size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_created ON responses (created);
CREATE TABLE IF NOT EXISTS response_events (response TEXT PRIMARY KEY, events BLOB NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS events_of_deleted AFTER DELETE ON responses
BEGIN DELETE FROM response_events WHERE response = OLD.id; END;
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
    size INTEGER NOT NULL, content BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, status TEXT NOT NULL, input_file TEXT NOT NULL,
    batch BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batch_lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, failed INTEGER NOT NULL, answer BLOB NOT NULL,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
"""


class Database:
    """Opened on first use; ``folder`` None keeps everything in memory. A folder belongs to one server at a time."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="twofold-database")
        self._connection: sqlite3.Connection | None = None
        self._lock: IO[bytes] | None = None

    @property
    def in_memory(self) -> bool:
        return self._folder is None

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """``work(connection)`` in one transaction on the database's thread. StorageError where the disk fails."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    def close(self) -> None:
        """Let running work end and give the folder free."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._open()
            assert self._connection is not None
            with self._connection:
                return work(self._connection)
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
            raise StorageError(f"the server's database {self._place} failed: {error}") from error

    @property
    def _place(self) -> str:
        return "in memory" if self._folder is None else str(self._folder / "server.db")

    def _open(self) -> None:
        if self._folder is None:
            connection = sqlite3.connect(":memory:", check_same_thread=False)
        else:
            with writing(self._folder):
                self._lock = _lock(self._folder)
                connection = sqlite3.connect(self._folder / "server.db", check_same_thread=False)
            (self._folder / "server.db").chmod(0o600)
            # Commits need no wait for the disk: a power cut may lose the last of them, never the file.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > _VERSION:
            connection.close()
            raise StorageError(f"{self._place} was written by a newer version of Twofold; choose another --state-dir")
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version={_VERSION}")
        self._connection = connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _lock(folder: Path) -> IO[bytes]:
    """A lock file that nobody else holds (StorageError); closing it, or the end of the process, gives it free."""
    lock = open(folder / "lock", "ab")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StorageError(f"another server uses {folder}; give each its own --state-dir") from None
    return lock
