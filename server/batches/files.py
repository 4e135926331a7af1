"""Stored files: the input and the output of batches."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from ...errors import RequestError
from ..database import Database

MAX_BYTES_IN_MEMORY = 1 << 30
_COLUMNS = "id, owner, created, name, purpose, size"


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class FileStore:
    """Each file belongs to ``owner``, the API key that made it, and is not there for others."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, owner: str, name: str, purpose: str, content: bytes) -> FileObject:
        """Keep a file; RequestError where memory for files is full."""
        row = (f"file-{uuid.uuid4().hex}", owner, time.time(), name, purpose, len(content))

        def write(connection: sqlite3.Connection) -> None:
            total = connection.execute("SELECT COALESCE(SUM(size), 0) FROM files").fetchone()[0]
            if self._database.in_memory and total + len(content) > MAX_BYTES_IN_MEMORY:
                raise RequestError(
                    f"files take {total} bytes of {MAX_BYTES_IN_MEMORY}, this one has {len(content)}; delete some, or "
                    "start the server with --state-dir",
                    param="file",
                )
            connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, content))

        await self._database.run(write)
        return _file(row)

    async def get(self, owner: str, file_id: str) -> FileObject:
        """HTTPException 404 where it is not there."""
        query = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner = ?"
        row = await self._one(query, owner, file_id)
        return _file(row)

    async def content(self, owner: str, file_id: str) -> bytes:
        """HTTPException 404 where it is not there."""
        row = await self._one("SELECT content FROM files WHERE id = ? AND owner = ?", owner, file_id)
        content: bytes = row[0]
        return content

    async def newest(self, owner: str, purpose: str | None) -> list[FileObject]:
        """The owner's files, newest first."""

        def read(connection: sqlite3.Connection) -> list[Any]:
            query = f"SELECT {_COLUMNS} FROM files WHERE owner = ? ORDER BY created DESC, rowid DESC"
            return connection.execute(query, (owner,)).fetchall()

        files = [_file(row) for row in await self._database.run(read)]
        return [file for file in files if purpose in (None, file.purpose)]

    async def delete(self, owner: str, file_id: str) -> None:
        """HTTPException 404 where it is not there."""

        def remove(connection: sqlite3.Connection) -> int:
            return connection.execute("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)).rowcount

        if not await self._database.run(remove):
            raise HTTPException(404, f"no file {file_id!r} is stored here")

    async def _one(self, query: str, owner: str, file_id: str) -> Any:
        row = await self._database.run(lambda connection: connection.execute(query, (file_id, owner)).fetchone())
        if row is None:
            raise HTTPException(404, f"no file {file_id!r} is stored here")
        return row


def _file(row: Iterable[Any]) -> FileObject:
    file_id, _, created, name, purpose, size = row
    return FileObject(id=file_id, bytes=size, created_at=int(created), filename=name, purpose=purpose)
