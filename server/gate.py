"""The gate before all routes: API keys, the bound on open requests, the count of answered ones, and the last resort."""

from __future__ import annotations

import hmac
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import EngineBusyError
from .errors import INVALID_REQUEST, ErrorReply, error_reply
from .open_requests import ClientGone
from .state import ServerState

# Probes and scrapers must get through when everything else is full.
_UNBOUNDED = ("/health", "/metrics")
_KEYLESS = ("/health",)
# The customary status of a request whose client left before an answer.
_NOTHING_SENT = "499"


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [form for key in state.config.api_keys for form in _byte_forms(key)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _NOTHING_SENT

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        bounded = scope["path"] not in _UNBOUNDED
        self._state.num_open += bounded
        try:
            refusal = self._refusal(scope)
            app = self._app if refusal is None else refusal.response(scope["path"])
            await app(scope, receive, counting_send)
        except ClientGone:
            pass
        except Exception as error:
            reply = error_reply(error)
            if status == _NOTHING_SENT:
                await reply.response(scope["path"])(scope, receive, counting_send)
        finally:
            self._state.num_open -= bounded
            handler = getattr(scope.get("endpoint"), "__name__", "none")
            self._state.metrics.http_requests.labels(handler, status).inc()

    def _refusal(self, scope: Scope) -> ErrorReply | None:
        path = scope["path"]
        if self._keys and path not in _KEYLESS and not self._has_key(Headers(scope=scope)):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            headers = {"WWW-Authenticate": "Bearer"}
            return ErrorReply(401, message, INVALID_REQUEST, code="invalid_api_key", headers=headers)
        limit = self._state.config.max_open_requests
        if path not in _UNBOUNDED and self._state.num_open > limit:
            return error_reply(EngineBusyError(f"{limit} requests are open, the most that are taken; try again later"))
        return None

    def _has_key(self, headers: Headers) -> bool:
        # Headers are bytes; starlette's latin-1 text gives them back as they came.
        scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get("x-api-key", "").encode("latin-1")
        given = key.strip(b" \t")
        # Every key is compared, so that the time taken does not tell which one came close.
        return any([hmac.compare_digest(given, known) for known in self._keys])


def _byte_forms(key: str) -> set[bytes]:
    """A key as clients send it: in UTF-8, as curl does, and in latin-1, as most HTTP libraries do where they can."""
    forms = {key.encode("utf-8", "surrogateescape")}
    with suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms
