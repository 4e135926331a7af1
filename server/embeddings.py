"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from .answer import json_response, read_body
from .state import state_of
from .vectors import Prompt, prepare_vectors

MAX_INPUTS = 2048


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``input`` is one or several texts or lists of token ids; ``pooling`` and ``normalize`` override the model's."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None

    def check(self) -> None:
        """RequestError for no inputs, too many, or a mixture of kinds."""
        if not self.input:
            raise RequestError("input is empty; give at least one text", param="input")
        if isinstance(self.input, str):
            return
        kind = type(self.input[0])
        if kind is not int and len(self.input) > MAX_INPUTS:
            raise RequestError(f"input has {len(self.input)} texts; the limit is {MAX_INPUTS}", param="input")
        for index, item in enumerate(self.input):
            if type(item) is not kind:
                raise RequestError(
                    f"input[{index}] is of another kind than input[0]; give texts, token ids or lists of token ids",
                    param=f"input[{index}]",
                )

    def prompts(self) -> list[tuple[str, Prompt]]:
        """(field name, prompt) of each input."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [("input", self.input)]  # type: ignore[list-item]
        return [(f"input[{index}]", item) for index, item in enumerate(self.input)]  # type: ignore[misc]


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def create_embeddings(request: Request) -> Response:
    """One vector per input; as base64 the vector's float32 values in little-endian order."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, EmbeddingRequest)
    vectors = await prepare_vectors(
        state,
        body.prompts(),
        arrival,
        pooling=body.pooling,
        normalize=body.normalize,
        dimensions=body.dimensions,
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt,
    )
    rows = await state.open_requests.run(request.receive, vectors.compute())
    as_text = body.encoding_format == "base64"
    data = [
        Embedding(
            index=index,
            embedding=base64.b64encode(row.astype("<f4").tobytes()).decode() if as_text else row.tolist(),
        )
        for index, row in enumerate(rows)
    ]
    num_tokens = vectors.num_prompt_tokens
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return json_response(EmbeddingList(data=data, model=body.model, usage=usage))
