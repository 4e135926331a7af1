"""``GET /openapi.json``: the API as the schemas that decode its bodies say it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..version import __version__
from . import chat_schema, completion_schema, embeddings, similarity, tokenize
from .batches import schema as batches
from .batches.files import FileObject
from .messages import schema as messages
from .responses import schema as responses
from .state import ServerState, state_of

# Handler's name -> (body, answer); None where a route has no such thing, or its answer is a plain object.
_SCHEMAS: dict[str, tuple[type[Any] | None, type[Any] | None]] = {
    "create_completion": (completion_schema.CompletionRequest, completion_schema.Completion),
    "create_chat_completion": (chat_schema.ChatRequest, chat_schema.ChatCompletion),
    "create_embeddings": (embeddings.EmbeddingRequest, embeddings.EmbeddingList),
    "create_score": (similarity.ScoreRequest, None),
    "create_rerank": (similarity.RerankRequest, None),
    "create_response": (responses.ResponseRequest, responses.Response),
    "count_input_tokens": (responses.ResponseRequest, None),
    "get_response": (None, responses.Response),
    "cancel_response": (None, responses.Response),
    "list_input_items": (None, responses.ItemList),
    "create_message": (messages.MessagesRequest, messages.AnthropicMessage),
    "count_tokens": (messages.CountTokensRequest, None),
    "create_batch": (batches.BatchRequest, batches.Batch),
    "get_batch": (None, batches.Batch),
    "cancel_batch": (None, batches.Batch),
    "upload_file": (None, FileObject),
    "get_file": (None, FileObject),
    "tokenize": (tokenize.TokenizeRequest, None),
    "detokenize": (tokenize.DetokenizeRequest, None),
}
_STREAMED = ("create_completion", "create_chat_completion", "create_response", "create_message")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def get_openapi(request: Request) -> Response:
    """This document."""
    return Response(state_of(request).shared(_Encoded).text(request), media_type="application/json")


def document(routes: Sequence[Route], *, keyed: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of ``routes``; ``keyed``: an API key is asked for."""
    kinds = [kind for pair in _SCHEMAS.values() for kind in pair if kind is not None]
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(kinds, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, schemas)
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Twofold", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }
    if keyed:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"key": []}]
    return result


class _Encoded:
    """One server's document, made when it is first asked for."""

    def __init__(self, state: ServerState) -> None:
        self._keyed = state.api_keys.required
        self._text: bytes | None = None

    def text(self, request: Request) -> bytes:
        if self._text is None:
            routes = [route for route in request.app.routes if isinstance(route, Route)]
            self._text = msgspec.json.encode(document(routes, keyed=self._keyed))
        return self._text


def _operation(route: Route, path: str, schemas: dict[type[Any], Any]) -> dict[str, Any]:
    handler: Callable[..., Any] = route.endpoint
    body, answer = _SCHEMAS.get(handler.__name__, (None, None))
    content = {"application/json": {"schema": schemas[answer] if answer is not None else {"type": "object"}}}
    if handler.__name__ in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "operationId": handler.__name__,
        "summary": (handler.__doc__ or "").strip().splitlines()[0],
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {"description": "an error", "content": error},
        },
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[body]}}}
    return operation
