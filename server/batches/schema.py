"""Bodies of /v1/batches, and the lines of their files."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...errors import RequestError

MAX_LINES = 50_000
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


class BatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None

    def check(self) -> None:
        """RequestError for an endpoint that takes no batches."""
        if self.endpoint not in ENDPOINTS:
            raise RequestError(
                f"endpoint is {self.endpoint!r}; it must be one of {', '.join(ENDPOINTS)}", param="endpoint"
            )


class BatchErrorItem(msgspec.Struct, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchErrorItem]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """``status``: validating, in_progress, finalizing, completed, failed, cancelling or cancelled."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchLine(msgspec.Struct, kw_only=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def read_lines(content: bytes, endpoint: str) -> tuple[list[BatchLine], list[BatchErrorItem]]:
    """The requests of an input file, and what is wrong with it: a file with one wrong line runs none of them."""
    lines: list[BatchLine] = []
    errors: list[BatchErrorItem] = []
    seen: set[str] = set()
    for number, text in enumerate(content.splitlines(), start=1):
        if not text.strip():
            continue
        problem = None
        try:
            line = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            errors.append(BatchErrorItem(code="invalid_json_line", message=str(error)[:500], line=number))
            continue
        if line.url != endpoint:
            problem = f"url is {line.url[:100]!r}; this batch is for {endpoint}"
        elif line.custom_id in seen:
            problem = f"custom_id {line.custom_id[:100]!r} is there twice"
        elif line.body.get("stream") or line.body.get("background"):
            problem = "the answers of a batch are neither streamed nor made in the background"
        if problem is not None:
            errors.append(BatchErrorItem(code="invalid_request", message=problem, line=number))
        seen.add(line.custom_id)
        lines.append(line)
    if not lines and not errors:
        errors.append(BatchErrorItem(code="empty_file", message="the input file has no requests"))
    if len(lines) > MAX_LINES:
        errors.append(BatchErrorItem(code="too_many_lines", message=f"{len(lines)} requests; the limit is {MAX_LINES}"))
    return lines, errors[:100]
