"""From a prompt to a request that the core can take: tokenizing, and every check that needs no model."""

from __future__ import annotations

import random
import reprlib
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Protocol

from ..errors import ContextLengthError, RequestError
from .grammar.grammar_text import check_structured
from .messages import EngineInfo, EngineRequest
from .sampling_params import MAX_SEED, SamplingParams

# The sampling options that a model's generation_config may set for requests that say nothing.
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class TextEncoder(Protocol):
    """The part of a tokenizer that makes prompts."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_token_length(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class InputProcessor:
    """Makes requests for one engine; stateless, so safe to call from several threads.

    ``generation`` is the model's own sampling defaults (`ModelConfig.generation`).
    """

    def __init__(self, tokenizer: TextEncoder, info: EngineInfo, generation: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = info.max_model_len
        self._vocab_size = min(info.vocab_size, tokenizer.vocab_size)
        generation = generation or {}
        if generation.get("do_sample") is False:
            generation = {"temperature": 0.0}
        chosen = {name: generation.get(name) for name in GENERATION_DEFAULTS}
        self._generation = {name: value for name, value in chosen.items() if value is not None}

    def default_params(self, **options: Any) -> SamplingParams:
        """SamplingParams of the model's authors with ``options`` on top (RequestError for wrong values)."""
        return SamplingParams(**{**self._generation, **options})

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str | None = None,
        adapter: str | None = None,
        add_special_tokens: bool = True,
    ) -> EngineRequest:
        """Check and tokenize one prompt, and draw a seed where ``params`` has none.

        Raises RequestError for a wrong prompt or token id, or a form of output that no grammar can be made of,
        ContextLengthError where prompt and output cannot fit.
        """
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(
                f"cache_salt is {reprlib.repr(cache_salt)}; it must be a text or None", param="cache_salt"
            )
        params.check_vocabulary(self._vocab_size)
        if isinstance(prompt, str):
            self.check_length(prompt)
            token_ids = self.check_ids(self._tokenizer.encode(prompt, add_special_tokens))
        else:
            token_ids = self.check_ids(prompt)
        self._check_context(len(token_ids), params)
        if params.structured is not None:
            check_structured(params.structured)
        if params.seed is None:
            params = replace(params, seed=random.SystemRandom().randint(0, MAX_SEED))
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            cache_salt=cache_salt,
            adapter=adapter,
            arrival_time=time.time(),
        )

    def check_length(self, text: str) -> None:
        """Refuse a text that is too long whatever its tokens are, without tokenizing it (ContextLengthError)."""
        longest = self._max_model_len * max(1, self._tokenizer.max_token_length)
        if len(text) > longest:
            least = -(-len(text) // max(1, self._tokenizer.max_token_length))
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, at least {least} tokens; the model takes "
                f"{self._max_model_len}: shorten the prompt",
                param="prompt",
            )

    def check_ids(self, prompt: Sequence[int]) -> list[int]:
        """A prompt of token ids as a list; RequestError for an empty one, and for what is no id of the vocabulary."""
        if isinstance(prompt, (bytes, Mapping, Set)) or not isinstance(prompt, Iterable):
            raise RequestError(
                f"the prompt is {reprlib.repr(prompt)}; a prompt is a text or a list of token ids", param="prompt"
            )
        token_ids = list(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if not all(type(token) is int for token in token_ids):
            wrong = next(token for token in token_ids if type(token) is not int)
            raise RequestError(
                f"the prompt holds {reprlib.repr(wrong)}; a prompt is a text or a list of token ids", param="prompt"
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"the prompt holds token {wrong}; the vocabulary has ids 0 to {self._vocab_size - 1}", param="prompt"
            )
        return token_ids

    def _check_context(self, num_tokens: int, params: SamplingParams) -> None:
        if num_tokens >= self._max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; the model takes {self._max_model_len}, prompt and output "
                "together: shorten the prompt",
                param="prompt",
            )
        if params.max_tokens is not None and num_tokens + params.max_tokens > self._max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens and max_tokens is {params.max_tokens}, together "
                f"{num_tokens + params.max_tokens}; the model takes {self._max_model_len}: shorten the prompt or lower "
                "max_tokens",
                param="max_tokens",
            )
