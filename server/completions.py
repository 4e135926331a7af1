"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..engine.messages import TokenLogprobs
from ..engine.outputs import SampleDelta
from .answer import answer_request
from .completion_schema import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from .generation import Generation
from .logprobs import TokenTexts, completion_logprobs, finite, prompt_logprobs
from .prompt_text import EchoedPrompt, echoed_prompt
from .sampling import sampling_fields
from .sse import EventWriter, TextEvent, event
from .state import ServerState

DEFAULT_MAX_TOKENS = 16
# Many short prompts are tokenized on the loop; after so many the others have their turn.
_PROMPTS_PER_TURN = 16


async def create_completion(request: Request) -> Response:
    """Complete one or several prompts, ``n`` times each, at once or as a stream of events."""
    return await answer_request(request, CompletionRequest, _prepare)


async def _prepare(state: ServerState, body: CompletionRequest, arrival: float) -> CompletionAnswer:
    """Check and tokenize every prompt before the first of them runs."""
    client = state.ready_client()
    fields = sampling_fields(body)
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    fields["max_tokens"] = max(1, wanted) if body.echo else wanted
    fields["logprobs"] = body.logprobs
    if body.num_samples > (body.n or 1):
        # The candidates are ranked by the log-probabilities of their tokens.
        fields |= {"n": body.num_samples, "logprobs": body.logprobs or 0}
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    params = state.make_params(fields)
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    prompts = body.prompts()
    add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
    requests = []
    for index, prompt in enumerate(prompts):
        made = await client.make_request(
            prompt,
            params,
            request_id=f"{answer_id}-{index}",
            cache_salt=body.cache_salt,
            add_special_tokens=add_special_tokens,
        )
        requests.append(made)
        if index % _PROMPTS_PER_TURN == _PROMPTS_PER_TURN - 1:
            await asyncio.sleep(0)
    echoes = []
    if body.echo:
        hidden = client.tokenizer.special_ids if params.skip_special_tokens else frozenset()
        for prompt, item in zip(prompts, requests, strict=True):
            text = prompt if isinstance(prompt, str) else None
            echoes.append(echoed_prompt(client.tokenizer, item.prompt_token_ids, text, hidden))
    generation = Generation(client, requests, state.metrics, arrival)
    return CompletionAnswer(answer_id, body, generation, state.token_texts, echoes, num_samples=params.n)


@dataclass
class _Collected:
    """One choice while it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    total_logprob: float = 0.0
    num_tokens: int = 0

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, by which candidates are ranked."""
        return self.total_logprob / max(self.num_tokens, 1)


