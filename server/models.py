"""``GET /v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .state import ServerState, state_of


async def list_models(request: Request) -> Response:
    """Every name under which the model is served."""
    state = state_of(request)
    state.ready_client()
    return JSONResponse({"object": "list", "data": [_card(state, name) for name in state.served_names]})


async def get_model(request: Request) -> Response:
    """One of them; 404 for any other name."""
    state = state_of(request)
    state.ready_client()
    name = request.path_params["model"]
    state.check_model(name)
    return JSONResponse(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "twofold",
        "root": state.served_names[0],
        "parent": None,
        "max_model_len": state.ready_client().info.max_model_len,
    }
