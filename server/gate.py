"""The gate before all routes: API keys, bounds on open requests, the count of answered ones, and the last resort."""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import EngineBusyError
from .access_log import log_access
from .api_keys import ApiKey
from .errors import INVALID_REQUEST, ErrorReply, error_reply
from .open_requests import ClientGone
from .owners import set_owner
from .sse import CHUNK_WRITER, DIRECT_SEND
from .state import ServerState

# Probes and scrapers must get through when everything else is full.
_UNBOUNDED = ("/health", "/metrics")
_KEYLESS = ("/health",)
# The customary status of a request whose client left before an answer.
_NOTHING_SENT = "499"
# Refused by the headers alone: they do not count for a key's requests per minute.
_UNREAD = ("405", "415")
_NO_KEY = ErrorReply(
    401,
    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
    INVALID_REQUEST,
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._access_log = state.config.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = _NOTHING_SENT, time.monotonic()

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        scope[DIRECT_SEND] = send
        bounded = scope["path"] not in _UNBOUNDED
        self._state.num_open += bounded
        key: ApiKey | None = None
        try:
            key, refusal = self._enter(scope)
            app = self._app if refusal is None else refusal.response(scope["path"])
            await app(scope, receive, counting_send)
        except ClientGone:
            pass
        except Exception as error:
            reply = error_reply(error)
            if status == _NOTHING_SENT:
                await reply.response(scope["path"])(scope, receive, counting_send)
        finally:
            # They refer to what holds the scope; without them nothing waits for the collector.
            del scope[DIRECT_SEND]
            scope.pop(CHUNK_WRITER, None)
            self._state.num_open -= bounded
            if key is not None:
                key.release(counts=status not in _UNREAD)
            handler = getattr(scope.get("endpoint"), "__name__", "none")
            self._state.metrics.http_requests.labels(handler, status).inc()
            if self._access_log:
                log_access(scope, status, time.monotonic() - began)

    def _enter(self, scope: Scope) -> tuple[ApiKey | None, ErrorReply | None]:
        """The key that the request counts for, and why it is not taken."""
        path, keys, limit = scope["path"], self._state.api_keys, self._state.config.max_open_requests
        key: ApiKey | None = None
        if keys.required and path not in _KEYLESS:
            key = keys.find(_given_key(Headers(scope=scope)))
            if key is None:
                return None, _NO_KEY
            set_owner(scope, key.entry.name)
        if path in _UNBOUNDED:
            return None, None
        if self._state.num_open > limit:
            message = f"{limit} requests are open, the most that are taken; try again later"
            return None, error_reply(EngineBusyError(message))
        refusal = None if key is None else key.refusal()
        if refusal is not None:
            message, seconds = refusal
            headers = {"Retry-After": str(seconds)}
            code = "rate_limit_exceeded"
            return None, ErrorReply(429, f"{message}; try again later", code, code=code, headers=headers)
        return key, None


def _given_key(headers: Headers) -> bytes:
    """What the client sent, as OpenAI's clients do or as Anthropic's do."""
    # Headers are bytes; starlette's latin-1 text gives them back as they came.
    scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get("x-api-key", "").encode("latin-1")
    return key.strip(b" \t")
