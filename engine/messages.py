"""What crosses the line between a client and a core: plain dataclasses, the same in one process and over a socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from .sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """One prompt to complete ``params.n`` times. ``params.seed`` is set before a request reaches the core.

    With ``pooling`` (last, mean or cls) nothing is generated: the answer is one vector of the prompt's hidden states.
    With ``pooling`` score it is what the head says of the last token: a classifier's labels, or the logits of
    ``score_tokens``.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    adapter: str | None = None
    pooling: str | None = None
    score_tokens: list[int] = field(default_factory=list)
    arrival_time: float = 0.0


@dataclass(slots=True, kw_only=True)
class AbortRequest:
    """Stop a request, or one of its samples where ``index`` is given; unknown ids are ignored."""

    request_id: str
    index: int | None = None


@dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of one token under the raw model distribution, and the best candidates.

    ``rank`` is 1 for the most probable token. ``top`` holds (token id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TokenOutput:
    """New tokens of one sample after one step.

    ``logprobs`` has one entry per token when asked for. ``prompt_logprobs`` comes once, with the sample 0's first
    output: one entry per prompt token, the first of them None. ``finish_reason`` is None while running, else ``stop``,
    ``length``, ``abort`` or ``error``; ``stop_token`` is the id that ended it. ``error_param`` names the request's
    field that an ``error`` is about, where the request was wrong. ``num_cached_tokens`` counts the prompt
    tokens that came from the prefix cache. ``embedding`` is the vector of a pooling request, float32 little-endian.
    ``queue_seconds`` comes with a sample's first output: how long it waited before it was first computed.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_param: str | None = None
    embedding: bytes | None = None
    queue_seconds: float | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Gauges and counters of a core after a step. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_live_blocks: int = 0
    num_cached_blocks: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_steps: int = 0


@dataclass(slots=True, kw_only=True)
class EngineInfo:
    """What a client needs to know about a ready core.

    ``num_blocks`` usable KV blocks of ``block_size`` tokens. ``kernels`` is the kernel report, one row per choice.
    ``pooling`` and ``normalize`` are how the model's authors make embeddings, ``pooling_error`` why that is not served.
    ``num_labels`` above 0: a classifier, which generates nothing. ``rest_cpus``: where processes around the core should
    run, so that they take no core from its threads; empty: anywhere.
    """

    model_name: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    device: str
    dtype: str
    kernels: list[dict[str, str]] = field(default_factory=list)
    hidden_size: int = 0
    pooling: str = "last"
    normalize: bool = True
    pooling_error: str | None = None
    num_labels: int = 0
    rest_cpus: list[int] = field(default_factory=list)
