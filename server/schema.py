"""What the generating routes share: the body's sampling fields, and answers' usage.

Types are strict: ``"5"`` is not a number. Fields that nobody here knows are ignored. Fields that we know and cannot
honor are in ``REFUSED``: an answer that silently lacks what was asked for is worse than a 400. Those that cannot change
an answer are in ``NOTED``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ..errors import RequestError
from .refusals import COMMON, Refusals, check_refused

MAX_STOP_STRINGS = 64

# What clients tell for their own books, or as a hint to a cache: taken, without effect on the answer.
NOTED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

REFUSED: Refusals = {
    **COMMON,
    "store": ("completions are not stored; /v1/responses stores its answers", (None, False)),
    "verbosity": ("how much a model says is for the conversation to ask", (None, "medium")),
    "prediction": ("predicted outputs are not served", (None,)),
    "suffix": ("text after the completion is not served", (None, "")),
    "tools": ("tools are served for conversations only", (None, [])),
    "tool_choice": ("tools are served for conversations only", (None, "none", "auto")),
    "functions": ("this older name of tools is not served; give tools", (None, [])),
    "function_call": ("this older name of tool_choice is not served; give tool_choice", (None, "none", "auto")),
    "modalities": ("only text is served", (None, [], ["text"])),
    "audio": ("only text is served", (None,)),
    "web_search_options": ("the server has no web search", (None,)),
    "chat_template": ("the template is chosen when the server starts (--chat-template)", (None,)),
    "allowed_token_ids": ("restricting the vocabulary is not served; ban tokens with logit_bias", (None,)),
    "bad_words": ("banning words is not served; ban tokens with logit_bias", (None, [])),
    "use_beam_search": ("beam search is not served", (None, False)),
    "length_penalty": ("beam search is not served", (None, 1, 1.0)),
    "logits_processors": ("custom logits processors are not served", (None, [])),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """``continuous_usage_stats`` puts the usage so far into every chunk."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Refusable(msgspec.Struct, kw_only=True):
    """The fields of ``REFUSED``, whatever their type; ``served`` names those that a body does serve."""

    served: ClassVar[frozenset[str]] = frozenset()

    moderation: Any = None
    service_tier: Any = None
    prompt_cache_options: Any = None
    store: Any = None
    verbosity: Any = None
    prediction: Any = None
    suffix: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logits_processors: Any = None

    def check_served(self) -> None:
        """RequestError for the first field that asks for something which this server does not do."""
        check_refused(self, REFUSED, self.served)


class GenerationBody(Refusable, kw_only=True):
    """Sampling and streaming fields of both generating routes; None means "not given" for all of them."""

    model: str
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # One form for the output, under whichever name (`structured_output`).
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None

    @property
    def include_usage(self) -> bool:
        """True where the stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True where every chunk of the stream carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_common(self) -> None:
        """What types cannot say: refused fields, and fields that exclude each other (RequestError)."""
        self.check_served()
        check_stream_options(self.stream_options, self.stream)
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}", param="stop")
        if self.cache_salt == "":
            raise RequestError("cache_salt is empty; leave it out or give at least one character", param="cache_salt")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs does not go with stream true; use echo and logprobs", param="prompt_logprobs"
            )


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    """RequestError for options without a stream, or for padding that is not made."""
    if options is None:
        return
    if not stream:
        raise RequestError("stream_options is only allowed with stream true", param="stream_options")
    if options.include_obfuscation:
        raise RequestError(
            "stream_options.include_obfuscation: events are not padded; leave the field out",
            param="stream_options.include_obfuscation",
        )


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Cached tokens are a part of the prompt's, tokens of thoughts a part of the completion's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def make_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0) -> Usage:
    """The usage object of these counts."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )
