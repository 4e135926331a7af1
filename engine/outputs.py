"""What an engine gives back: deltas while a request runs, whole outputs when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class SampleDelta:
    """What is new in one sample of a request since the delta before.

    ``text`` may be empty while a character or a possible stop string is incomplete; ``token_ids`` are all generated
    tokens, the one that ended the output included. ``logprobs`` and ``text_offsets`` have one entry per token where
    log-probabilities were asked for; an offset counts the characters of this sample's text before that token.
    ``prompt_logprobs`` comes once, with sample 0. ``stop_reason`` is the stop string or the id out of
    ``stop_token_ids`` that matched, None for end of text. ``finish_reason`` is None, ``stop``, ``length``, ``abort`` or
    ``error``; with ``error`` the message is in ``error``, and ``error_param`` names the request's field that is to
    blame. ``embedding`` is the vector of a pooling request, float32 little-endian. The ``num_`` counters are totals up
    to this delta. ``queue_seconds``, which comes first, says how long the sample waited before it was first computed.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    text_offsets: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_param: str | None = None
    embedding: bytes | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    queue_seconds: float | None = None

    def extend(self, later: SampleDelta) -> None:
        """Take in the next delta of the same sample."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.text_offsets is not None:
            self.text_offsets = (self.text_offsets or []) + later.text_offsets
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.error_param = later.error_param
        self.embedding = later.embedding or self.embedding
        self.num_completion_tokens = later.num_completion_tokens
        self.num_cached_tokens = later.num_cached_tokens


@dataclass(slots=True, kw_only=True)
class Usage:
    """Tokens of one request: ``completion_tokens`` over all samples, ``cached_tokens`` of the prompt's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One finished sample; the fields are those of `SampleDelta`, complete."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One finished request: ``outputs`` has ``params.n`` samples in order of their index.

    ``prompt`` is None where the prompt was given as token ids. ``prompt_logprobs`` has one entry per prompt token, the
    first of them None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
