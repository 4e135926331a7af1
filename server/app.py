"""The Starlette application: routes, errors and the gate before them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.client import AsyncEngineClient
from ..errors import TwofoldError
from . import chat, completions, embeddings, health, metrics, models, openapi, similarity, tokenize
from .batches import routes as batches
from .config import ServerConfig
from .errors import handle_error
from .gate import Gate
from .messages import routes as messages
from .responses import routes as responses
from .state import ServerState

ROUTES = [
    Route("/openapi.json", openapi.get_openapi, methods=["GET"]),
    Route("/health", health.get_health, methods=["GET"]),
    Route("/metrics", metrics.get_metrics, methods=["GET"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
    Route("/v1/kernels", health.get_kernels, methods=["GET"]),
    Route("/v1/completions", completions.create_completion, methods=["POST"]),
    Route("/v1/chat/completions", chat.create_chat_completion, methods=["POST"]),
    Route("/v1/embeddings", embeddings.create_embeddings, methods=["POST"]),
    Route("/v1/score", similarity.create_score, methods=["POST"]),
    Route("/v1/rerank", similarity.create_rerank, methods=["POST"]),
    Route("/v1/responses", responses.create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", responses.count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", responses.get_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", responses.delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/cancel", responses.cancel_response, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", responses.list_input_items, methods=["GET"]),
    Route("/v1/messages", messages.create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
    Route("/v1/files", batches.upload_file, methods=["POST"]),
    Route("/v1/files", batches.list_files, methods=["GET"]),
    Route("/v1/files/{file_id}", batches.get_file, methods=["GET"]),
    Route("/v1/files/{file_id}", batches.delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", batches.get_file_content, methods=["GET"]),
    Route("/v1/batches", batches.create_batch, methods=["POST"]),
    Route("/v1/batches", batches.list_batches, methods=["GET"]),
    Route("/v1/batches/{batch_id}", batches.get_batch, methods=["GET"]),
    Route("/v1/batches/{batch_id}/cancel", batches.cancel_batch, methods=["POST"]),
    Route("/tokenize", tokenize.tokenize, methods=["POST"]),
    Route("/detokenize", tokenize.detokenize, methods=["POST"]),
]


def create_app(client: AsyncEngineClient | None = None, config: ServerConfig | None = None) -> Starlette:
    """The application. Without a ready ``client`` it answers 503 until ``app.state.server.attach(client)``."""
    state = ServerState(config or ServerConfig())
    app = Starlette(
        routes=ROUTES,
        middleware=[*_cors(state.config), Middleware(Gate, state=state)],
        exception_handlers={HTTPException: handle_error, TwofoldError: handle_error},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    state.router = _inner(app)
    if client is not None:
        state.attach(client)
    return app


def _inner(app: Starlette) -> ASGIApp:
    """The routes without the middleware before them."""

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await app.router({**scope, "app": app}, receive, send)

    return inner


def _cors(config: ServerConfig) -> list[Middleware]:
    """Before the gate: a browser's question whether it may ask carries no key, and refusals must be readable too."""
    if not config.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]
