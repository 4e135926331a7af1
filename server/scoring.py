"""How well pairs of texts go together: what a reranker says of each pair, or the cosine of their embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.types import Receive

from ..engine.client import AsyncEngineClient
from ..errors import RequestError, UnsupportedError
from .state import ServerState
from .vectors import Prompt, Vectors, prepare_vectors, unit

# (name of the field, text).
Place = tuple[str, str]

# What Qwen3-Reranker's model card gives: one prompt per pair, answered with one token.
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_ANSWERS = ("yes", "no")
_INLINE_CHARACTERS = 4000


class Scores:
    """Checked and tokenized pairs; nothing has been sent to the engine before `compute`."""

    def __init__(self, vectors: Vectors, kind: str, num_first: int) -> None:
        self._vectors = vectors
        self._kind = kind
        self._num_first = num_first

    async def compute(self, state: ServerState, receive: Receive) -> NDArray[np.float64]:
        """One number per pair: a probability from a reranker, else a cosine."""
        rows = (await state.open_requests.run(receive, self._vectors.compute())).astype(np.float64)
        if self._kind == "cosine":
            rows = unit(rows).astype(np.float64)
            return np.sum(rows[: self._num_first] * rows[self._num_first :], axis=1)
        logits = rows[:, 0] if self._kind == "label" else rows[:, 0] - rows[:, 1]
        return 1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0)))

    @property
    def num_prompt_tokens(self) -> int:
        return self._vectors.num_prompt_tokens


async def prepare_scores(
    state: ServerState, first: Sequence[Place], second: Sequence[Place], arrival: float, instruction: str | None = None
) -> Scores:
    """``first`` has one text, or as many as ``second``. RequestError, ContextLengthError, UnsupportedError."""
    client = state.ready_client()
    num_labels = client.info.num_labels
    if instruction is not None and state.reranker is None:
        raise RequestError("instruction is for rerankers that are told what to look for", param="instruction")
    if num_labels == 0 and state.reranker is None:
        return Scores(await prepare_vectors(state, [*first, *second], arrival), "cosine", len(first))
    if num_labels > 1:
        raise UnsupportedError(f"this classifier has {num_labels} labels; scores come from one with a single label")
    pairs = [(first[min(index, len(first) - 1)], place) for index, place in enumerate(second)]
    prompts = [(place[0], await _prompt(client, state.reranker, query, place, instruction)) for query, place in pairs]
    answers = [] if num_labels else [_single_token(client, answer) for answer in _ANSWERS]
    vectors = await prepare_vectors(
        state,
        prompts,
        arrival,
        pooling="score",
        normalize=False,
        score_tokens=answers,
        add_special_tokens=state.reranker is None,
    )
    return Scores(vectors, "label" if num_labels else "answer", 0)


async def _prompt(
    client: AsyncEngineClient, reranker: str | None, query: Place, document: Place, instruction: str | None
) -> Prompt:
    if reranker is not None:
        fields = {"instruction": instruction or _INSTRUCTION, "query": query[1], "document": document[1]}
        return _QWEN3.format(**fields)
    for place, text in (query, document):
        try:
            client.inputs.check_length(text)
        except RequestError as error:
            raise type(error)(str(error), param=place) from None
    texts: Any = (query[1], document[1])
    if len(query[1]) + len(document[1]) <= _INLINE_CHARACTERS:
        return client.tokenizer.encode_pair(*texts)
    return await asyncio.to_thread(client.tokenizer.encode_pair, *texts)


def _single_token(client: AsyncEngineClient, text: str) -> int:
    ids = client.tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise UnsupportedError(
            f"the reranker's answer {text!r} is {len(ids)} tokens of this model; it must be one (--reranker)"
        )
    return ids[0]
