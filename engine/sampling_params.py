"""SamplingParams: how one request's tokens are drawn and when it ends."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from .structured_output import ReasoningSpan, StructuredOutput

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request. Filters apply in the order temperature, top_k, top_p, min_p.

    ``max_tokens``           generated tokens at most; None: as many as the context allows.
    ``min_tokens``           until then nothing ends the output: end-of-text and stop ids are banned, stop strings wait.
    ``temperature``          0 is greedy; values under 1e-5 count as 0.
    ``top_k``                0 or -1: no limit. ``top_p`` in (0, 1]. ``min_p`` in [0, 1]: share of the best probability.
    ``repetition_penalty``   > 0, over prompt and output; presence and frequency penalties in [-2, 2], over the output.
    ``logit_bias``           token id -> value in [-100, 100]; 100 forces, -100 bans.
    ``seed``                 0 .. 2**63-1; None: drawn by the engine at admission.
    ``logprobs``             None: none; k: the chosen token and the k best, of the raw model distribution.
    ``prompt_logprobs``      the same for the prompt's tokens.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    reasoning: ReasoningSpan | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._make_tuple("stop", str, "a text or a list of texts")
        self._make_tuple("stop_token_ids", int, "a list of token ids")
        self._check_counts()
        self._check_switches()
        self._check_range("temperature", 0.0, math.inf)
        self._check_range("top_p", 0.0, 1.0, above=True)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("repetition_penalty", 0.0, math.inf, above=True)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        self._check_logit_bias()
        if not all(self.stop):
            raise RequestError("stop must be non-empty strings", param="stop")
        for name, kind in (("structured", StructuredOutput), ("reasoning", ReasoningSpan)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise RequestError(f"{name} is {reprlib.repr(value)}; it must be a {kind.__name__}", param=name)

    @property
    def is_greedy(self) -> bool:
        """True where the most probable token is taken."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True where earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside ``range(vocab_size)`` (RequestError)."""
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"logit_bias names token {token}; the vocabulary has ids 0 to {vocab_size - 1}", param="logit_bias"
                )
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"stop_token_ids names token {token}; the vocabulary has ids 0 to {vocab_size - 1}",
                    param="stop_token_ids",
                )

    def _make_tuple(self, name: str, kind: type, accepted: str) -> None:
        value = getattr(self, name)
        items: Any = () if value is None else value
        if not isinstance(items, (Sequence, Set)) or any(
            not isinstance(item, kind) or isinstance(item, bool) for item in items
        ):
            raise RequestError(f"{name} is {reprlib.repr(value)}; it must be {accepted}", param=name)
        object.__setattr__(self, name, tuple(items))

    def _check_switches(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name} is {reprlib.repr(value)}; it must be True or False", param=name)

    def _check_counts(self) -> None:
        bounds = {
            "n": (1, 128),
            "max_tokens": (1, None),
            "min_tokens": (0, None),
            "top_k": (-1, None),
            "seed": (0, MAX_SEED),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is None:
                if name in ("n", "min_tokens", "top_k"):
                    raise RequestError(f"{name} must be a whole number", param=name)
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"{name} is {value!r}; it must be a whole number", param=name)
            if value < low or (high is not None and value > high):
                limit = f"at least {low}" if high is None else f"from {low} to {high}"
                raise RequestError(f"{name} is {value}; it must be {limit}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", param="min_tokens"
            )

    def _check_range(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Whole numbers that no float can hold count as infinite.
        if not number or not abs(value) <= sys.float_info.max:
            raise RequestError(f"{name} is {reprlib.repr(value)}; it must be a finite number", param=name)
        if value > high or value < low or (above and value == low):
            bound = "above" if above else "at least"
            limit = f"{bound} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
            raise RequestError(f"{name} is {value:g}; it must be {limit}", param=name)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {reprlib.repr(self.logit_bias)}; it must map token ids to numbers, as in {{5: -100}}",
                param="logit_bias",
            )
        for token, value in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"logit_bias has the key {token!r}; keys are token ids", param="logit_bias")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not -100.0 <= value <= 100.0:
                raise RequestError(
                    f"logit_bias gives token {token} the value {value!r}; values lie from -100 to 100",
                    param="logit_bias",
                )
