"""``POST /v1/score`` and ``POST /v1/rerank``: how well texts go together."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from .answer import json_response, read_body
from .embeddings import MAX_INPUTS, EmbeddingUsage
from .scoring import Scores, prepare_scores
from .state import state_of


class ScoreRequest(msgspec.Struct, kw_only=True):
    """One text against each of ``text_2``, or as many in ``text_1`` as in ``text_2``, pair by pair."""

    model: str
    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None

    def check(self) -> None:
        """RequestError for numbers of texts that make no pairs."""
        first, second = self.pair()
        if not second or len(second) > MAX_INPUTS or len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many as in text_2, which may "
                f"have {MAX_INPUTS}",
                param="text_1",
            )

    def pair(self) -> tuple[list[str], list[str]]:
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        return first, [self.text_2] if isinstance(self.text_2, str) else self.text_2


class RerankRequest(msgspec.Struct, kw_only=True):
    """``documents`` are texts, or objects with a ``text``; ``top_n`` keeps the best."""

    model: str
    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool = True
    instruction: str | None = None

    def check(self) -> None:
        """RequestError for no documents, too many, or one without a text."""
        if not 1 <= len(self.documents) <= MAX_INPUTS:
            raise RequestError(f"documents has {len(self.documents)} texts; give 1 to {MAX_INPUTS}", param="documents")
        if self.top_n is not None and self.top_n < 1:
            raise RequestError(f"top_n is {self.top_n}; it must be at least 1", param="top_n")
        for index, document in enumerate(self.documents):
            if isinstance(document, dict) and not isinstance(document.get("text"), str):
                raise RequestError(f"documents[{index}].text must be a text", param=f"documents[{index}].text")

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document["text"] for document in self.documents]


async def create_score(request: Request) -> Response:
    """The score of each pair."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, ScoreRequest)
    first, second = body.pair()
    scores = await prepare_scores(
        state,
        _places("text_1", body.text_1, first),
        _places("text_2", body.text_2, second),
        arrival,
        body.instruction,
    )
    computed = await scores.compute(state, request.receive)
    data = [{"index": index, "object": "score", "score": float(score)} for index, score in enumerate(computed)]
    answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": body.model}
    return json_response({**answer, "data": data, "usage": _usage(scores)})


async def create_rerank(request: Request) -> Response:
    """The documents by their score with the query, best first."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, RerankRequest)
    texts = body.texts()
    places = [(f"documents[{index}]", text) for index, text in enumerate(texts)]
    scores = await prepare_scores(state, [("query", body.query)], places, arrival, body.instruction)
    computed = await scores.compute(state, request.receive)
    results = []
    for index in np.argsort(-computed, kind="stable")[: body.top_n].tolist():
        result: dict[str, Any] = {"index": index, "relevance_score": float(computed[index])}
        if body.return_documents:
            result["document"] = {"text": texts[index]}
        results.append(result)
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "results": results}
    return json_response({**answer, "usage": _usage(scores)})


def _places(name: str, given: str | list[str], texts: list[str]) -> list[tuple[str, str]]:
    if isinstance(given, str):
        return [(name, given)]
    return [(f"{name}[{index}]", text) for index, text in enumerate(texts)]


def _usage(scores: Scores) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=scores.num_prompt_tokens, total_tokens=scores.num_prompt_tokens)
