"""From a request's body to the fields of SamplingParams that it gives; the engine's defaults fill in the rest."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError
from .schema import GenerationBody
from .structured import structured_output

# Body fields that SamplingParams knows by the same name and type.
_DIRECT = (
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
# No vocabulary is larger: a top_k beyond it is no limit, and must not be too large a number for what follows.
_LARGEST_TOP_K = 2**31 - 1


def sampling_fields(body: GenerationBody) -> dict[str, Any]:
    """Keyword arguments of SamplingParams for what the body says; RequestError for a bad ``logit_bias`` key."""
    fields = {name: value for name in _DIRECT if (value := getattr(body, name)) is not None}
    if fields.get("top_k", 0) > _LARGEST_TOP_K:
        fields["top_k"] = 0
    if body.stop is not None:
        fields["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    structured = structured_output(body)
    if structured is not None:
        fields["structured"] = structured
    if body.logit_bias:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    return fields


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise RequestError(f"logit_bias has the key {key[:40]!r}; keys are token ids", param="logit_bias")
        result[int(key)] = value
    return result
