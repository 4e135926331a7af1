"""Runs batches through the server's own routes, a few lines at a time."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from ...log import get_logger
from ..errors import error_reply
from ..owners import set_owner
from ..state import Phase, ServerState
from .files import FileStore
from .schema import Batch, BatchErrors, BatchLine, read_lines
from .store import BatchStore

logger = get_logger(__name__)

# Lines of one batch at work at a time: the engine stays free for others, and its batches are full all the same.
_LINES_AT_ONCE = 16
_RETRY_SECONDS = 1.0


class Batches:
    """What the batch routes of one server share."""

    def __init__(self, state: ServerState) -> None:
        self.files = FileStore(state.database)
        self.store = BatchStore(state.database)
        self._state = state
        self._running: dict[str, tuple[asyncio.Task[None], Batch]] = {}

    async def resume(self) -> None:
        """Go on with what an earlier run of the server left."""
        for owner, batch in await self.store.unfinished():
            self.start(owner, batch)

    def start(self, owner: str, batch: Batch) -> None:
        """Work on a batch that has been stored."""
        self._running[batch.id] = asyncio.ensure_future(self._run(owner, batch)), batch

    async def cancel(self, owner: str, batch: Batch) -> Batch:
        """Take no more lines of a batch; those at work are ended. One that has ended stays as it is."""
        task, running = self._running.get(batch.id, (None, None))
        if task is None or running is None or running.status == "finalizing":
            return batch
        running.status, running.cancelling_at = "cancelling", int(time.time())
        await self.store.save(owner, running)
        task.cancel()
        await asyncio.wait((task,))
        await self._finish(owner, running)
        return running

    async def _run(self, owner: str, batch: Batch) -> None:
        try:
            if batch.status == "cancelling":
                await self._finish(owner, batch)
                return
            lines, errors = read_lines(await self.files.content(owner, batch.input_file_id), batch.endpoint)
            if errors:
                batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(data=errors)
                await self.store.save(owner, batch)
                return
            if await self._answer(owner, batch, lines):
                await self._finish(owner, batch)
        except Exception as error:
            logger.error("batch %s stopped: %s", batch.id, error, exc_info=error)
        finally:
            self._running.pop(batch.id, None)

    async def _answer(self, owner: str, batch: Batch, lines: list[BatchLine]) -> bool:
        """Answer the lines that have no answer yet; False where the server stops first."""
        answered = await self.store.answered(batch.id)
        counts = batch.request_counts
        counts.total = len(lines)
        counts.failed = sum(answered.values())
        counts.completed = len(answered) - counts.failed
        batch.status, batch.in_progress_at = "in_progress", batch.in_progress_at or int(time.time())
        await self.store.save(owner, batch)
        waiting = iter([(number, line) for number, line in enumerate(lines) if number not in answered])
        workers = [asyncio.ensure_future(self._work(owner, batch, waiting)) for _ in range(_LINES_AT_ONCE)]
        try:
            return all(await asyncio.gather(*workers))
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, owner: str, batch: Batch, waiting: Iterator[tuple[int, BatchLine]]) -> bool:
        for number, line in waiting:
            while True:
                status, request_id, body = await call(self._state.router, owner, line.url, line.body)
                if self._state.phase is not Phase.READY:
                    return False
                if status != 503:
                    break
                await asyncio.sleep(_RETRY_SECONDS)
            failed = status >= 400
            answer = {
                "id": f"batch_req_{uuid.uuid4().hex}",
                "custom_id": line.custom_id,
                "response": {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)},
                "error": None,
            }
            await self.store.add_line(batch.id, number, failed, msgspec.json.encode(answer))
            batch.request_counts.failed += failed
            batch.request_counts.completed += not failed
            await self.store.save(owner, batch)
        return True

    async def _finish(self, owner: str, batch: Batch) -> None:
        """Write the files of a batch whose lines are done, or that was cancelled."""
        cancelled = batch.status == "cancelling"
        if not cancelled:
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
            await self.store.save(owner, batch)
        output, failures = await self.store.take_lines(batch.id)
        if output:
            batch.output_file_id = (await self._write(owner, batch, "output", output)).id
        if failures:
            batch.error_file_id = (await self._write(owner, batch, "error", failures)).id
        batch.status = "cancelled" if cancelled else "completed"
        setattr(batch, f"{batch.status}_at", int(time.time()))
        await self.store.save(owner, batch)
        await self.store.drop_lines(batch.id)

    async def _write(self, owner: str, batch: Batch, kind: str, content: bytes) -> Any:
        return await self.files.add(owner, f"{batch.id}_{kind}.jsonl", "batch_output", content)


async def call(app: ASGIApp, owner: str, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    """(status, request id, JSON) of a POST to one of the server's own routes, past the gate but with its owner."""
    sent = False
    status, request_id, answer = 500, "", b""

    async def receive() -> Message:
        nonlocal sent
        if sent:
            # A client that neither sends more nor leaves.
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, request_id, answer
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            answer += message.get("body", b"")

    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "server": None,
        "client": None,
    }
    set_owner(scope, owner)
    try:
        await app(scope, receive, send)
    except Exception as error:
        reply = error_reply(error)
        return reply.status, "", reply.encode()
    return status, request_id, answer
