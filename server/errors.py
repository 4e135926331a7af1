"""Every error as OpenAI's envelope, ``{"error": {"message", "type", "param", "code"}}``, or as Anthropic's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..errors import (
    EngineBusyError,
    EngineDeadError,
    RequestError,
    StorageError,
    TwofoldError,
    UnsupportedError,
)
from ..log import get_logger
from .open_requests import RequestTimeoutError

logger = get_logger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
ANTHROPIC_PATH = "/v1/messages"
RETRY_AFTER = {"Retry-After": "1"}

_HTTP_CODES = {
    400: "bad_request",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ModelNameError(RequestError):
    """A request names a model that is not served here (HTTP 404)."""

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        message = f"The model {model!r} does not exist here; served: {', '.join(served)}"
        super().__init__(message, param="model", code="model_not_found")


class GenerationError(TwofoldError):
    """The engine gave up one request while others go on (HTTP 500)."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What the client is told: the HTTP status and the four fields of the envelope."""

    status: int
    message: str
    kind: str = SERVER_ERROR
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def encode(self, path: str = "") -> bytes:
        """The envelope as the API that ``path`` belongs to writes it."""
        return msgspec.json.encode(self._anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body())

    def response(self, path: str = "") -> Response:
        return Response(self.encode(path), self.status, self.headers, media_type="application/json")

    def _anthropic_body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "api_error"
        error = {"type": _ANTHROPIC_TYPES.get(self.status, other), "message": self.message}
        return {"type": "error", "error": error}


def error_reply(error: BaseException) -> ErrorReply:
    """The reply for any exception; one that nobody foresaw is logged with its traceback and told without."""
    if isinstance(error, ModelNameError):
        return ErrorReply(404, str(error), INVALID_REQUEST, error.param, error.code)
    if isinstance(error, RequestError):
        return ErrorReply(400, str(error), INVALID_REQUEST, error.param, error.code)
    if isinstance(error, UnsupportedError):
        return ErrorReply(400, str(error), INVALID_REQUEST, code="unsupported")
    if isinstance(error, EngineBusyError):
        return ErrorReply(503, str(error), code="unavailable", headers=RETRY_AFTER)
    if isinstance(error, EngineDeadError):
        return ErrorReply(503, str(error), code="engine_dead")
    if isinstance(error, StorageError):
        # Its message names folders of the host.
        logger.error("%s", error)
        return ErrorReply(503, "the server cannot store this now; its log says why", code="storage_failed")
    if isinstance(error, RequestTimeoutError):
        return ErrorReply(504, str(error), code="request_timeout")
    if isinstance(error, GenerationError):
        return ErrorReply(500, str(error), code="generation_failed")
    if isinstance(error, HTTPException):
        kind = INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR
        code = _HTTP_CODES.get(error.status_code)
        return ErrorReply(error.status_code, error.detail, kind, code=code, headers=dict(error.headers or {}))
    logger.error("a request failed: %s", error, exc_info=error)
    return ErrorReply(500, "The server failed to handle this request; its log has the details", code="internal_error")


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for every exception."""
    if isinstance(error, HTTPException) and error.detail in ("Not Found", "Method Not Allowed"):
        reply = error_reply(error)
        what = f"no route {request.url.path}" if reply.status == 404 else f"{request.method} is not allowed here"
        reply = ErrorReply(reply.status, what, reply.kind, code=reply.code, headers=reply.headers)
        return reply.response(request.url.path)
    return error_reply(error).response(request.url.path)
