"""Embeddings of several texts: what the embedding, score and rerank routes share."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.sampling_params import SamplingParams
from ..errors import ContextLengthError, RequestError, UnsupportedError
from .errors import GenerationError
from .generation import Generation
from .state import ServerState

Prompt = str | list[int]


class Vectors:
    """Checked and tokenized texts; nothing has been sent to the engine before `compute`."""

    def __init__(self, generation: Generation, *, normalize: bool, num_dimensions: int) -> None:
        self._generation = generation
        self._normalize = normalize
        self._num_dimensions = num_dimensions

    async def compute(self) -> NDArray[np.float32]:
        """[texts, dimensions]; vectors are cut before they are normalized. GenerationError where the engine gave up."""
        found: dict[int, bytes] = {}
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                if delta.embedding is not None:
                    found[index] = delta.embedding
        if len(found) < self._generation.num_choices:
            raise GenerationError("the engine gave no vector for one of the texts")
        rows = [np.frombuffer(found[index], dtype="<f4") for index in range(self._generation.num_choices)]
        vectors = np.stack(rows)[:, : self._num_dimensions]
        return unit(vectors) if self._normalize else vectors

    @property
    def num_prompt_tokens(self) -> int:
        return self._generation.usage().prompt_tokens


def unit(vectors: NDArray[Any]) -> NDArray[np.float32]:
    """Each row over its length; rows of zeros stay."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


async def prepare_vectors(
    state: ServerState,
    prompts: Sequence[tuple[str, Prompt]],
    arrival: float,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    score_tokens: Sequence[int] = (),
    **options: Any,
) -> Vectors:
    """``prompts`` are (field name, text or token ids). RequestError, ContextLengthError, UnsupportedError."""
    client = state.ready_client()
    info = client.info
    if info.pooling_error is not None and pooling is None:
        raise UnsupportedError(f"this model makes embeddings in a way that is not served: {info.pooling_error}")
    if dimensions is not None and not 1 <= dimensions <= info.hidden_size:
        raise RequestError(f"dimensions is {dimensions}; it must be from 1 to {info.hidden_size}", param="dimensions")
    # Nothing is drawn; the engine asks for parameters all the same.
    params = SamplingParams(max_tokens=1, temperature=0.0)
    name = f"embd-{uuid.uuid4().hex}"
    requests = []
    for index, (place, prompt) in enumerate(prompts):
        try:
            request = await client.make_request(prompt, params, request_id=f"{name}-{index}", **options)
        except ContextLengthError as error:
            raise ContextLengthError(str(error), param=place) from None
        except RequestError as error:
            raise RequestError(str(error), param=place if error.param == "prompt" else error.param) from None
        requests.append(replace(request, pooling=pooling or info.pooling, score_tokens=list(score_tokens)))
    generation = Generation(client, requests, state.metrics, arrival)
    wanted = info.normalize if normalize is None else normalize
    return Vectors(generation, normalize=wanted, num_dimensions=dimensions or info.hidden_size)
