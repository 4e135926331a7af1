"""The responses that a server remembers."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from ...errors import RequestError
from ..database import Database
from .schema import Response

# OpenAI keeps responses for as long.
KEPT_SECONDS = 30 * 24 * 3600
MAX_BYTES_IN_MEMORY = 256 << 20
MAX_BYTES_ON_DISK = 8 << 30
UNFINISHED = ("queued", "in_progress")

_CHAIN = """
WITH RECURSIVE chain(id, depth) AS (
    SELECT ?, 0
    UNION ALL
    SELECT previous, depth + 1 FROM responses JOIN chain USING (id) WHERE previous IS NOT NULL AND owner = ?
)
SELECT chain.id, responses.status, responses.size, responses.items, responses.response
FROM chain LEFT JOIN responses ON responses.id = chain.id AND responses.owner = ? ORDER BY depth
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the items that its request brought."""

    response: Response
    items: list[dict[str, Any]]


class ResponseStore:
    """Each response belongs to ``owner``, the API key that made it, and is not there for others."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._limit = MAX_BYTES_IN_MEMORY if database.in_memory else MAX_BYTES_ON_DISK

    async def save(self, owner: str, response: Response, items: list[dict[str, Any]]) -> None:
        """Write a response, in place of an older state of it; the oldest go where room or time is up."""
        body, encoded = msgspec.json.encode(response), msgspec.json.encode(items)
        previous = response.previous_response_id
        row = (response.id, owner, time.time(), previous, response.status, body, encoded, len(body) + len(encoded))

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            connection.execute("DELETE FROM responses WHERE created < ?", (time.time() - KEPT_SECONDS,))
            self._make_room(connection)

        await self._database.run(write)

    async def update(self, response: Response) -> None:
        """Write a new state, unless the response has been deleted or has ended meanwhile."""
        body = msgspec.json.encode(response)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE responses SET status = ?, response = ? WHERE id = ? AND status IN ('queued', 'in_progress')",
                (response.status, body, response.id),
            )

        await self._database.run(write)

    async def save_events(self, response_id: str, events: list[bytes]) -> None:
        """Keep the events of a response in the background, for clients that come back."""
        encoded = msgspec.json.encode([event.decode() for event in events])

        def write(connection: sqlite3.Connection) -> None:
            grown = connection.execute(
                "UPDATE responses SET size = size + ? WHERE id = ?", (len(encoded), response_id)
            ).rowcount
            if grown:
                connection.execute("REPLACE INTO response_events VALUES (?, ?)", (response_id, encoded))
                self._make_room(connection)

        await self._database.run(write)

    async def events(self, response_id: str) -> list[bytes] | None:
        """What `save_events` kept; None where there is nothing."""

        def read(connection: sqlite3.Connection) -> Any:
            query = "SELECT events FROM response_events WHERE response = ?"
            return connection.execute(query, (response_id,)).fetchone()

        row = await self._database.run(read)
        return None if row is None else [event.encode() for event in msgspec.json.decode(row[0])]

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """HTTPException 404 where it is not there."""

        def read(connection: sqlite3.Connection) -> Any:
            query = "SELECT response, items FROM responses WHERE id = ? AND owner = ?"
            return connection.execute(query, (response_id, owner)).fetchone()

        row = await self._database.run(read)
        if row is None:
            raise not_found(response_id)
        return StoredResponse(msgspec.json.decode(row[0], type=Response), msgspec.json.decode(row[1]))

    async def delete(self, owner: str, response_id: str) -> None:
        """HTTPException 404 where it is not there."""

        def remove(connection: sqlite3.Connection) -> int:
            query = "DELETE FROM responses WHERE id = ? AND owner = ?"
            return connection.execute(query, (response_id, owner)).rowcount

        if not await self._database.run(remove):
            raise not_found(response_id)

    async def history(self, owner: str, response_id: str, max_bytes: int) -> list[dict[str, Any]]:
        """All items up to the output of ``response_id``, oldest first (RequestError where some are missing)."""

        def read(connection: sqlite3.Connection) -> list[Any]:
            rows, size = [], 0
            for row in connection.execute(_CHAIN, (response_id, owner, owner)):
                rows.append(row)
                size += row[2] or 0
                if row[1] is None or size > max_bytes:
                    break
            return rows

        rows = await self._database.run(read)
        size = sum(row[2] or 0 for row in rows)
        if size > max_bytes:
            raise _bad_previous(
                f"the conversation before this response has {size} bytes or more; the limit is {max_bytes}"
            )
        if rows[-1][1] is None:
            raise _bad_previous(
                f"previous_response_id: {rows[-1][0]!r} is not stored here (any more); send the conversation as input"
            )
        if rows[0][1] in UNFINISHED:
            raise _bad_previous(f"previous_response_id: {response_id!r} is not finished; wait for its end")
        items: list[dict[str, Any]] = []
        for row in reversed(rows):
            items += msgspec.json.decode(row[3])
            items += msgspec.json.decode(row[4])["output"]
        return items

    async def fail_unfinished(self, message: str) -> None:
        """Mark what an earlier run of the server left unfinished as failed."""

        def mark(connection: sqlite3.Connection) -> None:
            rows = connection.execute("SELECT id, response FROM responses WHERE status IN ('queued', 'in_progress')")
            for response_id, body in rows.fetchall():
                response = msgspec.json.decode(body)
                response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
                connection.execute(
                    "UPDATE responses SET status = 'failed', response = ? WHERE id = ?",
                    (msgspec.json.encode(response), response_id),
                )

        await self._database.run(mark)

    def _make_room(self, connection: sqlite3.Connection) -> None:
        total = connection.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()[0]
        while total > self._limit:
            oldest, size = connection.execute("SELECT id, size FROM responses ORDER BY created LIMIT 1").fetchone()
            connection.execute("DELETE FROM responses WHERE id = ?", (oldest,))
            total -= size


def not_found(response_id: str) -> HTTPException:
    return HTTPException(404, f"no response {response_id!r} is stored here")


def _bad_previous(message: str) -> RequestError:
    return RequestError(message, param="previous_response_id", code="previous_response_not_found")
