"""Admission: from a client's request to samples that the engine can certainly answer."""

from __future__ import annotations

import dataclasses
import secrets

from ...errors import ContextLengthError, RequestError
from ..messages import EngineRequest
from ..sampling_params import MAX_SEED
from .kv_cache import KVPlan
from .pooler import POOLINGS, Pooler
from .request import Sample


def check_request(request: EngineRequest, plan: KVPlan, vocab_size: int, num_labels: int = 0) -> None:
    """Refuse what cannot be computed (RequestError, ContextLengthError); nothing has been stored by then."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty; it must have at least one token", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(f"the prompt holds token {wrong}; ids go from 0 to {vocab_size - 1}", param="prompt")
    if len(prompt) >= plan.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and at least one more is generated; this engine serves up to "
            f"{plan.max_model_len} tokens in all (KV cache: {plan.num_blocks * plan.block_size}); shorten the prompt",
            param="prompt",
        )
    if request.pooling is not None and request.pooling not in POOLINGS:
        raise RequestError(f"pooling is {request.pooling!r}; it must be one of {', '.join(POOLINGS)}", param="pooling")
    if request.pooling is not None and request.params.n != 1:
        raise RequestError(f"a pooling request has one answer, but n is {request.params.n}", param="n")
    if request.pooling is None and num_labels:
        raise RequestError(
            "this model is a classifier and generates no text; ask it to score texts (/v1/score, /v1/rerank)",
            param="model",
        )
    if request.pooling == "score":
        _check_score_tokens(request.score_tokens, vocab_size, num_labels)
    request.params.check_vocabulary(vocab_size)


def _check_score_tokens(tokens: list[int], vocab_size: int, num_labels: int) -> None:
    if num_labels and tokens:
        raise RequestError("score_tokens are for language models; this model has labels", param="score_tokens")
    if not num_labels and not (tokens and all(0 <= token < vocab_size for token in tokens)):
        raise RequestError(
            f"score_tokens is {tokens}; a language model scores by tokens, whose ids go from 0 to {vocab_size - 1}",
            param="score_tokens",
        )


def make_samples(request: EngineRequest, plan: KVPlan, eos_token_ids: frozenset[int], first_order: int) -> list[Sample]:
    """The request's ``n`` samples in order. Output ends at ``max_tokens`` or at the longest sequence served."""
    params = request.params
    if params.seed is None:
        request.params = params = dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED + 1))
    # Where a grammar says when the text may end, there is an end to heed.
    ignore_eos = params.ignore_eos and params.structured is None
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if ignore_eos else eos_token_ids)
    limit = plan.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(request.prompt_token_ids) + params.max_tokens)
    samples = [
        Sample(
            request=request,
            index=index,
            order=first_order + index,
            tokens=list(request.prompt_token_ids),
            max_num_tokens=limit,
            stop_ids=stop_ids,
            waits_for_constraint=params.structured is not None or params.reasoning is not None,
        )
        for index in range(params.n)
    ]
    leader, *siblings = samples
    leader.siblings = siblings
    for sibling in siblings:
        sibling.leader = leader
    if request.pooling is not None:
        leader.pooler = Pooler(request.pooling, leader.num_tokens)
    if params.prompt_logprobs is not None:
        leader.prompt_logprobs = []
    return samples