class CompletionAnswer:
    """Shapes one generation as completions, whole or in chunks."""

    def __init__(
        self,
        answer_id: str,
        body: CompletionRequest,
        generation: Generation,
        tokens: TokenTexts,
        echoes: list[EchoedPrompt],
        *,
        num_samples: int,
    ) -> None:
        self.id = answer_id
        self._body = body
        self._generation = generation
        self._tokens = tokens
        self._echoes = echoes
        self._num_samples = num_samples
        self._created = int(time.time())
        self.writer = EventWriter()
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._echoed: set[int] = set()
        self._with_output = body.max_tokens != 0

    async def collect(self) -> Completion:
        """The whole answer."""
        choices = [_Collected() for _ in range(self._generation.num_choices)]
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                part = self._choice(index, delta)
                choice = choices[index]
                choice.texts.append(part.text)
                choice.logprobs = _joined(choice.logprobs, part.logprobs)
                choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
                choice.total_logprob += sum(finite(item.logprob) for item in delta.logprobs or ())
                choice.num_tokens += len(delta.logprobs or ())
        choices = self._best(choices)
        usage = self._generation.usage(with_output=self._with_output)
        return self._completion(
            [
                CompletionChoice(
                    index=index,
                    text="".join(choice.texts),
                    logprobs=choice.logprobs,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    prompt_logprobs=self._shown_prompt_logprobs(index // (self._body.n or 1)),
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def _best(self, choices: list[_Collected]) -> list[_Collected]:
        """The ``n`` best of each prompt's candidates, best first; all of them in their order where none is left out."""
        num_shown = self._body.n or 1
        if num_shown == self._num_samples:
            return choices
        best = []
        for start in range(0, len(choices), self._num_samples):
            ranked = sorted(choices[start : start + self._num_samples], key=lambda item: -item.mean_logprob)
            best += ranked[:num_shown]
        return best

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One event per delta that shows something, then the usage where asked for."""
        usage: Any = None if self._body.include_usage else msgspec.UNSET
        texts: dict[int, TextEvent] = {}
        is_plain = self._with_output and not self._echoes and not self._body.continuous_usage

        def direct(index: int, delta: SampleDelta) -> bool:
            text = texts.get(index)
            if text is None or delta.logprobs is not None:
                return False
            return not delta.text or self.writer.write(text(delta.text))

        async with aclosing(self._generation.deltas(direct)) as deltas:
            async for index, delta in deltas:
                if is_plain and delta.finish_reason is None and delta.logprobs is None:
                    if delta.text:
                        if index not in texts:
                            texts[index] = self._text_event(index, usage)
                        yield texts[index](delta.text)
                    continue
                choice = self._choice(index, delta)
                if choice.text or choice.logprobs or choice.finish_reason:
                    if self._body.continuous_usage:
                        usage = self._generation.usage(with_output=self._with_output)
                    yield event(msgspec.json.encode(self._completion([choice], usage=usage)))
        if self._body.include_usage:
            usage = self._generation.usage(with_output=self._with_output)
            yield event(msgspec.json.encode(self._completion([], usage=usage)))

    def _text_event(self, index: int, usage: Any) -> TextEvent:
        return TextEvent(lambda text: self._completion([CompletionChoice(index=index, text=text)], usage=usage))

    def _completion(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, index: int, delta: SampleDelta) -> CompletionChoice:
        """What one delta adds to its choice, the echoed prompt before the first."""
        prompt = index // self._num_samples
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        text = delta.text if self._with_output else ""
        logprobs = self._new_logprobs(prompt, delta) if self._with_output else None
        if self._echoes and index not in self._echoed:
            self._echoed.add(index)
            text = self._echoes[prompt].text + text
            logprobs = _joined(self._echoed_logprobs(prompt), logprobs)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason if self._with_output or not delta.finish_reason else "length",
            stop_reason=delta.stop_reason if self._with_output else None,
        )

    def _new_logprobs(self, prompt: int, delta: SampleDelta) -> CompletionLogprobs | None:
        if delta.logprobs is None or self._body.logprobs is None:
            return None
        start = len(self._echoes[prompt].text) if self._echoes else 0
        offsets = [start + offset for offset in delta.text_offsets or []]
        texts = [self._tokens.get(item.token_id)[0] for item in delta.logprobs]
        return completion_logprobs(self._tokens, delta.logprobs, texts, offsets, self._body.logprobs)

    def _echoed_logprobs(self, prompt: int) -> CompletionLogprobs | None:
        logprobs = self._prompt_logprobs.get(prompt)
        if logprobs is None or self._body.logprobs is None:
            return None
        echo = self._echoes[prompt]
        return completion_logprobs(self._tokens, logprobs, echo.tokens, echo.offsets, self._body.logprobs)

    def _shown_prompt_logprobs(self, prompt: int) -> Any:
        if self._body.prompt_logprobs is None:
            return msgspec.UNSET
        logprobs = self._prompt_logprobs.get(prompt)
        return None if logprobs is None else prompt_logprobs(self._tokens, logprobs, self._body.prompt_logprobs)


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or second is None:
        return second if first is None else first
    first.tokens += second.tokens
    first.token_logprobs += second.token_logprobs
    first.top_logprobs += second.top_logprobs
    first.text_offset += second.text_offset
    return first
