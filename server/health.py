"""``GET /health`` and ``GET /v1/kernels``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .errors import RETRY_AFTER, ErrorReply
from .state import Phase, state_of

_MESSAGES = {
    Phase.LOADING: "the model is still loading",
    Phase.DRAINING: "the server is shutting down",
    Phase.DEAD: "the engine has died",
}


async def get_health(request: Request) -> Response:
    """200 while requests are taken; 503 while loading, draining, or after the engine's death, which ``code`` tells."""
    phase = state_of(request).phase
    if phase is Phase.READY:
        return JSONResponse({"status": phase.value})
    return ErrorReply(503, _MESSAGES[phase], code=phase.value, headers=RETRY_AFTER).response()


async def get_kernels(request: Request) -> Response:
    """Which kernel each class of layers and each operation got, and why better candidates were refused."""
    info = state_of(request).ready_client().info
    return JSONResponse({"device": info.device, "dtype": info.dtype, "kernels": info.kernels})
