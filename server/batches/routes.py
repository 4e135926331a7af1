"""``/v1/files`` and ``/v1/batches``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ..answer import json_response
from ..body import read_json, read_raw
from ..owners import owner_of
from ..state import state_of
from .files import FileObject
from .runner import Batches
from .schema import Batch, BatchRequest, RequestCounts

PURPOSES = ("batch", "user_data")
_MAX_PAGE = 10_000
_WINDOW_SECONDS = 24 * 3600

T = TypeVar("T", FileObject, Batch)


async def upload_file(request: Request) -> Response:
    """Store a file: a multipart form with ``file`` and ``purpose``."""
    config = state_of(request).config
    media_type = request.headers.get("content-type", "")
    body = await read_raw(request, max_bytes=config.max_body_bytes, seconds=config.body_seconds)
    if not media_type.lower().startswith("multipart/form-data"):
        raise RequestError("a file comes as multipart/form-data with the fields file and purpose", param="file")

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await MultiPartParser(request.headers, chunks(), max_files=1, max_fields=10).parse()
    except (MultiPartException, UnicodeDecodeError, ValueError) as error:
        raise RequestError(f"the form cannot be read: {error}", param="file") from None
    file, purpose = form.get("file"), form.get("purpose")
    if file is None or isinstance(file, str):
        raise RequestError("the form has no file; send one in the field file", param="file")
    if purpose not in PURPOSES:
        raise RequestError(f"purpose is {purpose!r}; it must be one of {', '.join(PURPOSES)}", param="purpose")
    content = await file.read()
    name = (file.filename or "file")[:255]
    return json_response(await _batches(request).files.add(owner_of(request), name, str(purpose), content))


async def list_files(request: Request) -> Response:
    """The stored files, newest first."""
    files = await _batches(request).files.newest(owner_of(request), request.query_params.get("purpose"))
    return _page(request, files)


async def get_file(request: Request) -> Response:
    """What is known of a file."""
    return json_response(await _batches(request).files.get(owner_of(request), request.path_params["file_id"]))


async def get_file_content(request: Request) -> Response:
    """A file's bytes."""
    content = await _batches(request).files.content(owner_of(request), request.path_params["file_id"])
    return Response(content, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Forget a file."""
    file_id = request.path_params["file_id"]
    await _batches(request).files.delete(owner_of(request), file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def create_batch(request: Request) -> Response:
    """Begin to answer the requests of a stored file."""
    state, batches, owner = state_of(request), _batches(request), owner_of(request)
    state.ready_client()
    config = state.config
    body = await read_json(request, BatchRequest, max_bytes=config.max_body_bytes, seconds=config.body_seconds)
    body.check()
    await batches.files.get(owner, body.input_file_id)
    now = int(time.time())
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + _WINDOW_SECONDS,
        request_counts=RequestCounts(),
        metadata=body.metadata,
    )
    await batches.store.save(owner, batch)
    created = json_response(batch)
    batches.start(owner, batch)
    return created


async def list_batches(request: Request) -> Response:
    """The batches, newest first."""
    return _page(request, await _batches(request).store.newest(owner_of(request)))


async def get_batch(request: Request) -> Response:
    """How far a batch is."""
    return json_response(await _batches(request).store.get(owner_of(request), request.path_params["batch_id"]))


async def cancel_batch(request: Request) -> Response:
    """End a batch; what it has answered so far is in its files."""
    batches, owner = _batches(request), owner_of(request)
    batch = await batches.store.get(owner, request.path_params["batch_id"])
    return json_response(await batches.cancel(owner, batch))


def _batches(request: Request) -> Batches:
    return state_of(request).shared(Batches)


def _page(request: Request, items: Sequence[T]) -> Response:
    limit, after = request.query_params.get("limit", "20"), request.query_params.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_PAGE):
        raise RequestError(f"limit is {limit[:40]!r}; it must be from 1 to {_MAX_PAGE}", param="limit")
    if request.query_params.get("order") == "asc":
        items = items[::-1]
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise RequestError(f"after: nothing has the id {after[:80]!r}", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends: dict[str, Any] = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return json_response({"object": "list", "data": list(page), "has_more": len(items) > len(page), **ends})
