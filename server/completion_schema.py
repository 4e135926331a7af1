"""Bodies of /v1/completions."""

from __future__ import annotations

import msgspec

from ..engine.sampling_params import MAX_LOGPROBS
from ..errors import RequestError
from .schema import GenerationBody, Usage

MAX_CHOICES = 4096
MAX_BEST_OF = 128


class CompletionRequest(GenerationBody, kw_only=True):
    """``prompt`` is a text, texts, token ids, or lists of token ids; max_tokens 0 with echo scores the prompt only."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def num_samples(self) -> int:
        """Answers drawn per prompt; the best ``n`` are shown."""
        return self.best_of or self.n or 1

    def check(self) -> None:
        """RequestError for fields that are refused, exclude each other, or lie outside their limits."""
        self.check_common()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs is {self.logprobs}; it must be from 0 to {MAX_LOGPROBS}", param="logprobs")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens is 0; it must be at least 1, or come with echo true", param="max_tokens")
        self._check_best_of()

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        shown = 1 if self.n is None else self.n
        if not max(shown, 1) <= self.best_of <= MAX_BEST_OF:
            raise RequestError(
                f"best_of is {self.best_of}; it must be from n, which is {shown}, to {MAX_BEST_OF}", param="best_of"
            )
        if self.stream and self.best_of > shown:
            raise RequestError(
                f"best_of is {self.best_of} and n is {shown}: what is best is known at the end, so best_of greater "
                "than n does not go with stream",
                param="best_of",
            )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one per group of ``n`` choices (RequestError for none, too many, or a mixture of kinds)."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is an empty list; give at least one prompt", param="prompt")
        kind = type(self.prompt[0])
        num_choices = (1 if kind is int else len(self.prompt)) * self.num_samples
        if num_choices > MAX_CHOICES:
            raise RequestError(
                f"prompts times n or best_of is {num_choices}; the limit is {MAX_CHOICES}, so send several requests",
                param="prompt",
            )
        for index, item in enumerate(self.prompt):
            if type(item) is not kind:
                raise RequestError(
                    f"prompt[{index}] is of another kind than prompt[0]; give texts, token ids or lists of token ids",
                    param=f"prompt[{index}]",
                )
        if kind is int:
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per token; ``text_offset`` counts characters in the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptCandidate(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptCandidate] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """An answer, or one chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
