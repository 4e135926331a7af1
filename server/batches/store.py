"""Batches in the database, line by line: what has been answered is not computed again after a restart."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from ..database import Database
from .schema import UNFINISHED, Batch


class BatchStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def save(self, owner: str, batch: Batch) -> None:
        """Write a batch's state, over an older one."""
        row = (batch.id, owner, time.time(), batch.status, batch.input_file_id, msgspec.json.encode(batch))

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET status = excluded.status, batch = excluded.batch",
                row,
            )

        await self._database.run(write)

    async def get(self, owner: str, batch_id: str) -> Batch:
        """HTTPException 404 where it is not there."""
        query = "SELECT batch FROM batches WHERE id = ? AND owner = ?"
        row = await self._database.run(lambda connection: connection.execute(query, (batch_id, owner)).fetchone())
        if row is None:
            raise HTTPException(404, f"no batch {batch_id!r} is stored here")
        return msgspec.json.decode(row[0], type=Batch)

    async def newest(self, owner: str) -> list[Batch]:
        """The owner's batches, newest first."""
        query = "SELECT batch FROM batches WHERE owner = ? ORDER BY created DESC, rowid DESC"
        rows = await self._database.run(lambda connection: connection.execute(query, (owner,)).fetchall())
        return [msgspec.json.decode(row[0], type=Batch) for row in rows]

    async def unfinished(self) -> list[tuple[str, Batch]]:
        """(owner, batch) of all that an earlier run of the server has left, oldest first."""
        query = f"SELECT owner, batch FROM batches WHERE status IN {UNFINISHED} ORDER BY created"
        rows = await self._database.run(lambda connection: connection.execute(query).fetchall())
        return [(owner, msgspec.json.decode(batch, type=Batch)) for owner, batch in rows]

    async def add_line(self, batch_id: str, number: int, failed: bool, answer: bytes) -> None:
        """Keep one line of the output."""
        row = (batch_id, number, failed, answer)
        await self._database.run(
            lambda connection: connection.execute("REPLACE INTO batch_lines VALUES (?, ?, ?, ?)", row)
        )

    async def answered(self, batch_id: str) -> dict[int, bool]:
        """Line number -> whether it failed, of all lines that have an answer."""
        query = "SELECT number, failed FROM batch_lines WHERE batch = ?"
        rows = await self._database.run(lambda connection: connection.execute(query, (batch_id,)).fetchall())
        return {number: bool(failed) for number, failed in rows}

    async def take_lines(self, batch_id: str) -> tuple[bytes, bytes]:
        """The answers and the failures as JSON lines, in the order of the input."""

        def read(connection: sqlite3.Connection) -> list[Any]:
            query = "SELECT failed, answer FROM batch_lines WHERE batch = ? ORDER BY number"
            return connection.execute(query, (batch_id,)).fetchall()

        rows = await self._database.run(read)
        parts = [
            b"".join(answer + b"\n" for failed, answer in rows if bool(failed) is wanted) for wanted in (False, True)
        ]
        return parts[0], parts[1]

    async def drop_lines(self, batch_id: str) -> None:
        """Forget the lines of a batch whose files are written."""
        await self._database.run(
            lambda connection: connection.execute("DELETE FROM batch_lines WHERE batch = ?", (batch_id,))
        )
